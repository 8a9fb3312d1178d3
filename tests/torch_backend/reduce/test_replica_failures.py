"""What a replica may do, and what happens: nothing is silently wrong, and nobody waits for ever."""

import collections
import copy
import datetime
import gc
import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import funcga
from tests.processes import Failed, Processes, answer, processes
from tests.torch_backend.reduce.test_replicas import difference, layers, made, problem, refused
from torch_backend import Replicas, module_value_and_grad


def alone(function, *args, count=2):
    """What the function returns on each of some processes that are used for nothing else."""
    own = Processes(count)
    try:
        return own.run(function, *args)
    finally:
        own.stop()


# ------------------------------------------------------------------------------------- errors and interruptions


class Fails(torch.autograd.Function):
    """Raises in its backward pass if it is told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise MemoryError("out of memory, say")
        return gradient, None


def catches(group):
    return [catches_in(group, n) for n in (1, 3)]


def catches_in(group, n):
    """In window 2 rank 1 raises halfway through the last backward pass, catches that, and all go on."""
    rank, params, x = dist.get_rank(group), layers(6), torch.ones(8, 64)
    fails = []

    def loss(params, x):
        x = deep_part(params[:3], x)
        return (deep_part(params[3:], Fails.apply(x, bool(fails))) ** 2).mean()

    step = funcga.accumulate(funcga.value_and_grad(loss), n, across=Replicas(group, bucket_bytes=2**14))
    expected = funcga.accumulate(funcga.value_and_grad(loss), n)(params, x)
    found = []
    for window in range(4):
        fails[:] = [1] if window == 2 and rank == 1 else []
        try:
            found.append(difference(step(params, x), expected))
        except (MemoryError, funcga.FuncgaError) as error:
            found.append(str(error))
    return found


def deep_part(params, x):
    for layer in params:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x


def test_an_error_that_is_caught_reaches_the_others():
    """All can go on if all of them leave the window out."""
    for rank, of_n in enumerate(alone(catches)):
        for found in of_n:
            assert max(found[0], found[1], found[3]) <= 1e-6
            text = "rank 1 has raised an error in this window"
            assert found[2].startswith("out of memory" if rank == 1 else text)


def fails_at_once(group, kind, failing):
    """Each rank raises in the windows that `failing` has for it, from the first one on, and catches that."""
    rank, current = dist.get_rank(group), []
    module, x, y = torch.nn.Linear(2, 1, bias=False), torch.ones(4, 2), torch.zeros(4, 1)
    torch.nn.init.ones_(module.weight)

    def loss(module, x, y):
        if current[0] in failing[rank]:
            raise ValueError(f"bad data in window {current[0]}")
        return ((module(x) - y) ** 2).mean()

    if kind == "module":
        step = funcga.accumulate(module_value_and_grad(module, loss), 2, across=group)
    else:
        pure = funcga.value_and_grad(lambda w, x, y: loss(lambda x: x @ w.T, x, y))
        grad_fn = pure if kind == "engine" else lambda w, x, y: pure(w, x, y)
        whole = funcga.accumulate(grad_fn, 2, across=group)
        step = lambda x, y: whole(module.weight, x, y)
    found = []
    for window in range(4):
        current[:] = [window]
        try:
            found.append(step(x, y)[0].item())
        except (ValueError, funcga.FuncgaError) as error:
            found.append(str(error).split(".")[0])
    return found


FAILING = [("engine", [[0, 1], []]), ("module", [[0], [0]]), ("calls", [[0], []])]


def all_fail_at_once(_):
    return [fails_at_once(dist.new_group([0, 1]), kind, failing) for kind, failing in FAILING]


def test_an_error_in_the_first_window_can_be_left_out_too():
    """There is no channel yet, and making one is a collective: what is owed waits for it."""
    for rank, of_cases in enumerate(processes().run(all_fail_at_once, size=2)):
        for (_, failing), found in zip(FAILING, of_cases, strict=True):
            for window, text in enumerate(found):
                ranks = [each for each in (0, 1) if window in failing[each]]
                if rank in ranks:
                    assert text == f"bad data in window {window}"
                elif ranks:
                    assert text == f"rank {ranks[0]} has raised an error in this window, and has nothing to merge"
                else:
                    assert text == 4


def fails_in_one_of_two(_, first):
    """Rank 1 fails in one of two steps, in the first window or later, and goes on with the other, of another group."""
    found, rank, x = [], dist.get_rank(), torch.ones(2, 3)

    def loss(w, x):
        if rank == 1 and len(found) == (0 if first else 2):
            raise ValueError("bad data")
        return (x @ w).sum()

    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    steps = [funcga.accumulate(funcga.grad(loss), 2, across=group) for group in groups]
    for _ in range(3):
        for step in steps:
            try:
                found.append(step(torch.ones(3), x).tolist())
            except (ValueError, funcga.FuncgaError) as error:
                found.append(str(error).split(" in this window")[0])
    return found


@pytest.mark.parametrize("first", [True, False])
def test_an_error_in_one_of_two_steps_that_have_groups_of_their_own(first):
    """Here the loop goes on with the other step, and the others still wait in the first one."""
    exact = [1.0, 1.0, 1.0]
    for rank, found in enumerate(alone(fails_in_one_of_two, first)):
        expected = [exact] * 6
        expected[0 if first else 2] = "bad data" if rank == 1 else "rank 1 has raised an error"
        assert found == expected


class Broken(Exception):
    """What one rank raises, and catches."""


def doors(group):
    """The entry points of a step, as f(check, x, y): `check(place)` may raise there, on some rank."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 2).double()
    copies = [copy.deepcopy(plain) for _ in range(2)]
    wrapped = {
        "ddp": DistributedDataParallel(copies[0], process_group=group),
        "fsdp": fully_shard(copies[1], mesh=DeviceMesh.from_group(group, "cpu")),
    }
    params = {name: p.detach() for name, p in plain.named_parameters()}
    check, mse = [lambda place: None], torch.nn.functional.mse_loss

    def loss_of(module, x, y):
        check[0]("loss")
        return mse(module(x), y)

    def of_params(params, x, y):
        check[0]("loss")
        return mse(x @ params["weight"].T + params["bias"], y)

    def summary_of(module, x, y):
        check[0]("loss")
        return {"x": module(x), "y": y}

    def weight(x, y):
        check[0]("weight")
        return len(x)

    def totals(x, y):
        check[0]("totals")
        return {"rows": len(x)}

    def items(x, y):
        for item in range(2):
            check[0](f"item {item}")
            yield x[2 * item : 2 * item + 2], y[2 * item : 2 * item + 2]

    of_summary = lambda _, s: mse(s["x"], s["y"])
    counted = lambda params, x, y, totals: of_params(params, x, y) * (len(x) / totals["rows"])
    made, several = {}, {"weight": weight, "across": group}
    step = funcga.stream(funcga.value_and_grad(of_params), **several)
    made["stream"] = lambda x, y: step(params, items(x, y))
    whole = funcga.accumulate(funcga.value_and_grad(of_params), 2, **several)
    made["accumulate"] = lambda *batch: whole(params, *batch)
    called = funcga.accumulate(lambda *args: funcga.value_and_grad(of_params)(*args), 2, **several)
    made["a function"] = lambda *batch: called(params, *batch)
    total = funcga.accumulate(funcga.value_and_grad(counted), 2, fold=funcga.sum(), totals=totals, across=group)
    made["totals"] = lambda *batch: total(params, *batch)
    made["module"] = funcga.accumulate(module_value_and_grad(plain, loss_of), 2, **several)
    pure = lambda params, x, y: {"x": x @ params["weight"].T + params["bias"], "y": y + 0 * len([check[0]("loss")])}
    twice = funcga.coupled(pure, of_summary, 2, **several)
    made["coupled"] = lambda *batch: twice(params, *batch)
    for name, module in wrapped.items():
        gradient = module_value_and_grad(module, loss_of)
        made[name] = funcga.accumulate(gradient, 2, weight=weight)
        read = funcga.stream(gradient, weight=weight)
        made[f"stream of {name}"] = lambda x, y, read=read: read(items(x, y))
        made[f"{name} alone"] = gradient
    made["coupled over ddp"] = funcga.coupled(
        module_value_and_grad(wrapped["ddp"], summary_of), of_summary, 2, weight=weight
    )
    return made, params, check


PLACES = ("nothing to read", "no tensors", "item 0", "item 1", "totals", "weight", "loss")


def places(door):
    """Where a rank may raise, and the others know it before they send anything else."""
    # With FSDP a forward pass communicates: there they wait for it.
    return PLACES[:-1] if "fsdp" in door else PLACES


def raises_in(group, door):
    """Rank 1 raises in windows 1 and 2 (in the first one of all, too), at each place; what each rank has in each."""
    rank, found = dist.get_rank(group), {}
    for place in places(door):
        steps, params, check = doors(group)
        seen, log = [], []

        def fails(where, place=place, seen=seen):
            seen.append(where)
            if where == place and seen[0] == "fails":
                raise Broken(where)

        check[0] = fails
        for window in range(4):
            generator = torch.Generator().manual_seed(window)
            x, y = (torch.randn(8, k, generator=generator, dtype=torch.float64) for k in (3, 2))
            own = [x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]]
            is_failing = rank == 1 and window in (0, 2)
            seen[:] = ["fails" if is_failing else "works"]
            if is_failing and place == "nothing to read":
                own = [None, None]
            elif is_failing and place == "no tensors":
                own = [[1.0, 2.0], "rows"]
            try:
                loss, grads = steps[door](*own)
            except Exception as error:
                log.append(f"{type(error).__name__}: {error}")
                continue
            leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
            expected = torch.nn.functional.mse_loss(x @ leaves["weight"].T + leaves["bias"], y)
            expected.backward()
            grads = {name.removeprefix("module."): g for name, g in grads.items()}
            grads = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
            wanted = {name: leaf.grad for name, leaf in leaves.items()}
            log.append(max(difference(loss, expected.detach()), difference(grads, wanted)))
        found[place] = log
    return found


DOORS = (
    *("stream", "accumulate", "a function", "totals", "module", "coupled", "coupled over ddp"),
    *("ddp", "stream of ddp", "ddp alone", "fsdp", "stream of fsdp", "fsdp alone"),
)


@pytest.mark.parametrize("door", DOORS)
def test_whatever_raises_in_a_call_is_told_to_the_others(door):
    of_rank0, of_rank1 = alone(raises_in, door)
    raised = 0
    for place in places(door):
        for window, (other, mine) in enumerate(zip(of_rank0[place], of_rank1[place], strict=True)):
            if isinstance(mine, str):
                assert window in (0, 2), (place, window, mine)
                raised += 1
                assert isinstance(other, str), (place, window, other)
                assert "rank 1 has raised an error in this window" in other, (place, window, other)
            else:
                assert max(other, mine) <= 1e-12, (place, window, other, mine)
    assert raised >= 4


def observes(group, kind):
    """An observer raises on rank 1 in window 1, when the others have the result."""
    from torch.nn.parallel import DistributedDataParallel

    rank, window, found = dist.get_rank(group), 0, []
    module = torch.nn.Linear(3, 2)
    kwargs = {"across": group}
    if kind == "ddp":
        module, kwargs = DistributedDataParallel(module, process_group=group), {}

    def finish(xp, observed):
        if rank == 1 and window == 1:
            raise Broken("disk full")
        return observed.result

    gradient = module_value_and_grad(module, lambda m, x: m(x).square().mean())
    step = funcga.accumulate(gradient, 2, observe=funcga.observers.Observer(funcga.mean(), finish), **kwargs)
    for window in range(3):  # noqa: B007 - finish reads it
        try:
            step(torch.ones(4, 3))
            found.append("nothing")
        except (Broken, funcga.FuncgaError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("kind", ["across", "ddp"])
def test_what_raises_when_the_others_have_the_result_ends_the_next_window_on_all(kind):
    of_rank0, of_rank1 = alone(observes, kind)
    assert of_rank0[:2] == ["nothing"] * 2
    assert of_rank1[:2] == ["nothing", "disk full"]
    assert of_rank0[2] == of_rank1[2]
    assert of_rank0[2].startswith("the replicas are out of step: rank 0 begins window 3 and has finished 2, rank 1")


def is_killed(group, how):
    """In the second window rank 1 is killed, or sleeps; rank 0 says what was raised."""
    if how == "sleeps":
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    params, *batch = problem()
    step = made(group)
    step(params, *batch)
    if dist.get_rank(group) == 1:
        if how == "dies":
            os._exit(1)
        time.sleep(3)
        return None
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        step(params, *batch)
    (note,) = error.value.__notes__
    assert note.startswith("funcga: the replicas could not be merged. One of them has died")
    return note, time.monotonic() - begun < 30  # a deadline, not a measurement


def test_a_peer_that_dies_or_stays_away_raises():
    (note, is_in_time), _ = alone(is_killed, "sleeps")
    assert "did not call the step within the group's timeout" in note
    assert is_in_time
    with pytest.raises(Failed) as failure:
        alone(is_killed, "dies")
    assert failure.value.errors == [None, ("died", "")]


def peer_dies(group):
    """The last words of an error that a wrapper's own collective raises."""
    from torch.nn.parallel import DistributedDataParallel

    def loss_fn(module, x):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    module = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    with pytest.raises(RuntimeError, match="closed by peer") as info:
        funcga.accumulate(module_value_and_grad(module, loss_fn), 2)(torch.ones(4, 3))
    return info.value.__notes__


def test_an_error_of_a_wrappers_own_collective_is_explained():
    for (note,) in processes().run(peer_dies, size=2):
        assert note.startswith("funcga: the replicas could not be merged. One of them has died")


class Late(torch.utils._python_dispatch.TorchDispatchMode):
    """Waits before each all_reduce as long as it is told to."""

    seconds = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        time.sleep(self.seconds if "allreduce" in str(op) else 0)
        return op(*args, **(kwargs or {}))


def waits(group, where):
    """Rank 1 is interrupted while it waits for rank 0 in window 1; what each of them sees in windows 1 and 2."""
    rank, found, params, late = dist.get_rank(group), [], layers(3), Late()

    def loss(params, x):
        time.sleep(late.seconds if where == "before the header" else 0)
        return (deep_part(params, x) ** 2).mean()

    def ring(*_):
        raise TimeoutError("interrupted")

    step = funcga.accumulate(funcga.value_and_grad(loss), 1, across=group)
    before = signal.signal(signal.SIGALRM, ring)
    for window in range(3):
        late.seconds = 1.5 if window == 1 and rank == 0 else 0
        if window == 1 and rank == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.7)
        try:
            with late if where == "before the sums" else nullcontext():
                step(params, torch.ones(8, 64))
            found.append("nothing")
        except (TimeoutError, funcga.FuncgaError) as error:
            found.append(f"{type(error).__name__}: {error}")
    signal.signal(signal.SIGALRM, before)
    return found[1:]


def test_a_replica_that_is_interrupted_before_the_others_are_as_far():
    """It has sent nothing but its header. The rest is owed, and comes with a mark as soon as it goes on."""
    (late, after), interrupted = alone(waits, "before the header")
    assert interrupted == ["TimeoutError: interrupted", "nothing"]
    assert late.startswith("FuncgaError: another replica has raised an error, or was interrupted")
    assert after == "nothing"


def test_a_replica_that_is_interrupted_when_it_has_sent_everything():
    """The others have the result of that window, and it has not: the next window says so on all of them."""
    (complete, after), (interrupted, same) = alone(waits, "before the sums")
    assert (complete, interrupted) == ("nothing", "TimeoutError: interrupted")
    assert after == same
    assert same.startswith(
        "FuncgaError: the replicas are out of step: rank 0 begins window 3 and has finished 2, rank 1 begins window 3 "
        "and has finished 1. One of them has left out a window that the others merged, as after an error or an "
        "interruption that was caught. Let an error end the process"
    )


# ------------------------------------------------------------------------------------- other steps, other structures


def two_steps(group, kind, first):
    """Rank 1 calls two steps, whose leaves are alike, in another order, in the first windows or in later ones."""
    params, x = {"w": torch.ones(2)}, torch.ones(4)
    scaled = lambda k: lambda p, x: k * (p["w"].sum() * x).mean()
    losses = [lambda p, x: (p["w"].sum() * x).mean(), lambda p, x: 100 * (p["w"].sum() * x).mean()]
    losses = [scaled(1), scaled(100)] if kind == "factory" else losses
    steps = [funcga.accumulate(funcga.grad(loss), 2, across=group) for loss in losses]
    if not first:
        assert [step(params, x)["w"][0].item() for step in steps] == [1, 100]
    return [step(params, x) for step in (reversed(steps) if dist.get_rank(group) == 1 else steps)]


@pytest.mark.parametrize(("kind", "first"), [("lambdas", True), ("factory", False)])
def test_steps_that_are_called_in_another_order_are_named(kind, first):
    for text in refused(two_steps, kind, first, size=2):
        assert text.startswith("the replicas call different steps at the same time: rank 0 the step of `two_steps.")
        assert text.endswith("Make and call the steps in one order on every rank, from a list rather than a set.")


def changes_later(group, ranks):
    """In the third window a leaf has another shape, on some of the ranks."""
    params, *batch = problem()
    step = made(group)
    for _ in range(2):
        step(params, *batch)
    if dist.get_rank(group) in ranks:
        params["b"] = torch.zeros(1)
    return difference(step(params, *batch), step(params, *batch))


def test_a_structure_that_changes_on_one_replica_alone_is_named():
    for text in refused(changes_later, [1], size=3):
        assert text.startswith("the replicas fold different structures: `output[1]['b']` is float32[30]")
        assert "on rank 0 and float32[1] (weighted, by_weight) on rank 1" in text
    assert processes().run(changes_later, [0, 1, 2], size=3) == [0.0] * 3


def unpicklable(group, first):
    """The class of the output is known in a function alone."""
    pair = collections.namedtuple("pair", "a b")
    step = funcga.accumulate(lambda p, x: pair(p * x.sum(), x.sum()), 2, across=group)
    rows = torch.ones(4)
    if not first:
        step(torch.ones(2), rows)
    return step(torch.ones(2), rows[: 4 if dist.get_rank(group) else 0]).a.tolist()


def test_an_output_that_cannot_be_sent():
    for text in refused(unpicklable, True, size=2):
        assert "cannot be told what the others fold (" in text
        assert "pickle" in text
        assert "Give every replica a micro-batch in the first window" in text
    assert processes().run(unpicklable, False, size=2) == [[2.0, 2.0]] * 2


# ------------------------------------------------------------------------------------- groups


def channels(group):
    """What a group needs goes with it, and its threads."""
    steps = [made(across) for across in (group, Replicas(group), group)]
    for step in steps:
        step(*problem())
    before = threading.active_count()
    for _ in range(5):
        another = dist.new_group([0, 1])
        made(another)(*problem())
        dist.destroy_process_group(another)
        del another
    gc.collect()  # a step may be in a cycle
    return threading.active_count() == before


def test_what_a_group_needs_goes_with_it():
    assert alone(channels) == [True] * 2


def quietly(group, function, *args):
    import warnings

    warnings.simplefilter("ignore")  # torch.distributed.nn.functional is to go
    return function(group, *args)


# ------------------------------------------------------------------------------------- weights


def context_parallel(group, masks):
    """A loss that adds up activations of both ranks; some micro-batches have no token that counts."""
    import torch.distributed.nn.functional as functional

    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(rank)
    params = {"a": torch.ones(3, 5).double() / 3, "b": torch.linspace(-1, 1, 10).double().view(5, 2)}
    x, y = (torch.randn(8, k, generator=generator, dtype=torch.float64) for k in (3, 2))
    mask = torch.tensor(masks[rank], dtype=torch.float64)

    def loss(p, x, y, mask):
        h = torch.tanh(x @ p["a"])
        h = h + functional.all_reduce(h, group=group)
        return (((h @ p["b"] - y) ** 2).sum(1) * mask).sum() / mask.sum().clamp(min=1)

    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    for k in (slice(0, 4), slice(4, 8)):
        (loss(leaves, x[k], y[k], mask[k]) * mask[k].sum() / sum(map(sum, masks))).backward()
    for leaf in leaves.values():
        dist.all_reduce(leaf.grad, group=group)
    expected = {name: leaf.grad for name, leaf in leaves.items()}
    errors = []
    for weight in (lambda x, y, mask: int(mask.sum()), lambda x, y, mask: mask.sum()):
        step = funcga.accumulate(funcga.grad(loss), 2, weight=weight, across=group)
        for cast in (False, False, True):
            with torch.autocast("cpu", enabled=cast):  # which leaves float64 as it is
                errors.append(difference(step(params, x, y, mask), expected))
    return errors


MASKS = [[[1] * 4 + [0] * 4, [0] * 4 + [1] * 4], [[0, 0, 0, 0, 1, 0, 1, 1], [1] * 8]]


def test_a_loss_that_communicates_has_any_weights():
    """Its backward pass is run whatever the weight, and with cotangents in one unit."""
    for masks in MASKS:
        found = processes().run(quietly, context_parallel, masks, size=2)
        assert max(error for errors in found for error in errors) <= 1e-13


def disordered(group):
    """A loss that communicates in its backward pass, before or after other gradients are ready, by rank."""
    import torch.distributed.nn.functional as functional

    rank, width = dist.get_rank(group), 16
    torch.manual_seed(0)
    params = {"l0": torch.randn(width, width), "late": torch.randn(width)}
    torch.manual_seed(rank)
    x, y = torch.randn(4, width), torch.randn(4, width)

    def loss(p, x, y, keep):
        h = torch.tanh(x @ p["l0"])
        h = h - functional.all_reduce(h.mean(0), group=group)
        return ((h + p["late"] - y if keep else h - y) ** 2).mean()

    step = funcga.accumulate(funcga.grad(loss), 2, in_axes=(None, 0, 0, None), across=Replicas(group, bucket_bytes=256))
    step(params, x, y, True)
    found = step(params, x, y, rank == 0)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    for k in (slice(0, 2), slice(2, 4)):
        (loss(leaves, x[k], y[k], rank == 0) / 4).backward()
    for leaf in leaves.values():
        leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        dist.all_reduce(leaf.grad, group=group)
    return difference(found, {name: leaf.grad for name, leaf in leaves.items()})


def test_collectives_of_the_loss_do_not_mix_with_ours():
    assert max(processes().run(quietly, disordered, size=2)) <= 1e-6


# ------------------------------------------------------------------------------------- leaves of any kind


def keeps(group):
    params = {"w": torch.randn(2000, 500), "b": torch.zeros(3)}
    gradient = funcga.value_and_grad(
        lambda p, x: ((p["w"].mean() * x).sum() + p["b"].sum(), {"m": x.sum(0)}), has_aux=True
    )
    (loss, aux), _ = funcga.accumulate(gradient, 2, across=group)(params, torch.ones(6, 3))
    return loss.untyped_storage().nbytes(), aux["m"].untyped_storage().nbytes()


def test_a_kept_loss_keeps_no_bucket():
    assert processes().run(keeps, size=2) == [(4, 12)] * 2


# ------------------------------------------------------------------------------------- other options


def count_rows(x, y):
    return {"rows": len(x)}


# What rank 0 alone is given, the option that the error names, and what it is on that rank.
OPTIONS = {
    "observe": ({"observe": funcga.gradient_noise()}, "observe=", "an Observer of"),
    "another observer": ({"observe": funcga.dropped()}, "observe=", "an Observer of"),
    "drop": ({"drop": "window"}, "drop=", "'window'"),
    "totals": ({"totals": count_rows}, "totals=", "given"),
    "sync": ({"sync": "every"}, "sync=", "'every'"),
}
KINDS = ("across", "ddp", "ddp with buffers", "fsdp", "replicate", "multi_steps", "ddp alone")


def given_other_options(group, kind, name):
    """The error on each rank, which comes long before the timeout of the group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    is_first = dist.get_rank(group) == 0
    options = {**OPTIONS[name][0]} if is_first else {}
    if name == "another observer" and not is_first:
        options = {"observe": funcga.gradient_noise()}
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    if kind != "ddp with buffers":
        module = module[0]
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    if kind == "multi_steps":
        tx = funcga.multi_steps(funcga.transforms.Transform(dict, lambda g, s, p: (g, s)), 1, across=group, **options)
        params = {"w": torch.ones(2)}
        return answer(tx.update, params, tx.init(params), params)[1]
    wrapped = {
        "across": lambda: module,
        "fsdp": lambda: fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu")),
        "replicate": lambda: torch.distributed._composable.replicate(module, process_group=group),
    }.get(kind, lambda: DistributedDataParallel(module, process_group=group))()
    loss_fn = lambda m, x, y, totals=None: torch.nn.functional.mse_loss(m(x), y)
    gradient = module_value_and_grad(wrapped, loss_fn, sync=options.pop("sync", "last"))
    if kind == "ddp alone":
        return answer(gradient, x, y)[1]
    fold = {"fold": funcga.sum()} if "totals" in name else {}
    across = {"across": group} if kind == "across" else {}
    return answer(funcga.accumulate(gradient, 2, **fold, **across, **options), x, y)[1]


CASES = [
    *[(kind, "drop") for kind in KINDS[:-1]],
    *[(kind, "observe") for kind in ("across", "ddp", "ddp with buffers", "fsdp", "multi_steps")],
    *[(kind, "another observer") for kind in ("across", "ddp", "fsdp")],
    *[(kind, "totals") for kind in ("across", "ddp", "fsdp")],
    *[(kind, "sync") for kind in ("ddp", "ddp with buffers", "fsdp", "replicate", "ddp alone")],
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_options_that_differ_are_named_on_every_rank(kind, name):
    first, second = processes().run(given_other_options, kind, name, size=2, limit=30)
    _, option, text = OPTIONS[name]
    assert first == second
    assert first.startswith(f"the replicas were given different options: `{option}` is {text}"), first
    assert first.endswith("With other options they send each other other messages: give every rank the same.")
