"""The whole step under torch.compile, with inductor: as users call it, and against autograd on the whole batch."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import funcga
from benchmarks.torch_measure import allocator_peak
from torch_backend import pure_loss

# torch's compiler warns of torch's own use of what it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*")


@pytest.fixture(autouse=True)
def fresh():
    """What was compiled before, and how often, has no influence."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


W, X = torch.linspace(-1, 1, 3), torch.linspace(-2, 3, 24).reshape(8, 3).sin()


def loss(w, x):
    return ((x @ w) ** 2).mean()


def whole_batch(w, x):
    """(value, gradient) by autograd in float64."""
    w = w.double().requires_grad_()
    value = loss(w, x.double())
    return value.detach(), *torch.autograd.grad(value, w)


def check(found, expected):
    found, expected = tree_leaves(found), tree_leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-6)


# What the loop makes of folds, weights and structures is the same for every backend. This one takes no g++.
def traced(step, **options):
    return torch.compile(step, backend="aot_eager", **options)


def test_dynamic_shapes():
    step = traced(funcga.accumulate(funcga.value_and_grad(loss), 2), dynamic=True, fullgraph=True)
    for rows in (8, 7):
        check(step(W, X[:rows]), whole_batch(W, X[:rows]))


def counting(w, x):
    values = x @ w
    return (values**2).mean(), {"rows": values, "positive": (values > 0).sum(), "constant": 3}


KINDS = {
    "moments": {"fold": ((funcga.moments(), {"rows": funcga.concat(), "positive": funcga.max(), "constant": funcga.min()}), funcga.logsumexp())},
    "weight": {"fold": ((funcga.mean(), {"rows": funcga.concat(), "positive": funcga.sum(), "constant": funcga.sum()}), funcga.per_weight()), "weight": lambda x: (x > 0).sum()},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_every_kind_of_fold(kind):
    step = funcga.accumulate(funcga.value_and_grad(counting, has_aux=True), 3, **KINDS[kind])
    check(traced(step, fullgraph=True)(W, X), step(W, X))


@pytest.mark.parametrize("weight", [None, lambda x: (x > 0).sum()])
def test_micro_batches_follow_one_another(weight):
    """Before the rows of one can be used, all that was added before is done, to the loss and to the gradient."""
    found = []

    def backend(graph, inputs):
        nodes = [node for node in graph.graph.nodes if "funcga.after" in str(node.target)]
        found.append([len(node.args[0]) for node in nodes])
        return graph.forward

    step = funcga.accumulate(funcga.value_and_grad(loss), 4, weight=weight)
    check(torch.compile(step, backend=backend, fullgraph=True)(W, X), step(W, X))
    assert found == [[2, 2, 2]]


def test_no_second_gradient_is_alive():
    """As it is called first. Each gradient is added where it is computed: the peak is that of the sums, one gradient and the
    activations.
    """
    torch.manual_seed(0)
    rows = 8
    module = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())])
    params = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(4 * rows, 64)
    step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, lambda module, x: module(x).square().mean())), 4)
    compiled = torch.compile(step)
    first = compiled(params, x)
    check(first, step(params, x))
    check(compiled(params, x), first)
    size, activations = 64 * 64 * 4, 6 * rows * 64 * 4
    # What is activated, and the gradients of that, which products of matrices that are added may have to wait with.
    assert allocator_peak(lambda: compiled(params, x))[0] <= (6 + 1) * size + 2.5 * activations


def test_a_stream():
    step = funcga.stream(funcga.value_and_grad(loss))
    check(traced(lambda w, x: step(w, x.split(3)), fullgraph=True)(W, X), whole_batch(W, X))


def test_a_weight_on_a_device_after_one_on_the_host_writes_to_no_argument():
    """What grad_fn returns is its argument, which is the first sum, and may not be added to."""

    def whole(x, y, weight):
        step = funcga.stream(lambda p, x, weight: x, weight=lambda x, weight: weight)
        return step(torch.zeros(3), [(x, 1.0), (y, weight), (y, weight)])

    x, y = torch.ones(3), torch.full((3,), 5.0)
    step = torch.compile(whole, backend="eager", fullgraph=True)
    assert torch.equal(step(x, y, torch.tensor(2.0)), torch.full((3,), (1 + 2 * 10.0) / 5))
    assert torch.equal(x, torch.ones(3))
