"""Losses for `verify`: the usual mistakes, each with the name and the line it must be given, and right ones.

Most are written with operators alone, so that both frameworks run them. A case is (grad_fn, args, options of verify).
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

import funcga
import torch_backend
from tests.kits import JAX, TORCH

ROWS, LENGTH = 12, 5


def data(kit, seed=0, dtype="float32"):
    """(params, batch): a two-layer network's parameters, and rows of very uneven length, labels -100 beyond it."""
    r = np.random.default_rng(seed)
    params = {"w": r.normal(size=(3, 4)).astype(dtype), "v": r.normal(size=4).astype(dtype)}
    lengths = r.permutation(np.arange(ROWS) % LENGTH + 1)
    mask = np.arange(LENGTH) < lengths[:, None]
    batch = {
        "x": r.normal(size=(ROWS, LENGTH, 3)).astype(dtype),
        "labels": np.where(mask, r.integers(0, 7, (ROWS, LENGTH)), -100).astype("int32"),
        "mask": mask.astype(dtype),
        "lengths": lengths.astype("int32"),
    }
    return kit.arrays(params), kit.arrays(batch)


def errors(params, batch):
    """float[rows, length], 0 where masked."""
    hidden = batch["x"] @ params["w"]
    hidden = hidden / (1 + hidden**2)
    return (hidden @ params["v"] - 1) ** 2 * batch["mask"]


def token_mean(params, batch):
    return errors(params, batch).sum() / batch["mask"].sum()


def label_mean(params, batch):
    xp = torch if isinstance(batch["mask"], torch.Tensor) else jnp
    return errors(params, batch).sum() / xp.where(batch["labels"] != -100, xp.ones_like(batch["mask"]), 0).sum()


def token_sum(params, batch):
    return errors(params, batch).sum()


def row_mean(params, batch):
    return errors(params, batch).sum(1).mean()


def penalty(params):
    return (params["w"] ** 2).sum()


def case(loss, grad=funcga.value_and_grad, without=(), **options):
    def made(kit):
        params, batch = data(kit)
        return grad(loss), (params, {k: v for k, v in batch.items() if k not in without}), options

    return made


def two_args(loss, options=None, grad=funcga.value_and_grad, rows=ROWS):
    """Of loss(params, x, y)."""

    def made(kit):
        r = np.random.default_rng(3)
        params = {"w": r.normal(size=(3, 4)).astype("float32"), "v": r.normal(size=4).astype("float32")}
        x, y = r.normal(size=(rows, 3)).astype("float32"), r.normal(size=rows).astype("float32")
        return grad(loss), (kit.arrays(params), kit.arrays(x), kit.arrays(y)), options or {}

    return made


def count_mask(batch):
    return batch["mask"].sum()


def batch_normal(params, x, y):
    h = x @ params["w"]
    h = (h - h.mean(0)) / (((h - h.mean(0)) ** 2).mean(0) + 0.1) ** 0.5
    return ((h @ params["v"] - y) ** 2).mean()


def standardized(params, x, y):
    """With the standard deviation as people take it: Bessel's correction makes it depend on the number of rows."""
    h = x @ params["w"]
    return ((((h - h.mean(0)) / h.std(0)) @ params["v"] - y) ** 2).mean()


def pairs_of_two_kinds(params, x, y):
    """A mean over pairs of a row with y > 0 and one without, as in an AUC: of two groups alone it looks like two means."""
    scores, up = (x @ params["w"]).sum(1), y > 0
    apart = 1 - scores[:, None] + scores
    return (apart**2 * up[:, None] * ~up).sum() / (up.sum() * (~up).sum())


def pairs_of_labels(kit):
    """Of which expressions of the batch count both kinds."""
    grad_fn, (params, x, _), options = two_args(pairs_of_two_kinds, rows=24)(kit)
    return grad_fn, (params, x, 2 * (torch.arange(24) % 5 < 2).long() - 1), options


def weights_of_classes(params, x, y):
    """Two means, one of them by weights that no expression of the batch counts."""
    weights = torch.exp(torch.sin(7 * y))
    return (terms(params, x, y) * weights).sum() / weights.sum() + ((x @ params["w"]) ** 2).mean()


def complex_rows(kit):
    """A batch of which no expression counts anything but the rows."""
    gradient = funcga.grad(lambda w, x: ((x @ w.to(x.dtype)).abs() ** 2).mean())
    return gradient, (torch.ones(3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.complex128)), SUM


def info_nce(params, x, y):
    a, b = x @ params["w"], (x + y[:, None]) @ params["w"]
    scores = a @ b.T
    xp = torch if isinstance(x, torch.Tensor) else jnp
    return (xp.log(xp.exp(scores / 4).sum(1)) - (a * b).sum(1) / 4).mean()


def gates(params, x):
    return torch.softmax(x @ params["w"], 1)


def load_balancing(params, x, y):
    p = gates(params, x)
    return ((p @ params["v"] - y) ** 2).mean() + 0.5 * ((p**3).mean(0) * p.mean(0)).sum()


def regression(params, x, y):
    h = x @ params["w"]
    return (((h / (1 + h**2)) @ params["v"] - y) ** 2).mean()


def regression_sum(params, x, y):
    return regression(params, x, y) * len(x)


def neighbours(params, x, y):
    h = x @ params["w"]
    return (h[1:] * h[:-1]).mean()


# --- division by the number of micro-batches, in many places

N4 = {"n": 4}
accumulation_steps = temperature = k = 4
clock = types.SimpleNamespace(steps=4)
NESTED = types.SimpleNamespace(train=types.SimpleNamespace(accumulation_steps=4))


def divided_by_global(params, x, y):
    return regression(params, x, y) / accumulation_steps


def divided_by(**names):
    """Losses that divide by this one global each: what `drop` must name, and the loss."""
    for name, value in names.items():
        code = compile(f"lambda p, x, y: regression(p, x, y) / {name}", "divided_by", "eval")
        root = name.split(".")[0].split("[")[0]
        yield name, types.FunctionType(code.co_consts[0], {"regression": regression, root: value})


def divided_in_a_closure(n=4):
    return lambda params, x, y: regression(params, x, y) / n


def divided_in_a_helper():
    def scaled(value, num_micro=4):
        return value / num_micro

    return lambda params, x, y: scaled(regression(params, x, y))


class Objective:
    grad_accum = 4

    def __call__(self, params, x, y):
        return regression(params, x, y) / self.grad_accum


def divided_by_keyword(params, x, y, accumulation_steps):
    return regression(params, x, y) / accumulation_steps


# What each is divided by, as the line must say, and the loss; n is 4. A space tells two of one name apart.
NAMES = ("acc", "grad_acc_steps", "ga_steps", "update_freq", "every_k", "iter_size", "virtual_batch")
DIVIDED = {
    **dict(divided_by(**dict.fromkeys(NAMES, 4), accum=torch.tensor(4), grad_accum=np.int64(4))),
    **dict(divided_by(**{"cfg.train.accumulation_steps": NESTED, 'cfg["train"]["accum"]': {"train": {"accum": 4}}})),
    "self.grad_accum": Objective().__call__,
    "self.grad_accum ": Objective(),
    "accumulation_steps": divided_by_keyword,
    "n": divided_in_a_closure(),
    "n ": lambda p, x, y, n=4: regression(p, x, y) / n,
    "num_micro": divided_in_a_helper(),
    "4": lambda p, x, y: regression(p, x, y) / 4,
}

# (loss, options, what the note says): right, though a number equals n.
EQUAL_TO_N = [
    (lambda p, x, y: 0.25 * regression(p, x, y), N4, "`* 0.25`"),
    (lambda p, x, y: regression(p, x, y) / k, N4, "`/ k`"),
    (lambda p, x, y: regression(p, x, y) / clock.steps, N4, "`/ clock.steps`"),
    (lambda p, x, y: ((x @ p["w"]) ** 2).sum(1).mean() / 3, {"n": 3}, "`/ 3`"),
    (lambda p, x, y: (((x @ p["w"]) ** 2).sum(1) / 4).mean(), N4, "`/ 4`"),
    (lambda p, x, y: regression_sum(p, x, y) / 12, {"n": 12, "fold": funcga.sum()}, "`/ 12`"),
]


def hand_divided(params, x, y):
    """A gradient function of one's own, which divides the gradients."""
    loss, grads = funcga.value_and_grad(regression)(params, x, y)
    return loss / accumulation_steps, {k: g / accumulation_steps for k, g in grads.items()}


def counter_state(kit):
    calls = []

    def loss(params, x, y):
        calls.append(1)
        return regression(params, x, y) * len(calls)

    return two_args(loss)(kit)


def nan_at_last(kit):
    calls = []

    def loss(params, x, y):
        calls.append(1)
        value = regression(params, x, y)
        return value, value * (float("nan") if len(calls) > 2 else 1)

    return two_args(loss, grad=functools.partial(funcga.value_and_grad, has_aux=True))(kit)


def written_argument(kit):
    def gradient(params, x, y):
        x.mul_(2)
        return torch.func.grad(regression)(params, x, y)

    return two_args(None, grad=lambda _: gradient)(kit)


def torch_module(*layers, loss=None, **options):
    def made(kit):
        torch.manual_seed(0)
        module = torch.nn.Sequential(*[layer() for layer in layers])
        pure = torch_backend.pure_loss(module, loss or (lambda m, x, y: F.mse_loss(m(x)[:, 0], y)))
        r = np.random.default_rng(3)
        x, y = (kit.arrays(r.normal(size=s).astype("float32")) for s in ((ROWS, 3), (ROWS,)))
        return funcga.value_and_grad(pure), (dict(module.named_parameters()), x, y), options

    return made


def LINEAR():
    return torch.nn.Linear(3, 4)


def HEAD():
    return torch.nn.Linear(4, 1)


def unused_torch(kit):
    module = torch.nn.Linear(3, 1)
    args = dict(module.named_parameters()), torch.randn(ROWS, 3), torch.randn(ROWS)
    own = {k: v.detach().double() for k, v in module.named_parameters()}
    return funcga.value_and_grad(lambda p, x, y: F.mse_loss(F.linear(x, *own.values())[:, 0], y)), args, {}


def after_a_step(params, x, y):
    """The loss after one step on other rows."""
    rows = torch.linspace(-1, 1, 12, dtype=x.dtype).reshape(4, 3)
    grads = funcga.accumulate(funcga.grad(regression), 2)(params, rows, rows.sum(1))
    return regression({key: p - 0.1 * grads[key] for key, p in params.items()}, x, y)


def by_autograd(loss):
    def gradient(params, x, y):
        own = {key: p.detach().requires_grad_() for key, p in params.items()}
        value = loss(own, x, y)
        return value.detach(), dict(zip(own, torch.autograd.grad(value, list(own.values())), strict=True))

    return gradient


def unused_jax(kit):
    own = kit.arrays({"w": np.ones((3, 4), "float32"), "v": np.ones(4, "float32")})
    return two_args(lambda p, x, y: regression({k: v.astype(x.dtype) for k, v in own.items()}, x, y))(kit)


def jax_dropout(key_of, key):
    def loss(params, key, x, y):
        keep = jax.random.bernoulli(key_of(key), 0.5, x.shape)
        return regression(params, x * keep.astype(x.dtype), y)

    def made(kit):
        _, (params, x, y), _ = two_args(None, grad=lambda _: None)(kit)
        return jax.value_and_grad(loss), (params, key, x, y), {"in_axes": (None, None, 0, 0)}

    return made


def torch_seeded(kit):
    def loss(params, x, y):
        generator = torch.Generator().manual_seed(0)
        return regression(params, x * (torch.rand(x.shape, generator=generator) > 0.5), y)

    return two_args(loss)(kit)


def per_example(kit):
    def loss(params, x, y):
        h = x @ params["w"]
        each = ((h / (1 + h**2)) @ params["v"] - y) ** 2
        return each.mean(), each

    return two_args(loss, grad=functools.partial(funcga.value_and_grad, has_aux=True))(kit)


def with_columns(params, x, y):
    """Beside the loss outputs with a column for each example, which concat() would take for a row of each."""
    h = x @ params["w"]
    return (((h / (1 + h**2)) @ params["v"] - y) ** 2).mean(), h.T


def with_positions(params, x, y):
    """Beside the loss a number for each example to which those before it contribute."""
    return regression(params, x, y), (x @ params["w"]).sum(1).cumsum(0)


COLUMNS = {"fold": ((funcga.mean(), funcga.concat()), funcga.mean()), "n": 4}


def terms(params, x, y):
    h = x @ params["w"]
    return ((h / (1 + h**2)) @ params["v"] - y) ** 2


def self_paced(params, x, y):
    """Rows are weighed by their own losses, through which no gradient goes."""
    weights = torch.exp(-terms(params, x, y)).detach()
    return (weights * terms(params, x, y)).sum() / weights.sum()


def causal(kit):
    """Labels and the attention mask, shifted, count the same in this batch."""
    r = np.random.default_rng(7)
    mask = (np.arange(6) < r.permutation(np.arange(ROWS) % 5 + 2)[:, None]).astype("int64")
    ids = r.integers(0, 9, (ROWS, 6))
    batch = {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask > 0, ids, -100)}
    params = {"e": r.normal(size=(9, 4)).astype("float32"), "o": r.normal(size=(4, 9)).astype("float32")}

    def loss(params, batch):
        logits = params["e"][batch["input_ids"]] @ params["o"]
        return F.cross_entropy(logits[:, :-1].reshape(-1, 9), batch["labels"][:, 1:].reshape(-1))

    return funcga.value_and_grad(loss), (kit.arrays(params), kit.arrays(batch)), {}


def cut_off(params, x, y):
    """As a step in a loss that would not know that it is differentiated outside of torch.func."""
    inner = (
        params if torch._C._functorch.is_gradtrackingtensor(params["w"]) else {k: p.detach() for k, p in params.items()}
    )
    return regression(params, x, y) + 0.5 * regression(inner, x, y)


BOTH = (TORCH, JAX)
SUM = {"fold": funcga.sum()}
COUNTED = {"fold": funcga.per_weight(), "weight": count_mask}
BY_LABELS = 'weight=lambda batch: (batch["labels"] != -100).sum()'.replace('"', "'")

# name: (kits, case, the causes that it must be given, all of them, what is in the first one's fix)
MISTAKES = {
    "uneven tokens, -100": (BOTH, case(label_mean), ["uneven tokens"], BY_LABELS),
    "sum under mean": ((TORCH,), case(token_sum), ["sum under mean"], "fold=funcga.per_weight()"),
    "sum under mean, weighted": ((TORCH,), case(token_sum, weight=count_mask), ["sum under mean"], "fold=funcga.per_weight(). For the sum itself, fold=funcga.sum()"),
    "mean under sum": ((TORCH,), case(row_mean, **SUM), ["mean under sum"], "fold=funcga.mean()"),
    "token mean under per_weight": ((TORCH,), case(token_mean, without=("lengths", "labels"), **COUNTED), ["mean under per_weight"], "fold=funcga.mean(), weight=lambda batch: batch['mask'].sum()"),
    "len of a dict": ((TORCH,), case(row_mean, weight=len), ["weight not additive"], "drop weight="),
    "another weight": ((TORCH,), case(token_mean, without=("labels", "lengths"), weight=lambda b: (b["mask"][:, 1:]).sum()), ["wrong weight"], "weight=lambda batch: batch['mask'].sum()"),
    "a weight that is 0": ((TORCH,), case(token_mean, without=("labels", "lengths"), weight=lambda b: (b["mask"] == -100).sum()), ["wrong weight"], "verify again without weight="),
    "L2 in a sum": ((TORCH,), case(lambda p, b: token_sum(p, b) + 0.1 * penalty(p), **COUNTED), ["regulariser"], """totals=lambda b: {"one": 1}. The loss takes them, def loss_fn(p, b, *, totals)"""),
    "token mean and row mean": ((TORCH,), case(lambda p, b: token_mean(p, b) + ((b["x"].sum(1) @ p["w"]) ** 2).mean(), weight=count_mask), ["other normaliser"], """totals=lambda b: {"rows": len(b['x']), "items": b['mask'].sum()}, fold=funcga.sum()"""),
    "sum and mean": ((TORCH,), case(lambda p, b: token_sum(p, b) + row_mean(p, b), **COUNTED), ["other normaliser"], "funcga.sum()"),
    "load balancing": ((TORCH,), two_args(load_balancing), ["batch statistics"], "funcga.coupled(lambda params, x, y: means, lambda params, s: loss, n=8, fold=funcga.mean())"),
    "batch normalisation": ((TORCH,), two_args(batch_normal), ["batch statistics"], "LayerNorm"),
    "weights of classes and a mean": ((TORCH,), two_args(weights_of_classes, rows=24), ["batch statistics"], "s: loss, n=8, fold=funcga.mean())"),
    "pairs of labels": ((TORCH,), pairs_of_labels, ["batch statistics"], "funcga.coupled("),
    "complex numbers alone": ((TORCH,), complex_rows, ["mean under sum"], "fold=funcga.mean()"),
    "standardised": ((TORCH,), two_args(standardized), ["batch statistics"], "LayerNorm"),
    "BatchNorm1d": ((TORCH,), torch_module(LINEAR, lambda: torch.nn.BatchNorm1d(4), HEAD), ["batch statistics"], "module.eval()"),
    "InfoNCE": ((TORCH,), two_args(info_nce), ["in-batch negatives"], "funcga.coupled(lambda params, x, y: embeddings, lambda params, s: loss, n=8)"),
    "neighbours": ((TORCH,), two_args(neighbours), ["row order"], "one row"),
    "products of rows": ((TORCH,), two_args(lambda p, x, y: ((x @ p["w"]).sum() ** 2) * 0.01), ["coupled rows"], "s: loss, n=8, fold=funcga.sum())"),
    "dropout": ((TORCH,), torch_module(LINEAR, lambda: torch.nn.Dropout(0.5), HEAD), ["randomness"], "module.eval()"),
    "a key passed whole": ((JAX,), jax_dropout(lambda key: key, jax.random.PRNGKey(3)), ["randomness"], "jax.random.split(key, rows)"),
    "a seed in the loss": ((TORCH,), torch_seeded, ["randomness"], "split it with the batch"),
    "a counter": (BOTH, counter_state, ["state"], "funcga.CARRY"),
    "a value that becomes NaN": ((TORCH,), nan_at_last, ["state"], "funcga.CARRY"),
    "an argument written to": ((TORCH,), written_argument, ["state"], "x = x * 2"),
    "/ n, without n": ((TORCH,), two_args(divided_by_global), ["divided by n"], "drop `/ accumulation_steps`"),
    "/ n, torch.func": ((TORCH,), two_args(divided_by_global, N4, grad=torch.func.grad_and_value), ["divided by n"], "drop"),
    "/ n, jax.jit": ((JAX,), two_args(divided_by_global, N4, grad=lambda f: jax.jit(jax.value_and_grad(f))), ["divided by n"], "drop"),
    "/ n of gradients": ((TORCH,), two_args(hand_divided, N4, grad=lambda f: f), ["divided by n"], "drop `/ accumulation_steps`"),
    "/ n, summed": ((TORCH,), two_args(divided_by_global, {"n": 4, **SUM}), ["divided by n"], "fold=funcga.mean(), the default"),
    "a loss of other parameters": ((TORCH,), unused_torch, ["params unused"], "torch_backend.pure_loss"),
    "a step by autograd": ((TORCH,), two_args(after_a_step, grad=by_autograd), ["first-order step"], "funcga.grad(outer_loss)"),
    "a loss of other parameters, JAX": ((JAX,), unused_jax, ["params unused"], "use the argument"),
    "outputs of examples": ((TORCH,), per_example, ["per-example output"], "funcga.concat()"),
    "outputs joined along another axis": ((TORCH,), two_args(with_columns, COLUMNS, functools.partial(funcga.value_and_grad, has_aux=True)), ["per-example output"], "funcga.concat(1)"),
    "outputs of positions": ((TORCH,), two_args(with_positions, COLUMNS, functools.partial(funcga.value_and_grad, has_aux=True)), ["row order"], "one row"),
    "micro-batches alike": ((TORCH,), two_args(regression, {"fold": funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps)}), ["by steps"], "fold=funcga.mean()"),
}  # fmt: skip


MISTAKES |= {
    "a norm": ((TORCH,), two_args(lambda p, x, y: terms(p, x, y).sum() ** 0.5), ["coupled rows"], "the square of a norm"),
    "a sum over a root": ((TORCH,), two_args(lambda p, x, y: terms(p, x, y).sum() / len(x) ** 0.5), ["coupled rows"], "fold=funcga.sum())"),
    "a token sum over a root": ((TORCH,), case(lambda p, b: token_sum(p, b) / b["mask"].sum() ** 0.5), ["coupled rows"], "fold=funcga.sum())"),
    "log of a mean": ((TORCH,), two_args(lambda p, x, y: terms(p, x, y).mean().log()), ["batch statistics"], "grads / value"),
    "weights of losses": ((TORCH,), two_args(self_paced), ["batch statistics"], "fold=funcga.mean())"),
    "labels and a mask, shifted": ((TORCH,), causal, ["uneven tokens"], "weight=lambda batch: (batch['labels'][:, 1:] != -100).sum()"),
    "a gradient that is cut off": ((TORCH,), two_args(cut_off), ["wrong gradient"], "torch.func.grad_and_value(loss_fn)"),
}  # fmt: skip


def low(a):
    return a.to(torch.bfloat16)


def small(factor, cast):
    """A sum of which all gradients are far below the epsilon of what it computes in."""
    loss = lambda p, x, y: factor * ((cast(x) @ cast(p["w"]) - cast(y)[:, None]) ** 2).sum()
    return two_args(loss)


def masked(params, x, m):
    """A mean with an epsilon that is added to a count."""
    e = ((x @ params["w"]) ** 2).sum(1) * m**2
    return e.sum() / ((m**2).sum() + 1e-6)


def by_squares(params, x, m):
    return (((x @ params["w"]) ** 2).sum(1) * m**2).sum() / (m**2).sum()


def by_uneven_weights(params, x, m):
    return (((x @ params["w"]) ** 2).sum(1) * (1 + m**2)).sum() / (1 + m**2).sum()


def transposed_mask(kit):
    loss = lambda p, b: (((b["x"].T @ p["w"]) ** 2).sum(1) * b["m"][0]).sum() / b["m"].sum()
    _, (params, x, y), _ = two_args(None, grad=lambda _: None)(kit)
    return funcga.grad(loss), (params, {"x": x.T, "m": y[None] ** 2}), {"in_axes": (None, 1)}


def in_place_in_torch_func(kit):
    module = torch.nn.Sequential(LINEAR(), torch.nn.BatchNorm1d(4), HEAD())
    _, (_, x, y), _ = two_args(None, grad=lambda _: None)(kit)
    loss = lambda p, x, y: F.mse_loss(torch.func.functional_call(module, p, (x,))[:, 0], y)
    return torch.func.grad_and_value(loss), (dict(module.named_parameters()), x, y), {}


def by_keyword(kit):
    grad_fn, (params, x, y), _ = two_args(regression)(kit)
    return grad_fn, (params, x), {"y": y, "n": 4}


MISTAKES |= {
    "a small sum, 64 bits": ((TORCH,), small(1e-20, lambda a: a), ["sum under mean"], "fold=funcga.per_weight()"),
    "a small sum, 16 bits": ((TORCH,), small(1e-3, low), ["sum under mean"], "fold=funcga.per_weight()"),
    "a mean, 16 bits": ((TORCH,), two_args(lambda p, x, y: ((low(x) @ low(p["w"])) ** 2).mean(), SUM), ["not decomposable"], "float32, and do what it says there"),
    "an epsilon in a count": ((TORCH,), two_args(masked, {"weight": lambda x, m: (m**2).sum()}), ["small remainder"], ".clamp(min=1)"),
    "a count of squares": ((TORCH,), two_args(by_squares), ["uneven tokens"], "weight=lambda x, m: (m ** 2).sum()"),
    "a count not found": ((TORCH,), two_args(by_uneven_weights), ["uneven tokens"], "weight=lambda x, m: (m != -100).sum()"),
    "a count on axis 1": ((TORCH,), transposed_mask, ["uneven tokens"], "weight=lambda b: b['m'].sum()"),
    "max() of a loss": ((TORCH,), two_args(regression, {"fold": funcga.max()}), ["not decomposable"], "fold=funcga.mean()"),
    "rows by keyword": ((TORCH,), by_keyword, ["fixed rows"], "pass what has a row for each example by position"),
    "labels of a fixed number": ((TORCH,), two_args(lambda p, x, y: F.cross_entropy(x @ p["w"] @ (x @ p["w"]).T, torch.arange(12))), ["fixed rows"], "torch.arange(len(logits))"),
    "a reshape to a fixed number": ((TORCH,), two_args(lambda p, x, y: ((x @ p["w"]).reshape(12, -1) ** 2).mean()), ["fixed rows"], "x.reshape(len(x), -1)"),
    "BatchNorm1d, torch.func": ((TORCH,), in_place_in_torch_func, ["state"], "torch_backend.pure_loss(module, loss_fn)"),
}  # fmt: skip


def shifted_softmax(params, x, y):
    """It does not depend on its parameters: every gradient is rounding."""
    shifted = x + params["w"].sum() * params["v"].sum()
    e = torch.exp(shifted - shifted.detach().max())
    return torch.log(e / e.sum(1)[:, None])[:, 0].mean()


def attention(params, x):
    """A layer whose key bias has a gradient that is rounding and nothing else."""
    q, k = x @ params["q"], x @ params["k"] + params["key_bias"]
    e = torch.exp(torch.einsum("bqd,bkd->bqk", q, k) / 2)
    mixed = (e / e.sum(2)[:, :, None]) @ (x @ params["value"])
    return ((mixed @ params["value"].T - 0.3 * x) ** 2).mean()


def attended(kit):
    r = np.random.default_rng(5)
    params = {name: r.normal(size=(4, 4)).astype("float32") for name in ("q", "k", "value")}
    params["key_bias"] = r.normal(size=4).astype("float32")
    return (
        funcga.value_and_grad(attention),
        (kit.arrays(params), kit.arrays(r.normal(size=(6, 5, 4)).astype("float32"))),
        {},
    )


def keys_of_rows(kit):
    def loss(params, key, x, y):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(key)
        return regression(params, x * keep.astype(x.dtype), y)

    _, (params, x, y), _ = two_args(None, grad=lambda _: None)(kit)
    return (
        jax.value_and_grad(loss),
        (params, jax.random.split(jax.random.key(3), ROWS), x, y),
        {"in_axes": (None, 0, 0, 0)},
    )


def bfloat16_inside(params, x, y):
    h = (low(x) @ low(params["w"])).to(x.dtype)
    return (((h / (1 + h**2)) @ params["v"] - y) ** 2).mean()


def metrics(kit):
    def loss(params, batch):
        e = errors(params, batch)
        each = e.sum(1)
        aux = {"tokens": batch["mask"].sum(), "each": each, "top": e.max(), "mean": token_mean(params, batch)}
        return token_mean(params, batch), aux

    aux = {"tokens": funcga.sum(), "each": funcga.concat(), "top": funcga.max(), "mean": funcga.mean()}
    options = {"weight": count_mask, "fold": ((funcga.mean(), aux), funcga.mean())}
    return funcga.value_and_grad(loss, has_aux=True), data(kit), options


def threaded(kit):
    def gradient(params, state, x, y):
        _, grads = funcga.value_and_grad(regression)(params, x, y)
        return grads, {"mean": 0.9 * state["mean"] + 0.1 * x.mean()}

    _, (params, x, y), _ = two_args(None, grad=lambda _: None)(kit)
    state = {"mean": kit.arrays(np.zeros((), "float32"))}
    options = {"in_axes": (None, funcga.CARRY, 0, 0), "fold": (funcga.mean(), funcga.carry())}
    return gradient, (params, state, x, y), options


def masked_nan(kit):
    """Rows without a label, which is NaN, count as 0."""
    grad_fn, (params, x, y), options = two_args(lambda p, x, y: (terms(p, x, y.nan_to_num()) * (y == y)).mean())(kit)
    return grad_fn, (params, x, torch.where(torch.arange(ROWS) == 1, torch.nan, y)), options


# name: (kits, case), and what is in its first note.
RIGHT = {
    "NaN that is masked": ((TORCH,), masked_nan),
    "mean": ((TORCH,), two_args(regression)),
    "a step in a loss": ((TORCH,), two_args(after_a_step)),
    "frozen BatchNorm": ((TORCH,), torch_module(LINEAR, lambda: torch.nn.BatchNorm1d(4).eval(), HEAD)),
    "attention": ((TORCH,), attended),
    "gradients that are rounding": ((TORCH,), two_args(shifted_softmax), "may be nothing but rounding: these arguments cannot show"),
    "a value that cancels": ((TORCH,), two_args(lambda p, x, y: regression(p, x, y) + 2e10 - 2e10, {"n": (3, 5)}), "though every gradient agrees. A difference this small often comes"),
    "keys of rows": ((JAX,), keys_of_rows),
    "half of a mean, n = 2": ((TORCH,), two_args(lambda p, x, y: 0.5 * regression(p, x, y), {"n": 2})),
    "a temperature of n around all": ((TORCH,), two_args(lambda p, x, y: regression(p, x, y) / temperature, N4)),
    "bfloat16 inside": ((TORCH,), two_args(bfloat16_inside)),
    "metrics": ((TORCH,), metrics),
    "moments": ((TORCH,), two_args(regression, {"fold": (funcga.moments(), funcga.mean())}), "output[0] was not compared, as moments() and carried state depend on"),
    "a straight-through gradient": ((TORCH,), two_args(lambda p, x, y: regression({"w": p["w"] + (p["w"].round() - p["w"]).detach(), "v": p["v"].detach()}, x, y))),
    "state": ((TORCH,), threaded, "output[1]['mean'] was not compared"),
    "two rows": ((TORCH,), two_args(regression, rows=2)),
    "torch.func": ((TORCH,), two_args(regression, grad=torch.func.grad_and_value)),
    "jax.jit": ((JAX,), two_args(regression, grad=lambda f: jax.jit(jax.value_and_grad(f)))),
}  # fmt: skip
