"""The loop over the micro-batches: how calls of a step are read, cut and weighed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from itertools import islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments, groups, starts
from funcga._call.supported import MODULE
from funcga._fold import weight_on_host
from funcga._grad import GradientFunction
from funcga._types import GradFn, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.dtensor import is_dtensor
from torch_backend.engine.alone import value_alone
from torch_backend.engine.called import Called
from torch_backend.engine.opened import Own
from torch_backend.engine.plan import Plan, Plans, ambient, key_of
from torch_backend.engine.window import Window
from torch_backend.former import loop as former
from torch_backend.former.loop import (
    check_unwrapped,
    is_out_of_memory,
    is_traced,
    moved,
    telling,
    untraced,
)
from torch_backend.modules.checks import check_no_params, check_wrapped_before
from torch_backend.modules.layers import Walk
from torch_backend.wrapped.gradient import ModuleGradient

__all__ = ["accumulate", "alone", "is_out_of_memory", "is_traced", "stream", "telling"]


def accumulate(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(args, kwargs): the fold of the program over the micro-batches cut from args."""

    def fold(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        nonlocal program
        if "torch._dynamo" in sys.modules and (tool := _compiled()):  # else nothing is compiled
            program = tool.program_of(program)
        flat = [*map(trees.flatten, args)]
        if _is_former(program):
            return former.accumulate(program, backend)(args, kwargs)
        source, plans = Source(program, backend), program.memory.keep(Plans)
        key = source.key(flat, kwargs)
        plan: Plan | None = plans.get(key)
        if plan is None and source.is_former(flat):
            return former.accumulate(program, backend)(args, kwargs)
        if program.totals is not None:
            # What is passed whole, such as the parameters, is not counted.
            parts = program.read(args, backend).parts
            split = tuple([part.value if part.axes else None for part in parts])
            totals = accumulate(program.counting(backend), backend)(split, {})
            kwargs = {**kwargs, "totals": totals}
        source.check(args)
        arguments, cuts = _arguments_and_cuts(program, backend, args, flat, plan)
        state = [_owned(leaf) for leaf in arguments.state]
        weights: list[Any] = [size for _, size in cuts]
        if program.weight is not None:
            weights = _weights(program, arguments, cuts, state)
        with source.window(arguments, plan) as window:
            arguments, kwargs = window.prepared(arguments, kwargs)
            # Slice all views first: after a backward pass the CPU cache is cold.
            views = views_of(arguments, cuts, state)
            for (start, size), view, weight in zip(cuts, views, weights, strict=True):
                if program.is_exact or state:
                    take = _copied_rows if program.is_exact else None
                    view = arguments.cut(start, size, state, take)
                window.fold(view, kwargs, weight)
                state = window.state if state else state
            del view  # the last one, which may be a copy
            result = window.result()
        if window.plan is not None and window.plan is not plan:
            plans.put(key, window.plan.with_cuts(arguments, cuts))
        return result

    return _not_traced(fold, program)


def stream(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(leading, microbatches, kwargs): the fold of the program over an iterable of
    micro-batches.
    """

    def fold(
        leading: tuple[Tree, ...], items: Iterator[tuple[Tree, ...]], kwargs: dict[str, Tree]
    ) -> Tree:
        nonlocal program
        if "torch._dynamo" in sys.modules and (tool := _compiled()):  # else nothing is compiled
            program = tool.program_of(program)
        flat = [*map(trees.flatten, leading)]
        if _is_former(program) or Source(program, backend).is_former(flat):
            return former.stream(program, backend)(leading, items, kwargs)
        if program.device is not None:
            device = torch.device(program.device)
            items = moved(_with_weights(program, backend, leading, items), device)
            if program.totals is not None:
                ((totals,),) = moved(iter([(kwargs["totals"],)]), device)
                kwargs = {**kwargs, "totals": totals}
        source, plans, state = Source(program, backend), program.memory.keep(Plans), list[Any]()
        window: Window | Called | None = None
        plan, key = None, None
        with ExitStack() as stack:
            for item in items:
                known = item[-1] if program.device is not None else None
                item = item if program.device is None else item[:-1]
                arguments = program.read((*leading, *item), backend)
                # The arguments hold the item. Without references one micro-batch lives at a time.
                del item
                if program.weight is None:
                    _check_not_packed(arguments)
                if window is None:
                    source.check(tuple([part.value for part in arguments.parts]))
                    state = [_owned(leaf) for leaf in arguments.state]
                    key = source.key(flat, kwargs), len(arguments.parts)
                    plan = plans.get(key)
                    window = source.window(arguments, plan)
                    stack.enter_context(window)
                arguments, kwargs = window.prepared(arguments, kwargs)
                args = arguments.cut(0, None, state)
                weight = known
                if weight is None:
                    (weight,) = on_host([program.weigh(arguments, args, None)])
                window.fold(args, kwargs, weight)
                state, window.arguments = window.state, None
                del arguments, args
            assert window is not None
            result = window.result()
        if window.plan is not None and window.plan is not plan:
            plans.put(key, window.plan)
        return result

    return _not_traced(fold, program)


def _with_weights(
    program: Program, backend: Backend, leading: tuple[Tree, ...], items: Iterator[tuple[Tree, ...]]
) -> Iterator[tuple[Tree, ...]]:
    """The items, each with its weight behind it: a batch of the host is weighed before it is
    copied to a device, so that nothing waits for that.
    """
    for item in items:
        arguments = program.read((*leading, *item), backend)
        if program.weight is None:
            _check_not_packed(arguments)
        args = arguments.cut(0, None, [_owned(leaf) for leaf in arguments.state])
        (weight,) = on_host([program.weigh(arguments, args, None)])
        holder = [(*item, weight)]
        # No reference stays in this frame, so the consumer alone decides how long the item lives.
        del item, arguments, args
        yield holder.pop()


class Source:
    """Where the gradients, or values, of a program come from."""

    def __init__(self, program: Program, backend: Backend):
        grad_fn, self.program, self.backend = program.grad_fn, program, backend
        if dist.is_available() and dist.is_initialized():
            check_unwrapped(grad_fn, program.memory)
        self.gradient: GradientFunction | None = None
        self.own: Own | None = None
        if isinstance(grad_fn, ModuleGradient):
            grad_fn.check_not_traced()
            check_wrapped_before(grad_fn.module)
            walk, module = program.memory.keep(Walk), grad_fn.module
            self.gradient = grad_fn.parts
            self.own = Own(module, walk.trainable(module), walk)
        elif isinstance(grad_fn, GradientFunction) and not arrays.in_transform():
            self.gradient = grad_fn

    def check(self, args: tuple[Tree, ...]) -> None:
        """Raises FuncgaError for parameters that are given to a module, which has its own."""
        if self.own is not None:
            check_no_params(args, self.own.module)

    def key(self, flat: Sequence[tuple[list[Any], Any]], kwargs: dict[str, Tree]) -> object:
        """The structure of a call."""
        if self.gradient is None:
            return None
        own: object = None
        if self.own is not None:
            params = self.own.params
            own = key_of([*params.values()], tuple(params), are_fixed=True)
        return ambient(), own, tuple([key_of(*each) for each in flat]), tuple(kwargs)

    def is_former(self, flat: Sequence[tuple[list[Any], Any]]) -> bool:
        """Whether the former engine runs this: DTensors."""
        own = [] if self.own is None else [*self.own.params.values()]
        leaves = [*own, *[leaf for each, _ in flat for leaf in each]]
        return not _PLAIN.issuperset(map(type, leaves)) and any(map(is_dtensor, leaves))

    def window(self, arguments: Arguments, plan: Plan | None) -> Window | Called:
        """A window for calls with arguments like these."""
        program, grad_fn = self.program, self.program.grad_fn
        if self.gradient is not None:
            make: Callable[..., Window] = Window
            if "torch._dynamo" in sys.modules and self.own is None and (tool := _compiled()):
                make = tool.window_of(program, self.gradient)
            return make(program, self.gradient, self.backend, arguments, plan, self.own)
        is_own = isinstance(grad_fn, GradientFunction)
        function = grad_fn.bound(self.backend) if isinstance(grad_fn, GradientFunction) else grad_fn
        return Called(program, function, arguments, is_own)


def _compiled() -> Any:
    """The tool for what torch.compile has made; None where it is missing."""
    with suppress(ModuleNotFoundError):
        return import_module("funcga.tools.compiled.in_torch")
    return None


def _is_former(program: Program) -> bool:
    """Whether the former engine runs this: replicas, wrapped modules, what observes or drops."""
    grad_fn, options = program.grad_fn, (program.across, program.observers, program.dropping)
    is_wrapped = isinstance(grad_fn, ModuleGradient) and grad_fn.kind != MODULE
    return is_wrapped or options != (None, None, None)


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _arguments_and_cuts(
    program: Program,
    backend: Backend,
    args: tuple[Tree, ...],
    flat: Sequence[tuple[list[Any], Any]],
    plan: Plan | None,
) -> tuple[Arguments, Sequence[tuple[int, int]]]:
    """The arguments, and (first row, rows) of every micro-batch; as those of the plan, if any."""
    if plan is None or plan.parts is None:
        arguments = program.read(args, backend)
        _check_not_packed(arguments)
        return arguments, starts(groups(arguments.rows(), program.n, program.microbatch_size))
    parts = [
        part._replace(value=arg, leaves=leaves if part.axes else [])
        for part, arg, (leaves, _) in zip(plan.parts, args, flat, strict=True)
    ]
    return Arguments(tuple(parts), program.grad_fn, backend, program.in_axes is None), plan.cuts


def _is_unusual(leaf: torch.Tensor) -> bool:
    return leaf.layout is not torch.strided or leaf.is_nested


def views_of(
    arguments: Arguments, cuts: Sequence[tuple[int, int]], state: list[Any]
) -> list[tuple[Tree, ...]]:
    """The arguments of each micro-batch, as views."""
    leaves = [leaf for part in arguments.parts for leaf in part.leaves]
    axes = [axis for part in arguments.parts for axis in part.axes]
    is_usual = {*map(type, leaves)} == {torch.Tensor} and {*map(type, axes)} == {int}
    if not is_usual or any(map(_is_unusual, leaves)):
        return [arguments.cut(start, size, state) for start, size in cuts]
    # The usual case: one call cuts a tensor into all of its views.
    sizes = [size for _, size in cuts]
    pieces = zip(
        *[leaf.split(sizes, axis) for leaf, axis in zip(leaves, axes, strict=True)], strict=True
    )
    views = []
    for each in map(iter, pieces):
        views.append(
            tuple(
                [
                    trees.unflatten(part.structure, [*islice(each, len(part.leaves))])
                    if part.axes
                    else part.value
                    for part in arguments.parts
                ]
            )
        )
    return views


def _weights(
    program: Program,
    arguments: Arguments,
    cuts: Sequence[tuple[int, int]],
    state: list[Any],
) -> list[Any]:
    """The weight of each micro-batch; those that a device knows are read at once, in one wait."""
    views = views_of(arguments, cuts, state)
    sizes = [size for _, size in cuts]
    weighed = map(program.weigh, repeat(arguments), views, sizes)
    return [*on_host([*weighed])]


def on_host(weights: Sequence[Scalar]) -> Sequence[Scalar]:
    """The weights as numbers; in a transform, whose tensors have none, as they are."""
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if not tensors or arrays.in_transform():
        return weights
    if _private.FAKE in {*map(type, tensors)} or any(tensor.is_meta for tensor in tensors):
        numbers = [next(_private.NUMBERS) for _ in tensors]
    else:
        wide = torch.float64 if any(map(torch.is_floating_point, tensors)) else torch.int64
        numbers = torch.stack([each.to(tensors[0].device, wide) for each in tensors]).tolist()
    read = iter(numbers)
    return [
        weight_on_host(next(read)) if isinstance(weight, torch.Tensor) else weight
        for weight in weights
    ]


def _owned(leaf: Any) -> Any:
    """The initial state in memory of its own: grad_fn may update it in place."""
    return arrays.owned(leaf, (leaf,)) if arrays.is_array(leaf) else leaf


def _copied_rows(array: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
    """`size` rows from `start` on, in memory of their own.

    A kernel may round differently where an array begins in the middle of a cache line, and where
    the rows of a micro-batch begin depends on what stands before them.
    """
    return arrays.slice(array, axis, start, size).clone()


def _check_not_packed(arguments: Arguments) -> None:
    """Raises FuncgaError for a PackedSequence that is to be cut, or whose rows are counted."""
    for part in arguments.parts:
        nodes = []
        if part.axes:
            nodes = trees.flatten(part.value, lambda node: isinstance(node, PackedSequence))[0]
        if any(isinstance(node, PackedSequence) for node in nodes):
            raise FuncgaError(
                "an argument holds a PackedSequence, whose rows are time steps of all sequences "
                "together: they can neither be cut nor say what it weighs. Pass the padded "
                "sequences and their lengths, and pack them in loss_fn: pack_padded_sequence(x, "
                "lengths, batch_first=True, enforce_sorted=False). Or stream micro-batches that "
                "are packed: stream(grad_fn, weight=lambda packed, y: len(y))."
            )


def _not_traced(fold: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """The function, which torch.compile runs as it is."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return fold
    if program.across is not None:
        return untraced(fold)
    if torch.compiler.is_compiling() or callable(_private.compiling()):
        return untraced(fold, "funcga accumulates here; compile the loss, and not the step")
    return fold


def alone(grad_fn: GradientFunction, backend: Backend) -> GradFn:
    """The gradient function for a call outside of any window."""
    if torch.compiler.is_compiling() or arrays.in_transform():
        return grad_fn.bound(backend)
    gradient = partial(value_alone, grad_fn, backend)
    return untraced(gradient) if callable(_private.compiling()) else gradient
