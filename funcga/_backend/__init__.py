"""What a framework must supply.

The mathematics of a fold is in this package and is written against an array namespace, `xp`:
`torch` or `jax.numpy`. A backend supplies only what a framework truly owns: its trees, the facts
about its arrays, its loop and its gradients.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from funcga._types import Across, Array, Dtype, GradFn, Reduced, Scalar, Tree

# These types belong to packages that import this one, so naming them would be a cycle.
Program = Any
Accumulation = Any
GradientFunction = Any
Tally = Any
Window = Any
Memory = Any


# A module implements each of these protocols: `torch_backend.arrays` is an Arrays,
# `jax_backend.arrays` another one. So a reader finds the two answers to one question under one
# name.


class Trees(Protocol):
    """A framework's trees: which containers they have as nodes, in which order, and whether None
    is a leaf.
    """

    def flatten(
        self, tree: Tree, is_leaf: Callable[[Any], bool] | None = None
    ) -> tuple[list[Any], Any]:
        """The leaves, in the framework's order, and the structure that puts them back."""
        ...

    def unflatten(self, structure: Any, leaves: Sequence[Any]) -> Tree:
        """The tree of this structure with these leaves."""
        ...

    def children(self, tree: Tree) -> list[tuple[str, Any]] | None:
        """The (key, subtree) pairs one level down, keys written as in code; None for a leaf."""
        ...


class Arrays(Protocol):
    """What the mathematics has to know of a framework's arrays."""

    # The array namespace: `torch` or `jax.numpy`.
    xp: Any

    def is_array(self, leaf: Any) -> bool:
        """Whether the leaf can be split and folded as it is."""
        ...

    def as_array(self, leaf: Any, dtype: Dtype | None = None, beside: Array | None = None) -> Array:
        """The leaf as an array, a number as a 0-d array, in a dtype, and on the device of the one
        beside it; TypeError for anything else.
        """
        ...

    def as_dtype(self, dtype: Any) -> Dtype:
        """The dtype of this name; FuncgaError if the framework has none."""
        ...

    def scalar(self, weight: Any) -> Any:
        """A weight as a Python number where the host can see it without waiting for a device,
        else as it is.
        """
        ...


class Gradients(Protocol):
    """A framework's transforms from a loss to its gradient."""

    def value_and_grad(
        self, loss_fn: Callable[..., tuple[Array, Tree]], arg_indices: tuple[int, ...]
    ) -> GradFn:
        """A function that returns ((value, aux), grads) of one that returns (value, aux); grads
        has a tree an index.
        """
        ...

    def depends(self, loss: Array) -> bool | None:
        """Whether a loss depends on the inputs of the innermost of these transforms.

        None if that is unknown, and for a constant 0 or NaN, as of a fully masked micro-batch.
        """
        ...


class Loop(Protocol):
    """A framework's loop over the micro-batches."""

    def accumulate(self, program: Program, backend: "Backend") -> Callable[..., Any]:
        """f(args, kwargs): the fold of the program over the micro-batches cut from args."""
        ...

    def stream(self, program: Program, backend: "Backend") -> Callable[..., Any]:
        """f(leading, microbatches, kwargs, device): the fold of the program over an iterable of
        micro-batches, moved to the device if there is one, each while the one before it is
        computed with.
        """
        ...

    def alone(self, grad_fn: GradientFunction, backend: "Backend") -> GradFn:
        """The gradient function for a call outside of any window."""
        ...

    def telling(
        self, programs: Sequence[Program], backend: "Backend"
    ) -> AbstractContextManager[object] | None:
        """The context of a call that folds these programs one after the other, in which other
        processes are told of an error; None if they are folded by one process, or one program.
        """
        ...


class States(Protocol):
    """How a framework adds to the sums of a state between calls, divides and empties them, and how
    replicas share a window. Donated arguments may be written to, and results may share their
    memory.
    """

    def add(
        self,
        window: Accumulation,
        leaves: Sequence[Array],
        weights: Sequence[Scalar],
        donate: bool,
    ) -> list[Reduced]:
        """The accumulators of a window with the value of one more micro-batch."""
        ...

    def counted(self, window: Accumulation, weight: Scalar) -> tuple[Tally, Scalar, Scalar]:
        """(the tally with one more value, its weight as one scalar, the unit of the sums), where
        the host does not see the weights.
        """
        ...

    def finish(self, window: Accumulation, tallies: Sequence[Tally], donate: bool) -> list[Reduced]:
        """The leaves of a window, each normalised by its tally; in memory of their own, or in that
        of donated sums.
        """
        ...

    def scaled(self, leaves: Sequence[Array], factor: Scalar, donate: bool) -> list[Array]:
        """The leaves times a factor; in the same memory if that is donated."""
        ...

    def emptied(self, window: Accumulation) -> list[Reduced]:
        """The accumulators of an empty window like this one."""
        ...

    # Over the replicas that `across=` names; each folds a window of its own until an update.

    def own_parts(self, windows: Sequence[Window], across: Across) -> list[Window]:
        """The parts of a state's window that belong to this replica; without across= all, of
        several states.

        Raises FuncgaError if a part is missing, or is another replica's.
        """
        ...

    def as_part(self, windows: Sequence[Window], across: Across, is_empty: bool) -> Window:
        """A window as this replica's part of a state; without across= the whole of all parts.

        Raises FuncgaError if it names no replicas.
        """
        ...

    def merged(
        self, window: Accumulation, memory: Memory, updates: Array, donate: bool
    ) -> Accumulation:
        """The window merged over its replicas, whose states have made so many `updates`; in the
        same memory if that is donated.
        """
        ...


class Transforms(Protocol):
    """What `multi_steps` needs of a framework: its conditional, and the dtypes of an update."""

    def widened(
        self, params: Tree, copies: bool = False, donate: bool = False
    ) -> tuple[Tree, Callable[[Tree], Tree]]:
        """The params as a wrapped transform sees them, in no graph and in at least 32 bits, and the
        way back.

        `copies`: they have memory of their own. The way back is a function of such params after an
        update: they come in the dtypes of the params, and in the memory of these if that is
        donated.
        """
        ...

    def added(self, params: Tree, updates: Tree, state: Tree, donate: bool) -> Tree:
        """The params with the updates added; in place if they are donated and share no memory
        with the state.
        """
        ...

    def when(
        self,
        predicate: Scalar,
        emit: Callable[..., tuple[Tree, Tree]],
        state: Tree,
        operands: Tree,
        like: Tree,
        donate: bool = False,
    ) -> tuple[Tree, Tree, Scalar]:
        """`emit(state, operands)`, which is (updates, state), if the predicate holds; else zeros
        and the state.

        And whether it held. `donate`: the zeros need no memory, and then are not to be written to.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """One framework's parts, under the framework's name."""

    name: str
    trees: Trees
    arrays: Arrays
    gradients: Gradients
    loop: Loop
    states: States
    transforms: Transforms
