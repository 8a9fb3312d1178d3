"""A step inside of torch.compile: it runs as it is, beside the graph, and with fullgraph=True an error says what to compile."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import funcga
from torch_backend import module_value_and_grad, pure_loss

# torch's compiler warns of torch's own use of what it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*")


@pytest.fixture(autouse=True)
def fresh():
    """What was compiled before, and how often, has no influence."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


W, X = torch.linspace(-1, 1, 3), torch.linspace(-2, 3, 24).reshape(8, 3).sin()
MODULE = nn.Linear(3, 1, bias=False)
MODULE.weight.data = W[None].clone()


def loss(w, x):
    return ((x @ w) ** 2).mean()


def of_module(module, x):
    return module(x).square().mean()


def summed(w, x, totals):
    return ((x @ w) ** 2).sum() / totals


def streamed(**options):
    step = funcga.stream(funcga.value_and_grad(loss), **options)
    return lambda w, x: step(w, x.split(3))


PARAMS = {"weight": W[None]}
STEPS = {
    "accumulate": (funcga.accumulate(funcga.value_and_grad(loss), 3), W),
    "stream": (streamed(), W),
    "torch.func": (funcga.accumulate(lambda w, x: torch.func.grad_and_value(loss)(w, x)[::-1], 3), W),
    "a weight that is a tensor": (streamed(weight=lambda x: torch.tensor(len(x))), W),
    "drop": (funcga.accumulate(funcga.value_and_grad(loss), 3, drop="microbatch"), W),
    "observe": (funcga.accumulate(funcga.value_and_grad(loss), 3, observe=funcga.gradient_norms()), W),
    "totals": (funcga.accumulate(funcga.value_and_grad(summed), 3, fold=funcga.sum(), totals=len), W),
    "pure_loss": (funcga.accumulate(funcga.value_and_grad(pure_loss(MODULE, of_module)), 3), PARAMS),
    "module": (funcga.accumulate(module_value_and_grad(MODULE, of_module), 3), None),
    "compiled loss": (funcga.accumulate(funcga.value_and_grad(torch.compile(loss, backend="aot_eager")), 3), W),
}


def whole_batch(x):
    """(value, gradient) by autograd in float64."""
    w = W.double().requires_grad_()
    value = loss(w, x.double())
    return value.detach(), *torch.autograd.grad(value, w)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_beside_the_graph(name):
    """Called four times: first, with other values, with another number of rows, and the first again."""
    step, params = STEPS[name]
    args = () if params is None else (params,)
    compiled = torch.compile(lambda *args: step(*args[:-1], args[-1] * 1.0), backend="aot_eager")
    for x in (X, X.flip(0) * 2, X[:7], X):
        found = tree_leaves(compiled(*args, x))
        for a, b in zip(found[:2], whole_batch(x), strict=True):
            torch.testing.assert_close(a.flatten(), b.flatten().to(a.dtype), rtol=1e-5, atol=1e-6)
    whole = torch.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="funcga accumulates here; compile the loss, and not the step"
    ):
        whole(*args, X)
