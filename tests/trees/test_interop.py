"""Trees from one framework to another: values and dtypes are kept; memory is shared where it is asked for, and only there."""

import gc
import mmap
import sys
import warnings
from collections import OrderedDict, namedtuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch._subclasses.fake_tensor import FakeTensorMode

from funcga import to_jax, to_numpy, to_torch
from funcga.trees import shares_memory
from tests.kits import needs_cuda
from tests.test_errors import check_refused

Pair = namedtuple("Pair", "a b")
EXTENSIONS = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
NARROW = ["float32", "float16", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool", "complex64", *EXTENSIONS]
WIDE = ["float64", "int64", "uint64", "complex128"]
MOVES = {"torch": to_torch, "jax": to_jax, "numpy": to_numpy}


def aligned(values, dtype):
    """A NumPy array that begins at a multiple of 64 bytes, as JAX needs it."""
    values = np.array(values).astype(getattr(ml_dtypes, dtype, None) or dtype)
    memory = np.zeros(values.nbytes + 64, "uint8")
    start = -memory.ctypes.data % 64
    array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


def bits(tree):
    return [(x.dtype, x.shape, x.tobytes()) for x in jax.tree.leaves(to_numpy(tree))]


def address(x):
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    return x.unsafe_buffer_pointer() if isinstance(x, jax.Array) else x.__array_interface__["data"][0]


def sources(dtype):
    """The same numbers in an array of each framework, in memory that each other can take."""
    array = aligned([[1, 2, 4], [8, 2, 1]], dtype)
    return array, {"numpy": array, "torch": to_torch(array), "jax": to_jax(array)}


@pytest.mark.parametrize("copy", [True, None, False])
def test_every_dtype_through_every_pair(x64, copy):
    for dtype in NARROW + WIDE:
        array, trees = sources(dtype)
        assert bits(list(trees.values())) == bits([array] * 3)
        for source, x in trees.items():
            for target, move in MOVES.items():
                if copy is False and (source, target) == ("numpy", "torch"):
                    assert x.flags.writeable
                moved = move({"x": x}, copy=copy)["x"]
                assert str(moved.dtype).removeprefix("torch.") == dtype
                assert bits(moved) == bits(array)
                assert (address(moved) == address(x)) is (copy is not True), (dtype, source, target)
                assert shares_memory(x, moved) == {"": copy is not True}


@pytest.mark.parametrize("copy", [True, None])
@pytest.mark.parametrize("move", MOVES.values())
def test_what_is_shared_sees_what_is_written(move, copy):
    """Really written, as no pointer can be wrong then."""
    for dtype in ("float32", "bfloat16"):
        array = aligned([1, 2, 4], dtype)
        for leaf, memory in ((array, array.view("uint8")), (to_torch(array), None)):
            moved = move(leaf, copy=copy)
            (leaf.view(torch.uint8) if memory is None else memory)[...] = 0
            assert to_numpy(moved).astype("float32").tolist() == ([1, 2, 4] if copy else [0, 0, 0])
            array[...] = [1, 2, 4]


def test_a_large_copy_is_finished_when_it_is_returned():
    tensor = torch.zeros(2**22)
    moved = to_jax([tensor, tensor.numpy(), tensor[1:]])
    tensor.fill_(1)
    assert [float(x.max()) for x in moved] == [0, 0, 0]
    x = jax.jit(lambda: jnp.full(2**22, 3.0))()
    assert float(to_torch(x)[-1]) == 3


def peak_bytes(function):
    """By how many bytes the address space of this process grows at most while a function runs, and what that returns.

    Of address space Linux knows the exact peak; of resident memory it has estimates, which on a machine of many
    processors are wrong by 32 MB. Keep the result: what is freed late would be counted as less for a later call.
    """
    gc.collect()
    # The peak is never reset, so the process is first as large as it ever was.
    missing = address_space("VmPeak") - address_space("VmSize")
    with mmap.mmap(-1, max(missing, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        before = address_space("VmPeak")
        assert address_space("VmSize") >= before - 2**20
        result = function()
        return address_space("VmPeak") - before, result


def address_space(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


SIZE = 9 * 2**20  # floats of 36 MB: what is larger than 32 MB, malloc gives back when it is freed


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of this process")
def test_one_copy_is_what_a_copy_takes():
    held, array = [], aligned(np.ones(2 * SIZE), "float32")
    tensor = torch.from_numpy(array)
    for leaf in (tensor[:SIZE], tensor[1 : SIZE + 1], array[::2], to_jax(tensor[:SIZE], copy=False)):
        for move in MOVES.values():
            held.append(move(leaf))  # what is made once: threads, with memory of their own
            found = [peak_bytes(lambda move=move, leaf=leaf: move(leaf)) for _ in range(3)]
            held.append([moved for _, moved in found])
            # The middle one: a thread of an earlier test may end meanwhile, and give back what it had.
            _, peak, _ = sorted(peak for peak, _ in found)
            assert 0.75 < peak / leaf.nbytes < 1.25
    twice, _ = peak_bytes(lambda: to_jax(torch.ones(SIZE)))
    assert twice > 1.75 * 4 * SIZE  # so much a detour would be


def test_trees_keep_their_form():
    tree = {"z": Pair(np.ones(2, "float32"), None), "a": ["name", 3, np.zeros((), "int32")]}
    moved = to_torch(tree)
    assert list(moved) == ["z", "a"]
    assert isinstance(moved["z"], Pair)
    assert moved["z"].b is None
    assert moved["a"][:2] == ["name", 3]
    assert to_jax(moved)["z"].a.shape == (2,)
    assert to_numpy({"a": 1}) == {"a": 1}
    assert to_numpy(np.float32(1)) == 1
    mixed = {"a": jnp.ones(2), "b": torch.ones(2, requires_grad=True), "c": np.ones(2, "float32")}
    assert {(type(leaf), leaf.requires_grad) for leaf in to_torch(mixed).values()} == {(torch.Tensor, False)}
    assert all(isinstance(leaf, jnp.ndarray) for leaf in to_jax(mixed).values())


@pytest.mark.parametrize("copy", [True, None])
@pytest.mark.parametrize("move", MOVES.values())
def test_layouts_keep_their_numbers(move, copy):
    x = aligned(np.arange(24).reshape(4, 6), "float32")
    read_only = x.copy()
    read_only.flags.writeable = False
    fields = np.zeros(3, dtype=[("x", "f4"), ("y", "i2")])
    numpys = [x.T, x[::-1], x[:, ::2], x[1, 2, ...], x[:0], np.broadcast_to(x[:1], (3, 6)), read_only, fields["x"],
              x.astype(">f4"), np.float32(3), ml_dtypes.bfloat16(3), x.astype(ml_dtypes.bfloat16)[::-1, ::2]]  # fmt: skip
    tensor = torch.from_numpy(x)
    tensors = [tensor.T, tensor[1:, 1:], tensor[:, ::2], tensor[1, 2], tensor[:0], tensor[:1].expand(3, 6),
               tensor.bfloat16().T[::2], torch.view_as_complex(tensor.view(12, 2)).conj(),
               torch.view_as_complex(tensor.view(12, 2)).conj().imag]  # fmt: skip
    for leaf in [*numpys, *tensors]:
        plain = leaf.to(torch.complex64).resolve_conj().resolve_neg() if isinstance(leaf, torch.Tensor) else leaf
        moved = to_numpy(move(leaf, copy=copy))
        assert moved.shape == leaf.shape
        assert moved.dtype.itemsize == leaf.dtype.itemsize
        np.testing.assert_array_equal(moved.astype("complex64"), np.asarray(plain).astype("complex64"))


def test_none_copies_what_cannot_be_shared():
    x = torch.arange(64.0)
    tree = {"whole": x, "slice": x[1:], "turned": x.view(8, 8).T, "far": x[16:], "empty": x[:0], "one": np.float32(1)}
    moved = to_jax(tree, copy=None)
    found = {"whole": True, "slice": False, "turned": False, "far": True, "empty": False, "one": False}
    assert shares_memory(tree, moved) == {f"['{key}']": value for key, value in found.items()}
    back = to_torch(moved, copy=False)
    assert all(shares_memory(moved, back)[f"['{key}']"] is (key != "empty") for key in tree)


@pytest.mark.parametrize(
    ("move", "leaf"),
    [
        (to_jax, lambda x: x[1:]),  # not at a multiple of 64 bytes
        (to_jax, lambda x: x.view(8, 8).T),
        (to_jax, lambda x: x.numpy()[::-1]),
        (to_jax, lambda x: x.numpy().astype(">f4")),
        (to_jax, lambda x: x.to(torch.complex64).conj()),
        (to_numpy, lambda x: x.to(torch.complex64).conj()),
        (to_numpy, lambda x: jnp.ones(3, "int4")),
        (to_numpy, lambda x: sharded()),
        (to_torch, lambda x: x.numpy()[::-1]),
        (to_torch, lambda x: np.broadcast_to(x.numpy()[:1], (3,))),  # read-only
        (to_torch, lambda x: x.numpy().astype(">f4")),
        (to_torch, lambda x: sharded()),
        (lambda tree, copy: to_jax(tree, copy=copy, device="cpu:1"), lambda x: to_jax(x)),
        (lambda tree, copy: to_torch(tree, copy=copy, device="meta"), lambda x: x),
    ],
)
def test_sharing_that_cannot_be_is_refused(move, leaf):
    tree = {"a": [1, leaf(torch.arange(64.0))]}
    says = check_refused(
        "copy=False asks for no copy, and `tree['a'][1]` cannot be shared: it lies elsewhere, or in a layout",
        move,
        tree,
        copy=False,
    )
    assert says.endswith(" copy=None copies what cannot be shared, and nothing else.")
    move(tree, copy=None)


def sharded():
    return jax.device_put(jnp.arange(8.0), NamedSharding(jax.make_mesh((4,), ("d",)), PartitionSpec("d")))


def donated():
    x = jnp.ones(3)
    x.delete()
    return x


def fake():
    with FakeTensorMode():
        return torch.ones(3)


NARROWED = 'as 64-bit types are switched off. Switch them on: jax.config.update("jax_enable_x64", True), or narrow it yourself before.'


@pytest.mark.parametrize(
    ("move", "leaf", "what", "why"),
    [
        (to_jax, lambda: np.ones(2), "float64[2]", f"it would be narrowed to float32, {NARROWED}"),
        (to_jax, lambda: torch.ones(2, dtype=torch.int64), "int64[2]", f"it would be narrowed to int32, {NARROWED}"),
        (to_jax, lambda: np.ones(2, ">c16"), ">c16[2]", f"it would be narrowed to complex64, {NARROWED}"),
        (to_torch, lambda: np.array(["a"]), "<U1[1]", "can't convert np.ndarray of type numpy.str_. The only supported types are: float64"),
        (to_torch, lambda: jnp.ones(3, "int4"), "int4[3]", ""),
        (to_torch, lambda: jnp.ones(3, "float8_e3m4"), "float8_e3m4[3]", ""),
        (to_jax, lambda: torch.zeros(4, dtype=torch.uint8).view(torch.int4), "int4[4]", "Got unsupported ScalarType Int4."),
        (to_numpy, lambda: torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2[8]", "Got unsupported"),
        (to_torch, lambda: np.ma.masked_less(np.ones(2), 3), "float64[2]", "its mask would be lost; x.filled(0) has none."),
        (to_jax, lambda: np.ma.masked_less(np.ones(2, "float32"), 3), "float32[2]", "its mask would be lost; x.filled(0) has none."),
        (to_torch, lambda: jax.random.key(0), "key<fry>[]", ""),
        (to_numpy, lambda: jax.random.key(0), "key<fry>[]", "JAX array with PRNGKey dtype cannot be converted to a NumPy array. Use jax.random.key_data(arr)"),
        (to_numpy, donated, "float32[3]", "Array has been deleted"),
        (to_torch, donated, "float32[3]", "Array has been deleted"),
        (to_torch, lambda: jax.ShapeDtypeStruct((3,), "float32"), "float32[3]", "it is a shape without numbers."),
        (to_numpy, lambda: jax.ShapeDtypeStruct((3,), "float32"), "float32[3]", "it is a shape without numbers."),
        (to_jax, lambda: torch.ones(2, device="meta"), "float32[2]", "Cannot copy out of meta tensor; no data!"),
        (to_jax, fake, "float32[3]", ".numpy() is not supported for tensor subclasses."),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(move, leaf, what, why):
    for copy in (True, None):
        check_refused(
            f"`tree['a'].b` is {what}, which cannot be converted: {why}", move, {"a": Pair(1, leaf())}, copy=copy
        )


@pytest.mark.parametrize("leaf", [np.array(["a"]), np.zeros(1, "g")], ids=["text", "float128"])
def test_what_jax_refuses_of_numpy(leaf):
    with pytest.raises(TypeError, match="not a valid JAX array type"):
        to_jax({"a": leaf})


def test_inside_of_transforms():
    traced = "float32[2], which cannot be converted: "
    for move in (to_torch, to_numpy):
        jax.make_jaxpr(lambda x, move=move: check_refused(f"`tree[0]` is {traced}", move, [x]) and x)(jnp.ones(2))
    jax.make_jaxpr(lambda x: to_jax([x])[0] is x or 1 / 0)(jnp.ones(2))

    @jax.jit
    def add(x):
        return to_jax({"x": x, "t": torch.ones(2)}, copy=None)["t"] + x

    assert add(jnp.ones(2)).tolist() == [2, 2]
    check = lambda x: check_refused("which cannot be converted: Cannot access data pointer", to_jax, x) and x.sum()
    torch.func.grad(check)(torch.ones(2))


def test_devices():
    tree = [torch.ones(16), to_jax(np.ones(3, "float32"))]
    for device in ("cpu:1", jax.devices()[1]):
        moved = to_jax(tree, device=device)
        assert {x.device for x in moved} == {jax.devices()[1]}
    assert not to_jax(tree)[0].committed  # as jnp.asarray has it, so that it can be used beside what lies elsewhere
    assert to_jax(tree[0], device=sharded().sharding).sharding == sharded().sharding
    assert to_torch(tree, device=torch.device("cpu"))[1].tolist() == [1, 1, 1]
    for name in ("cpu:4", "tpu", "nothing"):
        with pytest.raises((IndexError, RuntimeError)):
            to_jax(tree, device=name)
    with pytest.raises((AssertionError, RuntimeError)):
        to_torch(tree, device="xpu:9")


def test_sharded_arrays_stay_where_they_are():
    x = sharded()
    for copy in (True, None):
        moved = to_jax(x, copy=copy)
        assert moved.sharding == x.sharding
        assert shares_memory(x, moved) == {"": copy is None}
    assert to_torch(x).tolist() == [*range(8)]
    assert to_numpy(x).flags.writeable


def test_a_donated_array_leaves_what_it_shares_as_it_is():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for leaf in (torch.zeros(64), aligned(np.zeros(64), "float32")):
        shared = to_jax(leaf, copy=False)
        assert step(shared).tolist() == [1] * 64
        assert shared.is_deleted()
        assert to_numpy(leaf).tolist() == [0] * 64
    own = to_jax(torch.zeros(64))
    place = address(own)
    assert address(step(own)) == place  # what is copied can be donated as any array of JAX


def test_trees_that_only_one_framework_walks():
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    for tree, path in ((model, ".layers[1].weight"), (state, "['kernel'].value")):
        for move in (to_torch, to_numpy):
            moved = move(tree, copy=None)
            assert type(moved) is type(tree)
            assert all(isinstance(leaf, torch.Tensor | np.ndarray) or callable(leaf) for leaf in jax.tree.leaves(moved))
            shared = shares_memory(tree, moved)
            assert shared[path]
            assert all(shared.values())
            assert shares_memory(moved, to_jax(moved))[path] is False
            assert bits(to_jax(moved)) == bits(tree) if move is to_torch and tree is state else True
    assert to_jax(to_torch(model))(jnp.ones(2)).tolist() == model(jnp.ones(2)).tolist()


def test_modules_and_tied_tensors():
    module = torch.nn.Linear(64, 64)
    state = module.state_dict()
    assert type(to_jax(state)) is OrderedDict
    assert shares_memory(state, to_jax(state, copy=None)) == {"['weight']": True, "['bias']": True}
    assert not any(leaf.requires_grad for leaf in to_torch([*module.parameters()], copy=False))
    tied = {"a": module.weight, "b": module.weight}
    for move in MOVES.values():
        for copy in (True, None):
            moved = move(tied, copy=copy)
            assert shares_memory(moved["a"], moved["b"]) == {"": copy is None}


def test_sparse_tensors_become_dense():
    rows = torch.eye(3)[:, :2].to_sparse()
    for move in (to_numpy, to_jax):
        for copy in (True, None):
            assert np.array_equal(np.asarray(move(rows, copy=copy)), rows.to_dense().numpy())
        check_refused("copy=False asks for no copy", move, rows, copy=False)


def test_what_shares_memory_can_be_asked():
    x = torch.arange(8.0)
    left = {"a": x[:4], "b": [x[4:], None, 3], "c": torch.stack([x, x]).to_sparse()}
    right = {"a": x[2:5].numpy(), "b": [x[:4].numpy(), None], "c": left["c"]}
    assert shares_memory(left, right) == {"['a']": True, "['b'][0]": False, "['c']": True}
    assert shares_memory(x[::2].to_sparse(), left["c"]) == {"": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        csr = torch.eye(2).to_sparse_csr()
    assert [*shares_memory([csr], [csr]).values(), *shares_memory([csr], [x]).values()] == [True, False]
    assert shares_memory(x[:2].numpy(), x.numpy()[1::-1]) == {"": True}
    assert shares_memory([fake(), donated(), np.float32(1), x[:0]], [x] * 4) == dict.fromkeys(
        ["[0]", "[1]", "[2]", "[3]"], False
    )
    key = jax.random.key(0)
    assert shares_memory(key, jax.random.key_data(key)) == {"": True}
    assert shares_memory([1], ["x"]) == {}
    for left, right in (({"a": x}, {}), ({}, {"a": x})):
        with pytest.raises(KeyError, match="'a'"):
            shares_memory(left, right)


@needs_cuda
def test_cuda():
    x = torch.arange(2.0**20, device="cuda")
    host = {"numpy": to_numpy(x), "jax": to_jax(x)}
    with_copy = to_torch(x)
    x.zero_()
    assert [float(leaf[-1]) for leaf in (*host.values(), with_copy)] == [2.0**20 - 1] * 3
    assert to_torch(host["numpy"], device="cuda").is_cuda
    check_refused("cannot be shared: it lies elsewhere", to_numpy, x, copy=False)
    if any(device.platform == "gpu" for device in jax.devices()):
        shared = to_jax(x, copy=False)
        assert address(shared) == address(x)
        assert address(to_torch(shared, copy=False)) == address(x)
        assert to_torch(shared, device="cpu").device.type == "cpu"
