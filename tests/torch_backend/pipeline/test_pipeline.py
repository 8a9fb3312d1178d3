"""Pipelines of torch.distributed.pipelining give the gradient of the whole model and the whole batch on one device."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcga
from funcga.tools.pipelines import private_in_torch
from tests.kits import Unseen
from tests.processes import processes
from torch_backend import assign_grads, pipeline_value_and_grad, pure_loss, trainable

TOLERANCE = 1e-12  # float64, sums in another order
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
MULTI = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
LENGTH = 5  # tokens of a row


def part(index, stages):
    """Stage `index` of a model that is the same everywhere: an embedding, then layers, the last one to classes."""
    torch.manual_seed(index)
    first = [nn.Embedding(7, 6)] if index == 0 else []
    # FSDP2 warns of outputs that are views, as those of a Linear are.
    last = [nn.Linear(6, 4), nn.Softplus()] if index == stages - 1 else []
    return nn.Sequential(*first, nn.Linear(6, 6), nn.Tanh(), *last).to(torch.float64)


def batch(rows, seed=0):
    """Tokens and labels, of which many do not count; the first row has none that does."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(7, (rows, LENGTH), generator=generator)
    y = torch.randint(4, (rows, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH + 1, (rows, 1), generator=generator)
    lengths[:1] = 0
    return x, torch.where(torch.arange(LENGTH) < lengths, y, -100)


def loss_fn(output, y):
    """The mean over the tokens that count: NaN where there are none."""
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=-100)


def with_metrics(output, y):
    kept = y != -100
    correct = ((output.argmax(-1) == y) & kept).sum().to(torch.float64) / kept.sum().clamp(min=1)
    return loss_fn(output, y), {"correct": correct, "predicted": output.argmax(-1)}


def tokens(x, y):
    return (y != -100).sum().item()


def tokens_on_device(x, y):
    return (y != -100).sum()


METRICS = ((funcga.mean(), {"correct": funcga.mean(), "predicted": funcga.concat()}), funcga.mean())


def whole(stages, x, y, metrics=False):
    """The value and the gradients of the whole batch on one device, by name; the metrics beside the value."""
    model = nn.ModuleDict({str(index): part(index, stages) for index in range(stages)})

    def loss(model, x, y):
        for stage in model.values():
            x = stage(x)
        return (with_metrics if metrics else loss_fn)(x, y)

    return funcga.value_and_grad(pure_loss(model, loss), has_aux=metrics)(trainable(model), x, y)


def mesh_of(group, data):
    """A mesh of `data` replicas of a pipeline."""
    return dist.device_mesh.DeviceMesh("cpu", torch.arange(group.size()).reshape(data, -1), mesh_dim_names=("dp", "pp"))


def indices(name, mesh):
    """The stages of this process, and how many there are."""
    rank, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    if name in SINGLE:
        return [rank], size
    other = 2 * size - 1 - rank if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else rank + size
    return [rank, other], 2 * size


def pipeline(name, mesh, loss_fn=loss_fn, wrap=lambda stage, group: stage, **options):
    """The gradient function of a schedule."""
    from torch.distributed import pipelining

    here, stages = indices(name, mesh)
    parts = [
        pipelining.PipelineStage(
            wrap(part(index, stages), mesh["dp"]), index, stages, torch.device("cpu"), group=mesh["pp"].get_group()
        )
        for index in here
    ]
    schedule = getattr(pipelining, name)
    return pipeline_value_and_grad(schedule, parts[0] if name in SINGLE else parts, loss_fn, **options), stages


def check(result, expected):
    """What this process has of the stages is what the whole model has."""
    value, grads = result
    value_of_whole, grads_of_whole = expected
    assert grads
    for name, grad in grads.items():
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(grad, grads_of_whole[name.replace(".module.", ".")], rtol=TOLERANCE, atol=TOLERANCE)
    for leaf, right in zip(*map(torch.utils._pytree.tree_leaves, (value, value_of_whole)), strict=True):
        torch.testing.assert_close(leaf, right, rtol=TOLERANCE, atol=TOLERANCE)


def uneven(group, name):
    """Uneven tokens, rows that do not divide, windows with fewer micro-batches, and more than one step of a schedule."""
    mesh = mesh_of(group, 1)
    gradient, stages = pipeline(name, mesh)
    grads_before = {name: torch.full_like(p, 3.0) for name, p in trainable(gradient.module).items()}
    assign_grads(gradient.module, grads_before)
    step = funcga.accumulate(gradient, 4, weight=tokens)
    for rows in (8, 11, 8, 3):  # longer micro-batches than before, then shorter ones, then fewer of them
        check(step(*batch(rows)), whole(stages, *batch(rows)))
    sums = funcga.accumulate(gradient, 4, weight=tokens_on_device, fold=funcga.mean())
    check(sums(*batch(9)), whole(stages, *batch(9)))
    assert all(p.grad.equal(grads_before[name]) for name, p in trainable(gradient.module).items())


def summed(output, y):
    return output.square().flatten(1).sum(1).dot(1.0 + y.sum(1).double().square())


def mean_of_rows(output, y):
    return (output.square().flatten(1).sum(1) * y["counted"]).sum() / y["counted"].sum()


def weighing_nothing(group, name):
    """What is summed counts whatever it weighs; of a mean a micro-batch of weight 0 is no part, not even its NaN."""
    (x, y), counted = batch(9), torch.arange(9) >= 6  # two of three micro-batches weigh nothing
    for in_last in (False, True):
        rows = counted if in_last else counted.flip(0)
        weights = [lambda x, y: y["counted"].sum().item(), lambda x, y: y["counted"].sum().as_subclass(Unseen)]
        for weight in weights:
            gradient, stages = pipeline(name, mesh_of(group, 1), lambda output, y: summed(output, y["y"]))
            model = nn.ModuleDict({str(index): part(index, stages) for index in range(stages)})
            total = summed(nn.Sequential(*model.values())(x), y)
            for fold, divisor in ((funcga.sum(), 1), (funcga.per_weight(), 3)):
                grads = torch.autograd.grad(total / divisor, [*model.parameters()], retain_graph=True)
                expected = total.detach() / divisor, dict(zip(trainable(model), grads, strict=True))
                check(funcga.accumulate(gradient, 3, fold=fold, weight=weight)(x, {"y": y, "counted": rows}), expected)
            # A mean over rows, which is NaN where none counts, as is its gradient.
            gradient, _ = pipeline(name, mesh_of(group, 1), mean_of_rows)
            total = mean_of_rows(nn.Sequential(*model.values())(x), {"counted": rows})
            expected = (
                total.detach(),
                dict(zip(trainable(model), torch.autograd.grad(total, [*model.parameters()]), strict=True)),
            )
            check(funcga.accumulate(gradient, 3, weight=weight)(x, {"counted": rows}), expected)


def several_steps(group, name):
    """A window of more micro-batches than a schedule runs at once, of a batch and of a stream; metrics everywhere."""
    mesh = mesh_of(group, 1)
    gradient, stages = pipeline(name, mesh, with_metrics, n_microbatches=4, has_aux=True)
    x, y = batch(13)
    for count in ({"n": 7}, {"microbatch_size": 3}):
        step = funcga.accumulate(gradient, **count, weight=tokens, fold=METRICS)
        check(step(x, y), whole(stages, x, y, metrics=True))
        assert gradient.pipeline.count == 4
    step = funcga.stream(gradient, weight=tokens, fold=METRICS)
    for count in (6, 2):
        microbatches = [batch(rows, seed) for seed, rows in enumerate((2, 1, 3, 1, 2, 2)[:count])]
        together = [torch.cat(parts) for parts in zip(*microbatches, strict=True)]
        check(step(microbatches), whole(stages, *together, metrics=True))


@pytest.mark.parametrize("name", SINGLE + MULTI)
def test_a_pipeline_is_the_model_on_one_device(name):
    processes(4).run(uneven, name, size=2)


def test_a_window_takes_several_steps_of_a_schedule():
    processes(4).run(several_steps, "Schedule1F1B", size=2)


def test_micro_batches_that_weigh_nothing():
    processes(4).run(weighing_nothing, "ScheduleGPipe", size=2)


class Normed(nn.Module):
    """A first stage that has no derivative at a row of zeros."""

    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True) + x.abs().sum(1, keepdim=True).log()


def floats(rows, masked, nan):
    """Rows that count and others, which are NaN."""
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    counted = torch.ones(rows, dtype=torch.float64)
    counted[masked], x[masked] = 0, nan
    return x, {"y": y, "counted": counted}


def square_of_rows(output, y):
    return ((output - y["y"]).square().sum(1) * y["counted"]).sum() / y["counted"].sum()


def rows_of_nan(group, wrap, weights, **options):
    """Replicas of two stages, whose rows of NaN weigh nothing; the second window has none on one replica."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = mesh_of(group, 2)

    def stages():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(3, 3), Normed(), nn.Tanh()).double(), nn.Linear(3, 3).double()]

    rank, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stage = PipelineStage(wrap(stages()[rank], mesh["dp"]), rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    gradient = pipeline_value_and_grad(Schedule1F1B, stage, square_of_rows, **options)
    across = mesh["dp"] if wrap is unwrapped else None
    step = funcga.accumulate(gradient, 4, weight=weights, across=across)
    for rows, masked in (((8, 8), slice(0, 4)), ((8, 0), slice(4, 8)), ((8, 4), slice(6, 11))):
        x, y = floats(sum(rows), masked, torch.nan)
        whole_x, whole_y = floats(sum(rows), masked, 1.0)
        model = nn.ModuleDict(dict(zip("01", stages(), strict=True)))
        total = square_of_rows(nn.Sequential(*model.values())(whole_x), whole_y)
        grads = torch.autograd.grad(total, [*model.parameters()])
        mine = slice(0, rows[0]) if replica == 0 else slice(rows[0], None)
        found = step(x[mine], {name: leaf[mine] for name, leaf in y.items()})
        check(found, (total.detach(), dict(zip(trainable(model), grads, strict=True))))


def counted_rows(x, y):
    return y["counted"].sum().item()


def counted_on_device(x, y):
    return y["counted"].sum().as_subclass(Unseen)


@pytest.mark.parametrize(
    ("wrap", "weights", "options"),
    [
        ("unwrapped", counted_rows, {"n_microbatches": 2}), ("unwrapped", counted_on_device, {}),
        ("ddp", counted_rows, {}), ("fsdp2", counted_rows, {"n_microbatches": 2}),
    ],
)  # fmt: skip
def test_rows_of_nan_that_weigh_nothing(wrap, weights, options):
    processes(4).run(rows_of_nan_in, wrap, weights, options)


def rows_of_nan_in(group, wrap, weights, options):
    rows_of_nan(group, globals()[wrap], weights, **options)


class Broken(Exception):
    pass


def fails_alone(group, name, where, failing):
    """What each of four windows came to, where one process fails in the second, before or between steps."""
    gradient, stages = pipeline(name, mesh_of(group, 1), n_microbatches=4)
    found, weighed = [], []

    def weight(x, y):
        weighed.append(1)
        if where == "weight" and len(found) == 1 and group.rank() == failing and len(weighed) == 6:
            raise Broken
        return tokens(x, y)

    step = funcga.accumulate(gradient, 8, weight=weight)
    for window in range(4):
        weighed.clear()
        x, y = batch(11, seed=window)
        short = where == "split" and window == 1 and group.rank() == failing
        try:
            result = step(x, y[:-1] if short else y)
        except (Broken, funcga.FuncgaError) as error:
            found.append(str(error) or "Broken")
            continue
        check(result, whole(stages, x, y))
        found.append("exact")
    return found


def empty_stream(group, failing):
    """What a process sees in three windows, where the stream of one of them is empty in the second."""
    gradient, stages = pipeline("Schedule1F1B", mesh_of(group, 1))
    step, found = funcga.stream(gradient, weight=tokens), []
    for window in range(3):
        x, y = batch(12, seed=window)
        try:
            is_empty = window == 1 and group.rank() == failing
            check(step([] if is_empty else [*zip(x.split(3), y.split(3), strict=True)]), whole(stages, x, y))
            found.append("exact")
        except funcga.FuncgaError as error:
            found.append(str(error).split(",")[0])
    return found


def test_an_empty_stream_of_one_process_ends_the_window_of_all():
    found = processes(4).run(empty_stream, 1, size=2)
    texts = ["rank 1 has raised an error in this window", "there is no micro-batch on this replica"]
    assert found == [["exact", text, "exact"] for text in texts]


@pytest.mark.parametrize(
    ("name", "where"),
    [("Schedule1F1B", "split"), ("ScheduleInterleaved1F1B", "weight")],
)
def test_an_error_of_one_process_ends_the_window_of_all(name, where):
    for failing in (0, 1):
        found = processes(4).run(fails_alone, name, where, failing, size=2)
        for rank, (first, second, *later) in enumerate(found):
            assert (first, later) == ("exact", ["exact", "exact"])
            if rank == failing:
                assert second == "Broken" or "different numbers of rows" in second
            else:
                assert f"rank {failing} has raised an error in this window" in second


def test_four_stages_in_four_processes():
    processes(4).run(uneven, "Schedule1F1B")


def ddp(module, mesh):
    return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group())


def fsdp2(module, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh)


def unwrapped(module, mesh):
    return module


def replicated(group, name, wrap, n=6, microbatch_size=None, **options):
    """Two replicas of a pipeline of two processes, with other rows: 11 and 6, 5 and 0, 4 and 13."""
    mesh = mesh_of(group, 2)
    gradient, stages = pipeline(name, mesh, wrap=wrap, **options)
    across = mesh["dp"] if wrap is unwrapped else None
    step = funcga.accumulate(gradient, n, microbatch_size=microbatch_size, weight=tokens, across=across)
    replica = mesh["dp"].get_local_rank()
    for rows in ((11, 6), (5, 0), (4, 13)):
        x, y = batch(sum(rows))
        mine = slice(0, rows[0]) if replica == 0 else slice(rows[0], None)
        check(step(x[mine], y[mine]), whole(stages, x, y))
    gc.collect()


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("ScheduleGPipe", unwrapped), ("ScheduleGPipe", ddp), ("Schedule1F1B", fsdp2),
        ("ScheduleInterleaved1F1B", fsdp2),
    ],
)  # fmt: skip
def test_replicas_of_a_pipeline(name, wrap):
    processes(4).run(replicated, name, wrap)


def test_replicas_of_a_zero_bubble_pipeline_in_several_steps():
    processes(4).run(several_steps_of_replicas, "ScheduleInterleavedZeroBubble", fsdp2)


def several_steps_of_replicas(group, name, wrap):
    replicated(group, name, wrap, n_microbatches=2)
    replicated(group, name, wrap, n=None, microbatch_size=2, n_microbatches=2)


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_replicas_with_other_numbers_of_micro_batches(wrap):
    processes(4).run(micro_batches_of_a_size, wrap)


def micro_batches_of_a_size(group, wrap):
    replicated(group, "Schedule1F1B", wrap, n=None, microbatch_size=2)


# --- what is refused, and errors


def refused(group, make, text, kind=funcga.FuncgaError):
    with pytest.raises(kind, match=text):
        make(mesh_of(group, 1))


def with_schedule(factory):
    """A step of a pipeline whose schedule is built like this."""

    def make(mesh):
        gradient, _ = pipeline("ScheduleGPipe", mesh)
        (stage,) = gradient.pipeline.stages
        return funcga.accumulate(pipeline_value_and_grad(factory, stage, loss_fn), 2)(*batch(4))

    return make


def scales(stage, n, loss_fn, scale_grads):
    from torch.distributed.pipelining import ScheduleGPipe

    return ScheduleGPipe(stage, n, loss_fn=loss_fn)  # where scale_grads is True


BUILT = []


def stepped(stage, n, **options):
    from torch.distributed.pipelining import ScheduleGPipe

    BUILT[:] = BUILT or [ScheduleGPipe(stage, n, **options)]
    return BUILT[0]


def step_of(**options):
    """A step of a pipeline, with other options."""

    def make(mesh):
        return funcga.accumulate(pipeline("ScheduleGPipe", mesh)[0], **{"n": 2, **options})(*batch(4))

    return make


def with_wrapper_inside(mesh):
    return pipeline("ScheduleGPipe", mesh, wrap=lambda stage, data: nn.Sequential(ddp(stage, data)))


def zero_bubble_of_ddp(mesh):
    funcga.accumulate(pipeline("ScheduleInterleavedZeroBubble", mesh, wrap=ddp)[0], 4)(*batch(4))


def fails_in_loss(mesh):
    """The error is raised in every process, and the pipeline is as good as new."""

    def sometimes(output, y):
        if (y == 3).any():
            raise FloatingPointError("a label of 3")
        return loss_fn(output, y)

    gradient, stages = pipeline("Schedule1F1B", mesh, sometimes)
    step, (x, y) = funcga.accumulate(gradient, 3, weight=tokens), batch(8)
    is_last = gradient.pipeline.has_last
    with pytest.raises(FloatingPointError if is_last else funcga.FuncgaError, match="a label of 3"):
        step(x, y)
    y = torch.where(y == 3, 0, y)
    check(step(x, y), whole(stages, x, y))


def other_batches(mesh):
    rank = mesh["pp"].get_local_rank()
    gradient, _ = pipeline("ScheduleGPipe", mesh)
    with pytest.raises(funcga.FuncgaError, match="were given different batches"):
        funcga.accumulate(gradient, 2, weight=tokens)(*batch(6, seed=rank))


def an_instance(mesh):
    from torch.distributed.pipelining import ScheduleGPipe

    (stage,) = pipeline("ScheduleGPipe", mesh)[0].pipeline.stages
    gradient = pipeline_value_and_grad(ScheduleGPipe(stage, 2, loss_fn=loss_fn), stage, loss_fn)
    funcga.accumulate(gradient, 2)(*batch(4))


def too_few(mesh):
    funcga.accumulate(pipeline("Schedule1F1B", mesh)[0], 1)(*batch(4))


def without_target(mesh):
    funcga.accumulate(pipeline("ScheduleGPipe", mesh)[0], 2)(batch(4)[0])


def planned(mesh):
    funcga.plan(pipeline("ScheduleGPipe", mesh)[0], *batch(4), memory="1 GB")


def everything_that_is_refused(group):
    """One call for all, as processes are slow to begin."""
    refused(group, with_schedule(scales), "scale_grads=True")
    with_schedule(stepped)(mesh_of(group, 1))
    refused(group, with_schedule(stepped), "was stepped before")
    refused(group, an_instance, "object is not callable", TypeError)
    refused(group, too_few, "microbatch", ValueError)  # what torch says
    refused(group, without_target, "empty", ValueError)
    refused(group, with_wrapper_inside, "wrapped as a whole")
    refused(group, step_of(n="auto"), "a window is replayed")
    refused(group, step_of(observe=funcga.gradient_norms()), "observe= was given")
    refused(group, step_of(drop="microbatch"), 'drop="microbatch" was given')
    refused(group, step_of(in_axes=(funcga.CARRY, 0)), "argument is CARRY")
    refused(group, step_of(fold=funcga.max()), "fold is no sum")
    refused(group, lambda mesh: pipeline_value_and_grad(dict, nn.Linear(1, 1), loss_fn), "no attribute", AttributeError)
    refused(group, planned, "the plan of a step of a pipeline was asked for")
    refused(group, zero_bubble_of_ddp, "in passes that DDP does not see")
    # A schedule that tells nothing is taken as it is.
    assert private_in_torch.loss_of_schedule(object(), loss_fn) is loss_fn
    assert not private_in_torch.has_weight_passes(object())
    fails_in_loss(mesh_of(group, 1))
    other_batches(mesh_of(group, 1))


def test_what_is_refused():
    processes(4).run(everything_that_is_refused, size=2)
