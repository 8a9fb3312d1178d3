"""The line of `coupled` that `verify` prints: written out on the very loss, it is the gradient of the whole batch."""

import functools

import jax
import pytest
import torch

import funcga
import torch_backend
from tests import mistakes
from tests.kits import JAX, TORCH, difference

pytestmark = pytest.mark.usefixtures("one_thread", "x64")


def log_sum_exp(scores):
    return torch.logsumexp(scores, 1) if isinstance(scores, torch.Tensor) else jax.nn.logsumexp(scores, axis=1)


def info_nce_of(params, s):
    return (log_sum_exp(s["a"] @ s["b"].T / 4) - (s["a"] * s["b"]).sum(1) / 4).mean()


def embedded(params, x, y):
    return {"a": x @ params["w"], "b": (x + y[:, None]) @ params["w"]}


def gated(params, x, y):
    p = mistakes.gates(params, x)
    return {"error": ((p @ params["v"] - y) ** 2).mean(), "p": p.mean(0), "cubes": (p**3).mean(0)}


# The mistake, what stands for the words in the line, and the words: the first is of the summary, the second the loss.
REMEDIES = {
    "InfoNCE": (embedded, info_nce_of, "embeddings"),
    "load balancing": (gated, lambda params, s: s["error"] + 0.5 * (s["cubes"] * s["p"]).sum(), "means"),
    "products of rows": (lambda p, x, y: (x @ p["w"]).sum(), lambda params, s: s**2 * 0.01, "sums"),
}  # fmt: skip


def line_of(verdict):
    return verdict.causes[0].fix.partition(". ")[0]


def written_out(line, summary_fn, loss_fn, word):
    """The step of the line, with calls in the place of its two words."""
    parameters = line.partition("lambda ")[2].partition(":")[0]
    first = parameters.partition(",")[0]
    line = line.replace(f": {word}", f": summary_fn({parameters})").replace("s: loss", f"s: loss_fn({first}, s)")
    names = {"funcga": funcga, "torch_backend": torch_backend, "summary_fn": summary_fn, "loss_fn": loss_fn}
    return eval(line, names)


@pytest.mark.parametrize(("kit", "name"), [*((TORCH, name) for name in REMEDIES), (JAX, "InfoNCE")])
def test_the_line_is_the_gradient_of_the_whole_batch(kit, name):
    grad_fn, args, options = mistakes.MISTAKES[name][1](TORCH)
    line = line_of(funcga.verify(grad_fn, *args, n=3, **options))  # it names no framework
    args = kit.arrays(jax.tree.map(lambda leaf: funcga.to_numpy(leaf).astype("float64"), args))
    step = written_out(line, *REMEDIES[name])
    gradient = torch.func.grad if kit is TORCH else jax.grad
    assert difference(kit, step(*args)[1], gradient(grad_fn.loss_fn)(*args)) <= 1e-12
    if kit is TORCH:
        funcga.verify(step, *args).assert_exact()


def scaled(grads, factor):
    return {key: grad * factor for key, grad in grads.items()}


# The mistake, the loss and the options that its fix says, and what it says to do with the result.
TERMS = mistakes.terms
CURED = {
    "log of a mean": (lambda *args: TERMS(*args).mean(), {}, lambda value, grads: scaled(grads, 1 / value)),
    "a norm": (lambda *args: TERMS(*args).sum(), {"fold": funcga.sum()}, lambda value, grads: scaled(grads, 0.5 * value**-0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", CURED)
def test_what_a_fix_says_is_exact(name):
    loss, options, after = CURED[name]
    grad_fn, args, _ = mistakes.MISTAKES[name][1](TORCH)
    wide = {key: p.double() for key, p in args[0].items()}, *(a.double() for a in args[1:])
    gradient = funcga.value_and_grad(loss)
    funcga.verify(gradient, *wide, **options).assert_exact()
    found = after(*funcga.accumulate(gradient, 3, **options)(*wide))
    assert difference(TORCH, found, torch.func.grad(grad_fn.loss_fn)(*wide)) <= 1e-10


def info_nce(model, x, y):
    return info_nce_of(None, {"a": model(x), "b": model(x + y[:, None])})


def line_of_call(grad_fn, args, **options):
    return line_of(funcga.verify(grad_fn, *args, **options))


def test_a_module_of_torch():
    module = torch.nn.Linear(3, 4)
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    args = params, torch.randn(12, 3), torch.randn(12)
    line = line_of_call(funcga.value_and_grad(torch_backend.pure_loss(module, info_nce)), args, n=4)
    assert line == (
        "funcga.coupled(torch_backend.pure_loss(module, lambda model, x, y: embeddings), lambda params, s: loss, n=4)"
    )
    line = line.replace("embeddings", '{"a": model(x), "b": model(x + y[:, None])}').replace(
        ": loss", ": info_nce_of(params, s)"
    )
    step = eval(line, globals() | {"module": module})
    expected = torch.func.grad(torch_backend.pure_loss(module, info_nce))(*args)
    funcga.compare(step(*args)[1], expected).assert_close()


def test_the_options_of_the_call_are_in_the_line():
    _, (params, x, y), _ = mistakes.two_args(None, grad=lambda _: None)(TORCH)
    contrastive = lambda images, weights, y, scale: scale * mistakes.info_nce(weights, images.T, y)
    both = lambda *args, **kwargs: (contrastive(*args, **kwargs), {"rows": args[0].mean()})
    gradient = functools.partial(funcga.value_and_grad, argnums=1)
    keyword = {"in_axes": (1, None, 0), "scale": torch.tensor(2.0)}
    assert line_of_call(gradient(contrastive), (x.T, params, y), n=(3, 5), **keyword) == (
        "funcga.coupled(lambda images, weights, y, scale: embeddings, lambda weights, s: loss, n=3, "
        "in_axes=(1, None, 0), argnums=1)"
    )
    assert line_of_call(gradient(both, has_aux=True), (x.T, params, y), **keyword) == (
        "funcga.coupled(lambda x0, x1, x2, scale: embeddings, lambda x1, s: (loss, aux), n=8, "
        "in_axes=(1, None, 0), argnums=1, has_aux=True)"
    )


def test_a_weight_is_that_of_the_means():
    grad_fn, args, _ = mistakes.MISTAKES["load balancing"][1](TORCH)
    verdict = funcga.verify(grad_fn, *args, weight=lambda x, y: 2.0 * len(x))
    line = line_of(verdict)
    assert line.endswith("n=8, fold=funcga.mean(), weight=weight)")
    # The line is not wrapped, and what explains it is.
    lines = str(verdict).splitlines()
    assert lines[lines.index(f"   Fix: {line}") + 1].startswith("   The first function returns means")
