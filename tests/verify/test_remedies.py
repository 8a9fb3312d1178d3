"""The line of `coupled` that `verify` prints: written out on the very loss, it is the gradient of the whole batch."""

import functools

import jax
import jax.numpy as jnp
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


def normalised(params, x, y):
    """What a loss after a normalisation over rows is made of: one that is linear takes products of two columns."""
    h, rows = x @ params["w"], len(x)
    return {"h": h.mean(0), "hh": h.T @ h / rows, "hy": h.T @ y / rows, "y": y.mean(), "yy": (y**2).mean()}


def normalised_loss(params, s):
    """The mean of (z @ v - y)**2, of z = (h - mean) / deviation."""
    xp = torch if isinstance(s["h"], torch.Tensor) else jnp
    covariance = s["hh"] - xp.outer(s["h"], s["h"])
    v = params["v"] / (xp.diagonal(covariance) + 0.1) ** 0.5
    return v @ covariance @ v - 2 * v @ (s["hy"] - s["h"] * s["y"]) + s["yy"]


def terms_of(params, x, y):
    return mistakes.terms(params, x, y).mean()


# The mistake, what stands for the words in the line, and the words: the first is of the summary, the second the loss.
REMEDIES = {
    "InfoNCE": (embedded, info_nce_of, "embeddings"),
    "load balancing": (gated, lambda params, s: s["error"] + 0.5 * (s["cubes"] * s["p"]).sum(), "means"),
    "batch normalisation": (normalised, normalised_loss, "means"),
    "log of a mean": (terms_of, lambda params, s: mistakes.log(s), "means"),
    "a norm": (lambda params, x, y: mistakes.terms(params, x, y).sum(), lambda params, s: s**0.5, "sums"),
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


def whole_gradient(kit, loss_fn, args):
    """The framework's own gradient of the whole batch."""
    return torch.func.grad(loss_fn)(*args) if kit is TORCH else jax.grad(loss_fn)(*args)


@functools.cache
def line_for(name):
    """As `verify` prints it for the loss in torch: it names no framework."""
    grad_fn, args, options = mistakes.MISTAKES[name][1](TORCH)
    return line_of(funcga.verify(grad_fn, *args, n=3, **options))


@pytest.mark.parametrize("kit", [TORCH, JAX], ids=lambda kit: kit.name)
@pytest.mark.parametrize("name", REMEDIES)
def test_the_line_is_the_gradient_of_the_whole_batch(kit, name):
    grad_fn, args, _ = mistakes.MISTAKES[name][1](kit)
    args = kit.arrays(jax.tree.map(lambda leaf: funcga.to_numpy(leaf).astype("float64"), args))
    step = written_out(line_for(name), *REMEDIES[name])
    assert difference(kit, step(*args)[1], whole_gradient(kit, grad_fn.loss_fn, args)) <= 1e-12
    if kit is TORCH:
        funcga.verify(step, *args).assert_exact()


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
        "funcga.coupled(lambda params, batch, y, scale: embeddings, lambda batch, s: (loss, aux), n=8, "
        "in_axes=(1, None, 0), argnums=1, has_aux=True)"
    )


def test_a_weight_is_that_of_the_means():
    grad_fn, args, _ = mistakes.MISTAKES["load balancing"][1](TORCH)
    line = line_of_call(grad_fn, args, weight=lambda x, y: 2.0 * len(x))
    assert line.endswith("n=8, fold=funcga.mean(), weight=weight)")


def test_the_line_is_not_wrapped_and_what_explains_it_is():
    grad_fn, args, _ = mistakes.MISTAKES["InfoNCE"][1](TORCH)
    verdict = funcga.verify(grad_fn, *args)
    lines = str(verdict).splitlines()
    start = lines.index(f"   Fix: {line_of(verdict)}")
    assert lines[start + 1].startswith("   The first function returns what is compared")
    assert "docs/howto/whole_batch.md" in " ".join(lines)
