"""One window of any function: it is called for each micro-batch, and its values are folded.

In transforms of torch.func autograd cannot add to `.grad`s; there a gradient of funcga's own is
such a function, too, and nothing is written to.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._grad import GradientFunction
from funcga._types import Args, GradFn, Kwargs, Scalar, Tree
from torch_backend import arrays, trees
from torch_backend.dtensor import settle
from torch_backend.modules.checks import check_unfrozen
from torch_backend.reduce import Reduction
from torch_backend.reduce.absent import empty_sums, zero_rows
from torch_backend.sums import Folding, Sums


class _Calling(threading.local):
    """The arguments, and those of the micro-batch, of a call of grad_fn whose in_axes was left
    at its default.
    """

    microbatch: tuple[Arguments, Args] | None = None


calling = _Calling()


class Called:
    """One window of grad_fn: `fold` each micro-batch, then take the `result`. A context.

    `gradient`: the gradient function that grad_fn is made of, if any. `merges`: what merges the
    sums over replicas, one after the other. `records`: whether grad_fn itself runs on autograd, and
    takes its arguments as they are.
    """

    sums: Sums | None = None
    plan = None  # nothing is known of what a function does
    count = 0  # micro-batches, of whatever weight; set by `fold`

    def __init__(
        self,
        program: Program,
        grad_fn: GradFn,
        arguments: Arguments,
        gradient: GradientFunction | None = None,
        merges: Sequence[Reduction] = (),
        records: bool = False,
    ):
        self.program, self.grad_fn, self.gradient = program, grad_fn, gradient
        # Those of the call, or of the present micro-batch of a stream, which takes them away after.
        self.arguments: Arguments | None = arguments
        self.merges, self.records = merges, records
        # Whether in_axes was left at its default, which passes the first argument whole.
        self.assumes_whole = program.in_axes is None and gradient is None
        self.pure = arrays.in_transform()
        self.quiet = nullcontext() if self.pure else torch.no_grad()

    def __enter__(self) -> "Called":
        return self

    def passes(self, weights: Sequence[Scalar] = ()) -> AbstractContextManager[object]:
        """The context of micro-batches: grad_fn makes its own."""
        return nullcontext()

    def __exit__(self, *error: Any) -> None:
        """Nothing: a call tells other replicas of an error."""

    def prepared(self, arguments: Arguments, kwargs: Kwargs) -> tuple[Arguments, Kwargs]:
        """The arguments without graphs: torch.func records a second one for what requires grad."""
        self.arguments = arguments
        if self.records:
            return arguments, kwargs
        gradient = self.gradient
        for index in () if gradient is None else gradient.arg_indices(len(arguments.parts)):
            assert gradient is not None
            check_unfrozen(arguments.parts[index].value, gradient, index)
        named = {name: trees.detached(value) for name, value in kwargs.items()}
        parts = [
            part._replace(leaves=trees.detached_leaves(part.leaves))
            if part.axes
            else part._replace(value=trees.detached(part.value))
            for part in arguments.parts
        ]
        return replace(arguments, parts=tuple(parts)), named

    @property
    def state(self) -> list[Any]:
        """What is threaded to the next micro-batch."""
        return self.sums.state if self.sums is not None else []

    def fold(self, args: Args, kwargs: Kwargs, weight: Scalar, last: bool = False) -> None:
        """Folds the value of one micro-batch in."""
        program, arguments = self.program, self.arguments
        assert arguments is not None
        if isinstance(weight, torch.Tensor) and program.weighs_all(arguments.backend):
            args, kwargs = _constant_if(weight == 0, (args, kwargs))
        value = self._called(arguments, args, kwargs)
        if program.readings is not None:
            value = program.readings(value, arguments).measured(value, weight)
        self.count += 1
        if self.sums is None:
            outputs, leaves = program.bind(value, arguments)
            self.sums = Sums(Folding(outputs, pure=self.pure))
            for merge in self.merges:
                merge.propose(self.sums, dict(enumerate(leaves)))
        else:
            leaves = self.sums.folding.outputs.leaves(value, f"micro-batch {self.count}")
        del value
        with self.quiet:
            self.add(self.sums, leaves, weight)

    def add(self, sums: Sums, leaves: list[Any], weight: Scalar) -> None:
        """Folds the leaves of one micro-batch in."""
        sums.add(dict(enumerate(leaves)), weight)

    def _called(self, arguments: Arguments, args: Args, kwargs: Kwargs) -> Tree:
        """grad_fn's output."""
        # The gradient function of a module that grad_fn calls sees what the call is a part of.
        outer = calling.microbatch
        calling.microbatch = (arguments, args) if self.assumes_whole else outer
        try:
            return self.grad_fn(*args, **kwargs)
        finally:
            calling.microbatch = outer

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        assert self.sums is not None
        with self.quiet:
            settle(self.sums.of, {})
            return self._merged(self.sums)

    def _merged(self, sums: Sums) -> Tree:
        for merge in self.merges:
            merge.merge()
        return self.finished(sums)

    def finished(self, sums: Sums) -> Tree:
        """The normalised result of merged sums."""
        return sums.result()

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: Kwargs, state: list[Any]
    ) -> Tree:
        """The result on a replica that has nothing to fold; `state` is what came in."""
        program, (first, *others) = self.program, self.merges
        if not others:
            sums = empty_sums(first, program, arguments)
        else:
            # All replicas of the first group may be without rows. What the others count is like the
            # totals of a row of zeros, which are not added.
            blank = arguments.cut(0, 1, state, zero_rows)
            outputs, leaves = program.bind(self.grad_fn(*blank), arguments)
            sums = Sums(Folding(outputs))
            for merge in self.merges:
                merge.propose(sums, dict(enumerate(leaves)))
        sums.state = state
        return self._merged(sums)


def _constant_if(is_constant: torch.Tensor, args: Tree) -> Tree:
    """The arguments of a micro-batch, without a derivative where the 0-d tensor is true: then it
    adds nothing, and the derivative of a NaN would be NaN.
    """
    leaves, structure = trees.flatten(args)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            leaves[index] = torch.where(is_constant.to(leaf.device), leaf.detach(), leaf)
    return trees.unflatten(structure, leaves)
