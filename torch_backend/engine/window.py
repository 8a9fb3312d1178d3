"""One window of a gradient that funcga made, at the cost of the hand-written loop.

`Window.fold` is all that a warm micro-batch runs: the loss forwards, and backwards into the sums.
The sums stand as `.grad`s of the leaves, autograd adds to them in place, and the weight of a
micro-batch is its cotangent.

Where a gradient cannot be added so (folds that are no sums, hooks of the user's beside uneven
weights, sums wider than a module's own parameters) each gradient is taken from `.grad` after its
pass, and folded in.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._grad import GradientFunction, evaluations, scaled_loss
from funcga._types import Scalar, Tree
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.dtensor import is_dtensor, local_tensors
from torch_backend.engine import graphs
from torch_backend.engine.guards import EVERY, ON, functions, unchanged
from torch_backend.engine.leaves import (
    check_dense,
    detached,
    leaves_of,
    with_hooks,
    without_graphs,
)
from torch_backend.engine.opened import NOTHING, Own, opened, recording
from torch_backend.engine.plan import Graph, Plan
from torch_backend.engine.sums import Folding, Sums
from torch_backend.gradients import is_constant, switched_off
from torch_backend.observing import ObservedGradient, Observing

_GRAD, _REQUIRES_GRAD, _LAYOUT = map(operator.attrgetter, ("grad", "requires_grad", "layout"))


class Window:
    """One window, a context: `fold` each micro-batch, then take the `result`.

    `opened`: what stays the same until the end, and `inputs` the leaves that last as long; both are
    set on entering. Arguments that are split have leaves of their own in each micro-batch,
    `moving`. `plan`: the one that is known, or a new one, which the first loss completes.
    `observing`: what measures the gradients on their way, from the first loss on.
    """

    looks_ahead = may_be_short = False
    may_communicate = False  # whether other processes may wait for each backward pass

    sums: Sums | None = None  # set by `_bind`, with the first loss
    # The sum that is the `.grad` of each of the inputs, or None: set by `_bind`, then by `_adopt`.
    held: list[Any]
    writes = 0  # set after each pass: how much has been added to the `.grad`s
    begun = False  # whether each of the inputs has its sum as its `.grad`
    unreached = False  # whether a loss reached no leaf, though it should have
    observing: Observing | None = None

    def __init__(
        self,
        program: Program | None,
        gradient: GradientFunction,
        backend: Backend,
        arguments: Arguments,
        plan: Plan | None,
        own: Own | None = None,
    ):
        """`own`: the module whose own parameters are differentiated; `program`: None for a gradient
        that is computed alone.
        """
        self.program, self.gradient, self.backend = program, gradient, backend
        self.plan: Any = plan  # a Plan, from entering on
        self.own = own
        # Those of the call, or of the present micro-batch of a stream, which takes them away after.
        self.arguments: Arguments | None = arguments
        self.held = []
        self.moving_trees: dict[int, Tree] = {}  # of the last micro-batch
        self.passed: dict[int, Any] = {}  # gradients that are collected or threaded

    # --- a micro-batch

    def fold(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: float, last: bool = False
    ) -> None:
        """Folds one micro-batch in: the loss forwards, and backwards into the sums."""
        # The iterable of a stream has the mode of the caller, and may change it in between.
        with recording() if self.opened.is_stream else NOTHING:
            self._fold(args, kwargs, weight)

    def _fold(self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: float) -> None:
        inputs, moving = self.inputs, list[torch.Tensor]()
        if self.plan.moving:
            args, moving = self._with_leaves_of(args)
        scale, kwargs = self.read_scale(kwargs)
        gradients = evaluations()
        with recording_loss(), self.opened.visit as loss_fn:
            loss, aux, objective, numbers = self.forward(loss_fn, args, kwargs, scale)
            if self.sums is None:
                self.sums = self._bind(loss.detach(), aux, moving)
            sums, folding = self.sums, self.sums.folding
            # Nothing was added since the last pass, unless loss_fn itself has called .backward().
            if ON and self._count_writes(moving) != self.writes:
                is_cleared = any(map(operator.is_not, map(_GRAD, inputs), self.held))
                raise unchanged.cleared() if is_cleared else unchanged.ran_backward()
            unit, share = sums.unit, sums.share(weight)
            assert share is not None
            if unit != sums.unit:  # the sums may have been brought to it, which is a write, too
                self.writes = self._count_writes()
            seed = 0.0
            # Of weight 0 nothing is added to weighted sums, not even a NaN.
            if share or moving or not folding.are_weighted or self.may_communicate:
                if not self.gradient.reached:
                    self.note_reached(objective, moving, weight, evaluations() == gradients)
                seed = self._add_gradients(objective, numbers, weight, share, moving)
        if folding.loss_alone is not None and loss.dtype is self.plan.loss_dtype:
            sums.add_loss(loss.detach(), folding.loss_alone, weight, share)
            return
        values = self._rest(loss.detach(), aux, moving)
        if self.observing is not None:
            values.update(self.observing.measures(values, weight, seed))
        sums.add(values, weight)

    def _add_gradients(
        self,
        loss: torch.Tensor,
        numbers: tuple[int, int],
        weight: float,
        share: float,
        moving: Sequence[torch.Tensor],
    ) -> float:
        """Folds the gradients of a loss in, whose graph has these numbers; from which cotangent."""
        assert self.sums is not None
        folding, inputs = self.sums.folding, self.inputs
        seed = share if folding.are_weighted else 1.0
        # The cotangent is the weight, or no gradient has one.
        is_lent = folding.lends and (seed == share or not folding.weighs)
        is_lent = is_lent and (seed == 1 or self._takes(seed, loss.dtype))
        if not is_lent:
            counts = share or moving or not folding.are_weighted
            seed, self.begun = 1.0 if counts else 0.0, False
            for leaf in inputs:
                leaf.grad = None
        if loss.requires_grad and (inputs or moving):
            self.backward(loss, seed, numbers, moving)
        if not is_lent:
            self._take(weight)
            self.writes = self._count_writes()
        elif not self.begun:
            self._adopt()
            self.writes = self._count_writes()
        return seed

    def read_scale(self, kwargs: dict[str, Tree]) -> tuple[Scalar | None, dict[str, Tree]]:
        """(the scale of the loss, the other keyword arguments)."""
        if not (kwargs or self.gradient.scaled):
            return None, kwargs
        return self.gradient.read_scale(kwargs, self.backend)

    def forward(
        self,
        loss_fn: Callable[..., Any],
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        scale: Scalar | None,
    ) -> tuple[torch.Tensor, Tree, torch.Tensor, tuple[int, int]]:
        """(the loss, its aux, the loss times its scale, the numbers of its graph)."""
        gradient = self.gradient
        nodes = graphs.nodes_made()
        with self.opened.noted:
            loss, aux = loss_fn(*args[self.opened.first :], **kwargs), None
        # The usual output is a plain scalar. Anything else is split, and checked.
        is_usual = type(loss) is torch.Tensor and not loss.ndim and loss.dtype.is_floating_point
        if gradient.has_aux or not is_usual:
            loss, aux = gradient.split(loss, self.backend)
        numbers = graphs.nodes_made() - nodes, graphs.functions_alive()
        return loss, aux, loss if scale is None else scaled_loss(loss, scale, arrays), numbers

    def backward(
        self,
        loss: torch.Tensor,
        seed: float,
        numbers: tuple[int, int],
        moving: Sequence[torch.Tensor],
    ) -> None:
        """Adds the gradients of a loss, times the seed, to the `.grad`s of the leaves."""
        plan, begun_with, leaves = self.plan, self.opened, (*self.inputs, *moving)
        graph: Graph | None = plan.graphs.get(numbers)
        if graph is None or EVERY:
            graph = self.graph_of(loss, numbers, leaves)
        on_host = plan.on_host and loss.is_cpu
        cotangent = torch.full_like(loss, seed, requires_grad=False)
        try:
            with begun_with.outside:
                if graph.custom:
                    around = begun_with.leaves.originals, self.gradient
                    functions.run_unrestricted(
                        loss, cotangent, leaves, on_host, begun_with.watch, *around
                    )
                else:
                    begun_with.watch.run(plan.run, loss, cotangent, leaves, on_host)
        except RuntimeError as error:
            if not all(map(_REQUIRES_GRAD, leaves)):
                raise switched_off() from error
            raise
        self.writes = self._count_writes()

    def graph_of(
        self, loss: torch.Tensor, numbers: tuple[int, int], leaves: Sequence[torch.Tensor]
    ) -> Graph:
        """What a graph of these numbers needs, which is walked."""
        found = graphs.reach(loss, {*map(id, leaves)})
        graph = Graph(found.custom, graphs.leads_elsewhere(found.foreign))
        self.plan.graphs.put(numbers, graph)
        return graph

    def _count_writes(self, moving: Sequence[torch.Tensor] = ()) -> int:
        """A number that grows with everything that is added to the `.grad`s of the leaves."""
        grads = self.held
        if not self.begun or moving:
            grads = [g for g in map(_GRAD, (*self.inputs, *moving)) if g is not None]
        return len(grads) + sum(map(_private.version, grads))

    def _takes(self, seed: float, dtype: torch.dtype) -> bool:
        """Whether the cotangent of a pass may be this weight."""
        plan = self.plan
        return plan.takes_weights and not plan.autocast and arrays.represents_exactly(dtype, seed)

    def _adopt(self) -> None:
        """Makes sums of the first gradients that autograd has left in the leaves."""
        assert self.sums is not None
        grads, held, indices = [*map(_GRAD, self.inputs)], [*self.held], self.sums.folding.grads
        new = [at for at, grad in enumerate(grads) if grad is not None and held[at] is None]
        firsts = [grads[at] for at in new]
        if {*map(_LAYOUT, firsts)} - {torch.strided}:
            firsts = [*map(arrays.strided, firsts)]
        # Later gradients are added in place, so nobody else may hold this memory.
        are_alone = arrays.are_alone(local_tensors(firsts))
        for at, first, alone in zip(new, firsts, are_alone, strict=True):
            total = first if alone else first.clone()
            if total is not grads[at]:
                self.inputs[at].grad = total
            held[at] = self.sums.of[indices[at]] = total
        self.held, self.begun = held, all(total is not None for total in held)

    def _take(self, weight: float) -> None:
        """Folds the gradients in that a pass has left in the leaves, and frees them."""
        assert self.sums is not None
        sums, folding = self.sums, self.sums.folding
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.inputs]
        values = dict(zip(folding.grads, map(torch.Tensor.detach, grads), strict=True))
        for leaf in self.inputs:
            leaf.grad = None
        sums.fold(values, weight)
        kept = {*sums.collected, *folding.outputs.threads}
        self.passed = {index: value for index, value in values.items() if index in kept}
        if folding.lends:
            self._hold([sums.of[index] for index in folding.grads])

    def _hold(self, totals: list[Any]) -> None:
        """Lets these sums stand as the `.grad`s of the leaves."""
        for leaf, total in zip(self.inputs, totals, strict=True):
            if total is not None:
                if total.dtype != leaf.dtype:
                    leaf.grad_dtype = None  # .grad may have another dtype than the leaf
                leaf.grad = total
        self.held, self.begun = totals, all(total is not None for total in totals)

    def _rest(
        self, loss: torch.Tensor, aux: Tree, moving: Sequence[torch.Tensor]
    ) -> dict[int, Any]:
        """What stands beside the gradients that autograd adds, by leaf."""
        assert self.sums is not None
        folding, gradient = self.sums.folding, self.gradient
        value = gradient.compose(loss, detached(aux, True), [() for _ in self.plan.indices])
        assert folding.rest_outputs is not None
        beside = folding.rest_outputs.leaves(value, f"micro-batch {self.sums.number}")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in moving]
        moved = zip(folding.moved, map(torch.Tensor.detach, grads), strict=True)
        passed, self.passed = self.passed, {}
        return {**dict(zip(folding.beside, beside, strict=True)), **dict(moved), **passed}

    # --- what a window begins with

    def __enter__(self) -> "Window":
        assert self.arguments is not None
        with ExitStack() as stack:
            self.opened, self.plan = opened(
                self.program,
                self.gradient,
                self.backend,
                self.arguments.parts,
                self.plan,
                self.own,
                stack,
            )
            self.inputs = self.opened.leaves.inputs
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def _with_leaves_of(
        self, args: tuple[Tree, ...]
    ) -> tuple[tuple[Tree, ...], list[torch.Tensor]]:
        """The arguments of a micro-batch with leaves of those that it alone has, and these."""
        moving = []
        for index in self.plan.moving:
            tree, leaves, originals = leaves_of(args[index], index, self.gradient, self.backend)
            with_hooks(originals, leaves, tree, index, self.gradient)
            self.moving_trees[index] = tree
            moving += leaves
        args = tuple([self.moving_trees.get(index, arg) for index, arg in enumerate(args)])
        return args, moving

    def prepared(
        self, arguments: Arguments, kwargs: dict[str, Tree]
    ) -> tuple[Arguments, dict[str, Tree]]:
        """The arguments as the loss is given them: with leaves, and all others without graphs."""
        self.arguments = arguments
        parts = without_graphs(arguments, self.opened.leaves.trees, self.plan.moving, True)
        named = (
            {name: detached(value, True) for name, value in kwargs.items()} if kwargs else kwargs
        )
        kept = arguments.grad_fn, arguments.backend, arguments.assumed, arguments.state
        return Arguments(tuple(parts), *kept), named

    # --- what becomes of the output

    def _bind(self, loss: torch.Tensor, aux: Tree, moving: Sequence[torch.Tensor]) -> Sums:
        """Makes room for the output, with the first loss."""
        folding, inputs = self._folding(loss, aux), self.inputs
        if self._count_writes(moving):
            raise unchanged.ran_backward()
        sums = Sums(folding)
        self.held = [None] * len(inputs)
        if folding.wide:
            # A wider sum begins with zeros: autograd could only begin it in the leaf's dtype.
            for at, dtype in folding.wide:
                total = torch.zeros_like(inputs[at], dtype=dtype, requires_grad=False)
                self.held[at] = sums.of[folding.grads[at]] = total
            self._hold(self.held)
            self.writes = self._count_writes()
        return sums

    @property
    def trees_of_leaves(self) -> dict[int, Tree]:
        """The differentiated arguments as the loss is given them. Before the first backward pass
        the leaves stand in for their gradients: they are alike.
        """
        return {**self.opened.leaves.trees, **self.moving_trees}

    @property
    def arriving(self) -> Sequence[torch.Tensor]:
        """The leaves that gradients come to, in the order of the inputs."""
        return self.inputs

    def _folding(self, loss: torch.Tensor, aux: Tree) -> Folding:
        """What becomes of every leaf of the output: what the plan knows, if it does."""
        plan, program, is_plain = self.plan, self.program, type(loss) is torch.Tensor
        assert program is not None
        is_new = plan.folding is None or loss.dtype is not plan.loss_dtype or not is_plain
        if is_new or self.gradient.has_aux or plan.moving or program.observers is not None:
            dtype = loss.dtype if is_plain else None
            self.plan = replace(plan, folding=self._new_folding(loss, aux), loss_dtype=dtype)
        return self.plan.folding  # type: ignore[no-any-return]

    def _new_folding(self, loss: torch.Tensor, aux: Tree) -> Folding:
        gradient, indices, arguments = self.gradient, self.plan.indices, self.arguments
        assert self.program is not None
        assert arguments is not None
        aux = detached(aux, True)
        trees_of = self.trees_of_leaves
        grads = [trees_of[index] for index in indices]
        if self.program.observers is not None:
            observed = ObservedGradient.of(self.program, gradient, (loss, aux), grads, arguments)
            self.gradient = gradient = observed
        like = gradient.compose(loss, aux, grads)
        outputs, leaves = self.program.bind(like, arguments)
        for index, tree in trees_of.items():
            check_dense(tree, index, gradient)
        # The gradients follow the value, argument by argument. Without a value they come first.
        counts = [len(trees.flatten(trees_of[index])[0]) for index in indices]
        start = gradient.leaves_before
        if gradient.with_value:
            start = len(leaves) - sum(counts)
        ends = [*accumulate(counts, initial=start)]
        of_argument = dict(zip(indices, map(range, ends, ends[1:]), strict=True))
        beside = [leaf for leaf in range(len(leaves)) if not start <= leaf < ends[-1]]

        def present(indices: Sequence[int]) -> tuple[int, ...]:
            found = [leaf for index in indices for leaf in of_argument[index]]
            return tuple([leaf for leaf in found if leaves[leaf] is not None])

        rest = gradient.compose(loss, aux, [() for _ in indices])
        of_inputs = present(self.plan.whole)
        if isinstance(gradient, ObservedGradient):
            self.observing = Observing(gradient, dict(zip(of_inputs, self.arriving, strict=True)))
            self.stack.callback(self.observing.end)
        return Folding(
            outputs,
            grads=of_inputs,
            moved=present(self.plan.moving),
            beside=tuple(beside),
            rest_outputs=outputs.part(beside, trees.flatten(rest)[1]),
            with_loss=gradient.with_value,
            may_be_wide=self.own is None and not any(map(is_dtensor, self.inputs)),
        )

    def note_reached(
        self, loss: torch.Tensor, moving: Sequence[torch.Tensor], weight: float, is_alone: bool
    ) -> None:
        """Notes whether a loss leads to a leaf, until one does.

        A constant is explained by being 0, as where all is masked, or by a gradient inside of the
        loss, such as that of a linear function; `is_alone`: whether there was none.
        """
        if not weight:
            return
        ids = {id(leaf) for leaf in (*self.inputs, *moving)}
        found = graphs.reach(loss, ids) if loss.requires_grad else None
        if found is not None and (found.own or found.custom):
            self.gradient.reached.add(True)
        elif ids:
            self.unreached |= loss.requires_grad or (is_alone and is_constant(loss))

    @staticmethod
    def check_no_grads(leaves: Sequence[torch.Tensor]) -> None:
        """Raises FuncgaError if a loss, before any backward pass, has left a gradient in a leaf."""
        if any(grad is not None for grad in map(_GRAD, leaves)):
            raise unchanged.ran_backward()

    # --- the end of the window

    @property
    def state(self) -> list[Any]:
        """What is threaded to the next micro-batch."""
        return [] if self.sums is None else self.sums.state

    def check(self) -> None:
        """Raises FuncgaError if the losses have reached no leaf, or have changed one."""
        if not all(map(_REQUIRES_GRAD, self.inputs)):
            raise switched_off()
        if self.unreached and not self.gradient.reached:
            raise self.gradient.unreached(self.plan.count, self.backend)
        if self.observing is not None:
            self.observing.end()
        if ON:
            self.opened.check_unchanged()

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        sums, inputs = self.sums, self.inputs
        assert sums is not None
        self.check()
        if ON and sums.folding.lends and any(map(operator.is_not, map(_GRAD, inputs), self.held)):
            raise unchanged.cleared()
        for leaf in inputs:
            leaf.grad = None
        with recording():
            for index, leaf in () if self.begun else zip(sums.folding.grads, inputs, strict=True):
                if sums.of[index] is None and index in sums.folding.folds:
                    # No loss of the window depended on it, or none had a weight.
                    sums.of[index] = sums.folding.folds[index].identity(leaf.detach())
            return self._finished(sums)

    def _finished(self, sums: Sums) -> Tree:
        return sums.result()
