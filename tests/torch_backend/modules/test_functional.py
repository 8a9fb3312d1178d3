"""torch.func.functional_call in a loss: the same as torch's own, whatever the module and the tensors are."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import funcga

plain = nn.utils.stateless._functional_call
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def in_a_window(call):
    """What it returns when it is called four times in the losses of one window: a plan is made, and then used."""
    results = []
    loss = lambda p, x: (results.extend(call() for _ in range(2)), (p * x).sum())[1]
    funcga.accumulate(funcga.grad(loss), 2)(torch.ones((), dtype=torch.float64), X)
    return results


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net


def used_twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def with_buffers():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))


class WritesToItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return x * self.weight * self.count


class InAnAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = torch.ones(4, dtype=torch.float64), nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) * self.scale


class OfItsOwn(nn.Linear):
    def named_parameters(self, *args, **kwargs):
        return super().named_parameters(*args, **kwargs)


def parametrized():
    net = nn.Sequential(nn.Linear(4, 4))
    parametrize.register_parametrization(net[0], "weight", nn.Tanh())
    return net


MODULES = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
    "tied": tied,
    "used twice": used_twice,
    "buffers": with_buffers,
    "writes": WritesToItself,
    "attribute": InAnAttribute,
    "of its own": lambda: OfItsOwn(4, 2),
    "parametrized": parametrized,
    "one": lambda: nn.Linear(4, 2),
}


def made(kind):
    torch.manual_seed(0)
    return MODULES[kind]().double()


def outcome(call, module, tensors, **options):
    """What a call returns or raises, and what module and dict are afterwards."""
    before = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    try:
        result = call(module, tensors, (X,), **options)
    except Exception as error:
        result = type(error), str(error)
    state = module.state_dict(keep_vars=True)
    is_kept = {id(tensor) for tensor in state.values()} == before
    return result, {name: tensor.clone() for name, tensor in tensors.items()}, is_kept


NAMES = ("all", "some", "duplicates", "buffers", "none", "unknown", "attribute")


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_it_is_that_of_torch(kind, ties):
    for names in NAMES if ties else ("all", "duplicates"):
        module, rival = made(kind), made(kind)
        rival.load_state_dict(module.state_dict())
        all_names = [name for name, _ in module.named_parameters(remove_duplicate=names != "duplicates")]
        names_of = {
            "some": all_names[:1],
            "buffers": all_names + [name for name, _ in module.named_buffers()],
            "none": [],
            "unknown": [*all_names, "nowhere.weight"],
            "attribute": [*all_names, "scale"],
        }
        state = {**module.state_dict(), "nowhere.weight": X, "scale": torch.full((4,), 2.0, dtype=torch.float64)}
        tensors = {name: torch.randn_like(state[name].double()) for name in names_of.get(names, all_names)}
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        call = lambda module=module, tensors=tensors: outcome(functional_call, module, tensors, tie_weights=ties)
        for got in in_a_window(call):
            expected = outcome(plain, rival, copies, tie_weights=ties)
            if isinstance(expected[0], torch.Tensor):
                torch.testing.assert_close(got[:2], expected[:2], rtol=0, atol=0)
            else:
                assert got[0] == expected[0]
            # What torch itself leaves in a part that is used twice is a tensor of the call.
            assert got[2] or not expected[2]


def replace_part(module):
    module[0] = nn.Linear(4, 3).double()


def replace_parameter(module):
    module[2].weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))


def tie(module):
    module[2].register_parameter("twin", module[2].bias)


def add_part(module):
    module.append(nn.Linear(2, 2).double())


def add_parameters_between(module):
    module[1] = nn.PReLU().double()


def swap_parts(module):
    module[1], module[2] = module[2], module[1]
    module.append(nn.Linear(2, 2).double())


def parametrize_part(module):
    parametrize.register_parametrization(module[2], "bias", nn.Tanh())


def swap_data(module):
    module[0].weight.data = torch.ones(3, 4, dtype=torch.float64)


def failing(module):
    before = [*module.parameters()]
    step = funcga.accumulate(funcga.grad(lambda p, x: functional_call(module, p, (x[:, :1],)).mean()), 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(dict(module.named_parameters()), X)
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))


CHANGES = [
    add_parameters_between, replace_part, replace_parameter, tie, add_part, swap_parts, parametrize_part, swap_data, failing,
]  # fmt: skip


@pytest.mark.parametrize("weight", [None, len])
def test_a_module_that_changes_in_the_middle_of_a_window(weight):
    """Inside of a loss; with a weight, also code between losses could change it."""
    module, same = made("plain"), []
    tensors = {name: torch.randn_like(p) for name, p in module.named_parameters()}

    def loss(p, x):
        functional_call(module, tensors, (X,))
        CHANGES[len(same)](module)
        same.append(torch.equal(functional_call(module, tensors, (X,)), plain(module, tensors, (X,))))
        return (p * x).sum()

    funcga.accumulate(funcga.grad(loss), 4, weight=weight)(torch.ones((), dtype=torch.float64), X)
    assert same == [True] * 4


def test_a_plan_keeps_no_module_alive():
    class Hooked(nn.Sequential):
        def note(self, *_):
            pass

    module = Hooked(made("plain"))
    module.register_forward_hook(module.note)  # now the module leads to itself
    in_a_window(lambda module=module: functional_call(module, dict(module.named_parameters()), (X,)))
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None
