"""What is refused of wrapped modules, on every replica alike, with the words that say what to do instead."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcga
from tests.kits import Unseen
from tests.processes import answer, processes
from tests.torch_backend.wrapped.test_wrapped import (
    WRAPPERS,
    BreaksBackward,
    Broken,
    by_steps,
    ddp,
    fsdp1,
    half,
    left_over,
    made,
    mean_square,
    mesh_of,
    rows_of,
)  # fmt: skip
from torch_backend import module_value_and_grad


def step_of(module, loss_fn=mean_square, n=2, has_aux=False, sync="last", **options):
    return funcga.accumulate(module_value_and_grad(module, loss_fn, has_aux=has_aux, sync=sync), n, **options)


def rows(group):
    return rows_of(group.rank(), torch.float32)


def of_ddp(group, **options):
    return step_of(ddp(group, made()), **options)(*rows(group))


def outer(group, wrapper):
    module_value_and_grad(WRAPPERS[wrapper](group, made()), mean_square, sync="outer")


def several_wrappers(group):
    from torch.distributed.fsdp import fully_shard

    parts = ddp(group, nn.Linear(2, 2)), fully_shard(nn.Linear(2, 2), mesh=mesh_of(group))
    module_value_and_grad(nn.Sequential(*parts), mean_square)


def uncovered(group):
    module_value_and_grad(nn.Sequential(ddp(group, nn.Linear(2, 2)), nn.Linear(2, 2)), mean_square)


def ignored(group):
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(2, 2)
    module_value_and_grad(fully_shard(module, mesh=mesh_of(group), ignored_params={module.bias}), mean_square)


def two_kinds(group):
    module = ddp(group, made())
    folds = dict.fromkeys(dict(module.named_parameters()), funcga.mean())
    step_of(module, fold=(funcga.mean(), {**folds, "module.0.bias": funcga.sum()}))(*rows(group))


def half_loss(group, kind):
    weight = lambda x, y: torch.tensor(257).as_subclass(kind)
    step = step_of(ddp(group, made(torch.bfloat16)), fold=funcga.mean(dtype="bfloat16"), weight=weight)
    step(*rows_of(0, torch.bfloat16))


def a_part_in_16_bits(group, wrapper):
    """One part of the module reduces in 16 bits, and the whole of it does not."""
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

    module = made()
    if wrapper == "fsdp1":
        policy = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        module[3] = fsdp1(group, module[3], mixed_precision=policy, auto_wrap_policy=None)
        module = fsdp1(group, module, auto_wrap_policy=None)
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.float32)
        fully_shard(module[2], mesh=mesh_of(group), mp_policy=policy)
        fully_shard(module, mesh=mesh_of(group))
    step_of(module, lambda module, x, y: ((module(x).float() - y) ** 2).mean())(*rows(group))


def over_different_replicas(group, wrapper):
    from torch.distributed.fsdp import fully_shard

    other = [dist.new_group([rank]) for rank in range(2)][group.rank()]
    module = made()
    if wrapper == "fsdp2":
        fully_shard(module[2], mesh=mesh_of(other))
        fully_shard(module, mesh=mesh_of(group))
    else:
        wrap = {"ddp": ddp, "fsdp1": fsdp1}[wrapper]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*NO_SHARD")  # as it says of one rank
            module = nn.Sequential(wrap(group, module[:2]), wrap(other, module[2:]))
    module_value_and_grad(module, mean_square)


def other_folds(group, wrapper):
    fold = by_steps() if group.rank() else funcga.mean()
    step_of(WRAPPERS[wrapper](group, made()), fold=(funcga.mean(), fold))(*rows(group))


def unsharded(group, module):
    """FSDP1 that shards nothing, and all-reduces gradients."""
    from torch.distributed.fsdp import ShardingStrategy

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*NO_SHARD")
        return fsdp1(group, module, sharding_strategy=ShardingStrategy.NO_SHARD)


class Sometimes(nn.Module):
    """A part that only inputs with a mark go through."""

    def __init__(self):
        super().__init__()
        self.always, self.part = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x):
        out = torch.tanh(self.always(x))
        return self.part(out) if x[0, 0] > 0 else out


def unused_at_last(group, wrapper, copies=False):
    module = unsharded(group, Sometimes()) if copies else WRAPPERS[wrapper](group, Sometimes())
    batch = [(torch.full((2, 4), mark), torch.ones(2, 3)) for mark in (1.0, -1.0)]
    funcga.stream(module_value_and_grad(module, mean_square))(batch)


def wrapped_late(group, wrapper, called):
    """A step of a module, or of what wraps a part of it, that is made before the wrapper."""
    module = made()
    step = step_of(module)
    if called:
        step(*rows_of(0, torch.float32))
    WRAPPERS[wrapper](group, module)
    step(*rows_of(0, torch.float32))


def in_a_summary(group):
    """A wrapped module that a summary closes over."""
    module = ddp(group, made())
    step = funcga.coupled(lambda w, x, y: w * module(x), lambda w, s: s.sum(), 2)
    step(torch.ones(()), *rows_of(0, torch.float32))


def part_wrapped_late(group):
    from torch.distributed.fsdp import fully_shard

    module = made()
    step = step_of(module)
    fully_shard(module[2], mesh=mesh_of(group))
    step(*rows_of(0, torch.float32))


def synchronised_statistics(group):
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3)), mesh=mesh_of(group))
    step_of(module)(torch.zeros(0, 4), torch.zeros(0, 3))


def inside_of_join(group):
    from torch.distributed.algorithms.join import Join

    module = ddp(group, made())
    step = step_of(module)
    with Join([module]):
        step(*rows(group))


def past_the_wrapper(group):
    """A loss that closes over the module which was wrapped, as the script had it before."""
    inside = made()
    step_of(ddp(group, inside), lambda _, *batch: mean_square(inside, *batch))(*rows(group))


def around_with_totals(group):
    loss_fn = lambda module, x, y, *, totals, scale: scale * mean_square(module, x, y)
    around = functools.partial(module_value_and_grad(ddp(group, made()), loss_fn), scale=2)
    funcga.accumulate(around, 2, fold=funcga.sum(), totals=lambda x, y: len(x))(*rows(group))


def hook_on_grad(group, wrapper):
    """A hook that updates a parameter in each backward pass, as some optimizers do."""
    module = WRAPPERS[wrapper](group, made())
    next(module.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    step_of(module)(*rows(group))


PURE = "funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn))"
OUTER = (
    'sync="outer" was asked of {}, which has no outer mesh to all-reduce over. It is for fully_shard with a mesh of two'
)
WRITTEN = "a parameter was changed in place during the window, by loss_fn or by another thread"
APART = (
    "`{}` is trained and is not among what {} reduces, as only other parts of the module are wrapped, or it was ignored: "
    "replicas would drift apart. Wrap the whole module, or freeze it: parameter.requires_grad_(False)."
)
NARROW = "` has gradients that {} sums in bfloat16 over the micro-batches, and the fold promises float32. {}"
LATE = (
    "and {} wrapped by {}: in this step its gradients are silently not reduced over the replicas. Leave it to the "
    "wrapper: wrap the module first, and then make the step, "
)


# (what is called with the group, words of the error)
def failed_outside(group):
    """A backward pass of the user's that fails within the module, and a call."""
    net, (x, y) = made(), rows(group)
    hook = net[1].register_forward_hook(lambda layer, args, out: BreaksBackward.apply(out))
    module = fsdp1(group, net)
    with pytest.raises(Broken):
        mean_square(module, x, y).backward()
    hook.remove()
    return step_of(module)(x, y)


def written_to(group, wrapper):
    """By an optimizer, between two micro-batches; a stream is one item ahead."""
    module = WRAPPERS[wrapper](group, made())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = rows(group)

    def items():
        yield x, y
        yield x, y
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
        yield x, y

    funcga.stream(module_value_and_grad(module, mean_square))(items())


REFUSED = {
    "no rows anywhere, drop": (
        (lambda group: step_of(ddp(group, made()), drop="window")(*[each[:0] for each in rows(group)]),),
        "no replica has a micro-batch to fold"),
    "written to, ddp": ((written_to, "ddp"), WRITTEN),
    "written to, fsdp2": ((written_to, "fsdp2"), WRITTEN),
    "written to, replicate": ((written_to, "replicated"), WRITTEN),
    "outer, ddp": ((outer, "ddp"), OUTER.format("DistributedDataParallel")),
    "outer, fsdp1": ((outer, "fsdp1"), OUTER.format("FullyShardedDataParallel")),
    "outer, fsdp2": ((outer, "fsdp2"), OUTER.format("fully_shard")),
    "outer, replicate": ((outer, "replicated"), OUTER.format("replicate")),
    "uncovered": ((uncovered,), APART.format("1.weight", "DistributedDataParallel")),
    "ignored": ((ignored,), APART.format("bias", "fully_shard")),
    "mixed": ((several_wrappers,), "parts of the module are wrapped by DistributedDataParallel and fully_shard, which"),
    "max": ((of_ddp, {"fold": funcga.max()}), "the gradients' fold is no sum, or some are weighed, as by funcga.mean(), and "
        "others are not, as by funcga.sum(): a module's own gradients are only added, in one backward pass with one weight. "
        "Fold all of them with funcga.mean(), per_weight() or sum(), and only the value otherwise: fold=(funcga.max(), "
        f"funcga.mean()). For any other fold of gradients use {PURE}, with the module not wrapped."),
    "reproducible": ((of_ddp, {"fold": funcga.reproducible(funcga.mean())}), "the gradients' fold is no sum"),
    "concat": ((of_ddp, {"fold": (funcga.mean(), funcga.concat())}), "the gradients' fold is no sum"),
    "two kinds": ((two_kinds,), "some are weighed, as by funcga.mean(), and others are not, as by funcga.sum()"),
    "across": ((of_ddp, {"across": "world"}), "across= names the ranks [0, 1, 2, 3], and the module is wrapped by "
        "DistributedDataParallel, which reduces over the ranks [0, 1]. Leave across= out: the wrapper knows its replicas."),
    "auto": ((of_ddp, {"n": "auto"}), 'n="auto" was given, and the gradient is that of a module in DDP, replicate or '
        "fully_shard: a window is replayed when memory runs out, and the other replicas or stages would hang. Say how"),
    "drop": ((of_ddp, {"drop": "microbatch"}), 'drop="microbatch" was given'),
    "drop_if": ((of_ddp, {"drop": "window", "drop_if": bool}), "drop_if= was given"),
    "empty": ((lambda group: funcga.stream(module_value_and_grad(ddp(group, made()), mean_square))([]),),
        "there is no micro-batch on this replica, and grad_fn is that of a wrapped module or of a pipeline, which the "
        "processes run together: without a micro-batch there is nothing to run it on. Give every replica a micro-batch, "
        "one of weight 0 if need be, or let funcga reduce, for which a replica may have none: "
        f"stream({PURE}, across=group), with the module that was wrapped."),
    "constant": ((of_ddp, {"loss_fn": lambda module, x, y: x.sum()}), "the loss does not depend on any parameter, so "
        "there is no backward pass for DistributedDataParallel to synchronise in. Return a loss that is computed from"),
    "vmap": ((lambda group: torch.func.vmap(module_value_and_grad(ddp(group, made()), mean_square))(*rows(group)),),
        "module_value_and_grad runs .backward() on the module's own parameters, which can be neither compiled nor "
        f"transformed by torch.func. Compile the module, or loss_fn; inside of a transform use {PURE}."),
    "totals": ((around_with_totals,), "averages every micro-batch over the replicas, where a sum is asked for"),
    "half loss": ((half_loss, torch.Tensor), "the loss is bfloat16[], which may not hold the weight 257. Return a loss in"),
    "half loss, device": ((half_loss, Unseen), "the loss is bfloat16[], which may not hold the weight 257"),
    "16 bits, ddp": ((half, "ddp"), NARROW.format("DistributedDataParallel", "Keep the parameters in float32, with "
        "torch.autocast in loss_fn; or use fully_shard with MixedPrecisionPolicy(reduce_dtype=torch.float32); or let "
        "funcga reduce")),
    "16 bits, fsdp1": ((half, "fsdp1"), NARROW.format("FullyShardedDataParallel", "Keep the parameters in float32 and "
        'write module_value_and_grad(module, loss_fn, sync="every"), which sums shards in their dtype; or use')),
    "16 bits, one micro-batch": ((half, "fsdp2 reduces in 16 bits", "last", None, 1), "Or say that bfloat16 is meant"),
    "16 bits, fsdp2": ((half, "fsdp2 reduces in 16 bits"), NARROW.format("fully_shard", "Say that it sums in float32: "
        "fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))")),
    "16 bits, part of fsdp1": ((a_part_in_16_bits, "fsdp1"), ".3._fsdp_wrapped_module.weight` has gradients that"),
    "16 bits, part of fsdp2": ((a_part_in_16_bits, "fsdp2"), "`2.0.weight" + NARROW.format("fully_shard", "")),
    "other replicas, ddp": ((over_different_replicas, "ddp"), "by DistributedDataParallel over different replicas, the"),
    "other replicas, fsdp1": ((over_different_replicas, "fsdp1"), "FullyShardedDataParallel over different replicas"),
    "other replicas, fsdp2": ((over_different_replicas, "fsdp2"), "so there is no one set of replicas to weigh "
        "micro-batches over. Give every part the same process group or mesh; or let funcga reduce"),
    "other folds, ddp": ((other_folds, "ddp"), "reduced by the module's wrapper (weighted, by_steps) on rank 1"),
    "other folds, fsdp2": ((other_folds, "fsdp2"), "reduced by the module's wrapper (weighted, by_weight) on rank 0"),
    "hook on .grad, ddp": ((hook_on_grad, "ddp"), "has a hook of register_post_accumulate_grad_hook, which acts on the .grad"),
    "hook on .grad, fsdp2": ((hook_on_grad, "fsdp2"), "has a hook of register_post_accumulate_grad_hook, which acts on the"),
    "sums of fsdp1": ((left_over, "fsdp1"), "the module is wrapped by FullyShardedDataParallel and has gradients of a "
        ".backward() in no_sync(), which would be reduced along with those of this call: first end that window"),
    "failed fsdp1": ((failed_outside,), "Or an error in an earlier pass has left its parameters unsharded, so that "
        "gradients would be missing: wrap the module anew, and load its parameters, module.load_state_dict(state)."),
    "sums of fsdp1, flat": ((left_over, "fsdp1_flat"), "has gradients of a .backward() in no_sync()"),
    "unused, ddp": ((unused_at_last, "ddp"), "the last micro-batch does not use all parameters, so that "
        "DistributedDataParallel did not synchronise, nor what earlier micro-batches had summed: it waits for every "
        "parameter in that backward pass. Use all parameters in every micro-batch, or wrap the module with "
        "find_unused_parameters=True. Torch says: Expected to have finished reduction"),
    "unused, fsdp1": ((unused_at_last, "fsdp1"), "_saved_grad_shard"),
    "unused, fsdp1 of copies": ((unused_at_last, "fsdp1", {"copies": True}), "the last micro-batch does not use all "
        "of the module that is wrapped by FullyShardedDataParallel, and it synchronises only what that backward pass reaches."),
    "late, fsdp2": ((wrapped_late, "fsdp2", False), LATE.format("it is", "fully_shard")),
    "late, replicate": ((wrapped_late, "replicated", True), LATE.format("it is", "replicate")),
    "in a summary": ((in_a_summary,), LATE.format("it is", "DistributedDataParallel")),
    "late, a part": ((part_wrapped_late,), LATE.format("the part `2` of it is", "fully_shard")),
    "join": ((inside_of_join,), "was called inside of Join, which answers for replicas that have run out of data, and "
        "knows nothing of the counts that funcga merges. Leave Join out: replicas may have different numbers of"),
    "past the wrapper": ((past_the_wrapper,), "DistributedDataParallel has reduced nothing in the last backward pass: "
        "loss_fn does not call it, but perhaps the module inside of it, that it closes over, whose gradients would differ"),
    "statistics": ((synchronised_statistics,), "this replica has fewer micro-batches than others, and the module has a "
        "SyncBatchNorm layer: rows that stand in for the missing ones would count in the statistics of all replicas."),
}  # fmt: skip


KIND = {"unused, fsdp1": "AssertionError"}  # what torch itself refuses


def refusals(group, names):
    found = {}
    for name in names:
        function, *args = REFUSED[name][0]
        options = args.pop() if args and isinstance(args[-1], dict) else {}
        if options.get("across") == "world":
            options = {"across": dist.group.WORLD}
        found[name] = answer(function, group, *args, **options)
    return found


def test_refusals():
    for found in processes().run(refusals, [*REFUSED], size=2):
        wrong = {
            name: error
            for name, error in found.items()
            if error[0] != KIND.get(name, "FuncgaError") or REFUSED[name][1] not in error[1]
        }
        assert wrong == {}


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((made(), mean_square), {"sync": "never"}, "sync is 'never'. Write sync=\"last\", to synchronise once a window"),
        ((made(), mean_square), {"sync": "outer"}, 'sync="outer" was asked of a module that is not wrapped, which has no'),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(args, options, words):
    with pytest.raises(funcga.FuncgaError) as error:
        module_value_and_grad(*args, **options)
    assert str(error.value).startswith(words)


def test_an_empty_stream_of_a_module_is_refused():
    assert [*module_value_and_grad(made(), mean_square).__signature__.parameters] == ["x", "y"]
    with pytest.raises(funcga.FuncgaError, match="the stream is empty: there is no micro-batch"):
        funcga.stream(module_value_and_grad(made(), mean_square))([])


@pytest.mark.filterwarnings("default")
def test_a_window_is_not_compiled():
    torch._dynamo.reset()
    step = step_of(made())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="funcga accumulates here; compile the loss, and not"):
        torch.compile(step, fullgraph=True, backend="eager")(*rows_of(0, torch.float32))
    gradient = torch.compile(module_value_and_grad(made(), mean_square), backend="eager")
    with pytest.raises(funcga.FuncgaError, match="which can be neither compiled nor transformed"):
        gradient(*rows_of(0, torch.float32))
    torch._dynamo.reset()


def test_a_loss_that_does_not_use_the_module():
    module, other, x = nn.Linear(3, 1), nn.Linear(3, 1), torch.randn(4, 3)
    for loss in (lambda _, x: other(x).mean(), lambda module, x: module(x).detach().square().mean()):
        with pytest.raises(
            funcga.FuncgaError, match="the loss does not depend on any parameter of the module: nothing"
        ):
            step_of(module, loss)(x)
    _, gradients = step_of(module, lambda module, x: x.sum() * 0)(x)
    assert not any(gradient.any() for gradient in gradients.values())
