"""Where the doctor does not guess: losses that compare rows, hooks that may change gradients, means of a number, sums over
rows, and updates that are skipped on purpose."""

import pytest
import torch
import torch.nn.functional as F

import funcga

N, WINDOWS = 4, 2


def net(*between):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), *between, torch.nn.Tanh(), torch.nn.Linear(16, 5)).double()


def rows(lengths):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(n, 6, generator=draw, dtype=torch.float64) for n in lengths]


def watched(loss, model=None, lengths=(8,) * N, over=N, hook=None):
    """What the doctor says of the loop over means, and how far off its last gradient is."""
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with funcga.watch(model, optimizer) as found:
        for _ in range(WINDOWS):
            for x in rows(lengths):
                total = loss(model, x) / over
                if hook is not None:
                    total.register_hook(hook)
                total.backward()
            grads = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    exact = torch.autograd.grad(loss(model, torch.cat(rows(lengths))), [*model.parameters()])
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads, exact, strict=True))
    return found, off


def normed(z):
    return (z - z.mean(0)) / z.std(0)


def classes(x):
    return x[:, :5].argmax(1)


COUPLED = {
    "in-batch negatives": lambda m, x: F.cross_entropy(m(x) @ m(x + 0.1).T, torch.arange(len(x))),
    "of einsum": lambda m, x: F.cross_entropy(torch.einsum("nd,md->nm", m(x), m(x + 0.1)), torch.arange(len(x))),
    "cosines of pairs": lambda m, x: F.cosine_similarity(m(x)[:, None], m(x + 0.1)[None], dim=-1).square().mean(),
    "distances of pairs": lambda m, x: (m(x)[:, None] - m(x + 0.1)[None]).abs().mean(),
    "pdist": lambda m, x: F.pdist(m(x)).mean(),
    "cdist": lambda m, x: torch.cdist(m(x), m(x + 0.1)).mean(),
    "Barlow Twins": lambda m, x: ((normed(m(x)).T @ normed(m(x + 0.1)) / len(x) - torch.eye(5)) ** 2).sum(),
    "std over rows": lambda m, x: F.relu(1 - m(x).std(0)).mean(),
    "var over rows": lambda m, x: m(x).var(0).mean(),
    "topk": lambda m, x: m(x).square().mean(1).topk(3).values.mean(),
    "centred": lambda m, x: (m(x) - m(x).mean(0)).square().mean(),
    "softmax over rows": lambda m, x: m(x)[:, 0].softmax(0).square().sum(),
    "norm of all": lambda m, x: m(x).norm(),
    "root of a mean": lambda m, x: m(x).square().mean().sqrt(),
    "largest": lambda m, x: m(x).square().max(),
    "Dice of the batch": lambda m, x: 1 - 2 * (m(x).sigmoid() * 0.5).sum() / (m(x).sigmoid().sum() + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_compare_rows_are_not_judged(name):
    found, off = watched(COUPLED[name])
    assert off > 1e-3
    assert found.ok is None, found
    assert "see coupled" in found.windows[0].unknown
    assert found.windows[0].shares == ()
    assert "nan" not in str(found)


# Statistics of each row, and of parameters, are no statistics over rows.
BY_ROWS = {
    "norm of a row": lambda m, x: m(x).norm(dim=1).mean(),
    "layer norm": lambda m, x: F.layer_norm(m(x), (5,)).square().mean(),
    "cosine to a weight": lambda m, x: F.cross_entropy(F.normalize(m(x)) @ F.normalize(m[-1].weight[:, :5]).T, classes(x)),
    "a row's spread": lambda m, x: m(x).std(1).mean(),
    "broadcast": lambda m, x: (m(x) - m(x).mean(1, keepdim=True)).square().mean(),
    "attention": lambda m, x: (m(x)[:, :, None] @ m(x)[:, None]).softmax(-1).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_ROWS)
def test_statistics_of_a_row_are_judged(name):
    found, off = watched(BY_ROWS[name])
    assert (found.ok, off < 1e-9) == (True, True), found


NUMBERS = {
    "mean": lambda loss: loss.mean(),
    "view": lambda loss: loss.view(1).mean(),
    "stack": lambda loss: torch.stack([loss]).mean(),
    "sum": lambda loss: loss[None].sum(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_mean_of_a_number_is_that_number(name):
    def loss(m, x):
        return NUMBERS[name](F.cross_entropy(m(x), classes(x)))

    for lengths, names in (((8, 8, 8, 8), []), ((3, 9, 5, 12), ["uneven tokens"])):
        found, off = watched(loss, lengths=lengths)
        assert [each.name for each in found.causes] == names
        assert found.ok == (off < 1e-9)


def test_a_number_that_many_elements_repeat_is_a_mean_of_its_own():
    found, off = watched(
        lambda m, x: (m(x).square().mean() * torch.ones(len(x)).double()).mean(), lengths=(3, 9, 5, 12)
    )
    assert ([each.name for each in found.causes], off > 1e-3) == (["uneven tokens"], True)


def counted_twice(m, x):
    """The first two rows of a micro-batch weigh more."""
    each = m(x).square().mean(1)
    return (each.sum() + each[:2].sum()) / (2 * len(x))


def of_weights(normed):
    """A mean with weights of rows, which are no mask."""

    def loss(m, x):
        each, weights = m(x).square().mean(1), x[:, 0].abs() + 0.1
        return (each * weights).sum() / (weights.sum() if normed else len(x))

    return loss


WEIGHTED = {
    "weights of elements": of_weights(normed=True),
    "not normed": of_weights(normed=False),
    "counted twice": counted_twice,
    "of classes": lambda m, x: F.cross_entropy(m(x), classes(x), torch.arange(1.0, 6.0).double()),
    "cat of parts": lambda m, x: torch.cat([m(x[:2]).square().mean(1), 3 * m(x[2:]).square().mean(1)]).mean(),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_targets_of_different_weights_are_not_judged(name):
    for lengths in ((8, 8, 8, 8), (3, 9, 5, 12)):
        for over in (N, 1):
            found, off = watched(WEIGHTED[name], lengths=lengths, over=over)
            assert found.ok is None or found.ok == (off < 1e-9), (lengths, over, str(found))


def test_elements_that_are_hidden_below_a_mean_are_not_judged():
    found, _ = watched(lambda m, x: ((m(x) - 1) * (x[:, :5] > 0)).square().mean())
    assert found.ok is None


def test_the_mean_of_one_target_may_be_a_sum():
    found, off = watched(lambda m, x: m(x)[:, 0].square().mean(), lengths=(1,) * N, over=1)
    assert (found.ok, off > 1) == (None, True)


@pytest.mark.parametrize("kind", ["of a tensor", "after accumulation", "of the loss"])
def test_hooks_may_change_gradients(kind):
    def clamped(grad):
        return grad.clamp(-0.01, 0.01)

    def clipped(param):
        param.grad.clamp_(-0.01, 0.01)

    model = net()
    for param in model.parameters():
        if kind == "of a tensor":
            param.register_hook(clamped)
        if kind == "after accumulation":
            param.register_post_accumulate_grad_hook(clipped)
    found, off = watched(lambda m, x: m(x).square().mean(), model, hook=clamped if kind == "of the loss" else None)
    assert (found.ok, off > 1e-3) == (None, True)
    assert {"of a tensor": "clamped", "after accumulation": "clipped", "of the loss": "hook"}[kind] in str(found)


@pytest.mark.parametrize("lengths", [((8,) * 4, (8,) * 4), ((8,) * 4, (8, 8, 8, 3)), ((3, 5), (9, 2))])
def test_a_sum_over_rows_is_one_in_all_windows(lengths):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with funcga.watch(model) as found:
        for window in lengths:
            for x in rows(window):
                (F.cross_entropy(model(x), classes(x)) * len(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert found.ok, found
    assert "sum that nothing divides" in "".join(found.notes)


def skipping(n, wrong, skipped, value=1e4):
    """A loop that does not step where the norm is too large. In a wrong one, gradients are erased too early."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with funcga.watch(model) as found:
        for window in range(6):
            for i, x in enumerate(rows((8,) * n)):
                if wrong and i == n // 2:
                    optimizer.zero_grad()
                (model(x).square().mean() * (value if window in skipped else 1) / n).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if norm < 100:
                optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("skipped", [(0,), (2, 3), (5,)])
def test_updates_that_are_skipped_are_no_error(n, skipped):
    found = skipping(n, False, skipped)
    assert found.ok, found
    assert "an update was skipped" in "".join(found.notes)
    assert all(len(window.parts) == n for window in found.windows)
    assert skipping(n, False, skipped, float("nan")).ok


def test_what_is_erased_inside_of_a_window_is_no_skipped_update():
    for skipped in ((), (2,)):
        assert "erased" in [each.name for each in skipping(4, True, skipped).causes]


def test_what_is_erased_before_a_short_window_is_no_skipped_update():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with funcga.watch(model) as found:
        for i, x in enumerate(rows((8,) * 9), 1):
            optimizer.zero_grad()
            (model(x).square().mean() / 4).backward()
            if i % 4 == 0 or i == 9:
                optimizer.step()
    assert "erased" in [each.name for each in found.causes]


def test_windows_that_got_nothing_have_no_row():
    """The generator's loss leaves gradients in the discriminator, which are erased."""
    torch.manual_seed(0)
    one, other = torch.nn.Linear(4, 1), torch.nn.Linear(2, 4)
    of_one, of_other = (torch.optim.Adam(each.parameters()) for each in (one, other))
    with funcga.watch(torch.nn.ModuleList([one, other])) as found:
        for _ in range(2):
            one.zero_grad()
            F.binary_cross_entropy_with_logits(one(torch.randn(8, 4)), torch.ones(8, 1)).backward()
            fake = other(torch.randn(8, 2))
            F.binary_cross_entropy_with_logits(one(fake.detach()), torch.zeros(8, 1)).backward()
            of_one.step()
            other.zero_grad()
            F.binary_cross_entropy_with_logits(one(fake), torch.ones(8, 1)).backward()
            of_other.step()
    assert found.ok
    assert [len(window.parts) for window in found.windows] == [2, 1, 2, 1]
    assert "nan" not in str(found)
