"""`across=` for each leaf: experts that are not on every process, against the model of all experts on one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcga
import torch_backend
from tests import experts
from tests.experts import count_of, loss_of, own_experts, problem, truth
from tests.kits import TORCH, difference
from tests.processes import answer, processes
from tests.torch_backend.reduce.test_replicas import counted
from torch_backend import Replicas

SIZES = [9, 3, 7, 5]  # the rows of each of 4 processes


class Grid:
    """4 processes as 2 x 2: each expert is on 2 of them, `edp`, and tokens travel between 2, `ep`."""

    def __init__(self, group, shape=(2, 2)):
        self.mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("edp", "ep"))
        self.edp, self.ep, self.all = self.mesh["edp"].get_group(), self.mesh["ep"].get_group(), group
        self.rank = dist.get_rank(group)

    def across(self, how="prefix", **options):
        prefix = (self.all, {"dense": self.all, "experts": self.mesh["edp"]})
        if how == "function":
            return lambda path: self.edp if path.startswith("1.experts.") else self.all
        return prefix if how == "prefix" else Replicas(self.all, leaves=prefix, **options)

    def rows(self, batch, sizes=SIZES):
        start = sum(sizes[: self.rank])
        return [leaf[start : start + sizes[self.rank]] for leaf in batch]


def error_of(grid, params, batch, found):
    """How far (loss, grads) of this process are from those of the model with all experts, on one process."""
    loss, grads = truth(params, batch)
    return difference(TORCH, found, (loss, own_experts(grads, grid.ep)))


def folds(reduction):
    return funcga.mean() if reduction == "mean" else funcga.per_weight()


def accumulated(group, how, reduction, shape=(2, 2)):
    grid, found = Grid(group, shape), []
    gradient = funcga.value_and_grad(loss_of(grid.ep, reduction))
    step = funcga.accumulate(gradient, 3, fold=folds(reduction), weight=count_of, across=grid.across(how))
    for seed in range(3):
        params, batch = problem(seed=seed)
        found.append(error_of(grid, params, batch, step(own_experts(params, grid.ep), *grid.rows(batch))))
    return max(found)


class Experts(nn.Module):
    def __init__(self, params, ep):
        super().__init__()
        self.w, self.b, self.ep = nn.Parameter(params["w"]), nn.Parameter(params["b"]), ep

    def forward(self, hidden, which):
        return experts.through_travel({"w": self.w, "b": self.b}, hidden, which, self.ep)


class Model(nn.Module):
    def __init__(self, params, ep):
        super().__init__()
        self.w, self.experts = nn.Parameter(params["dense"]["w"].clone()), Experts(params["experts"], ep)

    def forward(self, tokens, which):
        return self.experts(torch.tanh(tokens @ self.w), which)


def of_module(group, reduction):
    grid = Grid(group)
    params, batch = problem()
    model = Model(own_experts(params, grid.ep), grid.ep)
    across = lambda path: grid.edp if ".experts." in path else grid.all

    def loss_fn(model, tokens, which, targets, counts):
        errors = (model(tokens, which) - targets).square().sum(-1) * counts
        return errors.sum() / counts.sum().clamp(min=1) if reduction == "mean" else errors.sum()

    gradient = torch_backend.module_value_and_grad(model, loss_fn)
    step = funcga.accumulate(gradient, 3, fold=folds(reduction), weight=count_of, across=across)
    step(*grid.rows(batch))
    loss, grads = step(*grid.rows(batch))
    w, *of_experts = grads.values()
    grads = {"dense": {"w": w}, "experts": dict(zip("wb", of_experts, strict=True))}
    return error_of(grid, params, batch, (loss, grads))


def of_any(group, reduction, equal):
    grid = Grid(group)
    params, batch = problem()
    if equal:
        batch = (*batch[:3], torch.ones_like(batch[3]))
    gradient = funcga.value_and_grad(loss_of(grid.ep, reduction))
    step = funcga.accumulate(
        lambda *args: gradient(*args), 3, fold=folds(reduction), weight=count_of, across=grid.across()
    )
    sizes = [6] * 4 if equal else SIZES
    return error_of(grid, params, batch, step(own_experts(params, grid.ep), *grid.rows(batch, sizes)))


def trained(group):
    """Two windows of two micro-batches with multi_steps, by `update` and by `flush`, and by hand on all experts."""
    grid = Grid(group)
    params, batch = problem()
    own, mine, across = own_experts(params, grid.ep), grid.rows(batch), {"dense": grid.all, "experts": grid.edp}
    sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=0.1)
    tx = funcga.multi_steps(sgd, 2, fold=folds("sum"), across=across)
    state, gradient = tx.init(own), funcga.grad(loss_of(grid.ep, "sum"))
    halves = [[leaf[:2] for leaf in mine], [leaf[2:] for leaf in mine]]
    for half in halves:
        updates, state = tx.update(gradient(own, *half), state, own, weight=count_of(*half))
    own = torch_backend.apply_updates(own, updates)
    for half in halves:
        state = tx.accumulate(gradient(own, *half), state, weight=count_of(*half))
    own = torch_backend.apply_updates(own, tx.flush(state, own)[0])
    for _ in range(2):
        _, grads = truth(params, batch)
        params = torch.utils._pytree.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    means = funcga.multi_steps(sgd, 2, across=across)
    with pytest.raises(funcga.FuncgaError, match="per_weight"):
        means.update(own, means.init(own), own, weight=3)
    with pytest.raises(funcga.FuncgaError, match="are of different experts"):
        means.merge([means.accumulate(own, means.init(own))] * 4)
    return difference(TORCH, own, own_experts(params, grid.ep))


WAYS = ["exact", "hook", "split", "scaled"]


def weighed_late(group, how, equal):
    """What autograd cannot weigh while it adds: the gradients of other processes' losses come with the weight 1."""
    grid = Grid(group)
    params, batch = problem()
    if equal:
        batch = (*batch[:3], torch.ones_like(batch[3]))
    own, rows = own_experts(params, grid.ep), grid.rows(batch, [6] * 4 if equal else SIZES)
    fold, options, kwargs, argnums, across = funcga.mean(), {}, {}, 0, grid.across()
    if how == "exact":
        fold = funcga.reproducible(fold)
    if how == "hook":
        own["dense"]["w"].requires_grad_().register_hook(lambda grad: grad)
    if how == "scaled":
        options["scaled"], kwargs["loss_scale"] = True, 2.0
    if how == "split":
        argnums, across = (0, 1), (grid.all, (across[1], grid.all))
        fold = (funcga.mean(), (funcga.mean(), funcga.concat()))
    gradient = funcga.value_and_grad(loss_of(grid.ep, "mean"), argnums, **options)
    _, grads = funcga.accumulate(gradient, 3, fold=fold, weight=count_of, across=across)(own, *rows, **kwargs)
    grads = grads[0] if how == "split" else grads
    expected, scale = own_experts(truth(params, batch)[1], grid.ep), 2.0 if how == "scaled" else 1.0
    return max(float((grads["experts"][name] / scale - expected["experts"][name]).abs().max()) for name in "wb")


SCENARIOS = {
    "prefix": (accumulated, "prefix", "sum"),
    "function": (accumulated, "function", "mean"),
    "replicas": (accumulated, "replicas", "sum"),
    "each expert on one process": (accumulated, "prefix", "mean", (1, 4)),
    "module": (of_module, "mean"),
    "multi_steps": (trained,),
    "any grad_fn": (of_any, "sum", False),
    "any grad_fn, equal weights": (of_any, "mean", True),
}
LIMITS = {"exact": 1e-6}


def errors_of(group):
    found = {name: function(group, *args) for name, (function, *args) in SCENARIOS.items()}
    return found | {how: weighed_late(group, how, True) for how in WAYS}


def test_exact_against_one_process():
    for found in processes().run(errors_of):
        assert {name: error for name, error in found.items() if not error <= LIMITS.get(name, 1e-12)} == {}


def without_collectives(group):
    """Leaves whose gradients are those of this process's own loss."""
    grid = Grid(group)
    x = torch.arange(8.0, dtype=torch.float64) + 10 * grid.rank
    value = lambda w, x: {"all": x.mean(), "some": x.mean() * w, "most": x.max(), "each": x.sum()}
    fold = {
        "all": funcga.mean(),
        "some": funcga.reproducible(funcga.mean()),
        "most": funcga.max(),
        "each": funcga.sum(),
    }
    across = {"all": grid.all, "some": grid.edp, "most": grid.edp, "each": grid.mesh["ep"]}
    step = funcga.accumulate(value, 2, fold=fold, weight=lambda x: len(x) * (1 + grid.rank), across=across)
    return {name: float(leaf) for name, leaf in step(torch.tensor(2.0), x).items()}


def test_each_leaf_has_the_replicas_of_its_own_and_the_weights_of_the_window():
    means, weights = [3.5 + 10 * rank for rank in range(4)], [8 * (1 + rank) for rank in range(4)]
    for rank, found in enumerate(processes().run(without_collectives)):
        edp, ep = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["all"] == pytest.approx(sum(map(float.__mul__, means, map(float, weights))) / 80, rel=1e-14)
        assert found["some"] == pytest.approx(sum(2 * means[r] * weights[r] for r in edp) / 80, rel=1e-6)
        assert found["most"] == 7 + 10 * edp[1]
        assert found["each"] == pytest.approx(sum(8 * means[r] for r in ep), rel=1e-14)


def in_16_bits(group):
    """2048 and eight ones, in leaves of float16, where 2048 + 1 is 2048."""
    grid = Grid(group)
    each = lambda x: dict.fromkeys(("usual", "wide", "own"), x.sum())
    fold = {"usual": funcga.sum(), "wide": funcga.sum(dtype="float64"), "own": funcga.sum(dtype="float32")}
    across = {"usual": grid.all, "wide": grid.edp, "own": grid.mesh["ep"]}
    rows = torch.tensor([2048] + [1] * 8, dtype=torch.float16)
    found = funcga.accumulate(each, 9, in_axes=0, fold=fold, across=across)(rows)
    return {name: float(leaf) for name, leaf in found.items()}


def test_sums_of_16_bits_are_wider_over_replicas_of_their_own():
    assert processes().run(in_16_bits) == [{"usual": 4 * 2056, "wide": 2 * 2056, "own": 2 * 2056}] * 4


def travels(group):
    """What a second window calls, in small buckets and in large ones."""
    grid = Grid(group)
    layers = [{"dense": torch.randn(64, 64), "experts": torch.randn(2, 64, 64)} for _ in range(4)]

    def loss_fn(layers, x):
        for layer in layers:
            x = torch.tanh(x @ layer["dense"] @ layer["experts"].mean(0))
        return x.square().mean()

    found = []
    for bucket_bytes in (2**14 + 1024, 2**24):
        leaves = lambda path: grid.edp if "experts" in path else grid.all
        across = Replicas(group, bucket_bytes=bucket_bytes, leaves=leaves)
        step = funcga.accumulate(funcga.value_and_grad(loss_fn), 2, across=across)
        step(layers, torch.ones(4, 64))
        with counted() as calls:
            step(layers, torch.ones(4, 64))
        found.append(calls)
    return found


def test_one_reduction_for_each_group():
    for small, large in processes().run(travels):
        assert [name for name, _ in large] == ["allgather_", "allreduce_", "allreduce_"]
        sizes = [size for name, size in small if name == "allreduce_"]
        assert len(sizes) == 8  # 4 of experts, 3 of dense ones, and the last dense one with the loss
        assert sum(sizes) <= 4 * (3 * 4 * 64 * 64) + 8 * 256


# -- refusals


def disagreed(group, what):
    grid = Grid(group)
    own, rows = own_experts(problem()[0], grid.ep), grid.rows(problem()[1])
    if what == "group":
        across = (grid.all, {"dense": grid.all, "experts": grid.ep if grid.rank == 0 else grid.edp})
        gradient = funcga.value_and_grad(loss_of(grid.ep, "sum"))
        return funcga.accumulate(gradient, 3, fold=funcga.sum(), across=across)(own, *rows)
    across = {"dense": grid.all, "experts": grid.edp}
    funcga.check_replicas(own, across)
    with pytest.raises(funcga.FuncgaError, match=r"params\['experts'\]\['w'\]"):
        funcga.check_replicas(own, grid.all)
    own["experts"]["b"] += grid.rank == 3
    across = across if what == "parameters" else lambda path: grid.edp if "experts" in path else grid.all
    return funcga.check_replicas(own, across)


def of_another_kind(group, what):
    from torch.distributed.fsdp import fully_shard

    grid = Grid(group)
    own = own_experts(problem()[0], grid.ep)
    x, beyond = grid.rows(problem()[1])[0], Replicas(grid.all, leaves=lambda path: grid.edp)
    if what == "rows":
        funcga.accumulate(lambda w, x: x, 1, fold=funcga.concat(), across=beyond)(own, x)
    if what == "moments":
        funcga.accumulate(lambda w, x: x.mean(), 1, fold=funcga.moments(), across=beyond)(own, x)
    if what == "coupled":
        funcga.coupled(lambda p, x: x, lambda p, x: x.sum(), 2, across=grid.across())(own["dense"], x)
    if what == "ddp":
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 1), process_group=grid.all)
        gradient = torch_backend.module_value_and_grad(ddp, lambda model, x: model(x).sum())
        funcga.accumulate(gradient, 2, across=(grid.all, grid.edp))(x.float())
    if what == "fsdp":
        model = Model(own, grid.ep)
        fully_shard(model.experts, mesh=grid.mesh["edp"])
        fully_shard(model, mesh=dist.DeviceMesh.from_group(group, "cpu"))
        torch_backend.module_value_and_grad(model, lambda model, x, which: model(x, which).sum())


def given(group, across, **options):
    grid = Grid(group)
    params, batch = problem()
    gradient = funcga.value_and_grad(loss_of(grid.ep, "sum"))
    step = funcga.accumulate(gradient, 3, fold=funcga.sum(), across=across(grid), **options)
    step(own_experts(params, grid.ep), *grid.rows(batch))


# (what is called with the group, words of the error)
REFUSED = {
    "none": (given, lambda grid: (grid.all, {"dense": grid.all, "experts": None}),
        "across= has None for some leaves. Name the replicas of every leaf"),
    "missing": (given, lambda grid: (grid.all, {"dense": grid.all}),
        "Name the replicas of every leaf, across=(WORLD, {'dense': WORLD"),
    "function": (given, lambda grid: lambda path: grid.edp if "experts" in path else None,
        "across= names no replicas for `output[0]`: it is None there"),
    "cover": (given, lambda grid: (grid.edp, {"dense": grid.edp, "experts": grid.ep}),
        "Name the group of all processes that fold: across=torch_backend.Replicas(group, leaves=...)"),
    "beyond": (given, lambda grid: Replicas(grid.edp, leaves=lambda path: grid.all), "their weights not counted"),
    "empty": (given, lambda grid: (), "across= is ()"),
    "list": (given, lambda grid: [], "across= is []"),
    "name": (given, lambda grid: (grid.all, {"dense": grid.all, "experts": "edp"}), "across= has 'edp' for some leaves"),
    "observe": (given, Grid.across, {"observe": funcga.gradient_norms()}, "Leave observe= out"),
    "drop": (given, Grid.across, {"drop": "microbatch"}, "Leave drop= out"),
    "rows": (of_another_kind, "rows", "is of the whole window"),
    "moments": (of_another_kind, "moments", "is of the whole window"),
    "coupled": (of_another_kind, "coupled", "across=group"),
    "ddp": (of_another_kind, "ddp", "which reduces all gradients itself"),
    "fsdp": (of_another_kind, "fsdp", "are wrapped by fully_shard over different replicas"),
    "group": (disagreed, "group", "Name the same group on all of its ranks"),
    "parameters": (disagreed, "parameters", "not as on rank 1 is `params['experts']['b']` of rank 3"),
    "parameters, by a function": (disagreed, "function", "not as on rank 1 is `params['experts']['b']` of rank 3"),
    "any grad_fn": (of_any, "mean", False, "nothing has weighed that"),
    **{how: (weighed_late, how, False, "nothing has weighed that") for how in WAYS},
}  # fmt: skip


def refusals(group):
    found = {}
    for name, (function, *args, _) in REFUSED.items():
        options = args.pop() if isinstance(args[-1], dict) else {}
        found[name] = answer(function, group, *args, **options)
    return found


def test_refusals():
    for found in processes().run(refusals):
        wrong = {k: error for k, error in found.items() if error[0] != "FuncgaError" or REFUSED[k][-1] not in error[1]}
        assert wrong == {}
