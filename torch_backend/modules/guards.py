"""What a pure loss must not do: bypass the reduction of a wrapped module, or write to somebody's `.grad`."""

import functools
import gc
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from funcga._grad import GradientFunction
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.wrapped.graphs import last_applied


def check_module_and_loss(module: Any, loss_fn: Any, name: str) -> None:
    """Raises FuncgaError if these are no module and no function of it; `name` is what was called with them."""
    if not isinstance(module, nn.Module):
        raise FuncgaError(
            f"{name} was given {type(module).__name__} as its module. Pass the module, then the loss: "
            f"{name}(model, lambda model, x, y: F.mse_loss(model(x), y))."
        )
    if not callable(loss_fn):
        raise FuncgaError(
            f"loss_fn is {loss_fn!r}, which is no function. Pass loss_fn(module, *batch) -> scalar, such as "
            f"lambda model, x, y: F.mse_loss(model(x), y)."
        )


def check_not_scripted(module: nn.Module) -> None:
    """Raises FuncgaError for a module of TorchScript, or one inside, in which nobody can put other parameters."""
    for name, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule):
            where = f"the part `{name}` of the module" if name else "the module"
            raise FuncgaError(
                f"{where} is one of TorchScript, whose parameters cannot be replaced by others for a pure loss. Use "
                f"the module that it was made of; or torch_backend.module_value_and_grad(module, loss_fn), which runs "
                f"on the module's own parameters."
            )


def check_not_wrapped(*modules: nn.Module) -> None:
    """Raises FuncgaError if a module, or one inside, is wrapped to reduce gradients: a pure loss bypasses that."""
    for module in modules if _distributed() else ():
        for name, inner in module.named_modules():
            wrapper = wrapper_of(inner)
            if wrapper:
                where = f"the part `{name}` of it is" if name else "it is"
                raise FuncgaError(
                    f"the loss uses a module of type {type(module).__name__}, and {where} wrapped by {wrapper}. With "
                    f"parameters as arguments its gradients are silently not reduced over the replicas. Leave it to "
                    f"the wrapper: funcga.accumulate(torch_backend.module_value_and_grad(module, loss_fn), n). Or use "
                    f"the module that was wrapped, `module.module` of a DDP, and let funcga reduce: "
                    f"accumulate(..., across=group)."
                )


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def wrapper_of(module: nn.Module) -> str | None:
    """What reduces the gradients of the module: "DistributedDataParallel", for instance; None if nothing does."""
    for where, kind, name in _WRAPPERS:
        found = getattr(sys.modules.get(where), kind, None)
        if found is not None and isinstance(module, found):
            return name
    return None


# (module, class, what it is called); those not imported wrap nothing
_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel"),
    ("torch.distributed._composable.replicate", "DDP", "replicate"),
    ("torch.distributed._composable.replicate_with_fsdp", "ReplicateModule", "replicate"),
    ("torch.distributed.fsdp", "FSDPModule", "fully_shard"),
)


def check_no_wrapped_module_in(grad_fn: Any) -> bool:
    """The same for the modules that a gradient function closes over; False if there is nothing to look for yet.

    These are the modules in closures, defaults, partial arguments and the globals that its code names, and those of the
    functions found there.
    """
    if torch.compiler.is_compiling() or not _distributed():
        return False
    check_not_wrapped(*modules_in(grad_fn))
    return True


def modules_in(function: Any) -> Iterator[nn.Module]:
    """The modules that a function closes over, as far as they can be seen from outside."""
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


_LIBRARIES = ("torch.", "jax.", "numpy.", "funcga.", "torch_backend.")  # whose functions close over no model


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, GradientFunction):
        return [value.loss_fn]
    if hasattr(type(value), "entered"):  # a pure_loss, whose own module was looked at when it was made
        return [value.loss_fn]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, tuple | list):
        return value if len(value) < 100 else ()
    if isinstance(value, dict):
        return value.values() if len(value) < 100 else ()
    if isinstance(value, types.FunctionType) and not (value.__module__ or "").startswith(_LIBRARIES):
        return _closed_over(value)
    return ()


def _closed_over(function: types.FunctionType) -> list[Any]:
    """What a function can name beside its arguments and builtins."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    return [*cells, *named, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if the variable is not set yet
    except ValueError:
        return False
    return True


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*inner)


def check_not_differentiated(name: str, tree: Any) -> None:
    """Raises FuncgaError if these are differentiated from outside: what `name` makes of them has no derivative."""
    if arrays.in_transform() and any(getattr(leaf, "requires_grad", False) for leaf in trees.flatten(tree)[0]):
        raise FuncgaError(
            f"{name} is used inside of a loss that is being differentiated, and its updates carry no derivative. Write "
            f"the update as a function of tensors, such as `p - lr * g`. If it is a constant for that loss, compute it "
            f"under torch.no_grad()."
        )


class GradsWatch:
    """The `.grad`s of some tensors, which a call must leave alone."""

    def __init__(self, tensors: Iterable[Any]):
        leaves = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
        self.before = [(t, t.grad, None if t.grad is None else t.grad._version) for t in leaves]

    def changed(self) -> list[torch.Tensor]:
        """The tensors whose `.grad` is another one than before or was written to; what was None is None again."""
        found = []
        for tensor, grad, version in self.before:
            now = tensor.grad
            if now is not grad or (now is not None and now._version != version):
                found.append(tensor)
                tensor.grad = grad
        self.before = []  # once is enough
        return found

    def check(self) -> None:
        """Raises FuncgaError if one was changed."""
        if self.changed():
            raise FuncgaError(
                "a parameter's .grad changed during the call: loss_fn, or another thread, called .backward() on the "
                "module's own parameters. Return the loss without calling .backward(), and use the parameters that "
                "loss_fn is given: functional_call(module, params, ...), or torch_backend.pure_loss(module, loss_fn)."
            )


class Surroundings:
    """The leaves of autograd around a loss, which backward passes inside of its own may write to.

    `originals`: what the window's leaves are made of, with `paths`. `gradient`: whose loss it is. `in_module`: whether
    the window's leaves are in its module during the backward pass too, as those of a pure_loss.
    """

    def __init__(
        self, originals: list[Any], paths: Callable[[], list[str]], gradient: GradientFunction, in_module: bool
    ):
        self.originals, self.paths, self.gradient, self.in_module = originals, paths, gradient, in_module
        self.since = last_applied()  # before anything of this window was

    @functools.cached_property
    def objects(self) -> list[Any]:
        """The tensors and modules that the loss leads to, by closures, modules, and the attributes of objects."""
        return [*_reachable(self.gradient)]

    @functools.cached_property
    def leaves(self) -> list[torch.Tensor]:
        """All leaves of autograd among these, and the originals."""
        found = [value for value in [*self.originals, *self.objects] if isinstance(value, torch.Tensor)]
        return [tensor for tensor in found if tensor.requires_grad and tensor.is_leaf]

    def check(self, written: list[torch.Tensor]) -> None:
        """Raises FuncgaError if a backward pass inside has written to leaves in the place of those of the window.

        They are the originals; or they have the name and the shape of one, as where functional_call has put a module's
        own parameters back by the time when it runs again.
        """
        found = {id(leaf) for leaf in written}
        if not found:
            return
        if found.isdisjoint(map(id, self.originals)) and (self.in_module or not self._replaced(found)):
            return
        raise FuncgaError(
            "loss_fn runs a module again in the backward pass, as a checkpoint with use_reentrant=True does, and then "
            "with the module's own parameters instead of those that loss_fn is given: functional_call has taken them "
            "out by then. Use torch_backend.pure_loss(module, loss_fn), or use_reentrant=False."
        )

    def _replaced(self, written: set[int]) -> bool:
        """Whether a module has a parameter among those written to, by the name and shape of what is differentiated."""
        names = [".".join(re.findall(r"[\w-]+", path)) for path in self.paths()]
        shapes = [getattr(original, "shape", None) for original in self.originals]
        given = [*zip(names, shapes, strict=True)]

        def fits(name: str, own: str) -> bool:
            return own.endswith(f".{name}") or own.rpartition(".")[2].isdigit()  # which is an item of a list

        modules = [value for value in self.objects if isinstance(value, nn.Module)]
        slots = [slot for module in modules for slot in module.named_parameters(remove_duplicate=False)]
        replaced = [(name, p) for name, p in slots if id(p) in written]
        return any(fits(name, own) and shape == p.shape for own, shape in given for name, p in replaced)


_ENOUGH = 20_000  # objects to look at


def _reachable(function: Any) -> Iterator[Any]:
    """The tensors and modules that can be found from a function, the nearest first."""
    waiting, seen = [function], {id(function)}
    for value in waiting:  # which grows meanwhile
        if issubclass(type(value), torch.Tensor | nn.Module):
            yield value
        if not issubclass(type(value), torch.Tensor) and len(waiting) < _ENOUGH:
            parts = [part for part in _held_by(value, type(value)) if id(part) not in seen]
            seen.update(map(id, parts))
            waiting += parts


def _held_by(value: Any, kind: type) -> Iterable[Any]:
    if kind is types.FunctionType:
        return () if (value.__module__ or "").startswith(_LIBRARIES) else _closed_over(value)
    if issubclass(kind, nn.Module):
        return [*value.parameters(), *vars(value).values()]
    if issubclass(kind, type | types.ModuleType) or (issubclass(kind, _CONTAINERS) and len(value) > 1000):
        return ()
    return gc.get_referents(value)  # the items of containers, the attributes of objects, bound arguments


_CONTAINERS = (list, tuple, dict, set, frozenset)
