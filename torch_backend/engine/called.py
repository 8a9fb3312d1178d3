"""One window of any function: it is called for each micro-batch, and its values are folded.

In transforms of torch.func autograd cannot add to `.grad`s; there a gradient of funcga's own is
such a function, too, and nothing is written to.
"""

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._types import GradFn, Scalar, Tree
from torch_backend import arrays, trees
from torch_backend.engine.leaves import detached, without_graphs
from torch_backend.engine.sums import Folding, Sums
from torch_backend.modules.checks import check_unfrozen


class _Calling(threading.local):
    """The arguments, and those of the micro-batch, of a call of grad_fn whose in_axes was left
    at its default.
    """

    microbatch: tuple[Arguments, tuple[Tree, ...]] | None = None


calling = _Calling()


class Called:
    """One window of grad_fn: `fold` each micro-batch, then take the `result`. A context.

    `assumes_whole`: whether in_axes was left at its default, which passes the first argument whole.
    """

    sums: Sums | None = None

    plan = None  # nothing is known of what a function does

    def __init__(self, program: Program, grad_fn: GradFn, arguments: Arguments, is_own: bool):
        self.program, self.grad_fn = program, grad_fn
        # Those of the call, or of the present micro-batch of a stream, which takes them away after.
        self.arguments: Arguments | None = arguments
        no_axes = program.in_axes is None and program.default_in_axes is None
        self.assumes_whole, self.is_own = no_axes and not is_own, is_own
        self.pure = arrays.in_transform()
        self.quiet = nullcontext() if self.pure else torch.no_grad()

    def __enter__(self) -> "Called":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def prepared(
        self, arguments: Arguments, kwargs: dict[str, Tree]
    ) -> tuple[Arguments, dict[str, Tree]]:
        """The arguments without graphs: torch.func records a second one for what requires grad."""
        self.arguments = arguments
        gradient: Any = self.program.grad_fn
        for index in gradient.arg_indices(len(arguments.parts)) if self.is_own else ():
            value = arguments.parts[index].value
            check_unfrozen(trees.flatten(value)[0], value, gradient, index)
        named = {name: detached(value) for name, value in kwargs.items()}
        return replace(arguments, parts=tuple(without_graphs(arguments, {}, (), False))), named

    @property
    def state(self) -> list[Any]:
        """What is threaded to the next micro-batch."""
        return self.sums.state if self.sums is not None else []

    def fold(self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar) -> None:
        """Folds the value of one micro-batch in."""
        assert self.arguments is not None
        is_hidden = self.pure and isinstance(weight, torch.Tensor)
        if is_hidden and self.program.weighs_all(self.arguments.backend):
            args, kwargs = _constant_if_weightless(args, kwargs, weight)
        # The gradient function of a module that grad_fn calls sees what the call is a part of.
        outer = calling.microbatch
        calling.microbatch = (self.arguments, args) if self.assumes_whole else outer
        try:
            value = self.grad_fn(*args, **kwargs)
        finally:
            calling.microbatch = outer
        if self.sums is None:
            outputs, leaves = self.program.bind(value, self.arguments)
            self.sums = Sums(Folding(outputs, pure=self.pure))
        else:
            which = f"micro-batch {self.sums.steps + 1}"
            leaves = self.sums.folding.outputs.leaves(value, which)
        del value
        with self.quiet:
            self.sums.add(dict(enumerate(leaves)), weight)

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        assert self.sums is not None
        with nullcontext() if self.pure else torch.no_grad():
            return self.sums.result()


def _constant_if_weightless(
    args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Any
) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """The arguments, constants if the weight is 0: a NaN would have NaN as its derivative."""

    def chosen(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor and (leaf.is_floating_point() or leaf.is_complex()):
            return torch.where((weight != 0).to(leaf.device), leaf, leaf.detach())
        return leaf

    leaves, structure = trees.flatten((args, kwargs))
    return trees.unflatten(structure, [*map(chosen, leaves)])  # type: ignore[no-any-return]
