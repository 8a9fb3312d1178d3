"""The torch side of `verify`: which dtypes a function computes in, and what it depends on."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from funcga._grad import GradientFunction
from funcga._types import GradFn, Tree
from torch_backend import trees
from torch_backend.arrays import recording_loss
from torch_backend.modules import PureLoss, pure_loss, trainable
from torch_backend.modules.checks import called, modules_in
from torch_backend.wrapped.gradient import ModuleGradient


def precision(precise: bool) -> AbstractContextManager[None]:
    """A context for computing in full precision; with `precise`, float64 is enabled."""
    # Convolutions on CUDA are in TF32 by default; matrix products are not.
    return (
        torch.backends.cudnn.flags(allow_tf32=False) if torch.cuda.is_available() else nullcontext()
    )


def copy(array: torch.Tensor) -> torch.Tensor:
    """A copy of the array, in no graph."""
    return array.detach().clone()


def take(array: torch.Tensor, axis: int, rows: Sequence[int]) -> torch.Tensor:
    """A copy of these rows, which may repeat, along an axis."""
    return array.index_select(axis, torch.tensor(rows, device=array.device))


def random_kept() -> AbstractContextManager[None]:
    """A context after which the global random generators are as they were before it."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.random.fork_rng(devices=range(torch.cuda.device_count() if used else 0))


def trace_call(
    function: GradFn, args: Tree, kwargs: Tree
) -> tuple[list[torch.Tensor], str, float, bool]:
    """(values, program, eps, draws) of a call.

    values, program: arrays and a text that are the same in all calls of a pure function. eps: of
    the coarsest float dtype in it. draws: whether it draws random numbers.
    """
    with _Watch() as mode:
        output = function(*args, **kwargs)
    values = [tensor.detach() for tensor in trees.tensors_in(output)]
    dtypes = {leaf.dtype for leaf in values} | mode.dtypes
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    eps = [torch.finfo(dtype).eps for dtype in floats]
    return values, "", max(eps, default=2.0**-52), mode.draws


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()
        self.draws = False

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: Tree = (), kwargs: Tree = None
    ) -> Tree:
        output = func(*args, **(kwargs or {}))
        # The weights of micro-batches, which have no axes, are float32 in any case.
        self.dtypes |= {tensor.dtype for tensor in trees.tensors_in(output) if tensor.ndim}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return output


def second_output(
    function: GradFn, transform: GradFn | None, args: Tree, kwargs: Tree
) -> Tree | None:
    """The output of a gradient function, computed in a second way; None if there is none.

    transform: that of torch.func, for a gradient function of funcga. Any other function is called
    as if inside of a loss that is differentiated: then steps in it return results with a graph.
    """
    # torch.func leaves hooks of parameters out.
    if transform is not None and any(
        p._backward_hooks for m in _modules(function) for p in m.parameters()
    ):
        return None
    try:
        if transform is not None:
            return transform(*args, **kwargs)
        with recording_loss():
            return function(*args, **kwargs)
    # Checkpoints, saved-tensor hooks and some custom functions are not for torch.func.
    except Exception:
        return None


def batch_normalisers(function: Callable[..., object]) -> list[str]:
    """The layers that the function closes over and that normalise over the batch, by path and
    type.
    """
    return [
        f"`{name or type(part).__name__}` ({type(part).__name__}, in training mode)"
        for module in _modules(function)
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    ]


class _OfModule(GradientFunction):
    """What module_value_and_grad made, as a gradient function of the parameters."""

    brings_parameters = True


def of_parameters(function: GradFn) -> tuple[GradientFunction, dict[str, torch.Tensor]] | None:
    """(the same gradient as a function of parameters, the parameters) for the gradient function of
    a module that nothing wraps; None for any other one.
    """
    if type(function) is not ModuleGradient:
        return None
    pure = pure_loss(function.module, function.loss_fn)
    gradient = _OfModule(pure, 0, function.has_aux, True, function.scaled, {True})
    return gradient, dict(trainable(function.module))


def module_loss(function: Callable[..., object]) -> Callable[..., object] | None:
    """The loss_fn(module, *batch) if the function is the gradient of a pure_loss, else None."""
    pure = _pure_loss(function)
    return None if pure is None or pure.buffers else called(pure.loss_fn)


def _pure_loss(function: Callable[..., object]) -> PureLoss | None:
    pure = inspect.unwrap(function, stop=lambda inner: isinstance(inner, PureLoss))
    return pure if isinstance(pure, PureLoss) else None


def _modules(function: Callable[..., object]) -> list[torch.nn.Module]:
    pure = _pure_loss(function)
    return [*modules_in(function), *([] if pure is None else [pure.module])]
