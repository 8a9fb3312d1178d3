"""A compiled loss in a step that is not compiled: its micro-step is one graph, which adds to its inputs."""

import gc
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import funcga
from funcga.tools.compiled import private_in_torch
from tests.processes import processes
from torch_backend import pure_loss, trainable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*")


@pytest.fixture(autouse=True)
def fresh():
    """What was compiled before, and how often, has no influence."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def compile(self, function, **options):
        return torch.compile(function, backend=self, **options)

    def __len__(self):
        return len(self.graphs)

    @property
    def additions(self):
        """How many inputs each graph adds to."""
        return [
            sum(node.target == "add_" and node.args[0].op == "placeholder" for node in graph.graph.nodes)
            for graph in self.graphs
        ]


@pytest.fixture
def graphs():
    return Graphs()


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def squares(module, x, y):
    return F.mse_loss(module(x), y)


def batch(rows, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(rows, 3, dtype=dtype), torch.randn(rows, 1, dtype=dtype)


def plain(params, x, y):
    return (((x @ params["w"]) - y[:, 0]) ** 2).mean()


def whole_batch(module, x, y):
    """(loss, gradients) by autograd, of the whole batch."""
    loss = squares(module, x, y)
    return loss.detach(), *torch.autograd.grad(loss, [*module.parameters()])


def check(found, expected, tolerance=1e-12):
    found, expected = tree_leaves(found), tree_leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype or tolerance > 1e-12
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


HOW = {
    "loss": lambda module, compiled: funcga.value_and_grad(pure_loss(module, compiled(squares))),
    "pure loss": lambda module, compiled: funcga.value_and_grad(compiled(pure_loss(module, squares))),
    "gradient": lambda module, compiled: compiled(funcga.value_and_grad(pure_loss(module, squares))),
}


@pytest.mark.parametrize("how", HOW)
def test_one_graph_for_every_n(how, graphs):
    module = mlp()
    gradient = HOW[how](module, lambda function: graphs.compile(function, fullgraph=how != "loss"))
    params = trainable(module)
    for n in (2, 5):
        x, y = batch(4 * n)
        check(funcga.accumulate(gradient, n)(params, x, y), whole_batch(module, x, y))
        # Four sums are inputs of the one graph, which adds to them.
        assert graphs.additions == [4]
    # A ragged last micro-batch takes a second one.
    x, y = batch(11)
    step = funcga.accumulate(gradient, microbatch_size=4)
    for _ in range(2):
        check(step(params, x, y), whole_batch(module, x, y))
        assert graphs.additions == [4, 4]
    assert all(p.grad is None for p in module.parameters())


WEIGHTS = {
    "tokens": ({"fold": funcga.per_weight(), "weight": lambda x, y: (x > 0).sum()}, 0),
    "a mean by tokens": ({"weight": lambda x, y: (x > 0).sum()}, 0),
    "some weigh nothing": ({"weight": lambda x, y: int(x[0, 0] > 0)}, 1),
    "a sum": ({"fold": funcga.sum()}, 0),
    "large": ({"weight": lambda x, y: 1e30 * len(x)}, 0),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_are_inputs(kind, graphs):
    """No weight is a new program."""
    options, eager = WEIGHTS[kind]
    module, (x, y) = mlp(), batch(20)
    make = lambda loss: funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss)), 5, **options)
    params = trainable(module)
    check(make(graphs.compile(squares))(params, x, y), make(squares)(params, x, y))
    # A micro-batch that weighs nothing has no backward pass: only its loss is compiled.
    assert sorted(graphs.additions) == [0] * eager + [4]


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_nothing_of_a_micro_batch_without_weight_is_added(empty, graphs):
    """Not even a NaN; and the others are added by one graph, also if the first of all weighs nothing."""
    x, y = batch(12)
    params, keep = {"w": torch.ones(3, dtype=torch.float64)}, [row for row in range(12) if row // 4 != empty]
    x[4 * empty : 4 * empty + 4] = torch.nan
    step = funcga.accumulate(
        funcga.value_and_grad(graphs.compile(plain)), 3, weight=lambda x, y: 0 if x.isnan().any() else 2 * len(x)
    )
    leaf = params["w"].clone().requires_grad_()
    expected = torch.autograd.grad(plain({"w": leaf}, x[keep], y[keep]), leaf)
    for _ in range(2):
        check(step(params, x, y)[1], expected)
    assert sorted(graphs.additions) == [0, 1]


@pytest.mark.parametrize("argnums", [(0, 1), (1, 0), 1])
def test_a_pure_loss_may_have_more_arguments(argnums, graphs):
    """Those after the parameters may be differentiated beside them, or alone."""
    module, (x, y), shift = mlp(), batch(8), torch.ones(1, dtype=torch.float64)
    shifted = lambda module, shift, x, y: F.mse_loss(module(x) + shift, y)
    make = lambda loss: funcga.value_and_grad(pure_loss(module, loss), argnums=argnums)
    steps = [
        funcga.accumulate(make(loss), 2, in_axes=(None, None, 0, 0)) for loss in (graphs.compile(shifted), shifted)
    ]
    found, expected = (step(trainable(module), shift, x, y) for step in steps)
    check(found, expected)
    assert graphs.additions == [1 if argnums == 1 else 5]


def test_a_stream_takes_the_same_graph(graphs):
    module, (x, y) = mlp(), batch(8)
    gradient, params = funcga.value_and_grad(pure_loss(module, graphs.compile(squares))), trainable(module)
    for step, given in (
        (funcga.accumulate(gradient, 2), (x, y)),
        (funcga.stream(gradient), ([(x[:4], y[:4]), (x[4:], y[4:])],)),
    ):
        check(step(params, *given), whole_batch(module, x, y))
    assert graphs.additions == [4]


def test_a_loss_of_another_dtype_than_its_parameters(graphs):
    loss_fn = lambda params, x: (x @ params["w"]).float().square().mean()
    params, x = {"w": torch.ones(3, dtype=torch.bfloat16)}, batch(8, torch.bfloat16)[0]
    make = lambda loss: funcga.accumulate(funcga.value_and_grad(loss), 2)
    step, expected = make(graphs.compile(loss_fn)), make(loss_fn)(params, x)
    for _ in range(2):
        loss, grads = step(params, x)
        assert (loss.dtype, grads["w"].dtype) == (torch.float32, torch.bfloat16)
        check((loss, grads), expected, 1e-2)
    assert graphs.additions == [1]


def test_sums_in_a_wider_dtype_than_float32_are_left_to_autograd(graphs):
    params, (x, y) = {"w": torch.ones(3)}, batch(8, torch.float32)
    make = lambda loss: funcga.accumulate(funcga.value_and_grad(loss), 2, fold=funcga.sum(dtype="float64"))
    check(make(graphs.compile(plain))(params, x, y), make(plain)(params, x, y))
    assert not any(graphs.additions)


def test_without_the_tool_autograd_adds(graphs, monkeypatch):
    monkeypatch.setitem(sys.modules, "funcga.tools.compiled.in_torch", None)
    module, (x, y) = mlp(), batch(8)
    step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, graphs.compile(squares))), 2)
    check(step(trainable(module), x, y), whole_batch(module, x, y))
    assert not any(graphs.additions)


@pytest.mark.cuda
def test_sums_that_a_cuda_graph_writes_to_stay_where_they_are(graphs, monkeypatch):
    """And no result shares memory with them."""
    known, marked = private_in_torch.compiled_of, []
    replaying = lambda function: (compiled := known(function)) and compiled._replace(replays=True)
    monkeypatch.setattr(private_in_torch, "compiled_of", replaying)
    monkeypatch.setattr(torch._dynamo, "mark_static_address", lambda tensor, guard=True: marked.append((tensor, guard)))
    step = funcga.accumulate(funcga.value_and_grad(graphs.compile(plain)), 2)
    eager = funcga.accumulate(funcga.value_and_grad(plain), 2)
    params, (x, y) = {"w": nn.Parameter(torch.ones(3, device="cuda"))}, (t.cuda() for t in batch(8, torch.float32))
    found = [step(params, scale * x, y) for scale in (1, 2, 3)]
    for scale, each in zip((1, 2, 3), found, strict=True):
        check(tree_map(torch.Tensor.cpu, each), tree_map(torch.Tensor.cpu, eager(params, scale * x, y)), 1e-5)
    # The sums once, and in each window what shares the memory of the parameter.
    assert [guard for _, guard in marked] == [False, True, False, False]
    assert {tensor.data_ptr() for tensor, guard in marked if not guard} == {params["w"].data_ptr()}


def test_what_is_around_the_step(graphs):
    """Autocast and saved-tensor hooks are for the engine; afterwards the micro-step is compiled as ever."""
    module, (x, y) = mlp(torch.float32), batch(8, torch.float32)
    params = trainable(module)
    step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, graphs.compile(squares))), 2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        step(params, x, y)
    assert saved
    with torch.autocast("cpu", torch.bfloat16):
        step(params, x, y)
    assert not any(graphs.additions)
    step(params, x, y)
    assert graphs.additions[-1] == 4


def test_a_backend_that_refuses_a_later_shape(graphs):
    """What was added stays, and autograd adds the rest."""

    def backend(graph, inputs):
        graphs(graph, inputs)
        if graphs.additions[-1:] == [4] and len([*filter(None, graphs.additions)]) > 1:
            raise RuntimeError("no")
        return graph.forward

    module, (x, y) = mlp(), batch(11)
    loss = torch.compile(squares, backend=backend)
    step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss)), microbatch_size=4)
    for _ in range(2):
        check(step(trainable(module), x, y), whole_batch(module, x, y))


def test_another_module_of_the_same_kind_compiles_nothing(graphs):
    """And a module is not kept alive by what was compiled for it."""
    loss, (x, y) = graphs.compile(squares), batch(8)
    for scale in (1, 2):
        module = mlp()
        with torch.no_grad():
            module[0].weight.mul_(scale)
        step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss)), 2)
        check(step(trainable(module), x, y), whole_batch(module, x, y))
    assert graphs.additions == [4]
    alive = weakref.ref(module)
    del module, step
    gc.collect()
    assert alive() is None


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **kwargs or {})


STATE = {"in_axes": (None, 0, funcga.CARRY), "fold": (funcga.carry(), funcga.mean())}
# Why autograd adds: keywords of value_and_grad, and of accumulate, and what is around the call.
AGAINST = {
    "observers measure each gradient": ({}, {"observe": funcga.gradient_noise()}, nullcontext),
    "the loss has aux": ({"has_aux": True}, {}, nullcontext),
    "the loss is scaled": ({"scaled": True}, {}, nullcontext),
    "leaves are made for each micro-batch": ({"argnums": (0, 1)}, {"fold": funcga.sum()}, nullcontext),
    "state is threaded": ({}, STATE, nullcontext),
    "a mode sees each operator": ({}, {}, Seen),
    "anomalies are detected": ({}, {}, torch.autograd.detect_anomaly),
}


@pytest.mark.parametrize("why", AGAINST)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_autograd_adds_where_something_stands_against_it(why, graphs):
    of_gradient, of_step, around = AGAINST[why]

    def loss_fn(params, x, y):
        loss = (((x @ params["w"]) - y.sum()) ** 2).mean()
        return (loss, y.sum()) if "has_aux" in of_gradient else loss

    make = lambda loss: funcga.accumulate(funcga.value_and_grad(loss, **of_gradient), 2, **of_step)
    x, y = batch(8)
    args = {"w": torch.ones(3, dtype=torch.float64)}, x, y.sum() if of_step is STATE else y
    scale = {"loss_scale": 2.0} if "scaled" in of_gradient else {}
    compiled_loss = graphs.compile(loss_fn)
    with around():
        check(make(compiled_loss)(*args, **scale), make(loss_fn)(*args, **scale))
    assert not any(graphs.additions)


def of_replicas(group, across):
    """How far a compiled loss is from one that is not, and how many inputs its graphs add to, beside another process."""
    torch._dynamo.reset()
    graphs, params, (x, y) = Graphs(), {"w": torch.ones(3, dtype=torch.float64)}, batch(8)
    options = {"across": group} if across else {}
    make = lambda loss: funcga.accumulate(funcga.value_and_grad(loss), 2, **options)
    found, expected = (make(loss)(params, x + group.rank(), y) for loss in (graphs.compile(plain), plain))
    return (found[1]["w"] - expected[1]["w"]).abs().max().item(), sum(graphs.additions)


@pytest.mark.parametrize("across", [False, True])
def test_processes_that_may_communicate_are_left_to_autograd(across):
    for difference, additions in processes().run(of_replicas, across, size=2):
        assert difference <= 1e-12
        assert additions == 0


@pytest.mark.parametrize("streams", [False, True])
def test_a_compiled_loss_under_inference_mode(streams):
    params, x = {"w": torch.randn(3)}, torch.randn(9, 3)
    loss = lambda params, x: (x @ params["w"]).square().mean()
    gradient = funcga.value_and_grad(torch.compile(loss, backend="eager"))
    step = funcga.accumulate(gradient, 3)
    if streams:
        step = lambda params, x: funcga.stream(gradient)(params, x.chunk(3))
    expected = funcga.value_and_grad(loss)(params, x)
    with torch.inference_mode():
        found = [step(params, x), step(params, x)]
    for value, grads in found:
        torch.testing.assert_close((value, grads["w"]), (expected[0], expected[1]["w"]))
