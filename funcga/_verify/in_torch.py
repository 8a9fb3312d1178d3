"""What `verify` asks of a framework about a user's function: what it computes in, and what it depends on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from torch_backend import arrays, trees
from torch_backend.engine.recording import recording_loss
from torch_backend.modules.checks import modules_in


def precision(dtype: str) -> AbstractContextManager[Any]:
    """A context in which arrays of this dtype exist and are computed with in all of their bits."""
    return nullcontext()  # on the CPU they always are


def differentiated() -> AbstractContextManager[Any]:
    """A context in which steps keep the graph of what they return, as inside of a loss that is differentiated."""
    return recording_loss()


def take(array: torch.Tensor, axis: int, rows: Sequence[int]) -> torch.Tensor:
    """A copy of these rows, which may repeat, along an axis."""
    return array.index_select(axis, torch.tensor(rows, device=array.device))


def random_state() -> Any:
    """The state of every global random generator of this framework."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if used else []
    return torch.get_rng_state(), cuda


def restore(state: Any) -> None:
    """Puts back what `random_state` returned."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def watch(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], str, float, bool, bool]:
    """(values, program, eps, random, mixed) of a call: what two calls must share, and how it computes.

    values: arrays that are the same for every call of a pure function; program: a text that is. eps: of the coarsest
    float dtype that it computes in. random: whether it draws numbers. mixed: whether it computes in several precisions.
    """
    with _Watch() as seen:
        output = function(*args, **kwargs)
    values = [leaf.detach() for leaf in trees.flatten(output)[0] if arrays.is_array(leaf)]
    found = {torch.finfo(dtype).eps for dtype in seen.dtypes} or {0.0}
    return values, "", max(found), seen.random, len(found) > 1


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in output if isinstance(output, tuple | list) else [output]:
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self.dtypes.add(leaf.dtype)
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return output


def is_write(error: Exception) -> bool:
    """Whether an error says that a function writes to what it closes over, which a transform forbids."""
    return "mutate a captured Tensor" in str(error)


def other_way(gradient: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a gradient function gives by the framework's own transform, if the loop has another; else None.

    gradient: the transform's. function: that of funcga which it stands for.
    """
    modules = [*modules_in(function), *_pure_modules(function)]
    # torch.func leaves hooks of parameters out
    if any(p._backward_hooks for module in modules for p in module.parameters()):
        return None
    try:
        return gradient(*args, **kwargs)
    except Exception:  # checkpoints, saved-tensor hooks and some custom functions are not for torch.func
        return None


def batch_normalisers(function: Callable[..., Any]) -> list[str]:
    """What normalises over the batch among what the function closes over, by path and type."""
    return [
        f"`{name or type(part).__name__}` ({type(part).__name__}, in training mode)"
        for module in [*modules_in(function), *_pure_modules(function)]
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    ]


def _pure_modules(function: Any) -> list[torch.nn.Module]:
    for _ in range(8):
        module = getattr(function, "module", None)
        if isinstance(module, torch.nn.Module):
            return [module]
        function = getattr(function, "loss_fn", getattr(function, "__wrapped__", None))
    return []
