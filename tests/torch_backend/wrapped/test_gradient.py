"""The gradients of a module that nothing wraps are those of the functional way, and the module is as before."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcga
from torch_backend import module_value_and_grad, pure_loss, trainable

ROWS = 11


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def batch(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(ROWS, 4, dtype=torch.float64).to(dtype), torch.randn(ROWS, 3, dtype=torch.float64).to(dtype)


def mse(module, x, y):
    return F.mse_loss(module(x), y)


def functional(module, loss_fn, **options):
    """A step over the module's own parameters, the functional way."""
    gradient = funcga.value_and_grad(pure_loss(module, loss_fn), **options)
    return lambda n, *args, **kwargs: funcga.accumulate(gradient, n, **kwargs)(trainable(module), *args)


def identical(a, b):
    leaves, structure = torch.utils._pytree.tree_flatten(a)
    others, other_structure = torch.utils._pytree.tree_flatten(b)
    assert structure == other_structure
    for leaf, other in zip(leaves, others, strict=True):
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
        assert torch.equal(leaf, other)


def test_called_by_itself_it_is_one_micro_batch():
    module, (x, y) = network(torch.bfloat16), batch(torch.bfloat16)
    gradient = module_value_and_grad(module, lambda m, x, y: (mse(m, x, y), {"out": m(x)}), has_aux=True)
    (value, aux), grads = gradient(x, y)
    assert torch.equal(aux["out"], module(x))
    identical((value, grads), funcga.accumulate(module_value_and_grad(module, mse), 1)(x, y))
    module.float()  # and made wider after a step
    x, y = x.float(), y.float()
    identical(gradient(x, y)[1], functional(module, mse)(1, x, y)[1])


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, lambda x, y: 257 + len(x)),
    ],  # more than 8 bits hold
)
def test_sums_of_16_bits_are_held_in_32(dtype, weight):
    """Against the mean of the micro-batches' gradients, taken in float64: rounded once, to the parameters' dtype."""
    module, (x, y) = network(dtype), batch(dtype)
    _, grads = funcga.accumulate(module_value_and_grad(module, mse), ROWS, weight=weight)(x, y)
    sums = dict.fromkeys(grads, 0)
    for row in range(ROWS):
        alone = copy.deepcopy(module)
        mse(alone, x[row : row + 1], y[row : row + 1]).backward()
        sums = {name: sums[name] + p.grad.double() for name, p in alone.named_parameters()}
    for name, gradient in grads.items():
        mean = sums[name] / ROWS
        assert gradient.dtype == dtype
        # Half a unit in the last place, and the rounding of sums in float32.
        torch.testing.assert_close(
            gradient.double(), mean, rtol=torch.finfo(dtype).eps / 2 + ROWS * 2**-23, atol=2.0**-24
        )


@pytest.mark.parametrize(("dtype", "fails"), [(torch.bfloat16, True), (torch.float32, False)])
def test_grads_of_the_user_and_their_dtypes_come_back(dtype, fails):
    module, data = network(dtype), batch(dtype)
    module[0].weight.grad_dtype = torch.float32
    kept = torch.ones_like(module[0].weight, dtype=torch.float32)
    module[0].weight.grad = kept

    def loss_fn(m, x, y):
        calls.append(1)
        return mse(m, x, y) if not fails or len(calls) < 3 else 1 / 0

    calls = []
    step = funcga.accumulate(module_value_and_grad(module, loss_fn), 4)
    if fails:
        with pytest.raises(ZeroDivisionError):
            step(*data)
    else:
        identical(step(*data), functional(module, mse)(4, *data))
    assert module[0].weight.grad is kept
    assert bool((kept == 1).all())
    assert [p.grad_dtype for p in module.parameters()] == [torch.float32, dtype, dtype, dtype]
    assert [p.grad for p in module.parameters()][1:] == [None] * 3


def test_an_embedding_may_shorten_its_rows_as_in_a_loop():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 1))
    expected, tokens = copy.deepcopy(module), torch.arange(5)
    _, grads = funcga.accumulate(module_value_and_grad(module, lambda m, x: m(x).sum()), 5, fold=funcga.sum())(tokens)
    for token in tokens:
        expected(token[None]).sum().backward()
    for name, p in expected.named_parameters():
        assert torch.equal(dict(module.named_parameters())[name], p)
        torch.testing.assert_close(grads[name], p.grad)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_an_embedding_that_is_changed_between_two_steps_may_shorten_its_rows(max_norm):
    module, tokens = nn.Sequential(nn.Embedding(5, 3, max_norm=max_norm), nn.Linear(3, 1)), torch.arange(5)
    step = funcga.accumulate(module_value_and_grad(module, lambda m, x: m(x).sum()), 5, fold=funcga.sum())
    step(tokens)
    if max_norm is None:
        module[0].max_norm = 0.5
    else:
        module[0] = nn.Embedding(5, 3, max_norm=0.5)
    expected = copy.deepcopy(module)
    _, grads = step(tokens)
    expected(tokens).sum().backward()
    torch.testing.assert_close(grads, {name: p.grad for name, p in expected.named_parameters()})


def test_a_loss_or_a_hook_that_acts_on_grad_is_refused():
    module = network()
    clears = lambda module, x, y: (mse(module, x, y), module.zero_grad())[0]
    with pytest.raises(funcga.FuncgaError, match=r"^loss_fn cleared or replaced the .grad"):
        funcga.accumulate(module_value_and_grad(module, clears), 3)(*batch())
    assert all(p.grad is None for p in module.parameters())
    handle = module[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    step = funcga.accumulate(module_value_and_grad(module, mse), 3)
    with pytest.raises(
        funcga.FuncgaError, match=r"a parameter, float\d\d\[\d, \d\], has a hook of register_post_accumulate"
    ):
        step(*batch())
    handle.remove()
    identical(step(*batch()), functional(module, mse)(3, *batch()))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_a_copy_is_the_gradient_function_of_the_copied_module(again):
    module, data = network(torch.float64), batch(torch.float64)
    trainer = {"gradient": module_value_and_grad(module, mse), "model": module}
    expected = trainer["gradient"](*data)  # what the call works out is not copied
    twin = again(trainer)
    assert twin["gradient"].module is twin["model"] is not module
    identical(twin["gradient"](*data), expected)
    with torch.no_grad():
        twin["model"][0].weight.zero_()
    identical(trainer["gradient"](*data), expected)
    identical(twin["gradient"](*data), functional(twin["model"], mse)(1, *data))


def timed(gradient):
    @functools.wraps(gradient)
    def wrapper(*args, **kwargs):
        return gradient(*args, **kwargs)

    return wrapper


WRAPPERS = {
    "partial": functools.partial,
    "decorated": timed,
    "twice": lambda gradient: functools.partial(timed(gradient)),
    "step": lambda gradient: funcga.accumulate(gradient, 2),
    "step of wrapped": lambda gradient: funcga.accumulate(timed(gradient), 2),
    "wrapped step": lambda gradient: timed(funcga.accumulate(gradient, 2)),
    "step with axes": lambda gradient: funcga.accumulate(lambda x, y: gradient(x, y), 2, in_axes=0),
    "lambda": lambda gradient: lambda x, y: gradient(x, y),
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=[*WRAPPERS])
def test_what_wraps_a_gradient_function_has_all_of_its_arguments_split(wrapper):
    module, (x, y) = network(torch.float64), batch(torch.float64)
    gradient = module_value_and_grad(module, mse)
    expected, wrapped = gradient(x, y), wrapper(gradient)
    parts = [*zip(x.tensor_split(4), y.tensor_split(4), strict=True)]
    in_axes = 0 if wrapper is WRAPPERS["lambda"] else None
    torch.testing.assert_close(funcga.accumulate(wrapped, 4, in_axes=in_axes)(x, y), expected)
    torch.testing.assert_close(funcga.accumulate(wrapped, "auto", in_axes=in_axes)(x, y), expected)
    torch.testing.assert_close(funcga.stream(wrapped)(parts), expected)


@pytest.mark.parametrize(
    "grad_fn",
    [
        lambda gradient, x, y: gradient(x / 255, y),  # not the tensor itself
        lambda gradient, x, y: gradient(x=x, y=y),
    ],
)
def test_a_wrapper_that_cannot_be_seen_through_is_caught_when_it_passes_on_the_whole_batch(grad_fn):
    module, (x, y) = network(), batch()
    gradient = module_value_and_grad(module, mse)
    wrapper = lambda x, y: grad_fn(gradient, x, y)
    with pytest.raises(funcga.FuncgaError) as caught:
        funcga.accumulate(wrapper, 4)(x, y)
    assert str(caught.value) == (
        "grad_fn calls the gradient function of a module with 11 rows, those of the whole batch, in a micro-batch of "
        "3. Without in_axes its first argument, `x`, is passed whole, and only the others are split. Split it too: "
        "accumulate(grad_fn, n, in_axes=0); or say that it is no part of the batch: in_axes=(None, 0)."
    )
    # It is over with that call: nothing is left behind.
    gradient(x, y)
    funcga.accumulate(wrapper, 4, in_axes=0)(x, y)


def test_what_is_passed_whole_on_purpose_is_no_mistake():
    module, (x, y) = network(), batch()
    gradient = module_value_and_grad(module, lambda module, x, y, center: mse(module, x - center, y))
    expected = gradient(x, y, x.mean(0))
    with_center = lambda center, x, y: gradient(x, y, center)
    torch.testing.assert_close(funcga.accumulate(with_center, 4)(x.mean(0), x, y), expected)
    # As many rows as the batch has, by chance.
    gradient = module_value_and_grad(module, lambda module, x, y, table: mse(module, x - table.mean(0), y))
    with_table = lambda table, x, y: gradient(x, y, table)
    step = funcga.accumulate(with_table, 4, in_axes=(None, 0, 0))
    torch.testing.assert_close(step(x, x, y), expected)


def test_a_search_leaves_no_trace_of_what_did_not_fit():
    """BatchNorm's statistics are those of the window that ran to its end, in the memory that they had."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    twin, buffers = copy.deepcopy(module), dict(module.named_buffers())

    def with_little_room(module, x, y):
        loss = mse(module, x, y)  # has written to the buffers by now
        if len(x) > 6:
            raise torch.OutOfMemoryError
        return loss

    found = funcga.accumulate(module_value_and_grad(module, with_little_room), "auto")(x, y)
    identical(found, funcga.accumulate(module_value_and_grad(twin, mse), 4)(x, y))
    assert int(module[1].num_batches_tracked) == 4
    for name, buffer in module.named_buffers():
        assert buffer is buffers[name]
        torch.testing.assert_close(buffer, dict(twin.named_buffers())[name], rtol=0, atol=0)
