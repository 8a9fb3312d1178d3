"""Private names of torch: each is taken away, and the numbers are the same still."""

import ast
import importlib
import inspect
import operator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcga
from tests.processes import processes
from torch_backend import _private, pure_loss


def loss(params, x, y):
    return (torch.tanh(x @ params["w"]) @ params["v"] - y).square().mean()


def arguments():
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 4, generator=generator), "v": torch.randn(4, generator=generator)}
    return params, torch.randn(7, 3, generator=generator), torch.randn(7, generator=generator)


def uneven():
    """Micro-batches of different weights, of which one is 0."""
    weight = lambda x, y: float(len(x) - 1)
    return funcga.accumulate(funcga.value_and_grad(loss), 4, weight=weight)(*arguments())


def shared():
    """A gradient in memory that the loss holds as well: here all of them are one tensor."""
    params, x, _ = arguments()
    same = torch.ones(4)

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return v.sum()

        @staticmethod
        def backward(ctx, grad):
            return same

    got = funcga.accumulate(funcga.grad(lambda p, x: Same.apply(p["v"]) * 1.0), 3)(params, x)
    assert same.equal(torch.ones(4))
    return got


def recomputed():
    params, x, y = arguments()
    inner = lambda w, v, x, y: loss({"w": w, "v": v}, x, y)
    outer = lambda p, x, y: checkpoint(inner, p["w"], p["v"], x, y, use_reentrant=True)
    return funcga.accumulate(funcga.value_and_grad(outer), 3)(params, x, y)


def halves():
    params, x, y = arguments()
    with torch.autocast("cpu", torch.bfloat16):
        return funcga.accumulate(funcga.value_and_grad(loss), 3)(params, x, y)


def transformed():
    """A step inside of torch.func, and one inside of forward-mode AD."""
    params, x, y = arguments()
    step = funcga.accumulate(funcga.value_and_grad(loss), 3)
    outer = lambda p: step(p, x, y)[0] + sum(g.square().sum() for g in step(p, x, y)[1].values())
    tangents = {name: torch.ones_like(p) for name, p in params.items()}
    return torch.func.grad(outer)(params), torch.func.jvp(outer, (params,), (tangents,))


def hooked():
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    module.weight.register_hook(lambda grad: 2 * grad)
    step = funcga.accumulate(funcga.grad(pure_loss(module, lambda module, x, y: module(x).squeeze(1).sub(y).sum())), 3)
    return step(dict(module.named_parameters()), *arguments()[1:])


CALLS = [uneven, shared, recomputed, halves, transformed, hooked]
NAMES = {
    "_engine_run_backward": lambda: torch.autograd.graph,
    "_execution_engine": lambda: torch.autograd.Variable,
    "_storage_Use_Count": lambda: torch._C,
    "_is_any_autocast_enabled": lambda: torch._C,
    "get_dynamic_layer_stack_depth": lambda: torch._C._functorch,
    "_current_level": lambda: torch.autograd.forward_ad,
    "_current_graph_task_id": lambda: torch._C,
}


@pytest.fixture
def without(monkeypatch):
    """Takes names away while the file of private names is loaded; torch itself has them again afterwards."""

    def take(*names):
        with monkeypatch.context() as taken:
            for name in names:
                taken.delattr(NAMES[name](), name)
            importlib.reload(_private)

    yield take
    importlib.reload(_private)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch itself calls for a jvp
@pytest.mark.parametrize("name", ["all", "_engine_run_backward", "_storage_Use_Count"])
def test_the_numbers_are_the_same_without(name, without):
    want = [call() for call in CALLS]
    without(*(NAMES if name == "all" else [name]))
    got = [call() for call in CALLS]
    funcga.compare(want, got, rtol=0, atol=0).assert_close()


def test_this_version_has_every_name():
    """Those of an object that a test would have to make, such as a module in DDP, are met by the tests of that."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(_private))) if isinstance(node, ast.Call)]
    read = [ast.unparse(call) for call in calls if getattr(call.func, "id", "") in ("_attribute", "_reader")]
    stand_ins = {"_attribute": lambda owner, path, otherwise: operator.attrgetter(path)(owner),
                 "_reader": lambda *names, otherwise: operator.attrgetter(*names)(torch.Tensor)}  # fmt: skip
    seen = 0
    for call in read:
        try:
            eval(call, vars(_private) | stand_ins)  # an AttributeError names what is missing
        except NameError:
            continue
        seen += 1
    assert seen >= 15
    assert _private.sends_no_fakes()


def merged_without(group, names):
    """A window over replicas, with and without these names of torch.distributed, which sends early the second time."""
    import torch.distributed as dist

    params, x, y = arguments()
    weight = lambda x, y: float(len(x))

    def window():
        again = dist.new_group([0, 1])
        step = funcga.accumulate(funcga.value_and_grad(loss), 2, weight=weight, across=again)
        return [step(params, x[: 3 + group.rank()], y[: 3 + group.rank()]) for _ in range(2)]

    want = window()
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delattr(dist if hasattr(dist, name) else dist.ProcessGroup, name)
        another = dist.new_group([0, 1])
        own = _private.group_of_our_own(another)
        called = _private.collectives_called()
        got = window()
    funcga.compare(want, got, rtol=0, atol=0).assert_close()
    return own is another, called is None


def test_replicas_without_a_group_of_our_own():
    assert processes().run(merged_without, [], size=2) == [(False, False)] * 2
    assert processes().run(merged_without, ["ProcessGroupGloo"], size=2) == [(True, False)] * 2
    assert processes().run(merged_without, ["_get_sequence_number_for_group"], size=2) == [(False, True)] * 2
