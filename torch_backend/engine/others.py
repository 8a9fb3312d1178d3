"""What belongs to others: the leaves of autograd that a backward pass may come to, and must leave alone.

Only torch has this file: JAX differentiates a program, which has no tensors of somebody else's.

A pass that is restricted to its own leaves leaves all others alone. Only the functions written in Python, each a
torch.autograd.Function, make a difference: they may run passes of their own, as a reentrant checkpoint does. To look
for them in every graph would take 5 % of the time of a loop over small layers, and most losses apply none: so it is
noted when one is.
"""

import functools
import gc
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from funcga._grad import GradientFunction
from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.modules.checks import closed_over

# --- functions written in Python

_last = object()


def last_applied() -> object:
    """What is another object after a function written in Python was applied, whether autograd recorded it or not."""
    return _last if _IS_NOTED else object()


def _note(_: object) -> None:
    global _last
    _last = object()


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def _is_noted() -> bool:
    """Lets every node of such a function note that it is made. False if torch has another way to make them."""
    if "__init__" in vars(BackwardCFunction):
        return False
    BackwardCFunction.__init__ = _note  # type: ignore[assignment, method-assign]
    before = _last
    _Probe.apply(torch.empty(0, device="cpu"))  # type: ignore[no-untyped-call]
    return _last is not before


_IS_NOTED = _is_noted()  # else every graph is looked at


# What adds to the `.grad` of a leaf.
_AccumulateGrad = type(get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)


def reach(loss: torch.Tensor, own: Collection[int]) -> tuple[list[torch.Tensor], bool]:
    """(the leaves of a loss's graph without those of these ids, whether a function in it may run a pass of its own)."""
    assert loss.grad_fn is not None
    nodes: list[Node] = [loss.grad_fn]
    seen: set[Node | None] = {None, *nodes}
    for node in nodes:  # which grow meanwhile
        for after, _ in node.next_functions:
            if after not in seen:
                seen.add(after)
                nodes.append(after)  # type: ignore[arg-type]
    leaves = [node.variable for node in nodes if type(node) is _AccumulateGrad]  # type: ignore[attr-defined]
    custom = any(issubclass(kind, BackwardCFunction) and not _is_compiled(kind) for kind in {*map(type, nodes)})
    return [leaf for leaf in leaves if id(leaf) not in own], custom


def _is_compiled(kind: type) -> bool:
    """Whether this is what torch.compile has made of a graph, which runs no backward pass of its own."""
    return str(kind._forward_cls.__module__).startswith("torch._functorch._aot_autograd.")  # type: ignore[attr-defined]


# --- gradients of others


@contextmanager
def left_alone(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """These leaves have no `.grad` in this context, and their own again afterwards."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


class GradsWatch:
    """The `.grad`s of some tensors, which a call must leave alone."""

    def __init__(self, tensors: Iterable[object]):
        leaves = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
        self.before = [(leaf, leaf.grad, _version_of(leaf.grad)) for leaf in leaves]

    def changed(self) -> bool:
        """Whether a `.grad` is another one than before, which it is again afterwards, or was written to."""
        changed = False
        for leaf, gradient, version in self.before:
            if leaf.grad is not gradient or _version_of(gradient) != version:
                changed, leaf.grad = True, gradient
        self.before = []  # once is enough
        return changed

    def check(self) -> None:
        """Raises FuncgaError if one was changed."""
        if self.changed():
            raise FuncgaError(
                "a parameter's .grad changed during the call: loss_fn, or another thread, called .backward() on the "
                "module's own parameters. Return the loss without calling .backward(), and use the parameters that "
                "loss_fn is given: functional_call(module, params, ...), or torch_backend.pure_loss(module, loss_fn)."
            )


def _version_of(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None else _private.version(gradient)


class Surroundings:
    """The leaves of autograd around a loss, which backward passes inside of its own may write to.

    `originals`: what the window's leaves are made of, with `paths`. `gradient`: whose loss it is. `in_module`: whether
    the window's leaves are in its module during the backward pass too, as those of a pure_loss.
    """

    def __init__(
        self, originals: list[object], paths: Callable[[], list[str]], gradient: GradientFunction, in_module: bool
    ):
        self.originals, self.paths, self.gradient, self.in_module = originals, paths, gradient, in_module

    @functools.cached_property
    def objects(self) -> list[torch.Tensor | nn.Module]:
        """The tensors and modules that the loss leads to, by closures, modules, and the attributes of objects."""
        return [*_reachable(self.gradient)]

    @functools.cached_property
    def leaves(self) -> list[torch.Tensor]:
        """All leaves of autograd among these, and the originals."""
        tensors = [value for value in [*self.originals, *self.objects] if isinstance(value, torch.Tensor)]
        return [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]

    def check(self, written: Sequence[torch.Tensor]) -> None:
        """Raises FuncgaError if a backward pass inside has written to leaves in the place of those of the window.

        They are the originals; or they have the name and the shape of one, as where functional_call has put a module's
        own parameters back by the time when it runs again.
        """
        ids = {id(leaf) for leaf in written}
        if ids.isdisjoint(map(id, self.originals)) and (self.in_module or not self._are_namesakes(ids)):
            return
        raise FuncgaError(
            "loss_fn runs a module again in the backward pass, as a checkpoint with use_reentrant=True does, and then "
            "with the module's own parameters instead of those that loss_fn is given: functional_call has taken them "
            "out by then. Use torch_backend.pure_loss(module, loss_fn), or use_reentrant=False."
        )

    def _are_namesakes(self, written: set[int]) -> bool:
        """Whether a module has a parameter among these, with the name and shape of what is differentiated."""
        if not written:
            return False
        slots = [
            (name, parameter)
            for module in self.objects
            if isinstance(module, nn.Module)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in written
        ]
        for path, original in zip(self.paths(), self.originals, strict=True):
            own_name = ".".join(re.findall(r"[\w-]+", path))
            is_item = own_name.rpartition(".")[2].isdigit()  # of a list, without a name
            for name, parameter in slots:
                is_named = is_item or own_name.endswith(f".{name}")
                if is_named and getattr(original, "shape", None) == parameter.shape:
                    return True
        return False


_ENOUGH = 20_000  # objects to look at
_CONTAINERS = (list, tuple, dict, set, frozenset)


def _reachable(function: object) -> Iterator[torch.Tensor | nn.Module]:
    """The tensors and modules that can be found from a function, the nearest first."""
    waiting, seen = [function], {id(function)}
    for value in waiting:  # which grows meanwhile
        # By its type: some objects answer isinstance() with what they stand for.
        if issubclass(type(value), torch.Tensor | nn.Module):
            yield value  # type: ignore[misc]
        if not issubclass(type(value), torch.Tensor) and len(waiting) < _ENOUGH:
            parts = [part for part in _parts(value, type(value)) if id(part) not in seen]
            seen.update(map(id, parts))
            waiting += parts


def _parts(value: object, kind: type) -> Iterable[object]:
    if kind is types.FunctionType:
        return closed_over(value)  # type: ignore[arg-type]
    if issubclass(kind, nn.Module):
        return [*value.parameters(), *vars(value).values()]  # type: ignore[attr-defined]
    if issubclass(kind, type | types.ModuleType) or (issubclass(kind, _CONTAINERS) and len(value) > 1000):  # type: ignore[arg-type]
        return ()
    return gc.get_referents(value)  # the items of containers, the attributes of objects, bound arguments
