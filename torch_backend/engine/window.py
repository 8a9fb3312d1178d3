"""One window of a gradient that funcga made, at the cost of the hand-written loop.

`Window.fold` is all that a warm micro-batch runs: the loss forwards, and backwards into the sums.
The sums stand as `.grad`s of the leaves, autograd adds to them in place, and the weight of a
micro-batch is its cotangent.

Where a gradient cannot be added so (folds that are no sums, hooks of the user's beside uneven
weights, sums wider than a module's own parameters) each gradient is taken from `.grad` after its
pass, and folded in.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._grad import GradientFunction, evaluations, scaled_loss
from funcga._types import Scalar, Tree
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.engine import graphs
from torch_backend.engine.guards import EVERY, ON, functions, recompute, unchanged
from torch_backend.engine.guards.aside import gradients_aside
from torch_backend.engine.guards.watched import grads_watched
from torch_backend.engine.leaves import (
    check_dense,
    detached,
    leaves_of,
    with_hooks,
    without_graphs,
)
from torch_backend.engine.plan import OWN, Graph, Plan, plan_of
from torch_backend.engine.sums import Folding, Sums
from torch_backend.gradients import is_constant, switched_off
from torch_backend.modules import PureLoss
from torch_backend.modules.checks import check_initialised, check_unfrozen
from torch_backend.modules.layers import Walk, call_loss
from torch_backend.modules.visits import Visit

_GRAD, _REQUIRES_GRAD, _LAYOUT = map(operator.attrgetter, ("grad", "requires_grad", "layout"))
_NOTHING = nullcontext()


class Own(NamedTuple):
    """A module, its own parameters that are differentiated, and the walk that has found them."""

    module: nn.Module
    params: dict[str, nn.Parameter]
    walk: Walk


class Window:
    """One window, a context: `fold` each micro-batch, then take the `result`.

    Set on entering, and the same until the end:

    - `trees`: the differentiated arguments as the loss is given them, by index; `inputs` are their
      leaves, and `originals` what these are made of. Arguments that are split have leaves of their
      own in each micro-batch, `moving`.
    - `visit`: the context that the loss is called in; `first`: the first argument that it is given.
    - `plan`: the one that is known, or a new one; the first loss completes it.
    """

    visits: Visit | None = None  # of a pure_loss: set on entering
    sums: Sums | None = None  # set by `_bind`, with the first loss
    held: list[
        Any
    ]  # set by `_bind`: the sum that stands as the `.grad` of each of the inputs, or None
    writes = 0  # set after each pass: how much has been added to the `.grad`s
    begun = False  # whether each of the inputs has its sum
    unreached = False  # whether a loss reached no leaf, though it should have

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
        self.known, self.own = plan, own
        # Those of the call, or of the present micro-batch of a stream, which takes them away after.
        self.arguments: Arguments | None = arguments
        self.count = len(arguments.parts)
        self.is_stream = program is not None and not (program.n or program.microbatch_size)
        self.held = []
        self.moving_trees: dict[int, Tree] = {}  # of the last micro-batch
        self.passed: dict[int, Any] = {}  # gradients that are collected or threaded

    # --- a micro-batch

    def fold(self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: float) -> None:
        """Folds one micro-batch in: the loss forwards, and backwards into the sums."""
        # The iterable of a stream has the mode of the caller, and may change it in between.
        with recording() if self.is_stream else _NOTHING:
            self._fold(args, kwargs, weight)

    def _fold(self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: float) -> None:
        inputs, moving = self.inputs, list[torch.Tensor]()
        if self.plan.moving:
            args, moving = self._with_leaves_of(args)
        scale, kwargs = self.read_scale(kwargs)
        with recording_loss(), self.visit as loss_fn:
            loss, aux, objective, nodes = self.forward(loss_fn, args, kwargs, scale)
            if self.sums is None:
                self.sums = self._bind(loss.detach(), aux, moving)
            sums, folding = self.sums, self.sums.folding
            # Nothing was added since the last pass, unless loss_fn itself has called .backward().
            if ON and self._count_writes(moving) != self.writes:
                is_cleared = any(map(operator.is_not, map(_GRAD, inputs), self.held))
                raise unchanged.cleared() if is_cleared else unchanged.ran_backward()
            unit, share = sums.unit, sums.share(weight)
            assert share is not None
            if sums.unit != unit:  # the sums were multiplied in place
                self.writes = self._count_writes()
            # Of weight 0 nothing is added to weighted sums, not even a NaN.
            if share or moving or not folding.are_weighted:
                if not self.gradient.reached:
                    self.note_reached(objective, moving, weight)
                has_graph = objective.requires_grad and (inputs or moving)
                seed = share if folding.are_weighted else 1.0
                is_lent = folding.lends and (seed == share or not folding.weighs)
                is_lent = is_lent and (seed == 1 or self._takes(seed, loss.dtype))
                if not is_lent:
                    seed, self.begun = 1.0, False
                    for leaf in inputs:
                        leaf.grad = None
                if has_graph:
                    self.backward(objective, seed, nodes, moving, self.writes if is_lent else 0)
                if not is_lent:
                    self._take(weight)
                    self.writes = self._count_writes()
                elif not self.begun:
                    self._adopt()
                    self.writes = self._count_writes()
        if folding.loss_alone is not None and loss.dtype is self.plan.loss_dtype:
            sums.add_loss(loss.detach(), folding.loss_alone, weight, share)
        else:
            sums.add(self._rest(loss.detach(), aux, moving), weight)

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
    ) -> tuple[torch.Tensor, Tree, torch.Tensor, int]:
        """(the loss, its aux, the loss times its scale, how many nodes its graph has)."""
        gradient = self.gradient
        nodes = graphs.nodes_made()
        if not gradient.reached:
            self.evaluations = evaluations()
        with self.noted:
            loss, aux = loss_fn(*args[self.first :], **kwargs), None
        # The usual output is a plain scalar. Anything else is split, and checked.
        is_usual = type(loss) is torch.Tensor and not loss.ndim and loss.dtype.is_floating_point
        if gradient.has_aux or not is_usual:
            loss, aux = gradient.split(loss, self.backend)
        nodes = graphs.nodes_made() - nodes
        return loss, aux, loss if scale is None else scaled_loss(loss, scale, arrays), nodes

    def backward(
        self,
        loss: torch.Tensor,
        seed: float,
        nodes: int,
        moving: Sequence[torch.Tensor],
        before: int = 0,
    ) -> None:
        """Adds the gradients of a loss, times the seed, to the `.grad`s of the leaves; `before`:
        how much had been added to these.
        """
        plan, leaves = self.plan, (*self.inputs, *moving)
        graph: Graph | None = plan.graphs.get(nodes)
        if graph is None or EVERY:
            graph = self.graph_of(loss, nodes, leaves)
        on_host = plan.on_host and loss.is_cpu
        cotangent = torch.full_like(loss, seed, requires_grad=False)
        try:
            with self.outside:
                if graph.custom:
                    functions.run_unrestricted(
                        loss, cotangent, leaves, on_host, self.watch, self.originals, self.gradient
                    )
                else:
                    self.watch.run(plan.run, loss, cotangent, leaves, on_host)
        except RuntimeError as error:
            if not all(map(_REQUIRES_GRAD, leaves)):
                raise switched_off() from error
            if "use_reentrant" in str(error) and not graph.custom:
                raise functions.changed() from error
            raise
        self.writes = self._count_writes()
        arrivals = self.writes - before
        if graph.arrivals != arrivals and not graph.custom:
            # Nobody has counted yet; or this is another graph of equally many nodes.
            if graph.arrivals is not None and graphs.reach(loss, {*map(id, leaves)}).custom:
                raise functions.changed()
            plan.graphs.put(nodes, graph._replace(arrivals=arrivals))

    def graph_of(self, loss: torch.Tensor, nodes: int, leaves: Sequence[torch.Tensor]) -> Graph:
        """What a graph of so many nodes needs, which is walked."""
        found = graphs.reach(loss, {*map(id, leaves)})
        graph = Graph(found.custom, graphs.leads_elsewhere(found.foreign), None)
        self.plan.graphs.put(nodes, graph)
        return graph

    def _count_writes(self, moving: Sequence[torch.Tensor] = ()) -> int:
        """A number that grows with everything that is added to the `.grad`s of the leaves."""
        grads = self.held
        if not self.begun or moving:
            grads = [g for g in map(_GRAD, (*self.inputs, *moving)) if g is not None]
        return len(grads) + sum(map(_private.version, grads))

    def _takes(self, seed: float, dtype: torch.dtype) -> bool:
        """Whether the cotangent of a pass may be this weight."""
        return self.plan.takes_weights and represents_exactly(dtype, seed)

    def _adopt(self) -> None:
        """Makes sums of the first gradients that autograd has left in the leaves."""
        assert self.sums is not None
        grads, held, indices = [*map(_GRAD, self.inputs)], [*self.held], self.sums.folding.grads
        new = [at for at, grad in enumerate(grads) if grad is not None and held[at] is None]
        firsts = [grads[at] for at in new]
        if {*map(_LAYOUT, firsts)} - {torch.strided}:
            firsts = [*map(arrays.strided, firsts)]
        # Later gradients are added in place, so nobody else may hold this memory.
        for at, first, alone in zip(new, firsts, are_alone(firsts), strict=True):
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
        beside = folding.rest_outputs.leaves(value, f"micro-batch {self.sums.steps + 1}")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in moving]
        moved = zip(folding.moved, map(torch.Tensor.detach, grads), strict=True)
        passed, self.passed = self.passed, {}
        return {**dict(zip(folding.beside, beside, strict=True)), **dict(moved), **passed}

    # --- what a window begins with

    def __enter__(self) -> "Window":
        with ExitStack() as stack:
            if not self.is_stream:
                stack.enter_context(recording())
            with recording():
                self._make_leaves()
            plan, loss_fn = self.plan, self.gradient.loss_fn
            self.visit: AbstractContextManager[Callable[..., Any]]
            if self.own is not None:
                stack.enter_context(
                    gradients_aside(self.inputs, self.own.walk.ids(self.own.module))
                )
                self.visit = nullcontext(partial(call_loss, loss_fn, self.own.module))
                self.first = 0
            else:
                if ON and plan.watches:
                    stack.enter_context(grads_watched(self.originals))
                self.visit, self.first = self._visit(stack)
            self.versions = unchanged.versions_of(self.inputs)
            self.outside: AbstractContextManager[object] = _NOTHING
            if plan.autocast:
                torch.clear_autocast_cache()  # parameters may have moved since
                stack.callback(torch.clear_autocast_cache)
                self.outside = Again(partial(_outside_of_autocast, plan.autocast))
            self.noted: AbstractContextManager[object] = _NOTHING
            is_noted = plan.noted and (self.known is None or EVERY)
            if is_noted:
                self.noted = Again(partial(recompute.noted, plan.seen, self.inputs))
            # A module that has its parameters in the backward pass, too, may run other layers in it
            # than in the first call, and other frozen parameters may be in these.
            keeps_parameters = self.own is not None or self.visits is not None
            is_compared = is_noted or (plan.noted and not keeps_parameters)
            seen = plan.seen if is_compared else None
            self.watch = recompute.Watch(seen, self.inputs, plan.on_host, keeps_parameters)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def _make_leaves(self) -> None:
        assert self.arguments is not None
        gradient, known, parts = self.gradient, self.known, self.arguments.parts
        self.trees: dict[int, Tree] = {}
        self.inputs: list[torch.Tensor] = []
        self.originals: list[Any] = []
        hooked = False
        indices: tuple[int, ...] = (OWN,)
        if self.own is not None:
            params = self.trees[OWN] = self.own.params
            if known is None and arrays.has_lazy(self.own.module.parameters()):
                check_initialised(self.own.module)
            self.inputs = self.originals = [*params.values()]
            if known is None or known.hooked:
                hooked = with_hooks(self.inputs, self.inputs, params, OWN, gradient)
        else:
            indices = gradient.arg_indices(len(parts)) if known is None else known.indices
        for index in indices if self.own is None else ():
            if known is None:
                value = parts[index].value
                check_unfrozen(trees.flatten(value)[0], value, gradient, index)
            if parts[index].axes:
                continue
            tree, leaves, originals = leaves_of(parts[index].value, index, gradient, self.backend)
            if known is None or known.hooked:
                hooked |= with_hooks(originals, leaves, tree, index, gradient)
            self.trees[index] = tree
            self.inputs += leaves
            self.originals += originals
        if known is None:
            moving = tuple([i for i in indices if i != OWN and parts[i].axes])
            own = None if self.own is None else self.own.module
            known = plan_of(gradient, indices, moving, self.inputs, self.originals, hooked, own)
        self.plan = known

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

    def _visit(self, stack: ExitStack) -> tuple[AbstractContextManager[Callable[..., Any]], int]:
        """The context that the loss is called in, and the first argument that it is given.

        A pure_loss is called in its module, which has the parameters meanwhile: for the window, as
        no code of the user's runs between two micro-batches of a batch; not of a stream.
        """
        assert self.arguments is not None
        loss, parts, program = self.gradient.loss_fn, self.arguments.parts, self.program
        if not isinstance(loss, PureLoss) or parts[0].axes:
            return nullcontext(loss), 0
        params: Tree = self.trees.get(0, parts[0].value)
        visit = self.visits = loss.entered(params, recorded=True)
        if program is None or self.is_stream or loss.buffers or loss.statistics:
            return visit, 1
        return nullcontext(stack.enter_context(visit)), 1

    def prepared(
        self, arguments: Arguments, kwargs: dict[str, Tree]
    ) -> tuple[Arguments, dict[str, Tree]]:
        """The arguments as the loss is given them: with leaves, and all others without graphs."""
        self.arguments = arguments
        parts = without_graphs(arguments, self.trees, self.plan.moving, True)
        named = (
            {name: detached(value, True) for name, value in kwargs.items()} if kwargs else kwargs
        )
        kept = arguments.grad_fn, arguments.backend, arguments.assumed, arguments.state
        return Arguments(tuple(parts), *kept), named

    # --- what becomes of the output

    def _bind(self, loss: torch.Tensor, aux: Tree, moving: Sequence[torch.Tensor]) -> Sums:
        """Decides with the first loss what becomes of every leaf of the output."""
        plan, folding, inputs = self.plan, self.plan.folding, self.inputs
        is_known = loss.dtype is plan.loss_dtype and type(loss) is torch.Tensor
        if folding is None or not is_known or self.gradient.has_aux or plan.moving:
            folding = self._folding(loss, aux)
            self.plan = replace(plan, folding=folding, loss_dtype=loss.dtype)
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

    def _folding(self, loss: torch.Tensor, aux: Tree) -> Folding:
        gradient, indices = self.gradient, self.plan.indices
        assert self.program is not None
        assert self.arguments is not None
        aux = detached(aux, True)
        # Before the first backward pass the leaves stand in for their gradients: they are alike.
        trees_of = {**self.trees, **self.moving_trees}
        like = gradient.compose(loss, aux, [trees_of[index] for index in indices])
        outputs, leaves = self.program.bind(like, self.arguments)
        for index, tree in trees_of.items():
            check_dense(tree, index, gradient)
        numbered = gradient.gradient_in(outputs.structure_of(range(len(leaves))))
        parts = numbered if isinstance(gradient.argnums, tuple) else (numbered,)
        of_argument = dict(zip(indices, [trees.flatten(part)[0] for part in parts], strict=True))
        in_gradient = {leaf for leaves_here in of_argument.values() for leaf in leaves_here}
        beside = [leaf for leaf in range(len(leaves)) if leaf not in in_gradient]

        def present(indices: Sequence[int]) -> tuple[int, ...]:
            found = [leaf for index in indices for leaf in of_argument[index]]
            return tuple([leaf for leaf in found if leaves[leaf] is not None])

        rest = gradient.compose(loss, aux, [() for _ in indices])
        return Folding(
            outputs,
            grads=present(self.plan.whole),
            moved=present(self.plan.moving),
            beside=tuple(beside),
            rest_outputs=outputs.part(beside, trees.flatten(rest)[1]),
            with_loss=gradient.with_value,
            may_be_wide=self.own is None,
        )

    def note_reached(
        self, loss: torch.Tensor, moving: Sequence[torch.Tensor], weight: float
    ) -> None:
        """Notes whether a loss leads to a leaf, until one does.

        A constant is explained by being 0, as where all is masked, or by a gradient inside of the
        loss, such as that of a linear function.
        """
        if not weight:
            return
        ids = {id(leaf) for leaf in (*self.inputs, *moving)}
        found = graphs.reach(loss, ids) if loss.requires_grad else None
        if found is not None and (found.own or found.custom):
            self.gradient.reached.add(True)
        elif ids:
            has_gradient_inside = evaluations() != self.evaluations
            self.unreached |= loss.requires_grad or (not has_gradient_inside and is_constant(loss))

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
            raise self.gradient.unreached(self.count, self.backend)
        if not ON:
            return
        own, visits = self.own, self.visits
        module = None if own is None else own.module
        if unchanged.are_written(self.inputs, self.versions, module):
            raise unchanged.written()
        if own is not None and not own.walk.still_finds(own.params):
            raise unchanged.other_parameters()
        if visits is not None and not visits.parts.are_those_of(visits.loss.module):
            raise unchanged.other_parameters()

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
                if sums.of[index] is None and index in sums.folding.outputs.reduced:
                    # No loss of the window depended on it, or none had a weight.
                    fold = sums.folding.outputs.folds[index]
                    assert fold is not None
                    sums.of[index] = fold.identity(leaf.detach())
            return sums.result()


class Again(AbstractContextManager[Any]):
    """A context that can be entered again and again: each time a new one is made."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self.make = make

    def __enter__(self) -> Any:
        self.entered = self.make()
        return self.entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.__exit__(*error)


def recording() -> AbstractContextManager[object]:
    """A context in which autograd records, and tensors are made that can have a gradient."""
    is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return _NOTHING if is_on else _recording()


@contextmanager
def _recording() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def _outside_of_autocast(devices: Sequence[str]) -> Iterator[None]:
    """A context outside of autocast, which is for the forward pass."""
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def represents_exactly(dtype: torch.dtype, number: float) -> bool:
    """Whether this dtype holds a number exactly, or rounds it no more than float32 does."""
    if number == 1 or dtype.itemsize >= 4:
        return True
    return torch.tensor(number, dtype=dtype, device="cpu").item() == number


_CDATA, _NBYTES = operator.attrgetter("_cdata"), operator.attrgetter("nbytes")


def are_alone(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """For each gradient, True if it is the only owner of its memory, which has exactly its size."""
    storages = [*map(torch.Tensor.untyped_storage, gradients)]
    # Two references to the memory are expected: that of the gradient, and the one in `storages`.
    # Memory that is not torch's own, such as a NumPy array's, cannot be resized. Its owner does not
    # count as a reference.
    return [
        count == 2 and held == needed and resizable
        for count, held, needed, resizable in zip(
            map(_private.use_count, map(_CDATA, storages)),
            map(torch.UntypedStorage.nbytes, storages),
            map(_NBYTES, gradients),
            map(torch.UntypedStorage.resizable, storages),
            strict=True,
        )
    ]
