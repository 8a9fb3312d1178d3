"""`grad` and `value_and_grad` of losses that depend on none of what is differentiated, or on some of it."""

import numpy as np
import pytest
import torch

import funcga
import torch_backend
from tests import problems
from tests.kits import difference

# A loss that depends on none of what is differentiated

TEXT = (
    "the loss does not depend on `params`: no gradient reaches an array of it, and nothing would be trained. loss_fn "
    "uses a module, or arrays, that it closes over, or it detaches what it computes. Compute the loss from the "
    "argument, as model.apply(params, x) does, or torch_backend.pure_loss(module, loss_fn)."
)


def steps_of(loss, **options):
    """Every way to a gradient of this loss, each made anew."""
    return {
        "grad": funcga.grad(loss, **options),
        "accumulate": funcga.accumulate(funcga.value_and_grad(loss, **options), 3),
        "one micro-batch": funcga.accumulate(funcga.grad(loss, **options), 1),
        "stream": lambda params, *batch: funcga.stream(funcga.value_and_grad(loss, **options))(params, [batch, batch]),
    }


WAYS = list(steps_of(min))


@pytest.mark.parametrize(("way", "kind"), [*((way, "float32") for way in WAYS), ("accumulate", "float16")])
def test_a_loss_that_closes_over_its_parameters(kit, way, kind):
    params, (x, y), loss = problems.regression(kind)
    own, x, y = kit.arrays((params, x, y))
    closed = lambda params, x, y: loss(own, x, y)
    with pytest.raises(funcga.FuncgaError) as caught:
        steps_of(closed)[way](own, x, y)
    assert str(caught.value) == TEXT


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_closes_over_its_module(way):
    module = torch.nn.Linear(3, 1)
    params, x, y = dict(module.named_parameters()), torch.randn(6, 3), torch.randn(6, 1)
    for loss in (
        lambda params, x, y: torch.nn.functional.mse_loss(module(x), y),
        lambda params, x, y: torch.nn.functional.mse_loss(module(x).detach(), y),
        lambda params, x, y: ((x @ params["weight"].detach().T - y) ** 2).mean(),
        torch.no_grad()(lambda params, x, y: ((x @ params["weight"].T - y) ** 2).mean()),
        lambda params, x, y: torch_backend.pure_loss(module, lambda m, x, y: (module(x).detach() - y).sum())(
            params, x, y
        ),
    ):
        with pytest.raises(funcga.FuncgaError, match="the loss does not depend on `params`"):
            steps_of(loss)[way](params, x, y)
    assert module.weight.grad is None


def test_of_several_arguments_one_is_enough(kit):
    params, (x, y), loss = problems.regression()
    params, x, y = kit.arrays((params, x, y))
    first, second = funcga.grad(lambda p, q, x, y: loss(p, x, y), (0, 1))(params, params, x, y)
    assert difference(kit, first, funcga.grad(loss)(params, x, y)) == 0
    assert not any(leaf.any() for leaf in kit.leaves(second))
    with pytest.raises(funcga.FuncgaError, match="the loss does not depend on `p` or `q`"):
        funcga.grad(lambda p, q, x, y: (x * x).mean(), (0, 1))(params, params, x, y)


@pytest.mark.parametrize("way", WAYS)
def test_zeros_for_some_leaves_are_right(kit, way):
    params, batch, _ = problems.regression()
    params, batch = kit.arrays((params, batch))
    for loss in (lambda p, x, y: (x @ p["w"]).sum(), lambda p, x, y: (x @ p["w"] * 0).sum()):
        out = steps_of(loss)[way](params, *batch)
        assert not (out[1] if isinstance(out, tuple) else out)["b"].any()


def test_what_depends_on_nothing_and_may():
    """A constant is right where all is masked, and where there is nothing to differentiate."""
    params, x = {"w": torch.ones(3)}, torch.ones(4, 3)
    masked = lambda p, x: (x * 0).sum() if x[0, 0] > 0 else (x @ p["w"]).sum()
    some = torch.cat([x, -x])
    for way, step in steps_of(masked).items():
        zeros = step(params, x)
        assert not (zeros[1] if isinstance(zeros, tuple) else zeros)["w"].any(), way
    assert funcga.accumulate(funcga.grad(masked), 2)(params, some)["w"].tolist() == [-2, -2, -2]
    # one micro-batch without a gradient, and not masked
    conditional = lambda p, x: (x * x).sum() if x[0, 0] > 0 else (x @ p["w"]).sum()
    assert funcga.accumulate(funcga.grad(conditional), 2)(params, some)["w"].tolist() == [-2, -2, -2]
    assert funcga.stream(funcga.grad(conditional))(params, [x, -x])["w"].tolist() == [-2, -2, -2]
    # a whole window of such, once it is known that others are not
    step = funcga.accumulate(funcga.grad(conditional), 2)
    step(params, some)
    assert step(params, x)["w"].tolist() == [0, 0, 0]
    # of weight 0, whatever it is
    ignored = funcga.accumulate(funcga.grad(lambda p, x: (x * x).sum()), 2, weight=lambda x: 0)
    assert ignored(params, x)["w"].tolist() == [0, 0, 0]
    assert funcga.accumulate(funcga.grad(lambda p, x: x.mean()), 2)({}, x) == {}
    assert funcga.grad(lambda p, x: x.mean())({"none": None}, x) == {"none": None}


def test_the_gradient_of_a_linear_function_is_a_constant(kit):
    w, x = kit.arrays((np.ones(3, "float32"), np.ones((4, 3), "float32")))
    slope = lambda w, x: funcga.grad(lambda v: (x @ v).sum())(w).sum()
    for way, step in steps_of(slope).items():
        out = step(w, x)
        assert not kit.leaves(out[1] if isinstance(out, tuple) else out)[0].any(), way


def test_without_arrays():
    with pytest.raises(funcga.FuncgaError, match="no array was found in `w`"):
        funcga.grad(lambda w: w)(1.0)
