"""One window where torch.distributed runs: its sums may be merged over replicas, its loss may call
collectives itself, and parameters may be DTensors.

A parameter that is a DTensor has gradients that are Partial sums. Autograd adds them as they are,
and each is reduced once, at the end of the window.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import CARRY, Arguments
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction
from funcga._types import Array, Tree
from torch_backend import arrays, trees
from torch_backend.engine import bound
from torch_backend.engine.leaves import OWN, Own, detached
from torch_backend.engine.plan import Plan
from torch_backend.engine.sums import Folding, Sums
from torch_backend.engine.window import Window
from torch_backend.observing import with_gradients
from torch_backend.replicas import Listener, Replicas


class Merge(Protocol):
    """What merges a window over replicas."""

    replicas: Replicas

    def propose(self, sums: Sums, leaves: Sequence[Array]) -> None:
        """Takes the sums of a window whose first micro-batch has these leaves."""
        ...

    def adopt(
        self,
        sums_of: Callable[[Folding], Sums],
        bind: Callable[[Tree], tuple[Outputs, Sequence[Any]]],
        known: Sequence[Any],
    ) -> Sums:
        """The sums of a replica without any micro-batch."""
        ...

    def merge(self, state: list[Array]) -> list[Array]:
        """Merges the sums, and returns the state that is threaded on."""
        ...

    def abort(self) -> None:
        """Tells the other replicas of an error."""
        ...


class Distributed(Window):
    """A window that may be merged over replicas, by `merge`."""

    may_communicate = True
    listener: Listener | None = None  # set by `prepared`

    def __init__(
        self,
        program: Program,
        gradient: GradientFunction,
        backend: Backend,
        arguments: Arguments,
        plan: Plan | None,
        own: Own | None,
        merge: Merge | None,
    ):
        super().__init__(program, gradient, backend, arguments, plan, own)
        self.merge = merge

    def __exit__(self, *error: Any) -> bool | None:
        if error[0] is not None and self.merge is not None:
            self.merge.abort()
        return super().__exit__(*error)

    def prepared(
        self, arguments: Arguments, kwargs: dict[str, Tree]
    ) -> tuple[Arguments, dict[str, Tree]]:
        """The arguments as the loss is given them. From here on the window hears collectives."""
        self.listener = self.listener or Listener()
        return super().prepared(arguments, kwargs)

    @property
    def communicates(self) -> bool:
        """Whether the loss has called collectives. Then other processes send gradients here that
        have their weights, whatever the weight is here.
        """
        return self.listener is not None and self.listener.heard

    def _takes(self, seed: float, dtype: torch.dtype) -> bool:
        if self.communicates:
            is_exact = arrays.represents_exactly(dtype, seed)
            return self.plan.takes_weights and is_exact
        return seed != 0 and super()._takes(seed, dtype)

    def _bind(self, loss: torch.Tensor, aux: Tree, moving: Sequence[torch.Tensor]) -> Sums:
        sums = super()._bind(loss, aux, moving)
        if self.merge is None:
            return sums
        if self.communicates:
            # Collectives of the loss add cotangents of several replicas, which have to be in one
            # unit.
            sums.unit, sums.unit_is_fixed = 1.0, True
        like = self.gradient.compose(loss, detached(aux, True), bound.trees_of(self))
        self.merge.propose(sums, trees.flatten(like)[0])
        return sums

    def merged(self, sums: Sums) -> Tree:
        """The normalised result, of all replicas."""
        sums.settle(dict(zip(sums.folding.grads, self.inputs, strict=True)))
        if self.merge is not None:
            sums.state = self.merge.merge(sums.state)
        return sums.result()

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Any]
    ) -> Tree:
        """The result on a replica that has nothing to fold; `state` is what came in."""
        program, own = self.program, self.opened.leaves.trees.get(OWN)
        assert self.merge is not None
        assert program is not None
        known: Tree = [part.value for part in arguments.parts] if own is None else own

        def bind(value: Tree) -> tuple[Outputs, list[Any]]:
            if own is not None:  # the others say what their own parameters are like
                value = with_gradients(program, value, lambda _: own)
            return program.bind(value, arguments)

        sums = self.merge.adopt(Sums, bind, trees.flatten(known)[0])
        sums.state = self.merge.merge(state)
        return sums.result()


def with_a_blank_row(arguments: Arguments) -> Arguments:
    """The arguments of an empty batch, with one row of zeros in it."""

    def blank(leaf: Array, axis: object) -> Array:
        if leaf is None or axis is None or axis is CARRY:
            return leaf
        shape = [*leaf.shape]
        shape[axis] = 1  # type: ignore[call-overload]
        return leaf.new_zeros(shape)

    parts = []
    for part in arguments.parts:
        leaves = [blank(leaf, axis) for leaf, axis in zip(part.leaves, part.axes, strict=True)]
        parts.append(part._replace(leaves=leaves) if part.axes else part)
    return replace(arguments, parts=tuple(parts))


def window_of(
    program: Program,
    gradient: GradientFunction,
    backend: Backend,
    arguments: Arguments,
    plan: Plan | None,
    own: Own | None,
) -> Window:
    """A window of a gradient that autograd computes."""
    if dist.is_available() and dist.is_initialized():
        return Distributed(program, gradient, backend, arguments, plan, own, None)
    return Window(program, gradient, backend, arguments, plan, own)
