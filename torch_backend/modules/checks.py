"""What modules and losses must not be: wrapped where nobody would reduce, frozen where a gradient
is asked for.

Only torch has this file: in JAX nothing reduces gradients but the program, and no array is frozen.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._types import GradFn, LossFn, Tree
from funcga.errors import FuncgaError, check_callable, similar, uninitialised
from torch_backend import _private, arrays, trees

Tensors = Mapping[str, torch.Tensor]


# --- arguments that are no module, or no loss


def check_module_and_loss(module: object, loss_fn: object, name: str) -> None:
    """Raises FuncgaError if these are no module and no function of it; `name` is what was called
    with them.
    """
    if not isinstance(module, nn.Module):
        raise FuncgaError(
            f"{name} was given {type(module).__name__} as its module. Pass the module, then the "
            f"loss: {name}(model, lambda model, x, y: F.mse_loss(model(x), y))."
        )
    check_callable(loss_fn, "loss_fn", "lambda model, x, y: F.mse_loss(model(x), y)")


def check_no_params(args: tuple[Tree, ...], module: nn.Module) -> None:
    """Raises FuncgaError if the gradient function of a module is called with parameters, as that
    of a pure loss is.
    """
    first = args[0] if args else None
    is_module = first is module
    if is_module or (
        isinstance(first, dict) and any(isinstance(leaf, nn.Parameter) for leaf in first.values())
    ):
        raise FuncgaError(
            f"the first argument is {'the module' if is_module else 'a dict of parameters'}, and "
            "module_value_and_grad uses the module's own. Pass the batch alone: step(x, y), or "
            "stream's f(microbatches)."
        )


def check_initialised(module: nn.Module) -> None:
    """Raises FuncgaError for a parameter, or a buffer, that has no shape yet."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise uninitialised(name)


# --- modules that are wrapped to reduce their gradients


class WrapperKind(NamedTuple):
    """A way to wrap a module: where its class is, its name, and the class of ours that knows it,
    `module:class`.
    """

    module: str
    class_name: str
    name: str
    wrapper: str


_KINDS = (
    WrapperKind(
        "torch.nn.parallel",
        "DistributedDataParallel",
        "DistributedDataParallel",
        "torch_backend.wrapped.ddp:DDP",
    ),
    WrapperKind(
        "torch.distributed.fsdp",
        "FullyShardedDataParallel",
        "FullyShardedDataParallel",
        "funcga.tools.fsdp1.in_torch:FSDP1",
    ),
    WrapperKind(
        "torch.distributed._composable.replicate",
        "DDP",
        "replicate",
        "torch_backend.wrapped.ddp:Replicate",
    ),
    WrapperKind(
        "torch.distributed._composable.replicate_with_fsdp",
        "ReplicateModule",
        "replicate",
        "torch_backend.wrapped.fsdp:FSDP2",
    ),
    WrapperKind(
        "torch.distributed.fsdp", "FSDPModule", "fully_shard", "torch_backend.wrapped.fsdp:FSDP2"
    ),
)


def wrapper_kind_of(module: nn.Module) -> WrapperKind | None:
    """How the module is wrapped to reduce its gradients; None if it is not."""
    # A wrapper whose module is not imported can wrap nothing, so nothing is imported here.
    for kind in _KINDS:
        if kind.module in sys.modules and isinstance(
            module, vars(sys.modules[kind.module]).get(kind.class_name, ())
        ):
            return kind
    return None


def check_not_wrapped(*modules: nn.Module) -> None:
    """Raises FuncgaError if a module, or one inside, is wrapped to reduce gradients: a pure loss
    bypasses that.
    """
    for module in modules:
        for where, kind in _wrapped_in(module):
            raise FuncgaError(
                f"the loss uses a module of type {type(module).__name__}, and {where} wrapped by "
                f"{kind.name}: with parameters as arguments its gradients are silently not reduced "
                "over the replicas. Leave it to the wrapper: "
                "funcga.accumulate(torch_backend.module_value_and_grad(module, loss_fn), n). Or "
                "use the module that was wrapped, `module.module` of a DDP, and let funcga reduce: "
                "accumulate(..., across=group)."
            )


def check_wrapped_before(module: nn.Module) -> None:
    """Raises FuncgaError if a module whose gradient function was made without a wrapper is
    wrapped now.
    """
    for where, kind in _wrapped_in(module):
        raise FuncgaError(
            f"module_value_and_grad was given a {type(module).__name__} that nothing wrapped, and "
            f"now {where} wrapped by {kind.name}: the step would miss parameters, and would not "
            "reduce their gradients over the replicas. Wrap the module first, and then make the "
            "step: accumulate(module_value_and_grad(module, loss_fn), n)."
        )


def _wrapped_in(module: nn.Module) -> Iterator[tuple[str, WrapperKind]]:
    """(words for where, how) of the module and those inside that are wrapped to reduce
    gradients.
    """
    # Nothing is wrapped before processes know each other.
    for name, inner in module.named_modules() if _is_distributed() else ():
        kind = wrapper_kind_of(inner)
        if kind is not None:
            yield f"the part `{name}` of it is" if name else "it is", kind


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_no_wrapped_module_in(grad_fn: GradFn) -> bool:
    """Checks the modules that a gradient function closes over; False if no wrapper can exist yet.

    It looks in closures, defaults, partial arguments and the globals that the code names, and in
    functions among these.
    """
    if not _is_distributed():
        return False
    check_not_wrapped(*modules_in(grad_fn))
    return True


# --- what a function closes over


def called(loss_fn: LossFn) -> LossFn:
    """The function that has the parameters of a loss: of an nn.Module its forward."""
    return loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn


def signature_with(loss_fn: LossFn, names: Sequence[str]) -> inspect.Signature | None:
    """The signature of loss_fn(module, *batch) with parameters of these names in the place of the
    module; None if it has none.
    """
    try:
        signature = inspect.signature(called(loss_fn))
    except (TypeError, ValueError):
        return None
    parameters = [*signature.parameters.values()]
    # loss_fn(*args) takes the module as one of them.
    has_name = parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    positional = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
    kind = (parameters.pop(0) if has_name else positional).kind
    taken = {parameter.name for parameter in parameters}
    replaced = [inspect.Parameter(name + "_" * (name in taken), kind) for name in names]
    return signature.replace(parameters=[*replaced, *parameters])


def modules_in(function: object) -> Iterator[nn.Module]:
    """The modules that a function closes over, as far as they can be seen from outside."""
    # Functions name other functions, and these name others. After a few steps they have little to
    # do with the loss.
    waiting, seen = [(function, 0)], set()
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or depth > 6:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        else:
            waiting += [(part, depth + 1) for part in _parts(value)]


def _parts(value: object) -> Iterable[object]:
    match value:
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case types.MethodType():
            return [value.__self__, value.__func__]
        case tuple() | list():
            return value if len(value) < 100 else ()
        case dict():
            return value.values() if len(value) < 100 else ()
        case types.FunctionType():
            return closed_over(value)
    # Of a gradient function, or a pure loss.
    return [value.loss_fn] if hasattr(value, "loss_fn") else ()


# The functions of these close over no model.
_LIBRARIES = ("torch.", "jax.", "numpy.", "funcga.", "torch_backend.")


def closed_over(function: types.FunctionType) -> list[object]:
    """What a function can name beside its arguments and builtins; nothing for those of
    libraries.
    """
    if (function.__module__ or "").startswith(_LIBRARIES):
        return []
    # Cells hold the variables of enclosing functions. The names in the code are those of globals
    # and of attributes alike: looking up one too many does no harm.
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    named = [
        function.__globals__[name]
        for name in _names(function.__code__)
        if name in function.__globals__
    ]
    return [
        *cells,
        *named,
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]


_EMPTY = types.CellType()  # of a variable that is not set yet


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*inner)


# --- tensors in the place of the module's own


def replaced(given: Tensors, own: Mapping[str, torch.Tensor], what: str) -> dict[int, torch.Tensor]:
    """The given tensors by the ids of the module's `own` that they stand in for. Raises FuncgaError
    for names and shapes that the module does not have, and for gradients of frozen parameters.
    `what`: "parameters" or "buffers".
    """
    if not isinstance(given, Mapping):
        raise FuncgaError(
            f"the {what} of a pure_loss are of type {type(given).__name__}; they are a dict of "
            f"name to tensor, such as dict(module.named_{what}())."
        )
    # Annotated, and not list[str](), which torch.compile cannot trace.
    frozen: list[str] = []
    by_id: dict[int, torch.Tensor] = {}
    name_of: dict[int, str] = {}
    for name, tensor in given.items():
        original = own.get(name)
        if original is None:
            raise FuncgaError(
                f"the module has no `{name}`{similar(name, own)} among its {what}. Their names are "
                f"those of dict(module.named_{what}())."
            )
        if not isinstance(tensor, torch.Tensor) or tensor.shape != original.shape:
            raise FuncgaError(
                f"`{name}` is {arrays.describe(tensor)}, and the module's own is "
                f"{arrays.describe(original)}. Give each of the {what} in the shape that it has "
                f"there: dict(module.named_{what}())."
            )
        if name_of.setdefault(id(original), name) != name:
            raise FuncgaError(
                f"`{name_of[id(original)]}` and `{name}` are one tensor in the module, tied: give "
                f"one of the two names, as dict(module.named_{what}()) does."
            )
        if tensor.requires_grad and _is_frozen(original):
            frozen.append(name)
        by_id[id(original)] = tensor
    # If none is trained, the module is a mere frame for parameters from elsewhere.
    if frozen and any(tensor.requires_grad for tensor in own.values()):
        raise _frozen(frozen[0], len(frozen))
    return by_id


def check_hooks_called(given: Tensors, own: Tensors) -> None:
    """Raises FuncgaError if a parameter has hooks, and the tensor that is differentiated in its
    place has none.

    A transform of torch.func differentiates tensors of its own, and calls no hooks of the tensors
    they are made of.
    """
    for name, tensor in given.items():
        # What was computed from a parameter, as in meta-learning, has no use for its hooks.
        is_differentiated = tensor.requires_grad and tensor.is_leaf
        has_hooks = [bool(_private.hooks_of(each)) for each in (own[name], tensor)]
        if is_differentiated and has_hooks == [True, False]:
            raise FuncgaError(
                f"`{name}` has a hook of register_hook, which a transform of torch.func does not "
                "call. Take the gradient with funcga.grad or funcga.value_and_grad, which do; or "
                "remove it with handle.remove()."
            )


# --- what is differentiated


def check_unfrozen(
    leaves: list[object], tree: Tree, function: Callable[..., object], argnum: int
) -> None:
    """Raises FuncgaError if there are frozen nn.Parameters among these leaves of an argument of
    a function.
    """
    frozen = [
        index
        for index, leaf in enumerate(leaves)
        if type(leaf) is not torch.Tensor and _is_frozen(leaf)
    ]
    if frozen:
        name = argument_names(function, argnum + 1)[argnum]
        raise _frozen(leaf_paths(tree, trees, name)[frozen[0]], len(frozen))


def _is_frozen(leaf: object) -> bool:
    return isinstance(leaf, nn.Parameter) and not leaf.requires_grad


def _frozen(path: str, count: int) -> FuncgaError:
    more = f", as are {count - 1} more" if count > 1 else ""
    return FuncgaError(
        f"`{path}` is frozen, requires_grad=False{more}, and a gradient was asked for: an "
        "optimizer would move it. Give the parameters that are trained: "
        "torch_backend.trainable(module). Or unfreeze it: parameter.requires_grad_(True)."
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
