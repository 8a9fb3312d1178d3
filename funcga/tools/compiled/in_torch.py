"""Compiled micro-steps: the loss, its gradients and the sums of these in one compiled graph.

Autograd over a compiled loss runs two graphs, and adds every gradient outside of both. Here one
graph computes the loss and its gradients, and adds these to sums that are its inputs, in place. The
sums are zeros at first, and no gradient becomes one. The weight of a micro-batch is an input, too,
so one graph serves for every micro-batch of a shape, whatever n.

A CompiledWindow folds by micro-steps where nothing else has to see a gradient: see `serves_step`
and `serves_window`. If torch.compile refuses the micro-step as a whole, the loss
is compiled alone, as it was given, and autograd adds its gradients.
"""

import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from funcga._call import OwningGradient, Program
from funcga._grad import GradientFunction
from funcga._types import Args, Kwargs, LossFn, Scalar, Tree, TreeFn
from funcga.tools.compiled import private_in_torch
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording
from torch_backend.engine import bound
from torch_backend.engine.window import Window
from torch_backend.modules import PureLoss
from torch_backend.modules.visits import InUse
from torch_backend.sums import Folding, Sums


def program_of(program: Program) -> Program:
    """The program, with the gradient function that torch.compile was given in place of what it has
    made of that.

    The loss of the gradient function is compiled likewise.
    """
    made = None if arrays.in_transform() else _made_of(program.grad_fn)
    return replace(program, grad_fn=made) if isinstance(made, GradientFunction) else program


def window_of(program: Program, gradient: GradientFunction) -> Callable[..., Window] | None:
    """What makes the windows of a gradient whose loss is compiled; None for all others."""
    loss_fn = gradient.loss_fn
    loss_fn = loss_fn.loss_fn if isinstance(loss_fn, PureLoss) else loss_fn
    step = _made_of(loss_fn)
    if not (isinstance(step, MicroStep) and serves_step(program, gradient)):
        return None
    return partial(CompiledWindow, step)


def _made_of(function: TreeFn) -> "GradientFunction | MicroStep | None":
    """What is made of a compiled function, once for all steps: of a gradient function one whose
    loss is compiled, and of any other its micro-step. None of a function that is not compiled.
    """
    if not isinstance(function, types.FunctionType):
        return None
    if function not in _MADE:
        compiled = private_in_torch.compiled_of(function)
        _MADE[function] = compiled and (_gradient_of(compiled) or MicroStep(compiled))
    return _MADE[function]


def _gradient_of(compiled: private_in_torch.Compiled) -> GradientFunction | None:
    # torch.compile wraps a function around an object.
    gradient = vars(compiled.function).get("__wrapped__")
    if isinstance(gradient, OwningGradient) or not isinstance(gradient, GradientFunction):
        return None
    loss_fn = gradient.loss_fn
    if isinstance(loss_fn, PureLoss):
        inner = compiled.compile(loss_fn.loss_fn)
        return replace(gradient, loss_fn=replace(loss_fn, loss_fn=inner))
    return replace(gradient, loss_fn=compiled.compile(loss_fn))


# --- the graph


class MicroStep:
    """What one compiled loss is compiled to, for every step that accumulates its gradients.

    `run` is the compiled function, `is_refused` whether torch.compile has refused it once.
    `static`: sums of earlier windows, by what they are like, where calls are CUDA graphs, which
    write to fixed addresses.
    """

    def __init__(self, compiled: private_in_torch.Compiled):
        self.run = compiled.compile_whole(_micro_step(compiled.function))
        self.is_refused, self.replays = False, compiled.replays
        self.static: dict[object, list[list[torch.Tensor]]] = {}


_NUMBERS = itertools.count()


def _micro_step(loss_fn: LossFn) -> Callable[..., torch.Tensor]:
    """`micro_step(sums, params, inside, buffers, args, kwargs, factor)`, which returns the loss.

    It adds the gradients by `params`, arguments by their indices, to the sums: times `factor`, a
    0-d tensor, if there is one. `inside` is a PureLoss, else None, and `buffers` are
    those of that module.
    """

    def micro_step(
        sums: Sequence[torch.Tensor],
        params: dict[int, Tree],
        inside: Any,
        buffers: Mapping[str, torch.Tensor],
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        factor: torch.Tensor | None,
    ) -> torch.Tensor:
        def loss_of(params: dict[int, Tree]) -> torch.Tensor:
            called = [params.get(index, arg) for index, arg in enumerate(args)]
            if inside is None:
                return loss_fn(*called, **kwargs)  # type: ignore[no-any-return]
            output, _ = inside.functional(called[0], buffers, called[1:], kwargs)
            return output  # type: ignore[no-any-return]

        grads, loss = torch.func.grad_and_value(loss_of)(params)
        for total, gradient in zip(sums, trees.flatten(grads)[0], strict=True):
            # In the dtype of the sum, in which neither the gradient times its weight nor the sum
            # overflows early.
            more = gradient.to(total.dtype)
            total.add_(more if factor is None else more * factor.to(total.dtype))
        return loss  # type: ignore[no-any-return]

    # torch.compile keeps what it has compiled with the code object of a function, up to a limit,
    # and what it knows of shapes by its name. So each has a code object and a name of its own.
    assert isinstance(micro_step, types.FunctionType)
    micro_step.__code__ = micro_step.__code__.replace(co_name=f"micro_step_{next(_NUMBERS)}")
    return micro_step


_MADE: WeakKeyDictionary[Any, GradientFunction | MicroStep | None] = WeakKeyDictionary()


# --- where autograd adds the gradients of a compiled loss after all


def serves_step(program: Program, gradient: GradientFunction) -> bool:
    """Whether micro-steps may be compiled in the windows of a step: no replicas merge the sums, and
    no loss may call collectives; no gradient is measured or dropped; a loss returns no more than a
    number that is not scaled.
    """
    loss = gradient.loss_fn
    if program.across is not None or (dist.is_available() and dist.is_initialized()):
        return False
    if program.readings is not None or program.skip is not None:
        return False
    returns_state = isinstance(loss, PureLoss) and loss.buffers
    return not (gradient.has_aux or gradient.scaled or returns_state)


def _is_plain(leaf: Any) -> bool:
    """Whether it is a dense tensor of floats."""
    is_float = type(leaf) is torch.Tensor and leaf.is_floating_point()
    return is_float and leaf.layout is torch.strided


def serves_window(window: Window) -> bool:
    """Whether micro-steps may be compiled in a window: parameters are dense and passed whole, no
    state is threaded, and nothing is to see what a graph computes, as hooks and modes do.
    """
    plan, arguments, leaves = window.plan, window.arguments, trees.flatten(window.leaves.trees)[0]
    if not leaves or not all(map(_is_plain, leaves)) or plan.hooked or plan.moving:
        return False
    # A module that is not visited has other parameters in each micro-batch.
    is_split = isinstance(window.gradient.loss_fn, PureLoss) and window.visits is None
    if is_split or arguments is None or arguments.state:
        return False
    if _private.is_any_autocast_enabled() or torch.is_anomaly_enabled():
        return False
    return not (private_in_torch.saves_by_hooks() or private_in_torch.dispatch_modes())


# --- the window


class CompiledWindow(Window):
    """A window of a gradient whose loss is compiled: `step` folds the micro-batches, as far as it
    can, and autograd the others.

    `totals`: the sums of gradients that the step adds to; None where autograd adds all. They stand
    as `.grad`s of the leaves as well, where autograd adds to them. `params`, `inside`, `buffers`:
    what the step is called with in each micro-batch; `is_weighted`: whether the totals are;
    `factor(share)`: a share of the weight as a 0-d tensor. These are set by `_begin`. `unused`:
    where static totals are left for a later window.
    """

    totals: list[torch.Tensor] | None = None
    unused: list[list[torch.Tensor]] | None = None

    def __init__(self, step: MicroStep, program: Program, *others: Any):
        super().__init__(program, *others)
        self.step, self.weighs = step, program.weight is not None

    @contextmanager
    def passes(self, weights: Sequence[Scalar] = ()) -> Iterator[None]:
        """The context of micro-batches. The first weight is the unit of the totals."""
        with recording():
            yield

    def fold(self, args: Args, kwargs: Kwargs, weight: float, last: bool = False) -> None:
        """Folds one micro-batch in, by the compiled step or by autograd."""
        if self.sums is None and self.totals is None:
            self._begin()
        totals = self.totals
        loss = None if totals is None else self._run(totals, args, kwargs, weight)
        # Autograd finds out whether a loss that depends on nothing is an error.
        if loss is None or not (self.gradient.reached or any(map(torch.Tensor.any, totals or ()))):
            if totals is not None and self.sums is not None:
                self.writes = self._count_writes()  # also of what no pass of autograd has added
            with super().passes():
                super().fold(args, kwargs, weight)
            return
        self.gradient.reached.add(True)
        if self.sums is None:
            self.sums = self._bind(loss, None)
        self._add(loss, None, weight)

    def _begin(self) -> None:
        """Makes the totals, if nothing else is to see the gradients of a micro-batch, or takes part
        in computing them.
        """
        visits = self.visits
        if self.step.is_refused or not serves_window(self):
            return
        self.params = {index: trees.detached(tree) for index, tree in self.leaves.trees.items()}
        self.inside: PureLoss | None = None
        self.buffers: dict[str, torch.Tensor] = {}
        if visits is not None:
            self.inside = visits.loss
            with visits:  # which checks the module and its parameters
                self.buffers = dict(self.inside.module.named_buffers())
        leaves = trees.flatten(self.params)[0]
        # Until the first loss shows its dtype, one of that of the parameters stands in.
        folding = self.plan.folding or bound.folding_of(self, leaves[0].new_zeros(()), None)
        self.is_weighted = folding.are_weighted
        if folding.lends and len(folding.adds_of_grads) < 2:  # all are sums, of one kind
            self.totals = self._zeros(leaves, folding)
            like = {"dtype": self.totals[0].dtype, "device": self.totals[0].device}
            self.factor = cache(partial(torch.full, (), **like))

    def _zeros(self, leaves: list[torch.Tensor], folding: Folding) -> list[torch.Tensor]:
        dtypes = [folding.folds[index].accumulator_dtype for index in folding.grads]
        pairs = [*zip(leaves, dtypes, strict=True)]
        is_static = self.step.replays and all(leaf.is_cuda for leaf in leaves)
        if is_static:
            # A CUDA graph reads leaves made of parameters from where these stay, and copies others.
            for original, leaf in zip(self.leaves.originals, leaves, strict=True):
                if isinstance(original, nn.Parameter):
                    torch._dynamo.mark_static_address(leaf, guard=False)
            like = tuple([(leaf.shape, leaf.stride(), leaf.device, dtype) for leaf, dtype in pairs])
            self.unused = self.step.static.setdefault(like, [])
        if self.unused:  # another thread finds others, so that no two windows have the same
            totals = self.unused.pop()
            torch._foreach_zero_(totals)
            return totals
        totals = [torch.zeros_like(leaf, dtype=dtype) for leaf, dtype in pairs]
        for total in totals if is_static else ():
            torch._dynamo.mark_static_address(total)
        return totals

    def _run(
        self,
        totals: list[torch.Tensor],
        args: Args,
        kwargs: Kwargs,
        weight: float,
    ) -> torch.Tensor | None:
        """Adds the gradients of a micro-batch to the totals, and returns the loss; None where
        nothing is added.
        """
        sums, factor = self.sums, None
        # The first weight is the unit.
        share = float(bool(weight)) if sums is None else sums.share(weight)
        assert share is not None
        if share == 0 and self.is_weighted:
            return None  # not even a NaN is added
        # Without a factor inductor frees each gradient sooner. The user's own weights may be 1 now
        # and another number next, so these have one in every micro-batch, and one graph.
        if self.is_weighted and (share != 1 or self.weighs):
            factor = self.factor(share)
        # What is differentiated is passed apart.
        others = [None if index in self.params else arg for index, arg in enumerate(args)]
        called = self.params, self.inside, self.buffers, others, kwargs, factor
        # The module keeps its own parameters, and no other thread visits it.
        ids = [] if self.visits is None else self.visits.parts.ids
        try:
            with InUse(ids), torch.no_grad():
                loss: torch.Tensor = self.step.run(totals, *called)
                return loss
        except private_in_torch.refusals_to_compile():
            self.step.is_refused, self.totals = True, None
            return None

    def _bind(self, loss: torch.Tensor, aux: Tree) -> Sums:
        if self.totals is None:
            return super()._bind(loss, aux)
        is_known = loss.dtype is self.plan.loss_dtype
        folding = self.plan.folding if is_known else bound.folding_of(self, loss, aux)
        sums, self.even = Sums(folding), (0.0, None)
        for index, total in zip(folding.grads, self.totals, strict=True):
            sums.of[index] = total
        self._hold(self.totals)
        self.writes = self._count_writes()
        return sums

    def result(self) -> Tree:
        """The normalised result, out of the reach of a next window, for which static totals
        stay.
        """
        if self.unused is not None and self.totals is not None and self.sums is not None:
            for index, total in zip(self.sums.folding.grads, self.totals, strict=True):
                self.sums.of[index] = total.clone()
            self.unused.append(self.totals)
        return super().result()
