"""What modules and losses must not be: wrapped where nobody would reduce, frozen where a gradient
is asked for.

Only torch has this file: in JAX nothing reduces gradients but the program, and no array is frozen.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._types import LossFn, Tree
from funcga.errors import FuncgaError, similar
from torch_backend import _private, arrays, trees
from torch_backend.modules.closures import modules_in as modules_in

Tensors = Mapping[str, torch.Tensor]


def check_module_and_loss(module: object, loss_fn: object, name: str) -> None:
    """Raises FuncgaError if these are no module and no function of it; `name` is what was called
    with them.
    """
    if not (isinstance(module, nn.Module) and callable(loss_fn)):
        raise FuncgaError(
            f"{name} was given {type(module).__name__} as its module, and {type(loss_fn).__name__} "
            "as its loss. Pass the module, then the loss: "
            f"{name}(model, lambda model, x, y: F.mse_loss(model(x), y))."
        )


# --- modules that are wrapped to reduce their gradients


class WrapperKind(NamedTuple):
    """A way to wrap a module: where its class is, its name, and the class of ours that knows it,
    `module:class`.
    """

    module: str
    class_name: str
    name: str
    wrapper: str


_DDP = "torch_backend.wrapped.ddp:DDP"
_FSDP1 = "funcga.tools.fsdp1.in_torch:FSDP1"
_FSDP2 = "torch_backend.wrapped.fsdp:FSDP2"
_REPLICATE = "torch_backend.wrapped.ddp:Replicate"
_TORCH = "torch.distributed"
_KINDS = (
    WrapperKind("torch.nn.parallel", "DistributedDataParallel", "DistributedDataParallel", _DDP),
    WrapperKind(f"{_TORCH}.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel", _FSDP1),
    WrapperKind(f"{_TORCH}._composable.replicate", "DDP", "replicate", _REPLICATE),
    WrapperKind(
        f"{_TORCH}._composable.replicate_with_fsdp", "ReplicateModule", "replicate", _FSDP2
    ),
    WrapperKind(f"{_TORCH}.fsdp", "FSDPModule", "fully_shard", _FSDP2),
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


# --- tensors in the place of the module's own


def replaced(given: Tensors, own: Mapping[str, torch.Tensor], what: str) -> dict[int, torch.Tensor]:
    """The given tensors by the ids of the module's `own` that they stand in for. Raises FuncgaError
    for names and shapes that the module does not have, for gradients of frozen parameters, and
    where hooks would not be called. `what`: "parameters" or "buffers".
    """
    by_id: dict[int, torch.Tensor] = {}  # annotated: torch.compile cannot trace dict[...]()
    for name, tensor in given.items():
        original = own.get(name)
        if original is None or tensor.shape != original.shape:
            hint = similar(name, own) if original is None else ""
            raise FuncgaError(
                f"`{name}` is {arrays.describe(tensor)}, and among the {what} of the module it is "
                f"{arrays.describe(original)}{hint}. Give each by the name and in the shape that "
                f"it has there: dict(module.named_{what}())."
            )
        if id(original) in by_id:
            raise FuncgaError(
                f"`{name}` and another of the {what} that were given are one tensor in the module, "
                f"tied: give one of the two names, as dict(module.named_{what}()) does."
            )
        by_id[id(original)] = tensor
    _check_differentiated({n: each for n, each in given.items() if each.requires_grad}, own)
    return by_id


def _check_differentiated(given: Tensors, own: Tensors) -> None:
    """Raises FuncgaError for gradients of frozen parameters, and for hooks that are not called."""
    frozen = [name for name in given if not own[name].requires_grad]
    frozen = [name for name in frozen if isinstance(own[name], nn.Parameter)]
    # If none is trained, the module is a mere frame for parameters from elsewhere.
    if frozen and any(tensor.requires_grad for tensor in own.values()):
        raise _frozen(frozen[0])
    for name, tensor in given.items() if _private.transforms() else ():
        has_hooks = _private.hooks_of(own[name]) and not _private.hooks_of(tensor)
        # What was computed from a parameter, as in meta-learning, has no use for its hooks.
        if has_hooks and tensor.is_leaf:
            raise FuncgaError(
                f"`{name}` has a hook of register_hook, which a transform of torch.func does not "
                "call. Take the gradient with funcga.grad or funcga.value_and_grad, which do; or "
                "remove it with handle.remove()."
            )


# --- what is differentiated


def check_unfrozen(tree: Tree, function: Callable[..., object], argnum: int) -> None:
    """Raises FuncgaError if there are frozen nn.Parameters in this argument of a function."""
    for index, leaf in enumerate(trees.flatten(tree)[0]):
        if isinstance(leaf, nn.Parameter) and not leaf.requires_grad:
            name = argument_names(function, argnum + 1)[argnum]
            raise _frozen(leaf_paths(tree, trees, name)[index])


def _frozen(path: str) -> FuncgaError:
    return FuncgaError(
        f"`{path}` is frozen, requires_grad=False, and a gradient was asked for: an optimizer "
        "would move it. Give the parameters that are trained: torch_backend.trainable(module). Or "
        "unfreeze it: parameter.requires_grad_(True)."
    )


def nothing_to_train(module: nn.Module) -> FuncgaError:
    """The error for a module that is frozen as a whole."""
    return FuncgaError(
        f"no parameter of the {type(module).__name__} requires grad, so there is nothing to train. "
        "Unfreeze what is to be trained: module.requires_grad_(True), or "
        "parameter.requires_grad_(True)."
    )


def check_not_differentiated(name: str, tree: Tree) -> None:
    """Raises FuncgaError if these are differentiated from outside: the result of `name` has no
    derivative.
    """
    leaves = trees.flatten(tree)[0] if arrays.in_transform() else ()
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        raise FuncgaError(
            f"{name} is used inside of a loss that is being differentiated, and its updates carry "
            "no derivative. Write the update as a function of tensors, such as `p - lr * g`. If it "
            "is a constant for that loss, compute it under torch.no_grad()."
        )
