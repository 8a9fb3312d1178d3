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
from tests.processes import Failed, processes
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


@pytest.mark.parametrize(("how", "reduction"), [("prefix", "sum"), ("function", "mean"), ("replicas", "sum")])
def test_exact_against_one_process(how, reduction):
    assert max(processes().run(accumulated, how, reduction)) <= 1e-12


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_each_expert_on_one_process_and_on_all(shape):
    assert max(processes().run(accumulated, "prefix", "mean", shape)) <= 1e-12


def streamed(group):
    """Ragged windows: as many micro-batches on all processes, of different sizes."""
    grid = Grid(group)
    params, batch = problem()
    own = grid.rows(batch)
    step = funcga.stream(
        funcga.value_and_grad(loss_of(grid.ep, "sum")), fold=folds("sum"), weight=count_of, across=grid.across()
    )
    cuts = [slice(0, 1), slice(1, 3), slice(3, None)]
    return error_of(
        grid, params, batch, step(own_experts(params, grid.ep), ([leaf[cut] for leaf in own] for cut in cuts))
    )


def test_stream():
    assert max(processes().run(streamed)) <= 1e-12


def with_totals(group):
    """Tokens are counted over the whole window, and each micro-batch returns its part of the mean."""
    grid = Grid(group)
    sums = loss_of(grid.ep, "sum")
    gradient = funcga.value_and_grad(lambda params, *batch, totals: sums(params, *batch) / totals)
    step = funcga.accumulate(
        gradient, 3, fold=funcga.sum(), totals=lambda *batch: batch[-1].sum(), across=grid.across()
    )
    params, batch = problem()
    return error_of(grid, params, batch, step(own_experts(params, grid.ep), *grid.rows(batch)))


def test_totals_are_those_of_the_window():
    assert max(processes().run(with_totals)) <= 1e-12


# --- modules


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
    found = []
    for _ in range(2):
        loss, grads = step(*grid.rows(batch))
        w, *of_experts = grads.values()
        found.append(
            error_of(
                grid, params, batch, (loss, {"dense": {"w": w}, "experts": dict(zip("wb", of_experts, strict=True))})
            )
        )
    return max(found)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_parameters_of_a_module(reduction):
    assert max(processes().run(of_module, reduction)) <= 1e-12


# --- a transform


def trained(group, calls):
    """Two windows of two micro-batches with multi_steps, and by hand on all experts."""
    grid = Grid(group)
    params, batch = problem()
    own, mine = own_experts(params, grid.ep), grid.rows(batch)
    across = {"dense": grid.all, "experts": grid.edp}
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD, lr=0.1), 2, fold=folds("sum"), across=across)
    state, gradient = tx.init(own), funcga.grad(loss_of(grid.ep, "sum"))
    halves = [[leaf[:2] for leaf in mine], [leaf[2:] for leaf in mine]]
    for half in halves * 2:
        weight = count_of(*half)
        if calls == "update":
            updates, state = tx.update(gradient(own, *half), state, own, weight=weight)
        else:
            state = tx.accumulate(gradient(own, *half), state, weight=weight)
            updates, state = tx.flush(state, own) if half is halves[1] else (None, state)
        if updates is not None:
            own = torch_backend.apply_updates(own, updates)
    for _ in range(2):
        _, grads = truth(params, batch)
        params = torch.utils._pytree.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    return difference(TORCH, own, own_experts(params, grid.ep))


@pytest.mark.parametrize("calls", ["update", "accumulate and flush"])
def test_updates(calls):
    assert max(processes().run(trained, calls)) <= 1e-12


def weighed(group):
    grid = Grid(group)
    own = own_experts(problem()[0], grid.ep)
    across = {"dense": grid.all, "experts": grid.edp}
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD, lr=0.1), 2, across=across)
    with pytest.raises(funcga.FuncgaError, match="per_weight"):
        tx.update(own, tx.init(own), own, weight=3)
    state = tx.accumulate(own, tx.init(own))
    with pytest.raises(funcga.FuncgaError, match="are of different experts"):
        tx.merge([state, state, state, state])


def test_gradients_of_means_that_have_a_weight_are_refused():
    processes().run(weighed)


# --- any grad_fn


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


def test_a_function_around_the_gradient():
    assert max(processes().run(of_any, "sum", False)) <= 1e-12
    assert max(processes().run(of_any, "mean", True)) <= 1e-12
    # The losses of other processes came with the weight 1: what cannot be had any more is refused, on all of them.
    with pytest.raises(Failed) as failed:
        processes().run(of_any, "mean", False)
    assert all("nothing has weighed that" in text for _, text in failed.value.errors)


WAYS = ["exact", "wide", "hook", "half", "beside", "split", "bfloat16 loss", "scaled"]


def weighed_late(group, how, equal):
    """What autograd cannot weigh while it adds: the gradients of other processes' losses come with the weight 1."""
    grid = Grid(group)
    params, batch = problem()
    if equal:
        batch = (*batch[:3], torch.ones_like(batch[3]))
    kind = {"half": torch.float16, "wide": torch.float32}.get(how, torch.float64)
    as_kind = lambda tree: torch.utils._pytree.tree_map(lambda x: x.to(kind) if x.is_floating_point() else x, tree)
    own, rows = as_kind(own_experts(params, grid.ep)), as_kind(grid.rows(batch, [6] * 4 if equal else SIZES))
    base, options, kwargs = loss_of(grid.ep, "mean"), {}, {}
    loss_fn = (lambda *args: base(*args).bfloat16()) if how == "bfloat16 loss" else base
    folds = {
        "exact": funcga.reproducible(funcga.mean()),
        "wide": funcga.mean(dtype="float64"),
        "beside": (funcga.mean(), {"dense": funcga.sum(), "experts": funcga.mean()}),
    }
    weight = (lambda *batch: count_of(*batch) / 7) if how == "bfloat16 loss" else count_of
    if how == "hook":
        own["dense"]["w"].requires_grad_().register_hook(lambda grad: grad)
    if how == "scaled":
        options["scaled"], kwargs["loss_scale"] = True, 2.0
    argnums = (0, 1) if how == "split" else 0
    across = grid.across()
    if how == "split":
        across = (grid.all, (across[1], grid.all))
    folds["split"] = (funcga.mean(), (funcga.mean(), funcga.concat()))
    step = funcga.accumulate(
        funcga.value_and_grad(loss_fn, argnums, **options),
        3,
        fold=folds.get(how, funcga.mean()),
        weight=weight,
        across=across,
    )
    _, grads = step(own, *rows, **kwargs)
    grads = grads[0] if how == "split" else grads
    expected = own_experts(truth(params, batch)[1], grid.ep)
    scale = 2.0 if how == "scaled" else 1.0
    return max(
        float((grads["experts"][name].double() / scale - expected["experts"][name]).abs().max()) for name in "wb"
    )


@pytest.mark.parametrize("how", WAYS)
def test_what_cannot_be_weighed_before_it_travels_is_refused(how):
    with pytest.raises(Failed) as failed:
        processes().run(weighed_late, how, False)
    assert all("nothing has weighed that" in text for _, text in failed.value.errors)
    limit = {"half": 1e-2, "bfloat16 loss": 1e-2, "wide": 1e-5, "exact": 1e-6}.get(how, 1e-12)
    assert max(processes().run(weighed_late, how, True)) <= limit


class Unseen(torch.Tensor):
    """A weight that the host does not see, as one on a device."""


def hidden(group):
    """Weights that only a device knows are the cotangents, too."""
    grid = Grid(group)
    params, batch = problem()
    weight = lambda *batch: batch[-1].sum().as_subclass(Unseen)
    step = funcga.accumulate(
        funcga.value_and_grad(loss_of(grid.ep, "mean")), 3, weight=weight, across=grid.across()
    )  # fmt: skip
    return error_of(grid, params, batch, step(own_experts(params, grid.ep), *grid.rows(batch)))


def test_weights_on_a_device():
    assert max(processes().run(hidden)) <= 1e-12


def disagreed(group, what):
    grid = Grid(group)
    own, rows = own_experts(problem()[0], grid.ep), grid.rows(problem()[1])
    if what == "group":
        experts = grid.ep if grid.rank == 0 else grid.edp
        across = (grid.all, {"dense": grid.all, "experts": experts})
        funcga.accumulate(funcga.value_and_grad(loss_of(grid.ep, "sum")), 3, fold=funcga.sum(), across=across)(
            own, *rows
        )
    else:
        own["experts"]["b"] += grid.rank == 3
        funcga.check_replicas(own, {"dense": grid.all, "experts": grid.edp})


@pytest.mark.parametrize("what", ["group", "parameters"])
def test_what_one_process_has_otherwise_is_refused_by_all(what):
    with pytest.raises(Failed) as failed:
        processes().run(disagreed, what)
    says = {
        "group": "Name the same group on all of its ranks",
        "parameters": "not as on rank 1 is `params['experts']['b']` of rank 3",
    }
    assert all(kind == "FuncgaError" and says[what] in text for kind, text in failed.value.errors)


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


# --- what travels


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


# --- what is the same


def alike(group):
    grid = Grid(group)
    params = own_experts(problem()[0], grid.ep)
    funcga.check_replicas(params, {"dense": grid.all, "experts": grid.edp})
    with pytest.raises(funcga.FuncgaError, match=r"params\['experts'\]\['w'\]"):
        funcga.check_replicas(params, grid.all)
    params["experts"]["b"] += grid.rank // 2
    with pytest.raises(funcga.FuncgaError, match=r"params\['experts'\]\['b'\]"):
        funcga.check_replicas(params, lambda path: grid.edp if "experts" in path else grid.all)


def test_check_replicas():
    processes().run(alike)


# --- refusals


def refusals(group):
    grid, found = Grid(group), {}
    params, batch = problem()
    own, rows = own_experts(params, grid.ep), grid.rows(batch)
    gradient = funcga.value_and_grad(loss_of(grid.ep, "sum"))

    def refused(name, across, **options):
        with pytest.raises(funcga.FuncgaError) as error:
            funcga.accumulate(gradient, 3, fold=options.pop("fold", funcga.sum()), across=across, **options)(own, *rows)
        found[name] = str(error.value)

    refused("none", (grid.all, {"dense": grid.all, "experts": None}))
    refused("missing", (grid.all, {"dense": grid.all}))
    refused("function", lambda path: grid.edp if "experts" in path else None)
    refused("cover", (grid.edp, {"dense": grid.edp, "experts": grid.ep}))
    refused("beyond", Replicas(grid.edp, leaves=lambda path: grid.all))
    refused("empty", ())
    refused("list", [])
    refused("name", (grid.all, {"dense": grid.all, "experts": "edp"}))
    refused("observe", grid.across(), observe=funcga.gradient_norms())
    refused("drop", grid.across(), drop="microbatch")
    rows_of = lambda path: grid.edp
    with pytest.raises(funcga.FuncgaError) as error:
        funcga.accumulate(lambda w, x: x, 1, fold=funcga.concat(), across=Replicas(grid.all, leaves=rows_of))(
            own, rows[0]
        )
    found["rows"] = str(error.value)
    with pytest.raises(funcga.FuncgaError) as error:
        funcga.accumulate(lambda w, x: x.mean(), 1, fold=funcga.moments(), across=Replicas(grid.all, leaves=rows_of))(
            own, rows[0]
        )
    found["moments"] = str(error.value)
    with pytest.raises(funcga.FuncgaError) as error:
        funcga.coupled(lambda p, x: x, lambda p, x: x.sum(), 2, across=grid.across())(own["dense"], rows[0])
    found["coupled"] = str(error.value)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 1), process_group=grid.all)
    of_ddp = torch_backend.module_value_and_grad(ddp, lambda model, x: model(x).sum())
    with pytest.raises(funcga.FuncgaError) as error:
        funcga.accumulate(of_ddp, 2, across=(grid.all, grid.edp))(rows[0].float())
    found["ddp"] = str(error.value)
    from torch.distributed.fsdp import fully_shard

    model = Model(own, grid.ep)
    fully_shard(model.experts, mesh=grid.mesh["edp"])
    fully_shard(model, mesh=dist.DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(funcga.FuncgaError) as error:
        torch_backend.module_value_and_grad(model, lambda model, x, which: model(x, which).sum())
    found["fsdp"] = str(error.value)
    return found


def test_refusals():
    words = {
        "none": "across= has None for some leaves. Name the replicas of every leaf",
        "missing": "Name the replicas of every leaf, across=(WORLD, {'dense': WORLD",
        "function": "across= names no replicas for `output[0]`: it is None there",
        "cover": "Name the group of all processes that fold: across=torch_backend.Replicas(group, leaves=...)",
        "beyond": "their weights not counted",
        "empty": "across= is ()",
        "list": "across= is []",
        "moments": "is of the whole window",
        "name": "across= has 'edp' for some leaves",
        "observe": "Leave observe= out",
        "drop": "Leave drop= out",
        "rows": "is of the whole window",
        "coupled": "across=group",
        "ddp": "which reduces all gradients itself",
        "fsdp": "are wrapped by fully_shard over different replicas",
    }
    for found in processes().run(refusals):
        assert {name: text for name, text in found.items() if words[name] not in text} == {}
        assert found.keys() == words.keys()
