"""Forms in which people write the mean over valid targets, each of them in a right loop and in wrong ones: the doctor judges
nearly all of them, and none falsely. The truth is float64 autograd of the same form over the whole window."""

import math

import pytest
import torch
import torch.nn.functional as F

import funcga

N, WINDOWS, ROWS, LENGTH, CLASSES = 4, 2, 3, 6, 5


class Net(torch.nn.Module):
    """Tokens of 6 numbers; scores of two heads, boxes, and an image for each row."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(6, 8)
        self.head, self.other, self.boxes = (torch.nn.Linear(8, k) for k in (CLASSES, 3, 4))

    def forward(self, x):
        h = self.body(x).tanh()
        return self.head(h), self.other(h), self.boxes(h)


def micro_batch(lengths, rows, draw):
    """Rows of tokens, of which those behind the length of a row are no targets."""
    x = torch.randn(rows, LENGTH, 6, generator=draw, dtype=torch.float64)
    y = torch.randint(CLASSES, (rows, LENGTH), generator=draw)
    y[torch.arange(LENGTH) >= torch.tensor(lengths)[:, None]] = -100
    second = torch.randint(3, (rows, LENGTH), generator=draw)
    second[:, ::2] = -100
    target = torch.randn(rows, LENGTH, 4, generator=draw, dtype=torch.float64)
    return {"x": x, "y": y, "z": second, "t": target}


def micro_batches(even):
    draw = torch.Generator().manual_seed(0)
    lengths = [[4, 4, 4]] * N if even else [[6, 6, 6], [5, 4, 3], [2, 2, 1], [6, 3, 1]]
    return [[micro_batch(each, ROWS, draw) for each in lengths] for _ in range(WINDOWS)]


# A form gives the sum of a loss and the number of its targets, or several of these, as it is in the loop.


def rows_of(net, b):
    """Losses of all tokens, and which of them are targets."""
    return F.cross_entropy(net(b["x"])[0].flatten(0, 1), b["y"].flatten(), reduction="none"), b["y"].flatten() >= 0


def scores(net, b):
    return net(b["x"])[0].flatten(0, 1), b["y"].flatten()


def log_p(net, b):
    logits, y = scores(net, b)
    return logits.log_softmax(-1).gather(1, y.clamp(min=0)[:, None])[:, 0], y >= 0


def raw(net, b):
    """Losses that no ignored index has masked."""
    picked, mask = log_p(net, b)
    return -picked, mask


def errors(net, b):
    """Squared errors of the four numbers of each token."""
    return (net(b["x"])[2] - b["t"]).square(), (b["y"] >= 0)[..., None]


def focal(net, b):
    each, mask = rows_of(net, b)
    return (1 - (-each).exp()) ** 2 * each, mask


def smoothed(net, b):
    """As the LabelSmoother of transformers."""
    logits, y = scores(net, b)
    lp, hidden = -logits.log_softmax(-1), (y < 0)[:, None]
    nll = lp.gather(-1, y.clamp(min=0)[:, None]).masked_fill(hidden, 0.0)
    smooth = lp.sum(-1, keepdim=True).masked_fill(hidden, 0.0)
    return nll.sum(), smooth.sum(), (y >= 0).sum()


def valid(net, b):
    logits, y = scores(net, b)
    return logits[y >= 0], y[y >= 0]


def near(net, b, of=lambda t: t):
    return net(b["x"])[2][b["y"] >= 0], of(b["t"][b["y"] >= 0])


def soft(b):
    return b["t"][b["y"] >= 0].repeat(1, 2)[:, :CLASSES].softmax(-1)


def mixed(logits, y):
    return sum(w * F.cross_entropy(logits, z, reduction="sum") for w, z in ((0.7, y), (0.3, y.flip(0)))), len(y)


def smoothed_by_mean(logits, y):
    lp, mask = -logits.log_softmax(-1), y >= 0
    picked = lp.gather(-1, y.clamp(min=0)[:, None])[:, 0]
    return ((0.9 * picked + 0.1 * lp.mean(-1)) * mask).sum(), mask.sum()


def gaussian(out, target):
    return F.gaussian_nll_loss(out[:, 0], target[:, 0], out[:, 1].exp(), reduction="sum"), len(target)


def selective(logits, y):
    picked = logits.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return -picked.masked_fill(y < 0, 0.0).sum(), (y >= 0).sum()


def picked(logits, y):
    return -logits.log_softmax(-1)[torch.arange(len(y)), y].sum(), len(y)


def one_hot(logits, y):
    mask = (y >= 0)[:, None]
    return -(logits.log_softmax(-1) * F.one_hot(y.clamp(min=0), CLASSES) * mask).sum(), mask.sum()


def masked(each_of, how):
    def sum_of(net, b):
        each, mask = each_of(net, b)
        return how(each, mask), mask.expand(each.shape).sum() if mask.shape != each.shape else mask.sum()

    return sum_of


HOW = {
    "* mask": lambda each, mask: (each * mask).sum(),
    "* float mask": lambda each, mask: (each * mask.double()).sum(),
    "masked_fill": lambda each, mask: each.masked_fill(~mask, 0).sum(),
    "where": lambda each, mask: torch.where(mask, each, 0.0).sum(),
    "where, other way": lambda each, mask: torch.where(~mask, torch.zeros_like(each), each).sum(),
    "[mask]": lambda each, mask: each[mask.expand(each.shape)].sum(),
    "masked_select": lambda each, mask: each.masked_select(mask).sum(),
    "cat of chunks": lambda each, mask: torch.cat([(a * b) for a, b in zip(each.split(4), mask.split(4), strict=True)]).sum(),
    "stack of rows": lambda each, mask: torch.stack([*(each * mask)]).sum(),
    "sum of chunks": lambda each, mask: sum((a * b).sum() for a, b in zip(each.split(4), mask.split(4), strict=True)),
    "dot": lambda each, mask: torch.dot(each.flatten(), mask.expand(each.shape).flatten().double()),
    "einsum": lambda each, mask: torch.einsum("i,i->", each.flatten(), mask.expand(each.shape).flatten().double()),
    "nansum": lambda each, mask: torch.where(mask, each, math.nan).nansum(),
    "sum twice": lambda each, mask: (each * mask).sum(-1).sum(),
    "* weight of 2": lambda each, mask: (each * (mask * 2.0)).sum() / 2,
}  # fmt: skip
EACH = {"cross entropy": rows_of, "gathered": raw, "squared": errors, "focal": focal}

SUMS = {
    f"{name}, {how}": masked(each, HOW[how])
    for name, each in EACH.items()
    for how in (HOW if name in ("cross entropy", "squared") else ("* mask", "masked_fill", "[mask]", "where"))
}
SUMS |= {
    "cross_entropy(sum)": lambda net, b: (F.cross_entropy(*scores(net, b), reduction="sum"), (b["y"] >= 0).sum()),
    "of flat tokens": lambda net, b: (
        F.cross_entropy(net(b["x"][b["y"] >= 0])[0], b["y"][b["y"] >= 0], reduction="sum"), (b["y"] >= 0).sum()),
    "label smoothing": lambda net, b: (
        F.cross_entropy(*scores(net, b), reduction="sum", label_smoothing=0.1), (b["y"] >= 0).sum()),
    "nll_loss": lambda net, b: (
        F.nll_loss(scores(net, b)[0].log_softmax(-1), scores(net, b)[1], reduction="sum"), (b["y"] >= 0).sum()),
    "transposed": lambda net, b: (
        F.cross_entropy(net(b["x"])[0].transpose(1, 2), b["y"], reduction="sum"), (b["y"] >= 0).sum()),
    "errors that are masked": lambda net, b: (
        ((net(b["x"])[2] - b["t"]) * (b["y"] >= 0)[..., None]).square().sum(), 4 * (b["y"] >= 0).sum()),
    "mse_loss of masked": lambda net, b: (
        F.mse_loss(net(b["x"])[2] * (m := (b["y"] >= 0)[..., None]), b["t"] * m, reduction="sum"), 4 * m.sum()),
    "l1 of picked": lambda net, b: (
        F.l1_loss(net(b["x"])[2][b["y"] >= 0], b["t"][b["y"] >= 0], reduction="sum"), 4 * (b["y"] >= 0).sum()),
    "LabelSmoother": lambda net, b: (
        (s := smoothed(net, b))[0] * 0.9 + s[1] * (0.1 / CLASSES), s[2]),
    "smoothed by a mean": lambda net, b: smoothed_by_mean(*scores(net, b)),
    "mixup": lambda net, b: mixed(*valid(net, b)),
    "soft targets": lambda net, b: (
        F.cross_entropy(valid(net, b)[0], soft(b), reduction="sum"), len(valid(net, b)[1])),
    "kl_div": lambda net, b: (
        F.kl_div(valid(net, b)[0].log_softmax(-1), soft(b), reduction="sum"), len(valid(net, b)[1])),
    "bce": lambda net, b: (
        F.binary_cross_entropy_with_logits(*near(net, b, lambda t: (t > 0).double()), reduction="sum"), 4 * (b["y"] >= 0).sum()),
    "gaussian nll": lambda net, b: gaussian(*near(net, b)),
    "smooth l1": lambda net, b: (
        (F.smooth_l1_loss(net(b["x"])[2], b["t"], reduction="none") * (b["y"] >= 0)[..., None]).sum(), 4 * (b["y"] >= 0).sum()),
    "selective": lambda net, b: selective(net(b["x"])[0], b["y"]),
    "chunked cross entropy": lambda net, b: (
        torch.cat([F.cross_entropy(*each, reduction="none") for each in zip(*(t.split(5) for t in scores(net, b)), strict=True)]).sum(),
        (b["y"] >= 0).sum()),
    "chunks of sums": lambda net, b: (
        sum(F.cross_entropy(*scores(net, {"x": x, "y": y}), reduction="sum") for x, y in zip(b["x"].split(1), b["y"].split(1), strict=True)),
        (b["y"] >= 0).sum()),
    "picked by numbers": lambda net, b: picked(*valid(net, b)),
    "one hot": lambda net, b: one_hot(*scores(net, b)),
}  # fmt: skip


def penalty(net):
    return 1e-2 * sum(p.square().sum() for p in net.parameters())


def heads(net, b):
    """Two heads with their own counts."""
    first, second, _ = net(b["x"])
    return [
        (F.cross_entropy(first.flatten(0, 1), b["y"].flatten(), reduction="sum"), 1.0, (b["y"] >= 0).sum()),
        (F.cross_entropy(second.flatten(0, 1), b["z"].flatten(), reduction="sum"), 0.5, (b["z"] >= 0).sum()),
    ]


def boxes(net, b):
    """DETR: classes of all queries, and boxes of those that were matched."""
    logits, _, found = net(b["x"])
    mask = b["y"] >= 0
    count = mask.sum()
    l1 = F.l1_loss(found[mask], b["t"][mask], reduction="none").sum()
    labels = F.cross_entropy(logits.flatten(0, 1), b["y"].flatten().clamp(min=0), reduction="sum")
    areas = (found[mask].unsqueeze(1) - b["t"][mask]).abs().sum(-1)
    return [(labels, 1.0, mask.numel()), (l1, 5.0, count), (torch.diag(areas).sum(), 2.0, count)]


def dice(net, b):
    """Dice of each row, and cross entropy of its tokens."""
    logits = net(b["x"])[0]
    labels = b["y"].clamp(min=0)
    p, t = logits.softmax(-1), F.one_hot(labels, CLASSES)
    each = 1 - (2 * (p * t).sum((1, 2)) + 1) / (p.sum((1, 2)) + t.sum((1, 2)) + 1)
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return [(each.sum(), 1.0, len(each)), (ce, 1.0, labels.numel())]


def nll_and_l1(net, b):
    each, mask = rows_of(net, b)
    far, _ = errors(net, b)
    return [(each.sum(), 1.0, mask.sum()), ((far.sqrt().mean(-1).flatten() * mask).sum(), 0.3, mask.sum())]


def one(sum_of):
    return lambda net, b: [(total, 1.0, count) for total, count in [sum_of(net, b)]]


FORMS = {name: one(sum_of) for name, sum_of in SUMS.items()}
FORMS |= {"two heads": heads, "boxes": boxes, "dice": dice, "nll and l1": nll_and_l1}
FORMS |= {f"{name} and a penalty": FORMS[name] for name in ("cross_entropy(sum)", "two heads", "gathered, where")}


def terms_of(name, net, b):
    terms = FORMS[name](net, b)
    return [*terms, (penalty(net), 1.0, None)] if name.endswith("penalty") else terms


def means(name, net, b):
    return sum(scale * total / (1 if count is None else count) for total, scale, count in terms_of(name, net, b))


def whole(name, net, window):
    """The gradient of the means over all targets of the window."""
    every = [terms_of(name, net, b) for b in window]
    loss = 0.0
    for position in zip(*every, strict=True):
        count = position[0][2]
        if count is None:
            loss = loss + position[0][1] * position[0][0]
        else:
            loss = loss + position[0][1] * sum(total for total, _, _ in position) / sum(int(c) for _, _, c in position)
    return torch.autograd.grad(loss, [*net.parameters()], allow_unused=True)


def mean_of_means(name, net, b, window):
    return means(name, net, b) / N


def weighted(name, net, b, window):
    """Each term by its targets in the whole window."""
    counts = [[count for _, _, count in terms_of(name, net, each)] for each in window]
    totals = [None if c[0] is None else sum(int(each) for each in c) for c in zip(*counts, strict=True)]
    terms = zip(terms_of(name, net, b), totals, strict=True)
    return sum(scale * value / (N if total is None else total) for (value, scale, _), total in terms)


def twice(name, net, b, window):
    return weighted(name, net, b, window) / N


def undivided(name, net, b, window):
    return means(name, net, b)


def mean_twice(name, net, b, window):
    return means(name, net, b) * (1 / N) / N


LOOPS = {
    "mean of means": mean_of_means,
    "weighted": weighted,
    "twice": twice,
    "undivided": undivided,
    "means twice": mean_twice,
}


def seen(name, loop, even):
    """What the doctor says of a loop, and whether its gradients are those of the whole windows."""
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    worst = 0.0
    with funcga.watch(net, optimizer) as watched:
        for window in micro_batches(even):
            for b in window:
                LOOPS[loop](name, net, b, window).backward()
            grads = [p.grad for p in net.parameters()]
            for grad, exact in zip(grads, whole(name, net, window), strict=True):
                if grad is not None and exact is not None:
                    worst = max(worst, float((grad - exact).abs().max() / exact.abs().max()))
            optimizer.step()
            optimizer.zero_grad()
    return watched, worst


CASES = [
    (name, loop, even) for name in FORMS for loop in LOOPS for even in (True, False) if even or loop != "means twice"
]


@pytest.fixture(scope="module")
def verdicts():
    return {case: seen(*case) for case in CASES}


def test_no_verdict_is_false(verdicts):
    false = {
        case: (watched.ok, worst, [each.name for each in watched.causes])
        for case, (watched, worst) in verdicts.items()
        if watched.ok is not None and watched.ok != (worst < 1e-9)
    }
    assert not false


def test_nearly_all_are_judged(verdicts):
    """All but those that divide by a factor of 1/n, which may be the weight of a loss."""
    asked = [case for case in CASES if case[1] != "means twice"]
    judged = [case for case in asked if verdicts[case][0].ok is not None]
    assert len(judged) >= 0.9 * len(asked), [case for case in asked if case not in judged]


@pytest.mark.parametrize("name", ["focal, * mask", "LabelSmoother", "mixup", "chunks of sums", "two heads", "dice"])
def test_right_loops_are_exact(name):
    watched, worst = seen(name, "weighted", False)
    assert watched.ok, watched
    assert worst < 1e-9


@pytest.mark.parametrize("name", ["errors that are masked", "mse_loss of masked"])
@pytest.mark.parametrize("loop", ["weighted", "mean of means"])
def test_elements_that_are_hidden_below_a_loss_are_not_judged(name, loop):
    watched, _ = seen(name, loop, False)
    assert watched.ok is None, watched
