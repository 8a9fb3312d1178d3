"""DTensors: parameters and batches that lie on several devices are added where they lie, and reduced once."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import funcga
import torch_backend
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
    "sharded": ({"a": Shard(0), "bias": Replicate(), "b": Shard(0)}, Shard(0)),
}


def place(mesh, where, params, batch):
    places, rows = PLACES[where]
    placed = {k: distribute_tensor(v, mesh, [places[k]]) for k, v in params.items()}
    return placed, [distribute_tensor(x.contiguous(), mesh, [rows]) for x in batch]


def are_kept(grads, params):
    return all(grads[k].placements == params[k].placements for k in params if isinstance(params[k], DTensor))


# Scenarios: f(group, ...) -> how far a window is from the whole batch on one device


def placed(group, where, n, way="engine"):
    mesh = dist.init_device_mesh("cpu", (2,))
    whole, *rows = problem()
    params, batch = place(mesh, where, whole, rows)
    gradient = funcga.value_and_grad(loss)
    if way == "func":
        gradient = lambda p, *batch: torch.func.grad_and_value(loss)(p, *batch)[::-1]
    with CommDebugMode() as sent:
        found = funcga.accumulate(gradient, n)(params, *batch)
    with CommDebugMode() as once:
        funcga.value_and_grad(loss)(params, *batch)
    of_model = once.get_total_counts()
    # the loss and three gradients, whatever n; those of the model itself in each micro-batch
    expected = {"data": 4, "tensor": n * of_model, "sharded": sent.get_total_counts()}[where]
    assert sent.get_total_counts() == expected
    assert way == "func" or are_kept(found[1], params)
    return difference(found, funcga.value_and_grad(loss)(whole, *rows))


def ragged(group, places, **options):
    """Rows that do not divide, in one way or another."""
    mesh = dist.init_device_mesh("cpu", (2,))
    params, *batch = problem()
    whole = {k: distribute_tensor(v, mesh, [Replicate()]) for k, v in params.items()}
    rows = [distribute_tensor(x, mesh, [place]) for x, place in zip(batch, places, strict=True)]
    found = funcga.accumulate(funcga.value_and_grad(loss), **options)(whole, *rows)
    return difference(found, funcga.value_and_grad(loss)(params, *batch))


def exact(group, n):
    """Sums of bits, which take no DTensor: the loss makes plain tensors of its rows."""
    mesh = dist.init_device_mesh("cpu", (2,))
    params, *batch = problem()
    rows = [distribute_tensor(x, mesh, [Shard(0)]) for x in batch]
    gathered = lambda params, *rows: loss(params, *(x.full_tensor() for x in rows))
    fold = funcga.reproducible(funcga.mean())
    found = funcga.accumulate(funcga.value_and_grad(gathered), n, fold=fold)(params, *rows)
    return difference(found, funcga.value_and_grad(loss)(params, *batch))


def folded(group):
    """Rows that are collected, or that a state is threaded by, keep their order; moments and sums of exponentials are
    those of one device.
    """
    x = torch.arange(8.0, dtype=torch.float64)
    cut = distribute_tensor(x, dist.init_device_mesh("cpu", (2,)), [Shard(0)])
    rows = funcga.accumulate(lambda x: x * 2, 4, fold=funcga.concat(), in_axes=0)(cut)
    moments = funcga.accumulate(lambda x: x.mean(), 4, fold=funcga.moments(), in_axes=0)
    logs = funcga.accumulate(lambda x: 100 * x.mean(), 4, fold=funcga.logsumexp(), in_axes=0)
    slope = funcga.grad(lambda x: logs(x))
    halve = lambda state, x: state / 2 + x.sum()
    halved = funcga.accumulate(halve, 4, fold=funcga.carry(), in_axes=(funcga.CARRY, 0))
    state = torch.zeros((), dtype=torch.float64)
    everywhere = distribute_tensor(state, cut.device_mesh, [Replicate()])
    pairs = [(rows, 2 * x), *zip(moments(cut), moments(x), strict=True), (logs(cut), logs(x)), (slope(cut), slope(x))]
    pairs.append((halved(everywhere, cut), halved(state, x)))
    return max((found.full_tensor() - expected).abs().max().item() for found, expected in pairs)


def parallel(mesh):
    """A module that torch itself makes tensor parallel, and the same on one device."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain = copy.deepcopy(module)
    return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), plain


def mse(module, x, y):
    return ((module(x) - y) ** 2).mean()


def square():
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def two_dimensions(group, dtype, n):
    """Tensor parallel on one dimension of the mesh, replicas that hold unlike parts of the batch on the other."""
    mesh = square()
    whole, *batch = problem(dtype)
    rows = slice(0, 10) if mesh.get_local_rank("dp") == 0 else slice(10, 16)
    params, own = place(mesh["tp"], "tensor", whole, [x[rows] for x in batch])
    step = funcga.accumulate(funcga.value_and_grad(loss), n, across=mesh["dp"])
    step(params, *own)
    with CommDebugMode() as sent:
        found = step(params, *own)
    over_replicas = sum(count for op, count in sent.get_comm_counts().items() if "c10d." in str(op))
    assert over_replicas == 2  # the header, which says what is to be merged, and one reduction
    assert are_kept(found[1], params)
    return difference(found, funcga.value_and_grad(loss)(whole, *batch))


def idles(group):
    """A replica of tensor-parallel parameters that has nothing in the first window."""
    mesh = square()
    whole, *batch = problem()
    params, rows = place(mesh["tp"], "tensor", whole, [x[: 8 * (mesh.get_local_rank("dp") == 0)] for x in batch])
    funcga.accumulate(funcga.value_and_grad(loss), 2, across=mesh["dp"])(params, *rows)


def idle_module(group):
    """A replica of a tensor-parallel module that has nothing in the first window, and then has."""
    mesh, (_, *batch), errors = square(), problem(), []
    module, plain = parallel(mesh["tp"])
    loss_fn = lambda m, x, y: (mse(m, x, y), {"rows": torch.tensor(len(x))})
    gradient = torch_backend.module_value_and_grad(module, loss_fn, has_aux=True)
    step = funcga.accumulate(gradient, 2, across=mesh["dp"], fold=((funcga.mean(), funcga.sum()), funcga.mean()))
    for rows in ((8, 0), (8, 8), (0, 8), (5, 1)):
        rank = mesh.get_local_rank("dp")
        start = rows[0] if rank else 0
        (found, aux), grads = step(*(x[start : start + rows[rank]] for x in batch))
        expected = mse(plain, *(x[: sum(rows)] for x in batch))
        wanted = dict(zip(grads, torch.autograd.grad(expected, [*plain.parameters()]), strict=True))
        assert aux["rows"].item() == sum(rows)
        assert are_kept(grads, dict(module.named_parameters()))
        errors.append(difference((found, grads), (expected.detach(), wanted)))
    return max(errors)


CUT, WHOLE = Shard(0), Replicate()
SCENARIOS = {
    2: [
        (placed, "data", 4), (placed, "tensor", 2), (placed, "tensor", 1, "func"),
        (placed, "sharded", 8), (ragged, (CUT, WHOLE), {"n": 3}), (ragged, (CUT, CUT), {"microbatch_size": 6}),
        (ragged, (CUT, CUT), {"n": 9}),  # a micro-batch has a row of every device
        (exact, 2), (folded,),
    ],
    4: [(two_dimensions, torch.float32, 1), (two_dimensions, torch.float64, 3), (idle_module,)],
}  # fmt: skip


def errors_of(group):
    found = {}
    for function, *args in SCENARIOS[group.size()]:
        options = args.pop() if args and isinstance(args[-1], dict) else {}
        found[f"{function.__name__} {args} {options}"] = function(group, *args, **options)
    return found


@pytest.mark.parametrize("size", SCENARIOS)
def test_windows_are_those_of_one_device_and_gradients_lie_where_their_parameters_do(size):
    for found in processes(size).run(errors_of):
        wrong = {name: e for name, e in found.items() if not e <= (1e-6 if "float32" in name else 1e-13)}
        assert wrong == {}


def test_a_replica_of_a_mesh_without_data_in_its_first_window():
    with pytest.raises(Failed, match=r"on a mesh, .*give every replica a micro-batch in its first window") as failure:
        processes().run(idles)
    assert {kind for kind, _ in failure.value.errors} == {"FuncgaError"}
