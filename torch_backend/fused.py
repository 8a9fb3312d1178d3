"""Gradients of large weights, added to the sums inside of the backward pass.

Only torch has this file: XLA fuses the sum into the product by itself.

Autograd computes the gradient of a weight into new memory, writes it, reads it again, and adds it
to `.grad`; of an embedding it fills a table with zeros, to add a few rows. Here `F.linear`,
`F.embedding` and `torch.addmm` are replaced while a window lasts that has large weights. Called
with one of these, they record a function whose backward pass adds the product, or the rows, to the
`.grad` of the weight, and returns no gradient for it.

That is right only in a pass of the window itself. So each of its passes is known by the number that
autograd gives it. In any other pass, such as one that loss_fn or a hook runs, these functions
return the gradient, as torch's own do, and it can be differentiated again.

A tool: without this file autograd adds these gradients as it does all others. It stands on the
`Pass` of torch_backend.former, which it is registered with below.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import has_torch_function

from torch_backend import _private
from torch_backend.former.passes import FUSES, LARGE, Arrivals
from torch_backend.replacements import Replacements

# The same on a device, whose kernels take less time than a function written in Python, unless the
# weight has millions of elements. Reckoned from bytes, and not measured.
_LARGE_ON_DEVICE = 2**23

_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
# What a plan computes with has no numbers.
_DENSE = {torch.Tensor, torch.nn.Parameter, _private.FAKE}
# The weights of all windows, by their ids, and the stream that each window computes in: a
# checkpoint may run a module again in another thread.
_WEIGHTS: dict[int, tuple[torch.Tensor, torch.Stream | None]] = {}
# By the numbers that autograd gives to passes of windows: the weights of the window, and what is
# told of a first gradient.
_PASSES: dict[int, tuple[frozenset[int], Arrivals | None]] = {}


class fused_gradients(AbstractContextManager[None]):  # noqa: N801 - used as torch.set_grad_enabled is
    """Sets whether gradients of large weights are added inside of the backward pass, as they are by
    default.

    As a function it sets that for this thread; as a context, inside of it.

    Args:
        enabled: False lets autograd compute each gradient and add it, as a `.backward()` loop
            does, to the bit: in windows that begin then.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50_000, 16), nn.Linear(16, 1))
        >>> loss_fn = lambda model, x, y: F.mse_loss(model(x), y)
        >>> step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss_fn), n=4)
        >>> x, y = torch.randint(0, 50_000, (10,)), torch.randn(10, 1)
        >>> with torch_backend.fused_gradients(False):
        ...     loss, grads = step(x, y)
    """

    def __init__(self, enabled: bool):
        self.before, _SETTING.enabled = _SETTING.enabled, enabled

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        _SETTING.enabled = self.before


class _Setting(threading.local):
    enabled = True


_SETTING = _Setting()


def fuse(
    leaves: Sequence[torch.Tensor], stack: ExitStack
) -> Callable[[torch.Tensor, Arrivals | None], AbstractContextManager[torch.Tensor]] | None:
    """Fuses the gradients of the large weights among these leaves until the stack is closed.

    Returns the context of a backward pass; None if there are none, or if something keeps their
    gradients from being added here.
    """
    # A graph that torch.compile makes is compiled again where a function of torch is replaced.
    if not _SETTING.enabled or _private.may_compile():
        return None
    weights = {id(leaf): leaf for leaf in leaves if _is_weight(leaf)}
    if not weights:
        return None
    stack.enter_context(_REPLACEMENTS)
    # A window inside of a loss may have the same weights.
    around = {key: _WEIGHTS[key] for key in weights if key in _WEIGHTS}
    stack.callback(_WEIGHTS.update, around)
    for key, weight in weights.items():
        _WEIGHTS[key] = weight, _stream(weight)
        stack.callback(_WEIGHTS.pop, key, None)
    return partial(_adding, frozenset(weights))


@contextmanager
def _adding(
    weights: frozenset[int], loss: torch.Tensor, arrivals: Arrivals | None
) -> Iterator[torch.Tensor]:
    """A context in which the backward pass of the loss that it gives adds the gradients of these
    weights.
    """
    passes: list[int] = []

    def note(_: torch.Tensor) -> None:
        number = _private.graph_task()
        if number != -1:
            passes.append(number)
            _PASSES[number] = weights, arrivals

    # A node of our own: hooks of the loss may run other passes from there.
    with torch.enable_grad():
        root = loss.view_as(loss)
    root.register_hook(note)  # type: ignore[no-untyped-call]
    try:
        yield root
    finally:
        for number in passes:
            del _PASSES[number]


def _is_weight(leaf: torch.Tensor) -> bool:
    return (
        type(leaf) in _DENSE
        and (leaf.is_cpu or leaf.is_cuda)
        and leaf.numel() >= (LARGE if leaf.is_cpu else _LARGE_ON_DEVICE)
        and leaf.ndim == 2
        and leaf.dtype in _DTYPES
        and leaf.is_contiguous()
        and leaf.grad_dtype in (leaf.dtype, None)
    )


def _stream(tensor: torch.Tensor) -> torch.Stream | None:
    return torch.accelerator.current_stream(tensor.device) if tensor.is_cuda else None


def _is_fused(weight: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether the gradient of one of the weights may be added here for this call."""
    return (
        {type(input), type(bias)} <= {*_DENSE, type(None)}
        and not has_torch_function((input, weight))  # nor is a mode active
        and input.layout is torch.strided
        and not input.is_nested
        and (bias is None or bias.ndim == 1)
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        # These functions have no rules for torch.func, nor for tangents.
        and not _private.transforms()
        and _private.forward_level() < 0
        # Of another stream autograd would not wait for what is added there.
        and _WEIGHTS.get(id(weight)) == (weight, _stream(weight))
    )


def _is_added(weight: torch.Tensor) -> bool:
    """Whether the gradient of a weight is added to its `.grad` now, and not returned."""
    weights, arrivals = _PASSES.get(_private.graph_task(), (frozenset[int](), None))
    # What watches for a first gradient is told of one, though not which.
    hooks = [*(_private.hooks_of(weight) or {}).values()]
    is_seen = hooks and (arrivals is None or hooks != [arrivals.note])
    is_dense = weight.grad is None or weight.grad.layout is torch.strided
    is_own = id(weight) in weights
    return is_own and is_dense and not (is_seen or _private.has_hooks_on_grad(weight))


class _Linear(torch.autograd.Function):
    """`rows @ weight + bias`, or with the weight transposed, as `F.linear` has it."""

    runs_no_pass = True

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
    ) -> torch.Tensor:
        # Under autocast the rows are in another dtype.
        factor = weight.to(rows.dtype)
        ctx.is_cast = factor is not weight
        saved = (factor, weight) if ctx.is_cast else (factor,)
        ctx.save_for_backward(rows, *(saved if ctx.needs_input_grad[0] else ()))
        ctx.leaf, ctx.transposed = weight, transposed
        bias = bias if bias is None else bias.to(rows.dtype)
        return _LINEAR(rows, factor if transposed else factor.t(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors
        of_rows = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            factor = saved[0]
            if ctx.is_cast and torch.is_grad_enabled():  # a second derivative leads to the weight
                factor = saved[1].to(rows.dtype)
            of_rows = gradient @ (factor if ctx.transposed else factor.t())
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)
        if ctx.needs_input_grad[1]:
            left, right = (gradient.t(), rows) if ctx.transposed else (rows.t(), gradient)
            if not _is_added(ctx.leaf):
                of_weight = left @ right
            elif ctx.leaf.grad is None:
                ctx.leaf.grad = (left @ right).to(ctx.leaf.dtype)
            else:
                _add_product(ctx.leaf.grad, left, right)
        return of_rows, of_weight, of_bias, None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and total.dtype is torch.float32:
        # Nothing is rounded to 16 bits, and nothing of the weight's size is in between.
        _ADDMM(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


class _Embedding(torch.autograd.Function):
    """`F.embedding` of an index without options but `padding_idx`."""

    runs_no_pass = True

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.leaf, ctx.padding = weight, padding_idx
        return _EMBEDDING(input, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        total, count = ctx.leaf.grad, len(ctx.leaf)
        padding = -1 if ctx.padding is None else ctx.padding % count
        if total is None or not _is_added(ctx.leaf):
            of_weight = torch.ops.aten.embedding_dense_backward(
                gradient, input, count, padding, False
            )
            return None, of_weight, None
        index, rows = input.reshape(-1), gradient.reshape(-1, gradient.shape[-1]).to(total.dtype)
        if padding >= 0:
            rows = rows.masked_fill((index == padding)[:, None], 0)
        if total.is_cuda:  # where index_add_ adds in any order
            total.index_put_((index,), rows, accumulate=True)
        else:
            total.index_add_(0, index, rows)
        return None, None, None


_LINEAR, _EMBEDDING, _ADDMM = functional.linear, functional.embedding, torch.addmm


def _own(
    function: Callable[..., torch.Tensor], args: Any, kwargs: Any = MappingProxyType({})
) -> torch.Tensor:
    """Calls torch's own function. If a mode or a subclass sees the call, torch has its own
    functions meanwhile, which these may be compared with.
    """
    if not has_torch_function(args):
        return function(*args, **kwargs)
    with _REPLACEMENTS.lock:
        replaced = [
            entry for entry in _REPLACEMENTS.attributes if vars(entry[0])[entry[1]] is entry[3]
        ]
        for owner, name, own, _ in replaced:
            vars(owner)[name] = own
    try:
        return function(*args, **kwargs)
    finally:
        with _REPLACEMENTS.lock:
            for owner, name, own, ours in replaced if _REPLACEMENTS.count else ():
                if vars(owner)[name] is own:
                    vars(owner)[name] = ours


def _rows(input: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor | None:
    """The input as rows, in the dtype of the product; None if dtypes do not fit."""
    kind, dtypes = input.device.type, {each.dtype for each in (input, *others) if each is not None}
    if torch.is_autocast_enabled(kind) and dtypes <= _DTYPES - {torch.float64}:
        input = input.to(torch.get_autocast_dtype(kind))
    elif len(dtypes) > 1:
        return None
    return input.reshape(-1, input.shape[-1])


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if id(weight) in _WEIGHTS and _is_fused(weight, input, bias):
        rows = _rows(input, weight, bias)
        if rows is not None:
            product = _Linear.apply(rows, weight, bias, True)  # type: ignore[no-untyped-call]
            # Not a view, which could not be written to as what torch returns can.
            return torch.ops.aten._unsafe_view(product, [*input.shape[:-1], len(weight)])  # type: ignore[no-any-return]
    return _own(_LINEAR, (input, weight, bias))


def _addmm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Hugging Face's Conv1D calls it with a weight."""
    if len(args) == 3 and not kwargs and id(args[2]) in _WEIGHTS:
        bias, input, weight = args
        if _is_fused(weight, input, bias) and input.ndim == 2:
            rows = _rows(input, weight, bias)
            if rows is not None:
                return _Linear.apply(rows, weight, bias, False)  # type: ignore[no-any-return, no-untyped-call]
    return _own(_ADDMM, args, kwargs)


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if (
        id(weight) in _WEIGHTS
        and _is_fused(weight, input)
        and max_norm is None
        and not (scale_grad_by_freq or sparse)
    ):
        return _Embedding.apply(input, weight, padding_idx)  # type: ignore[no-any-return, no-untyped-call]
    options = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    return _own(_EMBEDDING, (input, weight, *options))


_REPLACEMENTS = Replacements()
_REPLACEMENTS.add(functional, "linear", _linear)
_REPLACEMENTS.add(functional, "embedding", _embedding)
_REPLACEMENTS.add(torch, "addmm", _addmm)

FUSES.append(fuse)
