"""One window of a gradient that funcga made, at the cost of the loop by hand: the page to read.

`Window.fold` is all that a warm micro-batch runs: the loss forwards, and backwards into the sums.
The sums stand as `.grad`s of the leaves, autograd adds to them in place, and the weight of a
micro-batch is its cotangent.

Where a gradient cannot be added so (folds that are no sums, hooks of the user's beside uneven
weights, sums wider than a module's own parameters) each gradient is taken from `.grad` after its
pass, and folded in.

What only a first call does stands in other files: plan and bound.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Argument, Arguments
from funcga._grad import GradientFunction, evaluations, scaled_loss
from funcga._types import Args, Kwargs, Scalar, Tree
from torch_backend import _private, arrays, graphs, trees
from torch_backend.arrays import recording, recording_loss
from torch_backend.engine import bound
from torch_backend.engine.guards import EVERY, ON, functions, recompute, unchanged
from torch_backend.engine.guards.grads import gradients_aside, grads_watched
from torch_backend.engine.leaves import (
    OWN,
    Leaves,
    Own,
)
from torch_backend.engine.plan import Plan, plan_of, run_backward, without_autocast
from torch_backend.gradients import put_hooks, switched_off
from torch_backend.modules import PureLoss
from torch_backend.modules.visits import Visit
from torch_backend.sums import Sums

_GRAD, _REQUIRES_GRAD, _LAYOUT = map(operator.attrgetter, ("grad", "requires_grad", "layout"))


class Window(ExitStack):
    """One window, a stack of contexts: `fold` each micro-batch, then take the `result`.

    `leaves` last as long, and `inputs` are these in order. Arguments that are split have leaves of
    their own in each micro-batch, `moving`: the last ones stand among the `leaves`, too. `plan`:
    the one that is known, or a new one, which the first loss completes. `versions`: those of the
    leaves, which nobody may write to. All of these are set on entering; of the others it says when.
    """

    watch: recompute.Watch | None = None  # looks at modules that run in backward passes

    visits: Visit | None = None  # the visit of a pure_loss to its module
    loss_fn: Callable[..., Any]  # as it is called; set on entering, and by `passes`
    noted: Callable[[], AbstractContextManager[object]] = nullcontext  # of a forward pass
    outside: Callable[[], AbstractContextManager[object]] = nullcontext  # of a backward pass

    scale: Scalar | None = None  # of the loss; set by `prepared`
    evaluations = 0  # of gradients, until a loss has reached a leaf; set before each loss

    may_communicate = False  # whether other processes may wait for each backward pass
    # Whether no pass is restricted to the leaves, as what wraps a module has hooks elsewhere.
    runs_whole = False
    may_fuse = True  # whether nothing else has to see the gradients of the present pass
    # Where Distributed merges the sums over replicas.
    merged: Callable[[Sums], Tree] | None = None

    sums: Sums | None = None  # set by `_bind`, with the first loss
    # The sum that is the `.grad` of each of the inputs, or None: set by `_bind`, then by `_adopt`.
    held: Sequence[Any] = ()
    # The weight of all micro-batches, and the share of each: set by `passes` where all are alike
    # and their share is exact, so that sums in this unit are means: nothing is left to divide.
    # Taken back by `_bind`, where sums are no such means.
    even: tuple[float, float | None] = 0.0, None
    # Whether a leaf has hooks of the user's, and a cotangent may be a weight: set by `_bind`.
    hooked = may_weigh = False
    # What the last pass started from, and its type, dtype, device, value; set by `backward`.
    cotangent: tuple[tuple[object, ...], Any] = (), None
    writes = 0  # set after each pass: how much has been added to the `.grad`s
    # The cotangent of the present pass of a wrapped module; set after its forward pass.
    seed = 0.0
    begun = False  # whether each of the inputs has its sum as its `.grad`
    unreached = False  # whether a loss reached no leaf, though it should have; set by passes
    measuring: Any = None  # set by `folding_of`, with the first loss: what measures the gradients

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
        super().__init__()
        self.program, self.gradient, self.backend = program, gradient, backend
        self.plan: Any = plan  # a Plan, from entering on
        self.own = own
        # Those of the call, or of the present micro-batch of a stream, which takes them away after.
        self.arguments: Any = arguments
        self.passed: dict[int, Any] = {}  # gradients that are collected or threaded

    # --- a window begins

    def __enter__(self) -> Self:
        """Makes the leaves, and begins what lasts as long as the window."""
        gradient, own, plan, parts = self.gradient, self.own, self.plan, self.arguments.parts
        notes_modules = plan is None or EVERY
        with ExitStack() as stack:
            with recording():
                if plan is None:
                    plan, leaves = plan_of(gradient, parts, own, self.leaves_of)
                else:
                    leaves = self.leaves_of(plan.whole, [part.value for part in parts])
            self.plan, self.leaves, inputs = plan, leaves, leaves.inputs
            if plan.hooked:
                put_hooks(leaves.originals, inputs)
            self.inputs, self.loss_fn = inputs, gradient.loss_fn
            if own is not None:
                stack.enter_context(gradients_aside(inputs, own.parts.ids))
                self.loss_fn = partial(gradient.loss_fn, own.module)
            elif isinstance(gradient.loss_fn, PureLoss) and 0 not in plan.moving:
                named: Any = leaves.trees.get(0, parts[0].value)
                self.visits = Visit(gradient.loss_fn, named, recorded=True)
            if plan.watches:
                stack.enter_context(grads_watched(leaves.originals))
            if plan.autocast:
                torch.clear_autocast_cache()  # parameters may have moved since
                stack.callback(torch.clear_autocast_cache)
                self.outside = partial(without_autocast, plan.autocast)
            # A module that has its parameters in the backward pass, too, may run other layers in it
            # than in the first call, and other frozen parameters may be in these.
            keeps_parameters, seen = own is not None or self.visits is not None, plan.seen
            if seen is not None and notes_modules:
                self.noted = partial(recompute.noted, seen, inputs)
            elif keeps_parameters:
                seen = None
            self.watch = recompute.Watch(seen, inputs, plan.on_host, keeps_parameters)
            self.versions = [*map(_private.version, inputs)]
            self.push(stack.pop_all())
        return self

    def leaves_of(self, indices: Sequence[int], args: Sequence[Tree]) -> Leaves:
        """Leaves of the arguments of these indices, which share their memory; None stays None. A
        module's own parameters are leaves themselves.
        """
        if self.own is not None:
            params: list[torch.Tensor] = [*self.own.params.values()]
            return Leaves({OWN: self.own.params}, params, params)
        found = Leaves({}, [], [])
        for index in indices:
            tree = args[index]
            originals, structure = trees.flatten(tree)
            present = [original for original in originals if original is not None]
            try:
                leaves = [original.detach().requires_grad_() for original in present]
            except (RuntimeError, AttributeError, ValueError):
                # Numbers, or tensors that were made in inference mode.
                copies = [arrays.as_array(each).detach().clone() for each in present]
                leaves = [copy.requires_grad_() for copy in copies]
            each = iter(leaves)
            spread = [None if original is None else next(each) for original in originals]
            found.trees[index] = trees.unflatten(structure, spread)
            found.inputs.extend(leaves)
            found.originals.extend(present)
        return found

    def prepared(self, arguments: Arguments, kwargs: Kwargs) -> tuple[Arguments, Kwargs]:
        """The arguments as the loss is given them: with leaves, and all others without graphs."""
        self.arguments = arguments
        parts = list[Argument]()
        for index, part in enumerate(arguments.parts):
            if index in self.plan.whole:
                part = part._replace(value=self.leaves.trees[index])
            elif part.axes:
                part = part._replace(leaves=trees.detached_leaves(part.leaves, True))
            else:
                part = part._replace(value=trees.detached(part.value, True))
            parts.append(part)
        arguments = Arguments(tuple(parts), arguments.grad_fn, self.backend, arguments.state)
        if kwargs or self.gradient.scaled:
            kwargs = {name: trees.detached(value, True) for name, value in kwargs.items()}
            self.scale, kwargs = self.gradient.read_scale(kwargs, self.backend)
        return arguments, kwargs

    # --- a micro-batch

    @contextmanager
    def passes(self, weights: Sequence[Scalar] = ()) -> Iterator[None]:
        """A context of micro-batches: of all those of a batch, or of each of a stream alone, as
        code of the user's runs between these. `weights`: of all, where they are known.
        """
        # Where replicas are merged, the weight of others is not known yet.
        n = 0 if self.may_communicate else len(weights)
        is_even = n > 0 and weights[0] and weights.count(weights[0]) == n
        if is_even and n & (n - 1) == 0 and n <= 2**14:  # 1 / n is exact, in float16 as well
            self.even = float(sum(weights)), 1 / n
        with recording_loss():
            if self.visits is None:
                yield
            else:
                with self.visits as self.loss_fn:
                    yield

    def fold(self, args: Args, kwargs: Kwargs, weight: float, last: bool = False) -> None:
        """Folds one micro-batch in: the loss forwards, and backwards into the sums."""
        moving: list[torch.Tensor] = []
        if self.plan.moving:
            args, moving = self._with_leaves_of(args)
        loss, aux, objective = self.forward(args, kwargs)
        # Nothing was added since the last pass, unless loss_fn itself has called .backward().
        if ON and self._count_writes(moving) != self.writes:
            raise unchanged.grads_changed()
        if self.sums is None:
            self.sums = self._bind(loss, aux)
        sums, folding = self.sums, self.sums.folding
        unit = sums.unit
        share: Any = sums.share(weight) if self.even[1] is None else self.even[1]
        if sums.unit != unit:  # the sums may have been brought to it, which is a write, too
            self.writes = self._count_writes()
        unreached = self.unreached
        seed = self._add_gradients(objective, weight, share, moving)
        if not weight:  # then it need not lead to a leaf
            self.unreached = unreached
        if folding.loss_alone is not None and loss.dtype is self.plan.loss_dtype:
            sums.add_loss(loss, folding.loss_alone, weight, share)
            return
        values = self._rest(loss, aux, moving)
        if self.measuring is not None:
            values.update(self.measuring.measures(values, weight, seed))
        sums.add(values, weight)

    def _add(self, loss: torch.Tensor, aux: Tree, weight: Scalar) -> None:
        """Adds what stands beside the gradients of a micro-batch, which are in the sums, or get
        there by themselves, and counts it.
        """
        sums: Any = self.sums
        index = sums.folding.loss_alone
        if index is not None and loss.dtype is self.plan.loss_dtype:
            sums.add_loss(loss, index, weight, sums.share(weight))
            return
        values = self._rest(loss, aux, ())
        if self.measuring is not None:
            values.update(self.measuring.measures(values, weight, self.seed))
        sums.add(values, weight)

    def _add_gradients(
        self,
        loss: torch.Tensor,
        weight: float,
        share: float,
        moving: Sequence[torch.Tensor],
    ) -> float:
        """Folds the gradients of a loss in, and returns the cotangent that they come from."""
        assert self.sums is not None
        folding, inputs = self.sums.folding, self.inputs
        # Of weight 0 nothing is added to weighted sums, not even a NaN.
        counts = bool(share or moving) or not folding.are_weighted
        if not (counts or self.may_communicate):
            return 0.0
        # Autograd adds to the sums if one cotangent is right for all of them: the weight, or 1 for
        # sums without weights. Else the gradients are taken, and each is folded in as it has to be.
        seed = share if folding.are_weighted else 1.0
        is_lent = folding.lends and (len(folding.adds_of_grads) < 2 or share == 1)
        is_lent = is_lent and (seed in (1, self.even[1]) or self._takes(seed, loss.dtype))
        if not is_lent:
            seed, self.begun = float(counts), False
            for leaf in inputs:
                leaf.grad = None
        self.backward(loss, seed, moving)
        if not is_lent:
            self._take(weight)
        elif not self.begun:
            self._adopt()
        self.writes = self._count_writes()
        return seed

    def forward(self, args: Args, kwargs: Kwargs) -> tuple[torch.Tensor, Tree, torch.Tensor]:
        """(the loss as a number, its aux, the loss times its scale, with its graph)."""
        gradient = self.gradient
        self.evaluations = 0 if gradient.reached else evaluations()
        with self.noted():
            # A module that is visited has the first argument, its parameters.
            loss, aux = self.loss_fn(*args[self.visits is not None :], **kwargs), None
        # The usual output is a plain scalar. Anything else is split, and checked.
        is_usual = type(loss) is torch.Tensor and not loss.ndim and loss.dtype.is_floating_point
        if gradient.has_aux or not is_usual:
            loss, aux = gradient.split(loss, self.backend)
        objective = loss if self.scale is None else scaled_loss(loss, self.scale, arrays)
        return loss.detach(), aux, objective

    def backward(self, loss: torch.Tensor, seed: float, more: Sequence[torch.Tensor]) -> None:
        """Adds the gradients of a loss, times the seed, to the `.grad`s of the leaves, and
        of `more` that the pass has.
        """
        inputs = leaves = (*self.inputs, *more)
        if not (loss.requires_grad and leaves):
            functions.note_constant(self, loss, leaves, seed)
            return
        others: AbstractContextManager[None] = nullcontext()
        if self.runs_whole or is_walked(self.gradient):
            inputs, others = functions.restriction(self, loss, leaves)
        on_host = self.plan.on_host and loss.is_cpu
        # One tensor serves all passes from the same cotangent, unless somebody has written to it.
        kind = type(loss), getattr(loss, "placements", None), loss.dtype, loss.device, seed
        known, cotangent = self.cotangent
        if (*kind, 0) != (*known, getattr(cotangent, "_version", None)):
            cotangent = torch.full_like(loss, seed, requires_grad=False)
            self.cotangent = kind, cotangent
        watch, hooks = self.watch, _private.FORWARD_PRE_HOOKS
        task: AbstractContextManager[object] = nullcontext()
        try:
            if ON and watch is not None:
                # A module that runs in the backward pass has the right parameters.
                hooks[watch] = watch.check
                if not watch.on_host:
                    task = watch.task_of(loss)
            with task, others, self.outside():
                run = self.plan.run if self.may_fuse else run_backward
                run(loss, cotangent, inputs, on_host)
        except RuntimeError as error:
            if all(map(_REQUIRES_GRAD, leaves)):
                raise
            raise switched_off() from error
        finally:
            hooks.pop(watch, None)

    def _count_writes(self, moving: Sequence[torch.Tensor] = ()) -> int:
        """A number that grows with everything that is added to the `.grad`s of the leaves."""
        grads = self.held
        if not self.begun or moving:
            grads = [g for g in map(_GRAD, (*self.inputs, *moving)) if g is not None]
        return len(grads) + sum(map(_private.version, grads))

    def _takes(self, seed: float, dtype: torch.dtype) -> bool:
        """Whether the cotangent of a pass may be this weight."""
        return self.may_weigh and arrays.represents_exactly(dtype, seed)

    # --- what becomes of the output

    def _bind(self, loss: torch.Tensor, aux: Tree) -> Sums:
        """Makes room for the output, with the first loss."""
        plan = self.plan
        # Hooks that the loss itself has put on leaves are there for all micro-batches.
        self.hooked = any(map(_private.has_hooks, self.inputs))
        is_known = loss.dtype is plan.loss_dtype and type(loss) is torch.Tensor
        sums = Sums(plan.folding if is_known else bound.folding_of(self, loss, aux))
        folding = sums.folding
        are_means = folding.lends and folding.are_weighted and not folding.normalized
        self.may_weigh = plan.takes_weights and not (plan.autocast or self.hooked)
        if not (are_means and self.may_weigh):
            self.even = 0.0, None
        elif self.even[1] is not None:
            sums.unit, _ = self.even
        self.held = [None] * len(self.inputs)
        if folding.lends and folding.wide:
            # A wider sum begins with zeros: autograd could only begin it in the leaf's dtype.
            for at, total in arrays.zeros(self.inputs, folding.wide).items():
                self.held[at] = sums.of[folding.grads[at]] = total
            self._hold(self.held)
            self.writes = self._count_writes()
        return sums

    def _adopt(self) -> None:
        """Makes sums of the first gradients that autograd has left in the leaves."""
        assert self.sums is not None
        if self.measuring is not None:
            self.measuring.measure()  # and holds none of them any more
        sums, grads, held = self.sums, [*map(_GRAD, self.inputs)], [*self.held]
        indices = sums.folding.grads
        # Of rows and a dense gradient autograd makes a dense one.
        new = [at for at, grad in enumerate(grads) if grad is not None and grad is not held[at]]
        firsts = [grads[at] for at in new]
        if sums.sparse or {*map(_LAYOUT, firsts)} - {torch.strided}:
            firsts = [*sums.taken({indices[at]: grads[at] for at in new}).values()]
        # Later gradients are added in place, so nobody else may hold this memory.
        for at, total in zip(new, arrays.in_own_memory(firsts), strict=True):
            if total is not grads[at]:
                self.inputs[at].grad = total
            held[at] = sums.of[indices[at]] = total
        self.held, self.begun = held, not (sums.sparse or type(None) in map(type, held))

    def _take(self, weight: float) -> None:
        """Folds the gradients in that a pass has left in the leaves, and frees them."""
        assert self.sums is not None
        sums, folding = self.sums, self.sums.folding
        values = dict(zip(folding.grads, gradients_in(self.inputs), strict=True))
        for leaf in self.inputs:
            leaf.grad = None
        sums.add_reduced(values, weight)
        kept = {*folding.outputs.collected, *folding.outputs.threads}
        self.passed = {index: value for index, value in values.items() if index in kept}
        if folding.lends:
            self._hold([sums.of[index] for index in folding.grads])

    def _hold(self, totals: Sequence[Any]) -> None:
        """Lets these sums stand as the `.grad`s of the leaves."""
        for leaf, total in zip(self.inputs, totals, strict=True):
            if total is not None:
                if total.dtype != leaf.dtype:
                    leaf.grad_dtype = None  # .grad may have another dtype than the leaf
                leaf.grad = total
        self.held, self.begun = totals, type(None) not in map(type, totals)

    def _rest(
        self, loss: torch.Tensor, aux: Tree, moving: Sequence[torch.Tensor]
    ) -> dict[int, Any]:
        """What stands beside the gradients that autograd adds, by leaf."""
        assert self.sums is not None
        folding, gradient = self.sums.folding, self.gradient
        value = gradient.compose(loss, trees.detached(aux, True), [() for _ in self.plan.indices])
        assert folding.rest_outputs is not None
        beside = folding.rest_outputs.leaves(value, f"micro-batch {self.sums.steps + 1}")
        moved = zip(folding.moved, gradients_in(moving), strict=True)
        passed, self.passed = self.passed, {}
        return {**dict(zip(folding.beside, beside, strict=True)), **dict(moved), **passed}

    def _with_leaves_of(self, args: Args) -> tuple[Args, list[torch.Tensor]]:
        """The arguments of a micro-batch with leaves of those that it alone has, and these."""
        leaves = self.leaves_of(self.plan.moving, args)
        put_hooks(leaves.originals, leaves.inputs)
        self.leaves.trees.update(leaves.trees)
        args = tuple([leaves.trees.get(index, arg) for index, arg in enumerate(args)])
        return args, leaves.inputs

    @property
    def arriving(self) -> Sequence[torch.Tensor]:
        """The leaves that gradients come to, in the order of the inputs."""
        return self.inputs

    # --- the end of the window

    @property
    def state(self) -> list[Any]:
        """What is threaded to the next micro-batch."""
        return [] if self.sums is None else self.sums.state

    def check(self) -> None:
        """Raises FuncgaError if the losses have reached no leaf, or have changed one."""
        inputs = self.inputs
        if self.own is None and not all(map(_REQUIRES_GRAD, inputs)):
            raise switched_off()
        if self.measuring is not None:
            self.measuring.end()
        is_written = [*map(_private.version, inputs)] != self.versions
        if ON and is_written:
            unchanged.check_parameters(self)
        if ON and (self.own is not None or self.visits is not None):
            unchanged.check_module(self)
        if self.unreached and not self.gradient.reached:
            raise self.gradient.unreached(self.plan.count)

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        sums, inputs = self.sums, self.inputs
        assert sums is not None
        self.check()
        if ON and any(map(_private.has_hooks, inputs)) != self.hooked:
            raise unchanged.other_hooks()
        if ON and sums.folding.lends and any(map(operator.is_not, map(_GRAD, inputs), self.held)):
            raise unchanged.grads_changed()
        for leaf in inputs:
            leaf.grad = None
        with recording():
            for index, leaf in () if self.begun else zip(sums.folding.grads, inputs, strict=True):
                if sums.of[index] is None and index in sums.folding.folds:
                    # No loss of the window depended on it, or none had a weight.
                    sums.of[index] = sums.folding.folds[index].identity(leaf.detach())
            return sums.result() if self.merged is None else self.merged(sums)


def gradients_in(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a pass has left in these leaves; zeros where it did not come."""
    return [(torch.zeros_like(p) if p.grad is None else p.grad).detach() for p in leaves]


# The kinds of functions written in Python that may run a backward pass of their own; and what tells
# whether there are more.
_kinds: tuple[str, list[Any]] = ("", [])


def is_walked(gradient: GradientFunction) -> bool:
    """Whether the graph of a loss is walked: until one has reached a leaf, and where a node of such
    a function is alive, in this graph or in any other.
    """
    global _kinds
    made, kinds = repr(_private.KINDS_MADE), _kinds
    if made != kinds[0]:
        kinds = _kinds = made, graphs.kinds_of_functions()
    for kind in kinds[1]:  # a class that has died has no nodes
        if kind() is not None and sys.getrefcount(kind()) > graphs.NO_NODES:
            return True
    return EVERY or not gradient.reached
