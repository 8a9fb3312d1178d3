"""What modules and losses must not be: wrapped where nobody would reduce, frozen where a gradient
is asked for.

Only torch has this file: in JAX nothing reduces gradients but the program, and no array is frozen.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._types import LossFn, Tree
from funcga.errors import FuncgaError
from torch_backend import trees
from torch_backend.modules.closures import modules_in as modules_in

# --- modules that are wrapped to reduce their gradients


class WrapperKind(NamedTuple):
    """A way to wrap a module: where its class is, its name, and the class of ours that knows it,
    `module:class`.
    """

    module: str
    class_name: str
    name: str
    wrapper: str


_DDP, _FSDP = "DistributedDataParallel", "FullyShardedDataParallel"
_FSDP2, _COMPOSABLE = "torch_backend.wrapped.fsdp:FSDP2", "torch.distributed._composable"
_KINDS = (
    WrapperKind("torch.nn.parallel", _DDP, _DDP, "torch_backend.wrapped.ddp:DDP"),
    WrapperKind("torch.distributed.fsdp", _FSDP, _FSDP, "funcga.tools.fsdp1.in_torch:FSDP1"),
    WrapperKind(
        f"{_COMPOSABLE}.replicate", "DDP", "replicate", "torch_backend.wrapped.ddp:Replicate"
    ),
    WrapperKind(f"{_COMPOSABLE}.replicate_with_fsdp", "ReplicateModule", "replicate", _FSDP2),
    WrapperKind("torch.distributed.fsdp", "FSDPModule", "fully_shard", _FSDP2),
)


def wrapper_kind_of(module: nn.Module) -> WrapperKind | None:
    """How the module is wrapped to reduce its gradients; None if it is not."""
    # A wrapper whose module is not imported can wrap nothing, so nothing is imported here.
    for kind in _KINDS:
        place = sys.modules.get(kind.module)
        if place is not None and isinstance(module, getattr(place, kind.class_name, ())):
            return kind
    return None


def check_not_wrapped(module: nn.Module) -> None:
    """Raises FuncgaError if a module, or one inside, is wrapped to reduce gradients, and used as if
    nothing wrapped it.
    """
    # Nothing is wrapped before processes know each other.
    is_distributed = dist.is_available() and dist.is_initialized()
    for name, part in module.named_modules() if is_distributed else ():
        kind = wrapper_kind_of(part)
        if kind is not None:
            where = f"the part `{name}` of it is" if name else "it is"
            raise FuncgaError(
                f"the loss uses a module of type {type(module).__name__}, and {where} wrapped by "
                f"{kind.name}: in this step its gradients are silently not reduced over the "
                "replicas. Leave it to the wrapper: wrap the module first, and then make the step, "
                "funcga.accumulate(torch_backend.module_value_and_grad(module, loss_fn), n). Or "
                "use the module that was wrapped, `module.module` of a DDP, and let funcga reduce: "
                "accumulate(..., across=group)."
            )


# --- what a loss is called with


def called(loss_fn: LossFn) -> LossFn:
    """The function that has the parameters of a loss: of an nn.Module its forward."""
    return loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn


def signature_with(loss_fn: LossFn, names: Sequence[str]) -> inspect.Signature | None:
    """The signature of loss_fn(module, *batch) with parameters of these names in the place of the
    module; None if that is not known.
    """
    try:
        signature = inspect.signature(called(loss_fn))
        module, *others = signature.parameters.values()
        if module.kind is inspect.Parameter.VAR_POSITIONAL:
            return None
        instead = [inspect.Parameter(name, module.kind) for name in names]
        return signature.replace(parameters=[*instead, *others])
    except (TypeError, ValueError):
        return None


# --- what is differentiated


def check_unfrozen(tree: Tree, function: Callable[..., object], argnum: int) -> None:
    """Raises FuncgaError if there are frozen nn.Parameters in this argument of a function."""
    for index, leaf in enumerate(trees.flatten(tree)[0]):
        if isinstance(leaf, nn.Parameter) and not leaf.requires_grad:
            name = argument_names(function, argnum + 1)[argnum]
            raise frozen(leaf_paths(tree, trees, name)[index])


def frozen(path: str) -> FuncgaError:
    """The error for a gradient of a frozen parameter."""
    return FuncgaError(
        f"`{path}` is frozen, requires_grad=False, and a gradient was asked for: an optimizer "
        "would move it. Give the parameters that are trained: torch_backend.trainable(module). Or "
        "unfreeze it: parameter.requires_grad_(True)."
    )
