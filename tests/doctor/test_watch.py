"""A watch changes nothing of what it sees, and says what it could not see: processes, wraps, files, errors of its own."""

import contextlib
import importlib
import json
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import funcga
from tests.processes import processes
from tests.programs import TRAIN

pytest_plugins = ["pytester"]


def train(model, optimizer, n=4, steps=2):
    losses = []
    for step in range(steps):
        for i in range(n):
            torch.manual_seed(step * n + i)
            x = torch.randn(8, 64)
            loss = F.cross_entropy(model(x), torch.randint(10, (8,))) / n
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def made(device="cpu"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10)
    )
    model = model.to(device)
    return model, torch.optim.AdamW(model.parameters())


def replaced():
    """What a watch replaces while it is open."""
    hooks = importlib.import_module("torch.optim.optimizer")
    owners = (
        torch.autograd,
        torch.amp.GradScaler,
        DistributedDataParallel,
        torch.nn.utils,
        torch.nn.utils.clip_grad,
        torch.optim.Optimizer,
        torch.nn.Module,
        torch.nn.modules.batchnorm._BatchNorm,
        torch.optim.lr_scheduler.LRScheduler,
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts,
        torch.optim.swa_utils.AveragedModel,
    )
    names = (
        "backward",
        "scale",
        "step",
        "unscale_",
        "forward",
        "clip_grad_norm_",
        "clip_grad_value_",
        "_clip_grads_with_norm_",
        "__init__",
        "zero_grad",
        "update_parameters",
    )
    found = [vars(owner).get(name) for owner in owners for name in names]
    return [*found, dict(hooks._global_optimizer_pre_hooks), dict(hooks._global_optimizer_post_hooks)]


def test_a_run_is_the_same_to_the_bit():
    before = replaced()
    plain, watched = made(), made()
    losses = train(*plain)
    with funcga.watch(watched[0]) as report:
        assert train(*watched) == losses
    assert report.ok
    for one, other in zip(plain[0].parameters(), watched[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert replaced() == before
    with pytest.raises(KeyError), funcga.watch(), funcga.watch():
        raise KeyError
    assert replaced() == before


class Sizes(TorchDispatchMode):
    """Counts what operators give by its size."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.numel() >= self.size:
            memory = {arg.untyped_storage().data_ptr() for arg in args if torch.is_tensor(arg)}
            self.count += result.untyped_storage().data_ptr() not in memory
        return result


def test_no_gradient_is_copied():
    def large(watching):
        model, optimizer = made()
        with watching(model, optimizer), Sizes(64 * 256) as sizes:
            train(model, optimizer)
        return sizes.count

    assert large(funcga.watch) == large(lambda *_: contextlib.nullcontext()) > 0


def test_an_error_of_its_own_ends_the_watch_and_not_the_run(monkeypatch, capsys):
    monkeypatch.setattr(torch, "cat", lambda *_, **__: 1 // 0)
    model, optimizer = made()
    with funcga.watch(model) as watched:
        train(model, optimizer)
    assert watched.ok is None
    assert "watching ended early, with ZeroDivisionError" in "".join(watched.notes)
    assert capsys.readouterr().err.count("funcga.watch sees nothing more of this run") == 1


def test_where_nothing_can_be_told():
    model, optimizer = made()
    with funcga.watch(model) as watched:
        pass
    assert watched.ok is None
    assert "came after a backward of torch" in str(watched)
    gradient = funcga.value_and_grad(lambda params, x: torch.func.functional_call(model, params, x).square().mean())
    with funcga.watch(model) as watched:
        _, grads = funcga.accumulate(gradient, 2)(dict(model.named_parameters()), torch.ones(4, 64))
        for name, param in model.named_parameters():
            param.grad = grads[name]
        optimizer.step()
    assert watched.ok is None
    assert "verify tells more" in str(watched)

    class Own(torch.autograd.Function):
        forward = staticmethod(lambda context, x: x.clone())
        backward = staticmethod(lambda context, grad: grad)

    for loss in (
        lambda x: Own.apply(model(x).mean()),
        lambda x: model(x).mean() + model(x).square().sum(),
        torch.compile(lambda x: model(x).square().mean(), backend="aot_eager"),
    ):
        optimizer.zero_grad()
        with funcga.watch(model) as watched:
            for _ in range(2):
                loss(torch.ones(4, 64)).backward()
            optimizer.step()
        assert watched.ok is None, watched
        assert "cannot be judged" in str(watched)


def test_only_the_first_steps_are_watched():
    model, optimizer = made()
    before = replaced()
    with funcga.watch(model, steps=3) as watched:
        train(model, optimizer, steps=3)
        assert replaced() == before
        train(model, optimizer, steps=2)
    assert watched.ok
    assert len(watched.windows) == 3
    assert "only the first steps" in str(watched)


def test_what_was_found_is_there_after_the_last_step_that_is_watched():
    model, optimizer = made()
    seen = []
    with funcga.watch(model, steps=3, on_step=lambda each: seen.append((each.ok, str(each)))) as watched:
        train(model, optimizer, steps=4)
    assert [ok for ok, _ in seen] == [None, None, True]
    assert seen[-1][1] == str(watched)
    with funcga.watch(model, steps=3, on_step=lambda _: 1 // 0) as watched:
        train(model, optimizer, steps=3)
    assert watched.ok is None
    assert "watching ended early, with ZeroDivisionError" in str(watched)


def test_micro_batches_of_another_optimizer_may_yet_be_stepped_when_the_watch_ends():
    """That of a second loss, which steps by turns with the first: it is not "never stepped"."""
    models = [torch.nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    with funcga.watch(torch.nn.ModuleList(models), steps=3) as watched:
        for _ in range(4):
            for model in models:
                model(torch.randn(8, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert watched.ok
    assert len(watched.windows) == 3


def test_windows_are_compared_with_those_of_their_own_optimizer():
    """The body steps after each micro-batch, and the head after four: no window of the body is short."""
    body, head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    of_body, of_head = (torch.optim.SGD(each.parameters(), 0.0) for each in (body, head))
    with funcga.watch(torch.nn.ModuleList([body, head])) as watched:
        for i in range(1, 9):
            (head(body(torch.randn(5, 3))).square().mean() / 4).backward()
            of_body.step()
            of_body.zero_grad()
            if i % 4 == 0:
                of_head.step()
                of_head.zero_grad()
    assert [each.name for each in watched.causes] == ["stepped too often"]


def test_several_optimizers():
    models = [torch.nn.Linear(4, 1) for _ in range(3)]
    a, b, other = (torch.optim.SGD(model.parameters(), 0.1) for model in models)

    def watched(*given, **named):
        with funcga.watch(*given, **named) as watched:
            for model, optimizer in zip(models, (a, b, other), strict=True):
                model(torch.randn(8, 4)).mean().backward()
                optimizer.step()
        return len(watched.windows)

    assert watched(None, a, b) == watched(None, a, optimizer=b) == watched(models[0], b) == 2
    assert watched(optimizer=a) == watched(None, a) == watched(models[0], None) == 1
    assert watched() == watched(models[0], other, b) == 3
    with pytest.raises(funcga.FuncgaError, match="was given list in place of a torch Optimizer"):
        funcga.watch(models[0], [a, b])


def test_other_threads_go_on():
    """A loop in another thread is seen as one of this: what is replaced belongs to the process."""
    model, optimizer = made()
    with funcga.watch(model) as watched:
        thread = threading.Thread(target=train, args=(model, optimizer))
        thread.start()
        thread.join()
    assert watched.ok


@pytest.mark.parametrize(("given", "name"), [((3,), "int"), ((torch.nn.Linear(1, 1), "adam"), "str")])
def test_nonsense_is_refused(given, name):
    with pytest.raises(funcga.FuncgaError, match=f"was given {name} in place of a torch"):
        funcga.watch(*given)


def test_files(tmp_path):
    model, optimizer = made()
    with funcga.watch(model) as watched:
        train(model, optimizer)
        (model(torch.ones(1, 64)).mean() * float("nan")).backward()
        optimizer.step()
    found = json.loads(watched.to_json())
    assert [window["factor"] for window in found["windows"]] == [pytest.approx(1), pytest.approx(1), None]
    pytest.importorskip("matplotlib")
    watched.plot(tmp_path / "watched.png")
    assert (tmp_path / "watched.png").stat().st_size > 1000


def test_the_fixture(pytester):
    pytester.makepyfile(
        f"""
        import sys
        import pytest

        @pytest.mark.parametrize("lengths", ["33", "39"])
        def test_training(watch_exact, lengths, monkeypatch):
            monkeypatch.setattr(sys, "argv", ["", *lengths])
            with pytest.raises(SystemExit):
                exec({TRAIN!r})
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=2, errors=1)


# --- processes: DDP and FSDP average gradients, whatever the numbers of targets


def ranks(group, wrapper, lengths, by_targets, sync=False, across=True):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 5))
    if wrapper == "FSDP2":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"))
    else:
        model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    own = lengths[group.rank()]
    total = torch.tensor(float(sum(own)))
    dist.all_reduce(total, group=group)
    with funcga.watch(model, across=group if across else None) as watched:
        for _ in range(2):
            for i, n in enumerate(own):
                is_last = i == len(own) - 1
                if wrapper == "FSDP2":
                    model.set_requires_gradient_sync(is_last)
                quiet = wrapper == "DDP" and not sync and not is_last
                with model.no_sync() if quiet else contextlib.nullcontext():
                    out, labels = model(torch.randn(n, 6)), torch.randint(5, (n,))
                    if by_targets:
                        loss = F.cross_entropy(out, labels, reduction="sum") * group.size() / total
                    else:
                        loss = F.cross_entropy(out, labels) / len(own)
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    factors = [window.factor for window in watched.windows]
    return watched.ok, [cause.name for cause in watched.causes], "; ".join(watched.notes), factors


RANKS = {
    "by targets": (((3, 9), (5, 4)), True, {}, True, [], ""),
    "even": (((4, 4), (4, 4)), False, {}, True, [], ""),
    "uneven": (((3, 9), (5, 4)), False, {}, False, ["uneven tokens"], ""),
    "ranks": (((4, 4), (9, 9)), False, {}, False, ["ranks weigh the same"], ""),
    "unseen": (((4, 4), (9, 9)), False, {"across": False}, None, [], "other processes are not seen"),
    "reduced each time": (((4, 4), (4, 4)), False, {"sync": True}, True, [], "reduced over the processes in 2 micro-batches"),
}  # fmt: skip


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
@pytest.mark.parametrize("name", RANKS)
def test_processes(wrapper, name):
    lengths, by_targets, options, ok, names, note = RANKS[name]
    if wrapper == "FSDP2" and "sync" in options:
        pytest.skip("FSDP2 has no switch of its own for each forward")
    found = processes(2).run(on_a_rank, wrapper, lengths, by_targets, options)
    for seen_ok, seen_names, notes, factors in found:
        assert (seen_ok, seen_names) == (ok, names)
        assert note in notes
        assert len(factors) == 2
        if ok is not None:
            assert factors == pytest.approx([1, 1], rel=1e-4)


def on_a_rank(group, wrapper, lengths, by_targets, options):
    return ranks(group, wrapper, lengths, by_targets, **options)


@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_host_waits_at_the_step_only():
    from tests.simulated import Events

    def waits(watching):
        model = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        x, y = torch.randn(8, 64, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")
        with watching(model, optimizer):
            counted = []
            for _ in range(2):
                with Events() as seen:
                    for _ in range(3):
                        (F.cross_entropy(model(x), y) / 3).backward()
                        schedule.step()
                counted.append(seen.waits)
                optimizer.step()
                optimizer.zero_grad()
        return counted

    assert waits(funcga.watch) == waits(lambda *_: contextlib.nullcontext())
