"""Plans of wrapped modules: within 5 % what a first window takes, and nothing is sent, changed, or waited for."""

import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcga
from benchmarks.torch_measure import Watch
from funcga import _replicas
from funcga._call import OwningGradient, step_program
from funcga._plan.in_torch import peak
from tests.call.test_plan import Block, mean_loss, mlp, transformer
from tests.processes import Failed, processes
from tests.torch_backend.wrapped.test_wrapped import WRAPPERS, made, mean_square, mesh_of, rows_of
from torch_backend import BACKEND, _private, module_value_and_grad

COUNTS = [1, 2, 5]
MOST_TRIES = 20
ALLOWED = 0.05


def sharded(group, model, mesh=None, low_precision=False, **options):
    """fully_shard of every block, and of the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh_of(group) if mesh is None else mesh
    if low_precision:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in model:
        if isinstance(part, Block) or (part is not model[-1] and isinstance(part, nn.Linear)):
            fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def kept_whole(group, model):
    return sharded(group, model, reshard_after_forward=False)


def in_bfloat16(group, model):
    return sharded(group, model, low_precision=True)


def on_a_square(group, model):
    return sharded(group, model, mesh_of(group, (2, 2)))


KINDS = {**{name: wrap for name, wrap in WRAPPERS.items() if name != "fsdp2"},
         **{f.__name__: f for f in (sharded, kept_whole, in_bfloat16, on_a_square)}}  # fmt: skip


@contextmanager
def nothing_sent():
    """A context in which no collective is called of any group."""
    before = _private.collectives_called()
    yield
    assert before is not None
    assert _private.collectives_called() == before


def predicted(step, args):
    with nothing_sent():
        return peak(step_program(step), lambda p: BACKEND.loop.accumulate(p, BACKEND), args, {}, BACKEND)


def first_windows(group, kind, problem, n, sync, case):
    """(what is predicted, what the first windows of new modules take at least): threads of gloo may hold memory longer."""
    options = CASES[case][2] if case else {}
    make = lambda model: funcga.accumulate(module_value_and_grad(KINDS[kind](group, model), mean_loss, sync=sync), n, **options)  # fmt: skip
    model, batch = problem()
    parts, taken = predicted(make(model), batch), []
    enough = 1.01 * sum(parts.values())
    for _ in range(MOST_TRIES):
        model, _ = problem()
        with Watch() as seen:  # also of what wrapping makes and the window frees: DDP makes its buckets anew
            step = make(model)
            seen.bytes = seen._live
            step(*batch)
        # DDP keeps the parameters that it is given.
        taken.append(seen.bytes + parts["batch"] + ("buckets" in parts) * parts["parameters"])
        is_least = torch.tensor(min(taken) <= enough)
        dist.all_reduce(is_least, dist.ReduceOp.MIN, group=group)
        if is_least:
            break
    return parts, min(taken)


def all_counts(group, kind, problem, sync, case):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    # Replicas tell each other which steps they have made: here none, though other tests have used these processes.
    with mock.patch.dict(_replicas._STEPS_MADE, clear=True):
        return [
            first_windows(group, kind, problem, n, sync, case)
            for n in (COUNTS if problem is mlp and not case else COUNTS[1:])
        ]


@pytest.mark.parametrize(
    ("kind", "problem"), [*((kind, mlp) for kind in KINDS if kind != "on_a_square"), ("sharded", transformer)]
)
def test_the_peak_is_that_of_the_first_window(kind, problem):
    for found in processes().run(all_counts, kind, problem, "last", None, size=2):
        for parts, taken in found:
            assert sum(parts.values()) == pytest.approx(taken, rel=ALLOWED)


CASES = {
    "every": ("sharded", "every", {}),
    "every, in 16 bits": ("in_bfloat16", "every", {}),
    "outer": ("on_a_square", "outer", {}),
    "on a square": ("on_a_square", "last", {}),
    "every, FSDP1": ("fsdp1", "every", {}),
    "every, DDP": ("ddp_views", "every", {}),
    "dropping": ("sharded", "last", {"drop": "window"}),
    "observing": ("sharded", "last", {"observe": funcga.gradient_noise()}),
    "max": ("ddp", "last", {"fold": (funcga.max(), funcga.mean())}),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_is_done_the_peak_is_that_of_the_first_window(case):
    kind, sync, _ = CASES[case]
    size = 4 if kind == "on_a_square" else 2
    for found in processes(size).run(all_counts, kind, mlp, sync, case, size=size):
        for parts, taken in found:
            assert sum(parts.values()) == pytest.approx(taken, rel=ALLOWED)


def named(group):
    """What is predicted of some wrappers with 1 and 4 micro-batches, and the bytes of the parameters."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    found = {}
    for kind, sync in (
        ("ddp", "last"),
        ("sharded", "last"),
        ("sharded", "every"),
        ("kept_whole", "last"),
        ("fsdp1", "last"),
    ):
        model, batch = mlp()
        whole = sum(p.nbytes for p in model.parameters())
        gradient = module_value_and_grad(KINDS[kind](group, model), mean_loss, sync=sync)
        found[kind, sync] = [predicted(funcga.accumulate(gradient, n), batch) for n in (1, 4)]
    return found, whole


def test_what_wrappers_hold_has_names():
    found, whole = processes().run(named, size=2)[0]
    for wrapped, names in [("ddp", {"buckets"}), ("sharded", {"unsharded parameters", "unsharded gradients"})]:
        one, four = found[wrapped, "last"]
        assert {*one} == {*four} == {"parameters", "batch", "sums", "activations", "gradients", *names}
    assert [parts["buckets"] for parts in found["ddp", "last"]] == [whole, whole]
    assert [parts["unsharded gradients"] for parts in found["sharded", "last"]] == [0, whole]
    assert 0 < found["sharded", "last"][1]["unsharded parameters"] < whole
    assert found["sharded", "every"][1]["unsharded gradients"] == 0
    assert found["kept_whole", "last"][1]["unsharded parameters"] == whole
    assert found["fsdp1", "last"][1]["unsharded gradients"] == whole


def from_shapes(group, n):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    model, batch = transformer()
    with torch.device("meta"):
        shapes, _ = transformer()
    steps = [funcga.accumulate(module_value_and_grad(sharded(group, each), mean_loss), n) for each in (model, shapes)]
    return predicted(steps[0], batch), predicted(steps[1], [leaf.to("meta") for leaf in batch])


def test_shapes_are_enough_for_shards():
    for real, from_meta in processes().run(from_shapes, 4, size=2):
        assert from_meta == real


def failing(module, x, y):
    raise KeyError("mine")


def failing_after(module, x, y):
    module(x)
    raise KeyError("mine")


def failing_in_backward(module, x, y):
    loss = mean_square(module, x, y)

    def fail(gradient):
        raise KeyError("mine")

    loss.register_hook(fail)
    return loss


def attributes(module):
    """What a plan must put back: every attribute of every part, and what lies in its lists and tables."""
    from torch.distributed.fsdp import FSDPModule

    holders = [*module.modules()]
    holders += [h for part in holders if isinstance(part, FSDPModule) for h in _private.holders_of_fsdp2(part)]
    found = {}
    for holder in holders:
        for name, value in vars(holder).items():
            entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            found[id(holder), name] = id(value), [(key, id(entry)) for key, entry in entries]
    return found


def trained(group, kind, plans):
    """The losses, gradients and parameters of some windows; one rank alone plans between them, or none."""
    last = nn.Identity() if kind == "in_bfloat16" else nn.BatchNorm1d(3)
    module = KINDS[kind](group, nn.Sequential(*made(), last))
    batch = rows_of(group.rank(), torch.float32)
    gradient = module_value_and_grad(module, mean_square)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for window in range(3):
        if plans and group.rank() == window % 2:
            before = attributes(module)
            with nothing_sent():
                assert funcga.plan(gradient, *batch, memory=10**9).n == 1
                assert sum(predicted(funcga.accumulate(gradient, 2), batch).values()) > 0
                for broken in (failing, failing_after, failing_in_backward):
                    with pytest.raises(KeyError, match="mine"):
                        funcga.plan(module_value_and_grad(module, broken), *batch)
            assert attributes(module) == before
            assert all(p.grad is None for p in module.parameters())
        loss, grads = funcga.accumulate(gradient, 2)(*batch)
        found += [loss, *grads.values()]
        for p, gradient_of_p in zip(module.parameters(), grads.values(), strict=True):
            p.grad = gradient_of_p
        optimizer.step()
        optimizer.zero_grad()
    found += [*module.parameters(), *module.buffers()]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in found]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "on_a_square"])
def test_one_rank_plans_alone_and_training_goes_on_bit_for_bit(kind):
    for plain, planned in zip(*[processes().run(trained, kind, plans, size=2) for plans in (False, True)], strict=True):
        assert len(plain) == len(planned) > 10
        assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


def without(group, kind, name):
    """A plan where torch has no such name: of its own, or as an attribute of the parts of the module."""
    module, batch = KINDS[kind](group, made()), rows_of(group.rank(), torch.float32)
    gradient = module_value_and_grad(module, mean_square)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch._C, name, raising=False)
        for part in module.modules():
            part.__dict__.pop(name, None)
        funcga.plan(gradient, *batch, memory=10**9)


@pytest.mark.parametrize(
    ("kind", "name", "label"),
    [
        ("ddp", "_dispatch_has_kernel_for_dispatch_key", "DistributedDataParallel"),
        ("fsdp1", "_exec_order_data", "FullyShardedDataParallel"),
    ],
)
def test_what_cannot_be_put_back_or_would_be_sent_is_refused(kind, name, label):
    with pytest.raises(Failed) as failed:
        processes().run(without, kind, name, size=2)
    for failure, text in failed.value.errors[:2]:
        assert failure == "FuncgaError"
        assert text == (
            f"the module is wrapped by {label}, which torch {torch.__version__} cannot run without sending anything. "
            f"Plan the step of the module that was wrapped, with across=group; or use torch 2.13 to 2.14."
        )


def test_a_pipeline_is_refused():
    class OfPipeline(OwningGradient):
        def __call__(self, x):
            return x

    with pytest.raises(funcga.FuncgaError, match="the plan of a step of a pipeline was asked for"):
        funcga.plan(OfPipeline(), torch.ones(4, 2))
