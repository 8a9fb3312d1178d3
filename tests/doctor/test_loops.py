"""Training loops as people write them, right and wrong: what `watch` calls them, and whether its figures are those of
float64 autograd over the whole window."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import funcga

EVEN, UNEVEN, SHORT = (4,) * 8, (3, 9, 5, 12, 7, 3, 8, 4), (4,) * 6
WINDOW = 4


def batches(lengths):
    """Rows of 6 numbers and a class of 5; the first two rows of each micro-batch are class 0."""
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 6, generator=draw), torch.cat([torch.zeros(2), torch.randint(1, 5, (n - 2,), generator=draw)]).long())
        for n in lengths
    ]  # fmt: skip


class Run:
    """A model, its optimizer, and the windows that a loop gets. Nothing is learned, so that gradients can be checked."""

    def __init__(self, lengths, dtype=torch.float32, layers=3):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)).to(dtype)
        self.optimizer = torch.optim.SGD(self.model[:layers].parameters(), lr=0.0)
        self.batches = [(x.to(dtype), y) for x, y in batches(lengths)]
        self.windows = [self.batches[i : i + WINDOW] for i in range(0, len(lengths), WINDOW)]

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def each(self, loss, then=None, window=None):
        """A window: backward of each loss, what comes then, and a step."""
        for rows in self.windows if window is None else [window]:
            for x, y in rows:
                loss(self, x, y, rows).backward()
            if then is not None:
                then(self, rows)
            self.update()


def mean(run, x, y, window):
    return F.cross_entropy(run.model(x), y)


def mean_over_n(run, x, y, window):
    return mean(run, x, y, window) / WINDOW


def targets(window):
    return sum(len(y) for _, y in window)


def by_targets(run, x, y, window, **options):
    return F.cross_entropy(run.model(x), y, reduction="sum", **options) / targets(window)


def is_target(y):
    return (y > 0).float()


def masked_mean(run, x, y, window):
    mask = is_target(y)
    return (F.cross_entropy(run.model(x), y, reduction="none") * mask).sum() / mask.sum() / WINDOW


def masked_sum(run, x, y, window):
    mask = is_target(y)
    return (F.cross_entropy(run.model(x), y, reduction="none") * mask).sum() / sum(
        is_target(y).sum() for _, y in window
    )


def by_roots(run, x, y, window):
    return mean(run, x, y, window) * len(y) ** 0.5 / sum(len(y) ** 0.5 for _, y in window)


def ignoring(run, x, y, window):
    ignored = torch.where(y > 0, y, -100)
    return F.cross_entropy(run.model(x), ignored, reduction="sum") / sum((y > 0).sum() for _, y in window)


def unshifted(run, x, y, window):
    return F.cross_entropy(run.model(x)[:-1], y[1:], reduction="sum") / targets(window)


def squared(run, x, y, reduction="mean"):
    return F.mse_loss(run.model(x), F.one_hot(y, 5).float(), reduction=reduction)


def two_means(run, x, y, window):
    """Two terms that weigh their targets alike."""
    return (mean(run, x, y, window) + 0.1 * run.model(x).square().mean()) / WINDOW


def over_rows(run, x, y, window):
    """Summed over features, averaged over rows."""
    return squared(run, x, y, "sum") / len(x) / WINDOW


def advantages(run, x, y, window):
    log_p = run.model(x).log_softmax(-1).gather(-1, y[:, None])[:, 0]
    return -(log_p * torch.linspace(-1, 1, len(y)) * is_target(y)).sum() / sum(is_target(y).sum() for _, y in window)


def per_sample(run, x, y, window):
    """Each row is a sample with five targets, of which some are masked."""
    mask = (x[:, :5] > -1).float()
    each = (F.mse_loss(run.model(x), x[:, :5], reduction="none") * mask).sum(1) / mask.sum(1)
    return each.mean() / WINDOW


RIGHT = {
    "by targets": (by_targets, UNEVEN),
    "fairseq": (lambda run, x, y, window: by_targets(run, x, y, window) * targets(window), UNEVEN),
    "mean times its share": (lambda run, x, y, window: mean(run, x, y, window) * (len(y) / targets(window)), UNEVEN),
    "means of one size": (mean_over_n, EVEN),
    "by the window that there is": (lambda run, x, y, window: mean(run, x, y, window) / len(window), SHORT),
    "mask": (masked_sum, UNEVEN),
    "ignored": (ignoring, UNEVEN),
    "label smoothing": (lambda *args: by_targets(*args, label_smoothing=0.1), UNEVEN),
    "squared": (lambda run, x, y, window: squared(run, x, y) / WINDOW, EVEN),
    "a factor of the loss": (lambda run, x, y, window: 0.5 * squared(run, x, y) / WINDOW, EVEN),
    "two means": (two_means, EVEN),
    "over rows": (over_rows, EVEN),
    "advantages": (advantages, UNEVEN),
    "per sample": (per_sample, EVEN),
    "sum": (lambda run, x, y, window: squared(run, x, y, "sum"), UNEVEN),
}  # fmt: skip


def divided_by_hand(run, window):
    for param in run.model.parameters():
        param.grad /= targets(window)
    clip_grad_norm_(run.model.parameters(), 0.01)


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_are_exact(name):
    loss, lengths = RIGHT[name]
    run = Run(lengths)
    with funcga.watch(run.model, run.optimizer) as watched:
        run.each(loss, then=divided_by_hand if name == "fairseq" else None)
    assert watched.ok, watched
    assert len(watched.windows) == len(run.windows)
    watched.assert_exact()


def twice(run):
    run.each(lambda *args: mean_over_n(*args) / WINDOW)


def clipped_inside(run):
    for window in run.windows:
        for x, y in window:
            mean_over_n(run, x, y, window).backward()
            clip_grad_norm_(run.model.parameters(), 0.1)
        run.update()


def scaled_inside(run):
    for window in run.windows:
        for x, y in window:
            mean_over_n(run, x, y, window).backward()
            for param in run.model.parameters():
                param.grad *= 0.9
        run.update()


def erased_inside(run):
    for window in run.windows:
        for x, y in window:
            run.optimizer.zero_grad()
            mean_over_n(run, x, y, window).backward()
        run.optimizer.step()


def never_erased(run):
    for window in run.windows:
        for x, y in window:
            mean_over_n(run, x, y, window).backward()
        run.optimizer.step()


def stepped_each_time(run):
    for x, y in run.batches:
        run.each(mean_over_n, window=[(x, y)])


def never_stepped(run):
    for number, (x, y) in enumerate(run.batches, 1):
        mean_over_n(run, x, y, None).backward()
        if number == WINDOW:
            run.update()


WRONG = {
    "mean of means": (lambda run: run.each(mean_over_n), UNEVEN, ["uneven tokens"]),
    "mean of masked means": (lambda run: run.each(masked_mean), UNEVEN, ["uneven tokens"]),
    "short": (lambda run: run.each(mean_over_n), SHORT, ["short window"]),
    "undivided": (lambda run: run.each(mean), EVEN, ["not divided"]),
    "undivided and uneven": (lambda run: run.each(mean), UNEVEN, ["not divided", "uneven tokens"]),
    "twice": (twice, EVEN, ["divided twice"]),
    "by 3": (lambda run: run.each(lambda *args: mean(*args) / 3), EVEN, ["divided by another n"]),
    "unshifted": (lambda run: run.each(unshifted), UNEVEN, ["another count"]),
    "wrong weight": (lambda run: run.each(by_roots), UNEVEN, ["wrong weight"]),
    "clipped inside": (clipped_inside, EVEN, ["clipped inside the window"]),
    "scaled inside": (scaled_inside, EVEN, ["scaled inside the window"]),
    "erased inside": (erased_inside, EVEN, ["erased"]),
    "never erased": (never_erased, EVEN, ["left over"]),
    "stepped each time": (stepped_each_time, EVEN, ["stepped too often"]),
    "never stepped": (never_stepped, EVEN, ["never stepped"]),
    "in no optimizer": (lambda run: run.each(mean_over_n), EVEN, ["in no optimizer"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_are_named_and_their_shares_are_those_of_autograd(name):
    loop, lengths, names = WRONG[name]
    run = Run(lengths, layers=1 if name == "in no optimizer" else 3)
    seen, before_step = [], lambda *_: seen.append([p.grad.clone() for p in run.model.parameters()])
    run.optimizer.register_step_pre_hook(before_step)
    with funcga.watch(run.model) as watched:
        loop(run)
    assert watched.ok is False
    assert sorted(cause.name for cause in watched.causes) == names, watched
    with pytest.raises(AssertionError, match=f"NOT exact. Steps: [0-9]+, causes: {len(names)}"):
        watched.assert_exact()
    if name in ("never erased", "in no optimizer", "clipped inside"):
        return
    # The gradient that the optimizer got is the sum of the micro-batches' own, each as often as its share says.
    masked, shifted = name == "mean of masked means", name == "unshifted"
    first = 0
    for window, grads in zip([each for each in watched.windows if each.is_step], seen, strict=True):
        rows = run.batches[first : first + len(window.shares)]
        first += len(rows)
        own = []
        for x, y in rows:
            x, y = (x[is_target(y) > 0], y[y > 0]) if masked else (x[:-1], y[1:]) if shifted else (x, y)
            own.append(gradient(run, x, y))
        for which, grad in enumerate(grads):
            expected = sum(window.factor * share * each[which] for share, each in zip(window.shares, own, strict=True))
            torch.testing.assert_close(grad.double(), expected, rtol=2e-4, atol=1e-6)


def gradient(run, x, y):
    """That of the mean over rows, in float64."""
    exact = Run(EVEN, torch.float64)
    exact.model.load_state_dict(run.model.state_dict())
    exact.model.zero_grad()
    F.cross_entropy(exact.model(x.double()), y).backward()
    return [param.grad for param in exact.model.parameters()]


def scaled(run, clip=None, unscale=True, overflow=False, step=True):
    """A loop with GradScaler, as its tutorial has it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for number, window in enumerate(run.windows):
        for x, y in window:
            loss = mean_over_n(run, x, y, window) * (float("inf") if overflow and number == 0 else 1)
            scaler.scale(loss).backward()
        if clip is not None:
            if unscale:
                scaler.unscale_(run.optimizer)
            clip_grad_norm_(run.model.parameters(), clip)
        if step:
            scaler.step(run.optimizer)
            scaler.update()
        else:
            run.optimizer.step()
        run.optimizer.zero_grad()


def with_closures(run):
    """As Lightning steps: the last micro-batch of a window is inside of the closure."""

    def closure():
        run.optimizer.zero_grad()
        for x, y in run.batches[:WINDOW]:
            loss = mean_over_n(run, x, y, None)
            loss.backward()
        return loss

    run.optimizer.step(closure)
    run.optimizer.step(closure=closure)


def search_along_a_line(run):
    run.optimizer = torch.optim.LBFGS(run.model.parameters(), max_iter=3)
    with_closures(run)


def value_clipped(run):
    def clip(run, window):
        torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)

    run.each(mean_over_n, then=clip)


def clipped_by_code(run):
    def clip(run, window):
        for param in run.model.parameters():
            param.grad *= 0.3

    run.each(mean_over_n, then=clip)


def gan(run):
    """Two losses for each of two optimizers; the generator's loss reaches the discriminator, too, and is erased."""
    other = torch.nn.Linear(3, 6)
    of_other = torch.optim.Adam(other.parameters(), lr=0.0)
    for x, y in run.batches:
        run.optimizer.zero_grad()
        F.cross_entropy(run.model(x), y).backward()
        F.cross_entropy(run.model(other(x[:, :3]).detach()), y).backward()
        run.optimizer.step()
        of_other.zero_grad()
        F.cross_entropy(run.model(other(x[:, :3])), y).backward()
        of_other.step()


def raising_once(run):
    for number, window in enumerate(run.windows):
        with contextlib.suppress(ZeroDivisionError):
            for x, y in window:
                loss = mean_over_n(run, x, y, window)
                if number == 0:
                    loss.register_hook(lambda grad: 1 // 0)
                loss.backward()
            run.optimizer.step()
        run.optimizer.zero_grad()


def in_16_bits(run):
    run.model.bfloat16()

    def divide(run, window):
        for param in run.model.parameters():
            param.grad /= targets(window)

    run.each(lambda run, x, y, w: F.cross_entropy(run.model(x.bfloat16()).float(), y, reduction="sum"), then=divide)


def evaluated_between(run):
    for window in run.windows:
        with torch.no_grad():
            mean(run, *window[0], window)
        run.each(mean_over_n, window=window)


# What happens beside the losses: is it exact, the names of the causes, and the word of a note.
EVENTS = {
    "scaled": (scaled, True, [], None),
    "scaled and clipped": (lambda run: scaled(run, clip=1e-3), True, [], None),
    "clipped before unscaling": (lambda run: scaled(run, clip=1e-3, unscale=False), False, ["clipped before unscaling"], None),
    "never unscaled": (lambda run: scaled(run, step=False), False, ["never unscaled"], None),
    "a step is skipped": (lambda run: scaled(run, overflow=True), True, [], "skipped a step"),
    "closures": (with_closures, True, [], None),
    "LBFGS": (search_along_a_line, True, [], None),
    "values are clipped": (value_clipped, True, [], None),
    "clipped by code": (clipped_by_code, True, [], "multiplied by 0.3"),
    "two optimizers": (gan, True, [], "2 losses"),
    "an error in a backward": (raising_once, True, [], None),
    "16 bits": (in_16_bits, True, [], None),
    "evaluation": (evaluated_between, True, [], None),
}  # fmt: skip


@pytest.mark.parametrize("name", EVENTS)
def test_what_else_a_loop_does(name):
    loop, ok, names, note = EVENTS[name]
    run = Run(EVEN if name != "16 bits" else UNEVEN)
    with funcga.watch(run.model) as watched:
        loop(run)
    assert (watched.ok, [cause.name for cause in watched.causes]) == (ok, names), watched
    assert note is None or note in "\n".join(watched.notes)


def test_gradients_that_are_older_than_the_watch():
    run = Run(EVEN)
    mean(run, *run.batches[0], None).backward()
    with funcga.watch(run.model) as watched:
        run.each(mean_over_n)
    assert [window.ok for window in watched.windows] == [None, True]
