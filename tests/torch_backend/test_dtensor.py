"""DTensors: parameters and batches that lie on several devices are added where they lie, and reduced once."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import funcga
from tests.processes import Failed, processes


def loss(params, x, y):
    return ((torch.tanh(x @ params["a"] + params["bias"]) @ params["b"] - y) ** 2).mean()


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (6, 8), "bias": (8,), "b": (8, 2)}
    params = {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in shapes.items()}
    return params, *(torch.randn(16, k, generator=generator, dtype=dtype) for k in (6, 2))


def difference(found, expected):
    pairs = [(found[0], expected[0]), *((found[1][k], expected[1][k]) for k in expected[1])]
    whole = [(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in pairs]
    assert all(a.isfinite().all() for a, _ in whole)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in whole)


PLACES = {  # of the parameters, of the batch
    "data": ({"a": Replicate(), "bias": Replicate(), "b": Replicate()}, Shard(0)),
    "tensor": ({"a": Shard(1), "bias": Shard(0), "b": Shard(0)}, Replicate()),
    "neither": ({"a": Replicate(), "bias": Replicate(), "b": Replicate()}, Replicate()),
    "sharded": ({"a": Shard(0), "bias": Replicate(), "b": Shard(0)}, Shard(0)),
}


def placed(group, where, n, way):
    mesh = dist.init_device_mesh("cpu", (2,))
    params, *batch = problem()
    expected = funcga.value_and_grad(loss)(params, *batch)
    places, rows = PLACES[where]
    params = {k: distribute_tensor(v, mesh, [places[k]]) for k, v in params.items()}
    batch = [distribute_tensor(x, mesh, [rows]) for x in batch]
    gradient = funcga.value_and_grad(loss)
    if way == "func":
        gradient = lambda p, *batch: torch.func.grad_and_value(loss)(p, *batch)[::-1]
    step = funcga.accumulate(gradient, n)
    with CommDebugMode() as sent:
        found = step(params, *batch)
    with CommDebugMode() as once:
        funcga.value_and_grad(loss)(params, *batch)
    kept = all(found[1][k].placements == params[k].placements for k in params)
    return difference(found, expected), kept, sent.get_total_counts(), once.get_total_counts()


CUT = [
    ("data", 4, "engine"),
    ("tensor", 2, "engine"),
    ("tensor", 1, "func"),
    ("neither", 4, "engine"),
    ("sharded", 8, "engine"),
]


@pytest.mark.parametrize(("where", "n", "way"), CUT)
def test_gradients_lie_where_their_parameters_do(where, n, way):
    for error, kept, sent, once in processes(2).run(placed, where, n, way):
        assert error <= 1e-13
        if where in ("data", "neither"):  # the loss and three gradients, whatever n
            assert sent == (4 if where == "data" else 0)
        if where == "tensor":
            assert sent == n * once  # those of the model itself
        assert kept or way == "func"


def ragged(group, places, options):
    """How far a window is from the whole batch whose rows do not divide, in one way or another."""
    mesh = dist.init_device_mesh("cpu", (2,))
    params, *batch = problem()
    expected = funcga.value_and_grad(loss)(params, *batch)
    whole = {k: distribute_tensor(v, mesh, [Replicate()]) for k, v in params.items()}
    batch = [distribute_tensor(x, mesh, [place]) for x, place in zip(batch, places, strict=True)]
    return difference(funcga.accumulate(funcga.value_and_grad(loss), **options)(whole, *batch), expected)


@pytest.mark.parametrize(
    ("places", "options"),
    [
        ((Shard(0), Shard(0)), {"n": 3}), ((Shard(0), Replicate()), {"n": 3}), ((Shard(0), Shard(0)), {"microbatch_size": 6}),
        ((Shard(0), Shard(0)), {"n": 9}),  # a micro-batch has a row of every device
    ],
    ids=["n", "one is whole", "size", "too many"],
)  # fmt: skip
def test_rows_that_do_not_divide(places, options):
    assert max(processes(2).run(ragged, places, options)) <= 1e-13


def folded(group):
    """Rows that are collected keep their order; moments and sums of exponentials are those of one device."""
    mesh = dist.init_device_mesh("cpu", (2,))
    x = torch.arange(8.0, dtype=torch.float64)
    cut = distribute_tensor(x, mesh, [Shard(0)])
    rows = funcga.accumulate(lambda x: x * 2, 4, fold=funcga.concat(), in_axes=0)(cut)
    moments = funcga.accumulate(lambda x: x.mean(), 4, fold=funcga.moments(), in_axes=0)
    logs = funcga.accumulate(lambda x: 100 * x.mean(), 4, fold=funcga.logsumexp(), in_axes=0)
    slope = funcga.grad(lambda x: logs(x))
    pairs = [(rows, 2 * x), *zip(moments(cut), moments(x), strict=True), (logs(cut), logs(x)), (slope(cut), slope(x))]
    return [(found.full_tensor() - expected).abs().max().item() for found, expected in pairs]


def test_other_folds_are_those_of_one_device():
    assert processes(2).run(folded) == [[0.0] * 5] * 2


def two_dimensions(group, dtype, n):
    """Tensor parallel on one dimension of the mesh, replicas that hold unlike parts of the batch on the other."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params, *batch = problem(dtype)
    expected = funcga.value_and_grad(loss)(params, *batch)
    rows = slice(0, 10) if mesh.get_local_rank("dp") == 0 else slice(10, 16)
    params = {k: distribute_tensor(v, mesh["tp"], [PLACES["tensor"][0][k]]) for k, v in params.items()}
    batch = [distribute_tensor(x[rows].contiguous(), mesh["tp"], [Replicate()]) for x in batch]
    step = funcga.accumulate(funcga.value_and_grad(loss), n, across=mesh["dp"])
    step(params, *batch)
    with CommDebugMode() as sent:
        found = step(params, *batch)
    over_replicas = sum(count for op, count in sent.get_comm_counts().items() if "c10d." in str(op))
    return difference(found, expected), over_replicas, found[1]["a"].placements == params["a"].placements


def test_tensor_parallel_replicas():
    for dtype, limit, n in ((torch.float32, 1e-6, 1), (torch.float64, 1e-13, 3)):
        for error, over_replicas, kept in processes().run(two_dimensions, dtype, n):
            assert error <= limit
            assert over_replicas == 2  # the header, which says what is to be merged, and one reduction
            assert kept


def tensor_parallel_module(group):
    """A module that torch itself has made tensor parallel."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import torch_backend

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    _, x, y = problem()
    mse = lambda module, x, y: torch.nn.functional.mse_loss(module(x), y)
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    expected = funcga.value_and_grad(torch_backend.pure_loss(module, mse))(params, x, y)
    mesh = dist.init_device_mesh("cpu", (2,))
    parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    step = funcga.accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, mse)), 4)
    return difference(step(dict(module.named_parameters()), x, y), expected)


def test_a_tensor_parallel_module():
    assert max(processes(2).run(tensor_parallel_module)) <= 1e-13


def idles(group, first):
    """A replica of tensor-parallel parameters that has nothing, in the first window or in a later one."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params, *batch = problem()
    expected = funcga.value_and_grad(loss)(params, *(x[:8] for x in batch))
    params = {k: distribute_tensor(v, mesh["tp"], [PLACES["tensor"][0][k]]) for k, v in params.items()}
    placed = lambda rows: [distribute_tensor(x[:rows].contiguous(), mesh["tp"], [Replicate()]) for x in batch]
    step = funcga.accumulate(funcga.value_and_grad(loss), 2, across=mesh["dp"])
    mine = mesh.get_local_rank("dp") == 0
    if not first:
        step(params, *placed(16))
    found = step(params, *placed(8 if mine else 0))
    return difference(found, expected), [found[1][k].placements == params[k].placements for k in params]


def test_a_replica_of_a_mesh_without_data():
    for error, kept in processes().run(idles, False):
        assert error <= 1e-13
        assert all(kept)
    with pytest.raises(Failed, match="a replica has nothing to fold in its first window") as failure:
        processes().run(idles, True)
    assert {kind for kind, _ in failure.value.errors} == {"FuncgaError"}


def idle_module(group):
    """A replica of a tensor-parallel module that has nothing in the first window, and then has."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import torch_backend

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    plain = copy.deepcopy(module)
    _, *batch = problem()
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    loss = lambda m, x, y: ((m(x) - y) ** 2).mean()
    loss_fn = lambda m, x, y: (loss(m, x, y), {"rows": torch.tensor(len(x))})
    gradient = torch_backend.module_value_and_grad(module, loss_fn, has_aux=True)
    step = funcga.accumulate(gradient, 2, across=mesh["dp"], fold=((funcga.mean(), funcga.sum()), funcga.mean()))
    errors, kept = [], []
    for rows in ((8, 0), (8, 8), (0, 8), (5, 1)):
        start = rows[0] if mesh.get_local_rank("dp") else 0
        own = slice(start, start + rows[mesh.get_local_rank("dp")])
        (found, aux), grads = step(*(x[own] for x in batch))
        plain.zero_grad()
        expected = loss(plain, *(x[: sum(rows)] for x in batch))
        expected.backward()
        kept.append(aux["rows"].item() == sum(rows))
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        errors.append(difference((found, grads), (expected.detach(), wanted)))
        kept += [
            grads[name].placements == p.placements for name, p in module.named_parameters() if hasattr(p, "placements")
        ]
    return max(errors), all(kept)


def test_a_replica_of_a_tensor_parallel_module_without_data():
    for error, kept in processes().run(idle_module):
        assert error <= 1e-13
        assert kept
