"""What a window differentiates by: some of its arguments, or a module's own parameters.

Only torch has this file: JAX differentiates a program by its arguments.

For each parameter among the arguments a window makes a leaf of its own,
`p.detach().requires_grad_()`, which shares the parameter's memory. So arguments, modules and their
`.grad`s stay as they are, and everything that autograd can do works: checkpointing, saved-tensor
hooks, custom functions, compiled losses. Of a module's own gradients the leaves are its parameters
themselves, whose `.grad`s are put aside meanwhile.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from funcga._backend import Backend
from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import CARRY, Argument, Arguments, argument_names
from funcga._grad import GradientFunction
from funcga._types import Array, GradFn, Structure, Tree
from funcga.errors import FuncgaError, uninitialised
from torch_backend import _private, arrays, trees
from torch_backend.dtensor import as_dtensor, is_dtensor
from torch_backend.former.foreign_leaves import GradsWatch, Surroundings, gradients_aside
from torch_backend.gradients import put_hooks
from torch_backend.modules import PureLoss
from torch_backend.modules.checks import check_initialised, check_no_params, check_unfrozen
from torch_backend.modules.layers import Walk, call_loss
from torch_backend.modules.visits import IN_USE

# A context that the loss is called in, which gives the function to call.
LossContext = AbstractContextManager[Callable[..., Any]]


class Leaves(NamedTuple):
    """One argument that is differentiated: its tree, and the leaves of it that autograd records;
    None stays None.
    """

    tree: Tree
    leaves: Sequence[torch.Tensor | None]
    structure: Structure
    originals: Sequence[Any]


@dataclass(eq=False)
class Inputs:
    """What a gradient function differentiates its loss by.

    `begin` makes the leaves that last as long as the window: `leaves` has them by the index of
    their argument, and `tensors` all of them. `are_whole`: whether no others are made for each
    micro-batch. `hooked`: whether a parameter has hooks of the user's. `watch` has the `.grad`s of
    parameters that were given and require grad themselves.

    `visit` is the context that the loss is called in, and `first` the first argument that it is
    given: a pure_loss has its parameters in the module. `count`: how many arguments there are.
    """

    gradient: GradientFunction
    backend: Backend
    # Class attributes without a type are no fields: these are what an instance begins with.
    are_whole, hooked, first, count = True, False, 0, 0
    watch: GradsWatch | None = field(default=None, init=False)
    leaves: dict[int, Leaves] = field(init=False)
    tensors: list[torch.Tensor] = field(init=False)
    visit: LossContext = field(init=False)

    def detached(self, args: tuple[Tree, ...], leading: bool = False) -> tuple[Tree, ...]:
        """The arguments without graphs, except those that are differentiated; `leading`: those
        of a stream.
        """
        raise NotImplementedError

    def begin(
        self, arguments: Arguments, args: tuple[Tree, ...], stack: ExitStack, stays: bool
    ) -> None:
        """Makes the leaves that last. `stack` is closed when the window ends; `stays`: whether a
        module may keep the parameters between two micro-batches.
        """
        raise NotImplementedError

    def with_those_of(self, args: tuple[Tree, ...]) -> tuple[dict[int, Leaves], list[torch.Tensor]]:
        """(all leaves in a micro-batch of these arguments, those that only it has)."""
        return self.leaves, []

    def _paths(self, tree: Tree, index: int) -> list[str]:
        return leaf_paths(tree, trees, self._name(index))

    def _name(self, index: int) -> str:
        raise NotImplementedError

    @cached_property
    def surroundings(self) -> Surroundings:
        """What functions of the loss may write to in backward passes of their own."""
        paths = lambda: [
            path
            for index, leaves in self.leaves.items()
            for path in self._paths(leaves.tree, index)
        ]
        originals = [original for leaves in self.leaves.values() for original in leaves.originals]
        return Surroundings(originals, paths, self.gradient, self.are_in_module)

    @property
    def are_in_module(self) -> bool:
        """Whether a module has the leaves during the backward pass, too."""
        return True

    def check_dense(self, leaves: Mapping[int, Leaves]) -> None:
        """Raises FuncgaError for a sparse parameter; a sparse gradient of a dense one is summed."""
        for index, argument in leaves.items():
            for position, leaf in enumerate(argument.leaves):
                if leaf is not None and leaf.layout is not torch.strided:
                    path = self._paths(argument.tree, index)[position]
                    raise FuncgaError(
                        f"`{path}` is a sparse tensor {arrays.describe(leaf)}, and sums of "
                        "gradients are dense, as parameters have to be. Let the values be the "
                        "parameter, and make the sparse tensor of them in loss_fn: "
                        "torch.sparse_coo_tensor(indices, values, shape)."
                    )

    def check_unchanged(self) -> None:
        """Raises FuncgaError if the window has changed what it was given."""

    def unreached(self) -> FuncgaError:
        """The error for a loss that depends on none of these."""
        return self.gradient.unreached(self.count, self.backend)


@dataclass(eq=False)
class DifferentiatedArguments(Inputs):
    """Some of the arguments. One that is split has leaves of its own in each micro-batch.

    `indices_of` is kept by the step: which arguments are differentiated, by how many there are.
    """

    indices_of: dict[int, tuple[int, ...]]

    def _indices(self, count: int) -> tuple[int, ...]:
        """Which of `count` arguments are differentiated."""
        if count not in self.indices_of:
            self.indices_of[count] = self.gradient.arg_indices(count)
        return self.indices_of[count]

    def detached(self, args: tuple[Tree, ...], leading: bool = False) -> tuple[Tree, ...]:
        """The arguments without graphs, except those that are differentiated."""
        argnums = self.gradient.argnums
        if leading:
            # How many arguments a stream has shows only with the first micro-batch.
            argnums = argnums if isinstance(argnums, tuple) else (argnums,)
        else:
            argnums = self._indices(len(args))
        return tuple(
            [
                arg if index in argnums else detached(arg, recorded=True)
                for index, arg in enumerate(args)
            ]
        )

    def begin(
        self, arguments: Arguments, args: tuple[Tree, ...], stack: ExitStack, stays: bool
    ) -> None:
        """Makes leaves of the arguments that are passed whole."""
        self.count, indices = len(args), self._indices(len(args))
        self.leaves = {
            index: self.leaves_of(args[index], index)
            for index in indices
            if not arguments.parts[index].axes
        }
        self.are_whole = len(self.leaves) == len(indices)
        self.tensors = [
            leaf
            for argument in self.leaves.values()
            for leaf in argument.leaves
            if leaf is not None
        ]
        # A loss that runs .backward() on the parameters themselves would write to their `.grad`s.
        watched = [
            original
            for leaves in self.leaves.values()
            for original in leaves.originals
            if isinstance(original, torch.Tensor) and original.requires_grad
        ]
        if watched:
            self.watch = GradsWatch(watched)
            stack.callback(self.watch.changed)  # after an error, too, `.grad`s are as before
        # It grows with each write to a leaf.
        self.versions = sum(map(_private.version, self.tensors))
        loss = self.gradient.loss_fn
        if isinstance(loss, PureLoss) and not arguments.parts[0].axes:
            self._begin_visit(loss, args[0], stack if stays else None)
        else:
            self.visit = nullcontext(loss)

    def _begin_visit(self, loss: PureLoss, params: Tree, stack: ExitStack | None) -> None:
        """Lets a pure_loss be called in its module, which has the parameters meanwhile: it is
        given none. If there is a `stack`, one visit lasts until that is closed.
        """
        params = self.leaves[0].tree if 0 in self.leaves else params
        self.visit, self.first = loss.entered(params, recorded=True), 1
        if stack is not None and not (loss.buffers or loss.statistics):
            self.visit = nullcontext(stack.enter_context(self.visit))

    def with_those_of(self, args: tuple[Tree, ...]) -> tuple[dict[int, Leaves], list[torch.Tensor]]:
        """(all leaves in a micro-batch of these arguments, those that only it has)."""
        moving = {
            index: self.leaves_of(args[index], index)
            for index in self._indices(self.count)
            if index not in self.leaves
        }
        in_order = {index: (moving | self.leaves)[index] for index in self._indices(self.count)}
        return in_order, tensors_of(moving)

    def leaves_of(self, tree: Tree, index: int) -> Leaves:
        """Leaves of an argument, with its hooks. Raises FuncgaError if it cannot be
        differentiated.
        """
        originals, structure = trees.flatten(tree)
        is_plain = are_plain(originals)
        if not is_plain:
            check_unfrozen(originals, tree, self.gradient, index)
        try:
            leaves = [
                leaf if leaf is None else leaf.detach().requires_grad_() for leaf in originals
            ]
        except (RuntimeError, AttributeError, ValueError):
            # Python numbers, integer tensors, or tensors made in inference mode. The check says
            # which cannot be differentiated at all; the others are copied.
            self.gradient.check_leaves(tree, index, self.backend)
            copies = [
                leaf if leaf is None else arrays.as_array(leaf).detach().clone()
                for leaf in originals
            ]
            leaves = [leaf if leaf is None else leaf.requires_grad_() for leaf in copies]
        if not is_plain:
            self.hooked |= put_hooks(originals, leaves, lambda: self._paths(tree, index))
        return Leaves(trees.unflatten(structure, leaves), leaves, structure, originals)

    def _name(self, index: int) -> str:
        return argument_names(self.gradient.loss_fn, index + 1)[index]

    @property
    def are_in_module(self) -> bool:
        """Whether a module has the leaves during the backward pass, too, as that of a pure_loss."""
        return self.first == 1

    def check_unchanged(self) -> None:
        """Raises FuncgaError if a parameter, or its `.grad`, was written to during the window."""
        if sum(map(_private.version, self.tensors)) != self.versions:
            raise FuncgaError(
                "a parameter was changed in place during the window, by loss_fn or by another "
                "thread: the gradients of its micro-batches were taken at different parameter "
                "values. Write to a copy, `p = p + ...`, and update the parameters when the window "
                "is done."
            )
        if self.watch is not None:
            self.watch.check()


OWN = -1  # in place of the index of an argument: the module's own parameters


@dataclass(eq=False)
class OwnParameters(Inputs):
    """A module's own parameters. None of them is an argument.

    The module may write to them, as an embedding with max_norm does.
    """

    module: nn.Module
    walk: Walk

    def detached(self, args: tuple[Tree, ...], leading: bool = False) -> tuple[Tree, ...]:
        """The arguments without graphs."""
        check_no_params(args, self.module)
        return tuple([detached(arg, recorded=True) for arg in args])

    def begin(
        self, arguments: Arguments, args: tuple[Tree, ...], stack: ExitStack, stays: bool
    ) -> None:
        """Takes the parameters for the leaves, and puts their `.grad`s aside."""
        stack.enter_context(IN_USE.using(self.walk.ids(self.module)))
        params = self.walk.trainable(self.module)
        leaves: list[torch.Tensor | None] = [*params.values()]
        self.leaves = {OWN: Leaves(params, leaves, trees.flatten(params)[1], leaves)}
        self.tensors = [*params.values()]
        if not are_plain(leaves):
            check_initialised(self.module)
            self.hooked = put_hooks(leaves, leaves, lambda: self._paths(params, OWN))
        stack.enter_context(gradients_aside(params.values()))
        self.visit = nullcontext(partial(call_loss, self.gradient.loss_fn, self.module))

    def _name(self, index: int) -> str:
        return "parameters"

    @property
    def are_sharded(self) -> bool:
        """Whether some are DTensors, of which this process has a shard."""
        return any(map(is_dtensor, self.leaves[OWN].leaves))

    def on_meshes(self, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of the shards as the DTensors that the parameters are."""
        return {name: as_dtensor(grads[name], p) for name, p in self.leaves[OWN].tree.items()}


def unsplit(args: tuple[Tree, ...], gradient: GradFn, backend: Backend) -> Arguments:
    """The arguments as a single micro-batch, of which nothing is split."""
    return Arguments(tuple([Argument(arg, [], [], None) for arg in args]), gradient, backend)


def with_a_blank_row(arguments: Arguments) -> Arguments:
    """The arguments of an empty batch, with one row of zeros in it."""

    def blank(leaf: Array, axis: object) -> Array:
        if leaf is None or axis is None or axis is CARRY:
            return leaf
        shape = [*leaf.shape]
        shape[axis] = 1  # type: ignore[call-overload]
        return leaf.new_zeros(shape)

    parts = [
        part._replace(
            leaves=[blank(leaf, axis) for leaf, axis in zip(part.leaves, part.axes, strict=True)]
        )
        if part.axes
        else part
        for part in arguments.parts
    ]
    return replace(arguments, parts=tuple(parts))


def tensors_of(leaves: Mapping[int, Leaves]) -> list[torch.Tensor]:
    """The leaves of all arguments."""
    return [leaf for argument in leaves.values() for leaf in argument.leaves if leaf is not None]


def are_plain(leaves: Sequence[Any]) -> bool:
    """Whether no leaf that is made of these needs to know more than the tensor: no hooks, no marks,
    nothing frozen.

    This glance at all of them is cheap. Only where it is False is each looked at.
    """
    types = {*map(type, leaves)}
    if not types <= {torch.Tensor, nn.Parameter} or (
        nn.Parameter in types and not all(map(_REQUIRES_GRAD, leaves))
    ):
        return False
    # A mark in the `__dict__` is, for example, that of a stand-in for a module's parameter.
    looks = _DICT, _private.has_hooks, _private.has_hooks_on_grad
    return not any(any(map(look, leaves)) for look in looks)


_REQUIRES_GRAD, _DICT = operator.attrgetter("requires_grad"), operator.attrgetter("__dict__")


def detached(tree: Tree, recorded: bool = False) -> Tree:
    """The tree without the graphs of its tensors.

    `recorded`: autograd will record them, outside of every transform. Tensors made in inference
    mode are copied then.
    """
    if not recorded and arrays.in_transform():
        return tree
    leaves, structure = trees.flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if arrays.has_lazy(tensors):
        lazy_index = next(index for index, leaf in enumerate(leaves) if is_lazy(leaf))
        raise uninitialised(leaf_paths(tree, trees, "params")[lazy_index])
    if not any(leaf.requires_grad or (recorded and leaf.is_inference()) for leaf in tensors):
        return tree
    return trees.unflatten(structure, [_without_graph(leaf, recorded) for leaf in leaves])


def _without_graph(leaf: Any, recorded: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if recorded and leaf.is_inference():
        with torch.inference_mode(False):
            return leaf.clone()
    return leaf.detach() if leaf.requires_grad else leaf
