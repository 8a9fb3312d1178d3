"""The lines that `verify` prints can be pasted: each is run as it is, and then `verify` says exact."""

import itertools
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcga
import torch_backend
from tests.kits import JAX, TORCH, difference

pytestmark = pytest.mark.usefixtures("one_thread", "x64", "as_users_write_it")


def pasted(fix):
    """The options of a line, without the sentences that explain it."""
    line = re.split(r"\. (?=[A-Z])|; ", fix)[0]
    return eval(f"dict({line})", {"funcga": funcga})


# --- a batch of padded rows: `ids` are 0 and `labels` -100 behind the end, `lengths` and `mask` say where that is

LENGTHS = np.array([5, 1, 4, 2, 3, 1, 5, 2, 2, 1, 4, 3])


def batch_of(kit):
    r = np.random.default_rng(2)
    inside = np.arange(5) < LENGTHS[:, None]
    return kit.arrays(
        {
            "x": r.normal(size=(12, 5, 3)) * inside[..., None],
            "ids": r.integers(1, 9, (12, 5)) * inside,
            "labels": np.where(inside, r.integers(0, 4, (12, 5)), -100),
            "lengths": LENGTHS,
            "mask": inside * 1.0,
        }
    )


def params_of(kit):
    r = np.random.default_rng(3)
    return kit.arrays({"w": r.normal(size=(3, 4)), "v": r.normal(size=4)})


def errors(params, x, mask):
    h = x @ params["w"]
    return ((h / (1 + h**2)) @ params["v"] - 1) ** 2 * mask


class Batch(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor


COUNTS = {
    "lengths": (lambda b: b["lengths"].sum(), "lengths.sum()"),
    "ids": (lambda b: (b["ids"] != 0).sum(), "(ids != 0).sum()"),
    "labels": (lambda b: (b["labels"] != -100).sum(), "(labels != -100).sum()"),
    "mask": (lambda b: b["mask"].sum(), "mask.sum()"),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    "names", [("ids", "x", "lengths", "labels", "mask"), ("mask", "labels", "lengths", "x", "ids")]
)
def test_of_counts_that_are_alike_it_is_that_of_the_loss(kit, name, names):
    """All four count the same in this batch. In the next one, where they differ, the line is right as well."""
    count, expression = COUNTS[name]
    params, batch = params_of(kit), batch_of(kit)
    # With the parameters in an order of its own, as people write it.
    loss = eval(f"lambda params, {', '.join(names)}: loss(params, dict(zip(names, ({', '.join(names)},))))", {
        "loss": lambda params, b: errors(params, b["x"], b["mask"]).sum() / count(b), "names": names, "dict": dict, "zip": zip,
    })  # fmt: skip
    args = [batch[key] for key in names]
    (cause,) = funcga.verify(funcga.value_and_grad(loss), params, *args, n=2).causes
    assert cause.name == "uneven tokens"
    assert cause.fix == f"weight=lambda {', '.join(names)}: {expression}"
    funcga.verify(funcga.value_and_grad(loss), params, *args, n=2, **pasted(cause.fix)).assert_exact()


# --- the ways to write a gradient

NET = nn.Linear(3, 4).double()


def cross_entropy(model, images, labels):
    return F.cross_entropy(model(images).flatten(0, 1), labels.flatten())


def of_params(params, images, labels):
    return cross_entropy(lambda x: x @ params["weight"].T + params["bias"], images, labels)


def with_aux(model, images, labels):
    return cross_entropy(model, images, labels), {"logits": model(images).detach(), "rows": torch.tensor(len(images))}


AUX = ((funcga.mean(), {"logits": funcga.concat(), "rows": funcga.sum()}), funcga.mean())


class Criterion(nn.Module):
    def forward(self, model, images, labels):
        return cross_entropy(model, images, labels)


def ways():
    """(gradient function, arguments, options, what weight= takes)."""
    pure, own = torch_backend.pure_loss, torch_backend.module_value_and_grad
    gradient, batch = funcga.value_and_grad, batch_of(TORCH)
    params, x, y = torch_backend.trainable(NET), batch["x"], batch["labels"]
    return {
        "a function": (gradient(of_params), (params, x, y), {}, "images, labels"),
        "of the other order": (gradient(lambda x, y, p: of_params(p, x, y), argnums=2), (x, y, params), {"in_axes": (0, 0, None)}, "x, y"),
        "a dict": (gradient(lambda p, b: of_params(p, b["x"], b["y"])), (params, {"x": x, "y": y}), {}, "b"),
        "a NamedTuple": (gradient(lambda p, b: of_params(p, b.x, b.labels)), (params, Batch(x, y)), {}, "b"),
        "without names": (gradient(lambda *args: of_params(*args)), (params, x, y), {}, "x0, x1"),
        "a name that is taken": (gradient(lambda x1, *args: of_params(x1, *args)), (params, x, y), {}, "x0, x1"),
        "torch.func": (torch.func.grad_and_value(of_params), (params, x, y), {}, "images, labels"),
        "pure_loss": (gradient(pure(NET, cross_entropy)), (params, x, y), {}, "images, labels"),
        "pure_loss, torch.func": (torch.func.grad(pure(NET, cross_entropy)), (params, x, y), {}, "images, labels"),
        "a module": (own(NET, cross_entropy), (x, y), {}, "images, labels"),
        "a module, another axis": (own(NET, lambda m, images, labels: cross_entropy(m, images.transpose(0, 1), labels)), (x.transpose(0, 1), y), {"in_axes": (1, 0)}, "images, labels"),
        "a module, auxiliary": (own(NET, with_aux, has_aux=True), (x, y), {"fold": AUX}, "images, labels"),
        "a module, a criterion of torch": (own(NET, Criterion()), (x, y), {}, "images, labels"),
        "a module, *args": (own(NET, lambda *args: cross_entropy(*args)), (x, y), {}, "x0, x1"),
        "auxiliary": (gradient(pure(NET, with_aux), has_aux=True), (params, x, y), {"fold": AUX}, "images, labels"),
    }  # fmt: skip


FOLDS = {
    "mean": ("uneven tokens", ""),
    "sum": ("mean under sum", "fold="),
    "per_weight": ("mean under per_weight", "fold="),
}


def other_fold(fold, tree):
    """The options with this fold in the place of mean()."""
    if isinstance(tree, funcga.Fold):
        return fold if tree == funcga.mean() else tree
    return tuple(other_fold(fold, child) for child in tree) if isinstance(tree, tuple) else tree


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("way", ways())
def test_the_line_is_exact_however_the_gradient_is_written(way, fold):
    grad_fn, args, options, names = ways()[way]
    name, start = FOLDS[fold]
    options = options | {"fold": other_fold(getattr(funcga, fold)(), options.get("fold", funcga.mean()))}
    verdict = funcga.verify(grad_fn, *args, n=3, **options)
    assert name in [cause.name for cause in verdict.causes], str(verdict)
    fix = next(cause.fix for cause in verdict.causes if cause.name == name)
    assert fix.startswith(start)
    assert f"weight=lambda {names}: (" in fix
    options |= pasted(fix)
    funcga.verify(grad_fn, *args, n=3, **options).assert_exact()
    # The whole batch by autograd alone.
    batch = batch_of(TORCH)
    expected = torch.autograd.grad(cross_entropy(NET, batch["x"], batch["labels"]), [*NET.parameters()])
    output = funcga.accumulate(grad_fn, 5, **options)(*args)
    grads = next(part for part in (*output, output) if isinstance(part, dict) and "weight" in part)
    assert difference(TORCH, [*grads.values()], [*expected]) < 1e-12


def test_a_sum_beside_other_outputs():
    """The line has the whole tree: what is right keeps its fold."""
    loss = lambda params, x, y: (F.cross_entropy(x @ params["w"], y, reduction="sum"), {"top": x.max(), "rows": x})
    batch, fold = batch_of(TORCH), ((funcga.mean(), {"top": funcga.max(), "rows": funcga.concat()}), funcga.mean())
    args = params_of(TORCH), batch["x"][:, 0], batch["labels"][:, 0]
    gradient = funcga.value_and_grad(loss, has_aux=True)
    (cause,) = (each for each in funcga.verify(gradient, *args, fold=fold).causes if each.name == "sum under mean")
    line = "fold=((funcga.per_weight(), {'top': funcga.max(), 'rows': funcga.concat()}), funcga.per_weight())"
    assert cause.fix.startswith(f"{line}. For the sum itself, fold=((funcga.sum(), ")
    funcga.verify(gradient, *args, **pasted(cause.fix)).assert_exact()
    verdict = funcga.verify(gradient, *args, fold=funcga.per_weight())
    (cause,) = (each for each in verdict.causes if each.name == "per-example output")
    line = "fold=((funcga.per_weight(), {'top': funcga.per_weight(), 'rows': funcga.concat()}), funcga.per_weight())"
    assert cause.fix == line
    reproducible = funcga.verify(
        funcga.value_and_grad(lambda *args: loss(*args)[0]), *args, fold=funcga.reproducible(funcga.mean())
    )
    assert reproducible.causes[0].fix.startswith("fold=funcga.reproducible(funcga.per_weight()). For")


@pytest.mark.parametrize(("fold", "epsilon"), [("mean", 1e-6), ("sum", 1e-5), ("per_weight", 1e-6)])
def test_an_epsilon_beside_the_count(kit, epsilon, fold):
    """The line has the count, and then verify says what to write instead of the epsilon."""
    over = lambda count: lambda params, x, mask: errors(params, x, mask).sum() / count(mask.sum())
    batch, guarded = batch_of(kit), funcga.value_and_grad(over(lambda count: count + epsilon))
    args, options = (params_of(kit), batch["x"], batch["mask"]), {"fold": getattr(funcga, fold)()}
    (cause,) = funcga.verify(guarded, *args, n=3, **options).causes
    assert cause.name == FOLDS[fold][0]
    assert cause.fix.endswith("weight=lambda x, mask: mask.sum()")
    options |= pasted(cause.fix)
    (cause,) = funcga.verify(guarded, *args, n=3, **options).causes
    assert cause.name == "small remainder"
    at_least_1 = (lambda count: count.clamp(min=1)) if kit is TORCH else (lambda count: kit.xp.maximum(count, 1))
    funcga.verify(funcga.value_and_grad(over(at_least_1)), *args, n=3, **options).assert_exact()


def test_a_mask_of_padding_counts_where_it_is_0(kit):
    """As torch's key_padding_mask, which is True where nothing counts."""
    loss = lambda params, x, padding: errors(params, x, ~padding).sum() / (~padding).sum()
    args = params_of(kit), batch_of(kit)["x"], batch_of(kit)["mask"] == 0
    (cause,) = funcga.verify(funcga.value_and_grad(loss), *args, n=3).causes
    assert cause.fix == "weight=lambda x, padding: (padding == 0).sum()"
    funcga.verify(funcga.value_and_grad(loss), *args, n=3, **pasted(cause.fix)).assert_exact()


BY_STEPS = funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps)


@pytest.mark.parametrize(
    "fold", [funcga.mean(), funcga.sum(), funcga.per_weight(), BY_STEPS], ids=lambda fold: fold.name
)
def test_a_count_that_is_not_found_is_said(fold):
    """Of weights for classes, which are no argument: the line is the form of one, whatever the fold was."""
    classes = torch.tensor([1.0, 2.0, 0.5, 3.0]).double()
    loss = lambda params, x, labels: F.cross_entropy(x @ params["w"], labels, classes)
    args = params_of(TORCH), batch_of(TORCH)["x"][:, 0], torch.arange(12) % 4
    (cause,) = funcga.verify(funcga.value_and_grad(loss), *args, n=3, fold=fold).causes
    line = cause.fix.partition(". ")[0]
    assert line.endswith("weight=lambda x, labels: (labels != -100).sum()")
    assert "No expression of the batch was found that counts" in cause.what + cause.fix
    options = pasted(line.replace("(labels != -100)", "classes[labels]"))
    options["weight"].__globals__["classes"] = classes
    funcga.verify(funcga.value_and_grad(loss), *args, n=3, **options).assert_exact()


# --- a count that may be 0

BOXES = {"some": [3, 0, 2, 1, 4, 0, 1, 2], "few": [0, 0, 2, 0, 0, 3, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1]}
OPTIONS = {
    "rows": {},
    "the count": {"weight": lambda x, boxes: boxes.sum()},
    "another count": {"weight": lambda x, boxes: (boxes > 0).sum()},
    "sum": {"fold": funcga.sum()},
    "per_weight": {"fold": funcga.per_weight()},
    "a tree": {"fold": (funcga.mean(), funcga.mean())},
}


def detection(kit, name):
    boxes = np.array(BOXES[name])
    r = np.random.default_rng(5)
    return kit.arrays({"w": r.normal(size=6)}), kit.arrays(r.normal(size=(len(boxes), 6))), kit.arrays(boxes)


def sum_of_all(params, x, boxes):
    return ((x @ params["w"]) ** 2).sum()


# JAX compiles each.
OF_ZERO = [(TORCH, *case) for case in itertools.product(OPTIONS, BOXES, (True, False))]
OF_ZERO += [(JAX, "rows", "some", True), (JAX, "the count", "few", False)]


@pytest.mark.parametrize(
    ("kit", "name", "boxes", "guarded"),
    OF_ZERO,
    ids=[f"{kit.name}-{'-'.join(map(str, rest))}" for kit, *rest in OF_ZERO],
)
def test_a_count_that_is_0_where_the_gradient_is_not(kit, name, boxes, guarded):
    """As in detection: a sum over all rows, by the number of positives. As a weight it would drop whole micro-batches."""

    def loss(params, x, boxes):
        count = boxes.sum() * 1.0
        return sum_of_all(params, x, boxes) / (kit.xp.where(count > 0, count, 1) if guarded else count)

    args, options = detection(kit, boxes), OPTIONS[name]
    (cause,) = funcga.verify(funcga.value_and_grad(loss), *args, n=2, **options).causes
    assert "weight=lambda x, boxes: boxes.sum(). Return the sum from the loss" in cause.fix
    options = options | pasted(cause.fix)
    assert options["fold"] == funcga.per_weight()
    gradient = funcga.value_and_grad(sum_of_all)
    funcga.verify(gradient, *args, n=2, **options).assert_exact()
    w, x, count = (np.asarray(funcga.to_numpy(a)) for a in (args[0]["w"], *args[1:]))
    expected = 2 * x.T @ (x @ w) / count.sum()
    for n in (2, len(x)):
        found = funcga.accumulate(gradient, n, **options)(*args)[1]["w"]
        assert np.abs(np.asarray(funcga.to_numpy(found)) - expected).max() < 1e-12


@pytest.mark.parametrize("boxes", BOXES)
def test_a_count_that_is_0_where_the_gradient_is_0(boxes):
    """A mean over the positives alone has its count as the weight."""
    loss = lambda params, x, boxes: (((x @ params["w"]) ** 2) * boxes).sum() / boxes.sum().clamp(min=1)
    args, gradient = detection(TORCH, boxes), funcga.value_and_grad(loss)
    (cause,) = funcga.verify(gradient, *args).causes
    assert cause.fix == "weight=lambda x, boxes: boxes.sum()"
    funcga.verify(gradient, *args, n=(2, 8), **pasted(cause.fix)).assert_exact()


# --- terms that count once, and ratios of sums


@pytest.mark.parametrize("fold", ["sum", "per_weight"])
def test_a_term_of_the_weights_alone(kit, fold):
    """The KL divergence of a Bayesian network: once a window, and not in every micro-batch."""
    log = kit.xp.log
    kl = lambda params: (params["w"] ** 2 - log(abs(params["w"]))).sum()
    loss = lambda params, x, y: ((x @ params["w"] - y) ** 2).sum() + kl(params)
    r = np.random.default_rng(6)
    args = kit.arrays({"w": r.normal(size=3)}), kit.arrays(r.normal(size=(12, 3))), kit.arrays(r.normal(size=12))
    options = {"fold": getattr(funcga, fold)()}
    (cause,) = funcga.verify(funcga.value_and_grad(loss), *args, n=2, **options).causes
    assert cause.name == "regulariser"
    assert 'totals=lambda x, y: {"one": 1}. The loss takes them, def loss_fn(params, x, y, *, totals)' in cause.fix
    once = lambda params, x, y, *, totals: ((x @ params["w"] - y) ** 2).sum() + kl(params) / totals["one"]
    options |= pasted(cause.fix)
    gradient = funcga.value_and_grad(once)
    funcga.verify(gradient, *args, n=2, **options).assert_exact()
    whole = funcga.value_and_grad(loss)(*args)[1]["w"] / (1 if fold == "sum" else 12)
    assert difference(kit, funcga.accumulate(gradient, 5, **options)(*args)[1]["w"], whole) < 1e-12


def test_a_total_of_one_that_divides_everything_is_found():
    loss = lambda params, x, *, totals: ((x @ params["w"]) ** 2).sum() / totals["one"]
    args = params_of(TORCH), batch_of(TORCH)["x"]
    verdict = funcga.verify(funcga.value_and_grad(loss), *args, fold=funcga.sum(), totals=lambda x: {"one": 1})
    assert not verdict.ok


def dice(params, s):
    return 1 - 2 * s["both"] / (s["p"] + s["y"])


def smooth_dice(params, s):
    return 1 - (2 * s["both"] + 1) / (s["p"] + s["y"] + 1)


def f_score(params, s, beta=2.0):
    hits, misses, alarms = s["both"], s["y"] - s["both"], s["p"] - s["both"]
    return -(1 + beta**2) * hits / ((1 + beta**2) * hits + beta**2 * misses + alarms + 1e-3)


def iou(params, s):
    return 1 - s["both"] / (s["p"] + s["y"] - s["both"])


def overlaps(params, x, y):
    p = torch.sigmoid(x @ params["w"])
    return {"both": (p * y).sum(), "p": p.sum(), "y": y.sum()}


@pytest.mark.parametrize(("ratio", "fold"), [(dice, "mean"), (smooth_dice, "sum"), (f_score, "sum"), (iou, "mean")])
def test_a_ratio_of_sums_is_named(ratio, fold):
    """The line has means where the loss is one of means, and else sums."""
    args = {"w": torch.randn(3).double()}, torch.randn(16, 3).double(), (torch.arange(16) % 3 == 0).double()
    (cause,) = funcga.verify(
        funcga.value_and_grad(lambda params, x, y: ratio(params, overlaps(params, x, y))), *args
    ).causes
    assert cause.name == "batch statistics"
    assert "a ratio of sums such as Dice, IoU or an F-score" in cause.what
    assert "for Dice, IoU and F-scores" in cause.fix
    assert "Statistics of the data alone are computed before the split: whiten the whole batch" in cause.fix
    line = cause.fix.partition(". ")[0]
    assert line == f"funcga.coupled(lambda params, x, y: {fold}s, lambda params, s: loss, n=8, fold=funcga.{fold}())"
    over = lambda params, x, y: {
        key: sum / (len(x) if fold == "mean" else 1) for key, sum in overlaps(params, x, y).items()
    }
    line = line.replace(f": {fold}s", ": over(params, x, y)").replace("s: loss", "s: ratio(params, s)")
    step = eval(line, {"funcga": funcga, "over": over, "ratio": ratio})
    funcga.verify(step, *args).assert_exact()
    expected = funcga.grad(lambda *args: ratio(None, overlaps(*args)))(*args)
    assert difference(TORCH, step(*args)[1], expected) < 1e-12


# --- the gradient of a module's own parameters


def regression(model, x, y):
    return F.mse_loss(model(x)[:, 0], y)


def contrastive(model, x, y):
    a = model(x)
    return (torch.logsumexp(a @ a.T, 1) - (a * a).sum(1)).mean()


def two_terms(model, x, y):
    """A mean over rows, and one weighed by y."""
    e = model(x)[:, 0] ** 2
    return e.mean() + (e * y).sum() / y.sum()


def modules(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2)).double()


def rows_of(seed=7):
    r = np.random.default_rng(seed)
    return torch.tensor(r.normal(size=(12, 3))), torch.tensor(r.normal(size=12))


OTHER = nn.Linear(3, 1).double()

# (layers, the loss, the options, the causes, what is in the first one's fix)
OWN = {
    "right": ((), regression, {}, [], ""),
    "a sum": ((), lambda m, x, y: regression(m, x, y) * len(x), {}, ["sum under mean"], "fold=funcga.per_weight()"),
    "BatchNorm": ((nn.BatchNorm1d(4),), regression, {}, ["batch statistics"], "module.eval()"),
    "dropout": ((nn.Dropout(0.5),), regression, {}, ["randomness"], "module.eval()"),
    "contrastive": ((), contrastive, {}, ["in-batch negatives"], "funcga.coupled(torch_backend.module_value_and_grad(module, lambda model, x, y: embeddings), lambda model, s: loss, n=8)"),
    "two terms": ((), two_terms, {}, ["other normaliser"], "def loss_fn(model, x, y, *, totals)"),
    "L2": ((), lambda model, x, y: len(x) * regression(model, x, y) + sum((p**2).sum() for p in model.parameters()), {"fold": funcga.sum()}, ["regulariser"], "def loss_fn(model, x, y, *, totals)"),
    "/ n": ((), lambda model, x, y, accumulation_steps=4: regression(model, x, y) / accumulation_steps, {"n": 4}, ["divided by n"], "drop `/ accumulation_steps`"),
    "another module": ((), lambda m, x, y: F.mse_loss(OTHER(x)[:, 0], y), {}, ["params unused"], "lambda module, *batch: ..."),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_the_gradient_of_a_module_is_verified(name):
    layers, loss_fn, options, causes, fix = OWN[name]
    module, (x, y) = modules(*layers), rows_of()
    if name == "two terms":
        y = torch.arange(12.0).double() % 5
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    verdict = funcga.verify(torch_backend.module_value_and_grad(module, loss_fn), x, y, **options)
    assert [cause.name for cause in verdict.causes] == causes, str(verdict)
    assert not causes or fix in verdict.causes[0].fix
    assert verdict.dtype == "float64"
    # Nothing of the module is changed, its buffers and gradients too.
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_the_line_of_coupled_for_a_module_is_exact():
    module, (x, y) = modules(), rows_of()
    (cause,) = funcga.verify(torch_backend.module_value_and_grad(module, contrastive), x, y).causes
    line = cause.fix.partition(". ")[0].replace(": embeddings", ": model(x)").replace("s: loss", "s: of_rows(s)")
    of_rows = lambda a: (torch.logsumexp(a @ a.T, 1) - (a * a).sum(1)).mean()
    step = eval(line, {"funcga": funcga, "torch_backend": torch_backend, "module": module, "of_rows": of_rows})
    expected = torch.autograd.grad(contrastive(module, x, y), [*module.parameters()])
    assert difference(TORCH, [*step(x, y)[1].values()], [*expected]) < 1e-12


def test_what_a_module_brings_is_no_argument():
    """Frozen parameters, what is passed whole or by keyword, and messages about arguments."""
    module, (x, y) = modules(), rows_of()
    module[0].requires_grad_(False)
    loss_fn = lambda model, x, y, scale, *, power: (scale * (model(x)[:, 0] - y).abs() ** power).mean()
    gradient = torch_backend.module_value_and_grad(module, loss_fn)
    scale = torch.tensor(2.0).double()
    funcga.verify(gradient, x, y, scale, in_axes=(0, 0, None), power=2).assert_exact()
    with pytest.raises(funcga.FuncgaError, match=r"output\[0\] of grad_fn is not finite"):
        funcga.verify(gradient, x, y * torch.nan, scale, in_axes=(0, 0, None), power=2)
    written = torch_backend.module_value_and_grad(module, lambda model, x, y: regression(model, x, y.mul_(2)))
    (cause,) = funcga.verify(written, x, y).causes
    assert (cause.name, cause.evidence) == ("state", "a call changed the argument `y`")
    with pytest.raises(funcga.FuncgaError, match="so there is nothing to train"):
        funcga.verify(torch_backend.module_value_and_grad(modules().requires_grad_(False), regression), x, y)
