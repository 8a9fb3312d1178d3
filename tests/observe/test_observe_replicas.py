"""observe= over replicas in torch: what all micro-batches of all processes say, whoever reduces the gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist

import funcga
import torch_backend
from tests.observe import oracle
from tests.processes import processes
from tests.torch_backend.wrapped.test_wrapped import WRAPPERS, made

LIMIT = 1e-12
OBSERVE = {"noise": funcga.gradient_noise(groups=lambda path: path.removeprefix("module.").split(".")[0])}
NORMS = {**OBSERVE, "norms": funcga.gradient_norms()}
# How many rows the micro-batches of each rank have: as many micro-batches everywhere, one, more on one, none on another.
EVEN, ALONE, UNEVEN, WITH_NONE = [[3, 2], [1, 4]], [[3], [2]], [[3, 1, 2], [4]], [[3, 2], []]


def items(sizes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    draw = lambda rows, columns: torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)
    return [[(draw(rows, 4), draw(rows, 3)) for rows in of_rank] for of_rank in sizes]


def loss_of(module, x, y):
    return ((module(x) - y) ** 2).mean()


def expected(sizes):
    """(the noise of each group, the norms) from the gradients of all micro-batches, one by one."""
    module = made(torch.float64)
    loss = torch_backend.pure_loss(module, loss_of)
    params = {name: p.detach() for name, p in torch_backend.trainable(module).items()}
    each = [funcga.grad(loss)(params, *item) for of_rank in items(sizes) for item in of_rank]
    weights = [rows for of_rank in sizes for rows in of_rank]
    flat = lambda gradient, group: oracle.flat(
        [leaf for name, leaf in gradient.items() if group is None or name.split(".")[0] == group]
    )
    names = dict.fromkeys(name.split(".")[0] for name in params)
    noise = {name: oracle.noise([flat(gradient, name) for gradient in each], weights) for name in names}
    return noise, oracle.norms([flat(gradient, None) for gradient in each], weights)


def apart(observed, sizes):
    """The largest relative distance of what was observed."""
    noise, (norms, mean) = expected(sizes)
    pairs = [
        (got, want)
        for name, (trace, norm_squared) in noise.items()
        for got, want in ((observed["noise"][name].trace, trace), (observed["noise"][name].norm_squared, norm_squared))
    ]
    if "norms" in observed:
        pairs += [(observed["norms"].mean, mean), *zip(observed["norms"].microbatches, norms, strict=True)]
    return max(abs(float(got) / want - 1) for got, want in pairs)


def merged(group, sizes, which, observe):
    module = made(torch.float64)
    own = items(sizes)[dist.get_rank(group)]
    if which == "own parameters":
        step = funcga.stream(torch_backend.module_value_and_grad(module, loss_of), across=group, observe=observe)
        args = (own,)
    else:
        gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_of))
        step = funcga.stream(gradient, across=group, observe=observe)
        args = (torch_backend.trainable(module), own)
    # Twice, since the first window learns what there is to send.
    return [apart(step(*args)[1], sizes) for _ in range(2)]


@pytest.mark.parametrize(
    ("which", "sizes"), [("params", WITH_NONE), ("own parameters", UNEVEN), ("own parameters", WITH_NONE)],
    ids=["with none", "own parameters", "own parameters, with none"],
)  # fmt: skip
def test_all_replicas_are_observed(which, sizes):
    found = processes().run(run_merged, sizes, which, size=2)
    assert max(max(of_rank) for of_rank in found) < LIMIT


def run_merged(group, sizes, which):
    # Observers are functions, which are not sent to other processes.
    return merged(group, sizes, which, OBSERVE) + merged(group, sizes, which, NORMS)


def wrapped(group, name, sizes, weighted):
    module = WRAPPERS[name](group, made(torch.float64))
    summed = lambda module, x, y: loss_of(module, x, y) * len(x)
    loss, fold = (loss_of, funcga.mean()) if weighted else (summed, funcga.per_weight())
    gradient = torch_backend.module_value_and_grad(module, loss)
    step = funcga.stream(gradient, fold=fold, observe=NORMS)
    plain = funcga.stream(gradient, fold=fold)
    own = items(sizes)[dist.get_rank(group)]
    found = []
    for _ in range(2):
        (_, grads), observed = step(own)
        found.append(apart(observed, sizes))
        _, others = plain(own)
        assert all(torch.equal(local(grads[key]), local(others[key])) for key in grads)
    return found


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def both_folds(group, name):
    # What wraps a module reduces the first gradients of a window of one micro-batch where they are.
    cases = itertools.product((EVEN, ALONE), (True, False))
    return [far for sizes, weighted in cases for far in wrapped(group, name, sizes, weighted)]


@pytest.mark.parametrize("name", [name for name in WRAPPERS if not name.startswith("fsdp1")])
def test_wrapped_modules_are_observed(name):
    found = processes().run(both_folds, name, size=2)
    assert max(max(of_rank) for of_rank in found) < LIMIT


def flat(group):
    module = WRAPPERS["fsdp1"](group, made())
    try:
        funcga.stream(torch_backend.module_value_and_grad(module, loss_of), observe=OBSERVE)
    except funcga.FuncgaError as error:
        return str(error)
    return ""


def test_a_flat_gradient_is_refused():
    assert all("one flat gradient for all" in text for text in processes().run(flat, size=2))
