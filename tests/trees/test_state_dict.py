"""State dicts: a window is saved in the middle and goes on bit for bit, in any format and in the other framework."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import funcga
import torch_backend
from tests import problems
from tests.kits import JAX, TORCH, difference

pytestmark = pytest.mark.usefixtures("as_users_write_it")


def tree(kit, seed, names="wba", dtype="float32"):
    r = problems.rng(seed)
    found = {name: r.normal(size=(2, 3)[: k % 3]).astype(dtype) for k, name in enumerate("abw")}
    return kit.arrays({name: {"x": found[name]} for name in names})


def transform(kit):
    inner = optax.adam(0.1) if kit is JAX else torch_backend.from_optimizer(torch.optim.Adam, lr=0.1)
    return funcga.multi_steps(inner, 3)


def halfway(kit, tx):
    """A state in the middle of the second window, and how it goes on."""
    params = tree(kit, 0)
    state = tx.init(params)
    for k in range(4):
        _, state = tx.update(tree(kit, k + 1), state, params, weight=k + 1)
    return state, lambda state: finished(kit, tx, state)


def finished(kit, tx, state):
    params = tree(kit, 0)
    for k in range(4, 6):
        updates, state = tx.update(tree(kit, k + 1), state, params, weight=k + 1)
    return updates, state


def through_npz(state, like):
    file = io.BytesIO()
    np.savez(file, **funcga.to_numpy(funcga.trees.to_state_dict(state)))
    file.seek(0)
    return funcga.trees.from_state_dict(like, np.load(file, allow_pickle=False))


def through_torch(state, like):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_safetensors(state, like):
    pytest.importorskip("safetensors")
    from safetensors import torch as files

    return funcga.trees.from_state_dict(like, files.load(files.save(funcga.trees.to_state_dict(state))))


@pytest.mark.parametrize(
    ("kit", "through"),
    [
        (TORCH, through_npz),
        (JAX, through_npz),
        (TORCH, through_torch),
        (TORCH, through_safetensors),
    ],
    ids=["torch-npz", "jax-npz", "torch-save", "torch-safetensors"],
)
@pytest.mark.host
def test_the_continuation_is_bit_identical(kit, through):
    tx = transform(kit)
    state, on = halfway(kit, tx)
    restored = through(state, tx.init(tree(kit, 0)))
    assert kit.backend.trees.flatten(restored)[1] == kit.backend.trees.flatten(state)[1]
    for a, b in zip(on(state), on(restored), strict=True):
        assert difference(kit, a, b) == 0


def test_through_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = transform(JAX)
    state, on = halfway(JAX, tx)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", tx.init(tree(JAX, 0)))
    for a, b in zip(on(state), on(restored), strict=True):
        assert difference(JAX, a, b) == 0


def sgd(kit, rate):
    """The same pair in both frameworks."""
    flatten, unflatten = kit.backend.trees.flatten, kit.backend.trees.unflatten

    def update(grads, state, params=None):
        leaves, structure = flatten(grads)
        moved = [0.9 * m + g for m, g in zip(flatten(state["momentum"])[0], leaves, strict=True)]
        return unflatten(structure, [-rate * m for m in moved]), {"momentum": unflatten(structure, moved)}

    return funcga.transforms.Transform(lambda params: {"momentum": params}, update)


@pytest.mark.parametrize(("kit", "other"), [(TORCH, JAX), (JAX, TORCH)], ids=["torch to jax", "jax to torch"])
def test_a_state_resumes_in_the_other_framework(kit, other):
    """Also where the dicts are in another order, and through numpy alone."""
    tx, there = (funcga.multi_steps(sgd(k, 0.5), 3) for k in (kit, other))
    state, on = halfway(kit, tx)
    like = there.init(tree(other, 0, names="abw"))
    assert {*funcga.trees.to_state_dict(like)} == {*funcga.trees.to_state_dict(state)}
    assert {".inner['momentum']['w']['x']", ".window.tally.weight[0]", ".updates"} < {*funcga.trees.to_state_dict(like)}
    restored = funcga.trees.from_state_dict(like, funcga.trees.to_state_dict(state))
    converted = {TORCH: funcga.to_torch, JAX: funcga.to_jax}[other](state)
    for resumed in (restored, converted):
        updates, after = finished(other, there, resumed)
        expected, last = on(state)
        for name in "abw":
            np.testing.assert_allclose(
                other.leaves(updates[name])[0], kit.leaves(expected[name])[0], rtol=1e-6, atol=1e-7
            )
        assert (int(after.updates), int(after.offered)) == (int(last.updates), int(last.offered)) == (2, 0)


def test_what_does_not_fit_is_refused(kit):
    like = tree(kit, 0)
    saved = funcga.trees.to_state_dict(like)
    for bad, text in (
        ({k: v for k, v in saved.items() if "'w'" not in k}, "missing `['w']['x']`, new nothing"),
        ({**saved, "['c']": saved["['w']['x']"]}, "missing nothing, new `['c']`"),
        (
            {**saved, "['w']['x']": saved["['a']['x']"]},
            "['w']['x'] is float32[] in the state dict and float32[2, 3] in",
        ),
        ({**saved, "['a']['x']": kit.cast(saved["['a']['x']"], "float16")}, "is float16[] in the state dict"),
    ):
        with pytest.raises(funcga.FuncgaError) as error:
            funcga.trees.from_state_dict(like, bad)
        assert text in str(error.value)


def test_arrays_go_where_the_others_lie():
    mesh = jax.make_mesh((4,), ("data",))
    like = {"w": jax.device_put(np.zeros((8, 2), "float32"), jax.NamedSharding(mesh, jax.P("data")))}
    restored = funcga.trees.from_state_dict(like, {"['w']": np.ones((8, 2), "float32")})
    assert restored["w"].sharding == like["w"].sharding
    assert (restored["w"] == 1).all()
    assert (like["w"] == 0).all()


def test_arrays_are_committed_to_a_device_only_if_the_others_are():
    like = {"w": jax.numpy.zeros(3), "v": jax.device_put(np.zeros(3, "float32"), jax.devices()[1])}
    restored = funcga.trees.from_state_dict(like, funcga.to_numpy(funcga.trees.to_state_dict(like)))
    assert not restored["w"].committed
    assert restored["v"].committed
    assert restored["v"].devices() == {jax.devices()[1]}
    everywhere = jax.device_put(np.ones(3, "float32"), jax.NamedSharding(jax.make_mesh((4,), ("data",)), jax.P()))
    assert ((restored["w"] + everywhere) == 1).all()


def test_numbers_of_python_stay_what_they_are(kit):
    like = {"state": tree(kit, 0), "done": 0, "rate": 0.0}
    saved = {
        **funcga.to_numpy(funcga.trees.to_state_dict(like)),
        "['done']": np.asarray(3),
        "['rate']": np.asarray(0.5),
    }
    found = funcga.trees.from_state_dict(like, saved)
    assert (found["done"], found["rate"]) == (3, 0.5)
    assert (type(found["done"]), type(found["rate"])) == (int, float)
    assert funcga.trees.from_state_dict(like, {**saved, "['done']": 4})["done"] == 4
    assert difference(kit, found["state"], like["state"]) == 0


def test_strides_are_those_of_the_tree_to_fill():
    like = {"w": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), "t": torch.zeros(3, 2).T}
    saved = {"['w']": np.arange(96, dtype="float32").reshape(2, 3, 4, 4), "['t']": np.ones((2, 3), "float32")}
    found = funcga.trees.from_state_dict({k: torch.nn.Parameter(v) for k, v in like.items()}, saved)
    assert all(found[k].stride() == like[k].stride() and not found[k].requires_grad for k in like)
    assert found["w"].flatten().tolist() == list(range(96))


def test_typed_keys_of_jax_go_through_a_file(tmp_path):
    params = jnp.ones(2)
    noisy = optax.chain(optax.add_noise(0.1, 0.1, jax.random.key(3, impl="rbg")), optax.sgd(1.0))
    tx = funcga.multi_steps(noisy, 2)
    with jax.numpy_dtype_promotion("standard"):
        run = jax.jit(tx.update)
        _, state = run(params, tx.init(params), params)
        np.savez(tmp_path / "state.npz", **funcga.to_numpy(funcga.trees.to_state_dict(state)))
        with np.load(tmp_path / "state.npz") as stored:
            again = funcga.trees.from_state_dict(tx.init(params), stored)
        np.testing.assert_array_equal(run(params, again, params)[0], run(params, state, params)[0])
    assert jax.tree.structure(again) == jax.tree.structure(state)
    keys = {path: leaf for path, leaf in funcga.trees.to_state_dict(state).items() if "key" in path}
    assert [str(key.dtype) for key in keys.values()] == ["uint32"]
    typed = {
        **funcga.trees.to_state_dict(state),
        **dict.fromkeys(keys, state.inner[0].rng_key),
    }  # as older ones have them
    assert funcga.trees.from_state_dict(state, typed).inner[0].rng_key == state.inner[0].rng_key
    with pytest.raises(TypeError, match="key"):
        funcga.trees.from_state_dict(state, {**typed, **{path: jnp.zeros(7, "uint32") for path in keys}})


def test_nothing_is_shared():
    like, saved = {"w": torch.zeros(3)}, funcga.trees.to_state_dict({"w": torch.ones(3)})
    restored = funcga.trees.from_state_dict(like, saved)
    saved["['w']"].zero_()
    assert (restored["w"] == 1).all()
    assert (like["w"] == 0).all()
