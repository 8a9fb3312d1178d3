"""The loop over the micro-batches: how calls of a step are read, cut and weighed."""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from itertools import repeat, starmap
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Argument, Arguments, starts
from funcga._call.supported import MODULE
from funcga._fold import weight_on_host
from funcga._grad import GradientFunction
from funcga._types import Args, GradFn, Kwargs, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.engine.alone import value_of
from torch_backend.engine.called import Called
from torch_backend.engine.leaves import Own
from torch_backend.engine.plan import Plan, Plans, call_key
from torch_backend.engine.window import Window
from torch_backend.modules.checks import check_not_wrapped, modules_in
from torch_backend.prefetch import moved
from torch_backend.reduce import Reduction, reductions_of
from torch_backend.reduce.absent import telling as telling
from torch_backend.wrapped.distributed import Distributed, rows_by_device
from torch_backend.wrapped.gradient import ModuleGradient

# How rows are taken: take(array, axis, first row, number of rows).
Take = Callable[..., Any]


def accumulate(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(args, kwargs): the fold of the program over the micro-batches cut from args."""

    def fold(args: Args, kwargs: Kwargs) -> Tree:
        source, plans = Source(program, backend), program.memory.kept.get(Plans)
        job, flat = source.program, [*map(trees.flatten, args)]
        key, plan = None, None
        if source.gradient is not None:
            key = call_key(source.own, flat, tuple(kwargs))
            plan = plans.get(key) if isinstance(plans, Plans) else None
        if plan is not None and plan.arguments is not None:
            cuts, take = plan.cuts, plan.take
            parts = [
                Argument(arg, leaves if axes else [], axes, structure, in_axes)
                for (_, _, axes, structure, in_axes), arg, (leaves, _) in zip(
                    plan.arguments, args, flat, strict=True
                )
            ]
            arguments = Arguments(tuple(parts), job.grad_fn, backend)
        else:
            arguments, cuts, take = cut(job, backend, args, source.may_be_short)
        weights = [size for _, size in cuts]
        if job.weight is not None:
            weights = weights_of(job, arguments, cuts, take)
        with source.window(arguments, plan) as window:
            arguments, named = window.prepared(arguments, kwargs)
            result = run_window(window, arguments, named, cuts, take, weights)
        if cuts and key is not None and window.plan is not plan:
            new = window.plan.with_cuts(arguments, cuts, take)
            program.memory.keep(Plans).put(key, new)
        if job.completed is not None:
            return job.completed(backend, result, kwargs)
        return result

    is_compiled = "torch._dynamo" in sys.modules  # something may be
    return _private.untraced(fold, program.across is not None) if is_compiled else fold


def run_window(
    window: Any,
    arguments: Arguments,
    kwargs: Kwargs,
    cuts: Sequence[tuple[int, int]],
    take: Take | None,
    weights: Sequence[Any],
) -> Tree:
    """The result of a window of the micro-batches that are cut from prepared arguments."""
    state = arguments.state and [_owned(leaf) for leaf in arguments.state]
    if take is None and window.program.is_exact:
        take = _copied_rows
    views = views_of(arguments, cuts, state, take)
    with window.passes(weights):
        for number, (view, weight) in enumerate(zip(views, weights, strict=True), 1):
            window.fold(view, kwargs, weight, number == len(cuts))
            del view  # it may be a copy
            if state:
                state[:] = window.state
    if not cuts:
        return window.result_without_microbatches(arguments, kwargs, state)
    return window.result()


def stream(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(leading, microbatches, kwargs, device): the fold of the program over an iterable of
    micro-batches, moved to the device if there is one, each while the one before it is computed
    with.
    """

    def fold(
        leading: Args,
        items: Iterator[tuple[Tree, ...]],  # torch.compile traces no subscript by an alias
        kwargs: Kwargs,
        device: object = None,
    ) -> Tree:
        source, plans, state = Source(program, backend), program.memory.keep(Plans), list[Any]()
        job, flat = source.program, [*map(trees.flatten, leading)]
        if device is not None:
            # Weighed on the host, so that nothing waits for a copy. A map keeps no item alive.
            weigh = partial(_weigh, job, backend, leading)
            items = moved(map(weigh, items), device)
        window: Any = None
        plan, key, nothing = None, None, None
        with ExitStack() as stack:
            for item, last in _marked(items, source.wrapped is not None):
                *item, weight = item if device is not None else (*item, None)
                arguments = _read(job, (*leading, *item), backend)
                # The arguments hold the item. Without references one micro-batch lives at a time.
                del item
                if window is None:
                    state = [_owned(leaf) for leaf in arguments.state]
                    if source.gradient is not None:
                        key = call_key(source.own, flat, tuple(kwargs), len(arguments.parts))
                        plan = plans.get(key)
                    window = stack.enter_context(source.window(arguments, plan))
                arguments, named = window.prepared(arguments, kwargs)
                args = arguments.cut(0, None, state)
                if weight is None:
                    (weight,) = on_host([job.weigh(arguments, args, None)])
                with window.passes():
                    window.fold(args, named, weight, last)
                state, window.arguments = window.state if state else state, None
                del arguments, args
            if window is not None:
                result = window.result()
            else:
                nothing = _without_items(job, backend, leading)
                window = stack.enter_context(source.window(nothing, None))
                nothing, named = window.prepared(nothing, kwargs)
                state = [_owned(leaf) for leaf in nothing.state]
                result = window.result_without_microbatches(nothing, named, state)
        if nothing is None and key is not None and window.plan is not plan:
            plans.put(key, window.plan)
        if job.completed is not None:
            return job.completed(backend, result, kwargs)
        return result

    is_compiled = "torch._dynamo" in sys.modules  # something may be
    return _private.untraced(fold, program.across is not None) if is_compiled else fold


def _marked(items: Iterator[Any], looks_ahead: bool) -> Iterator[tuple[Any, bool]]:
    """The items, each with whether it is the last; that is known only if the loop `looks_ahead`,
    which pays with the memory of a second item.
    """
    item = next(items, None)
    while item is not None:
        after = next(items, None) if looks_ahead else None
        # No reference stays in this frame, so the consumer alone decides how long the item lives.
        holder = [(item, looks_ahead and after is None)]
        del item
        yield holder.pop()
        item = after if looks_ahead else next(items, None)


def _without_items(program: Program, backend: Backend, leading: Args) -> Arguments:
    """The arguments of a stream that has no micro-batch."""
    axes = program.in_axes
    count = len(axes) if isinstance(axes, tuple | list) else len(leading)
    return program.read((*leading, *[None] * (count - len(leading))), backend)


def _weigh(program: Program, backend: Backend, leading: Args, item: Args) -> Args:
    """A micro-batch of a stream, with its weight behind it."""
    arguments = _read(program, (*leading, *item), backend)
    args = arguments.cut(0, None, [_owned(leaf) for leaf in arguments.state])
    return *item, *on_host([program.weigh(arguments, args, None)])


_HAS_PROCESSES = dist.is_available()
_LAYOUT, _IS_NESTED = operator.attrgetter("layout"), operator.attrgetter("is_nested")


class Source:
    """Where the gradients, or values, of a program come from.

    `gradient`: the gradient function that autograd computes, if any; `own` a module whose own
    parameters it differentiates by. `wrapped`: the gradient of a module that DDP, FSDP or a
    pipeline runs, whose processes go in step: a window of these must be told which micro-batch is
    its last. `may_be_short`: whether other replicas may have more micro-batches, and this one none.
    """

    gradient: GradientFunction | None = None
    own: Own | None = None
    wrapped: Any = None  # a WrappedGradient, or that of a pipeline
    compiled: Any = None

    def __init__(self, program: Program, backend: Backend):
        # Without torch._dynamo nothing is compiled.
        if "torch._dynamo" in sys.modules:
            self.compiled = _compiled()
            program = program if self.compiled is None else self.compiled.program_of(program)
        grad_fn, self.program, self.backend = program.grad_fn, program, backend
        self.is_distributed = _HAS_PROCESSES and dist.is_initialized()
        if self.is_distributed and Plans not in program.memory.kept:
            # Gradients of a wrapped module that a loss uses would be reduced by nobody. Once a step
            # is seen to use none, it is not looked at again.
            for module in modules_in(grad_fn):
                check_not_wrapped(module)
            program.memory.keep(Plans)
        self.may_be_short = program.across is not None
        if isinstance(grad_fn, ModuleGradient):
            grad_fn.check_not_traced()
            if grad_fn.kind != MODULE:
                self.wrapped, self.may_be_short = grad_fn, True
            self.own, self.gradient = grad_fn.own_in(program.memory), grad_fn
        elif isinstance(grad_fn, GradientFunction) and not arrays.in_transform():
            self.gradient = grad_fn

    def window(self, arguments: Arguments, plan: Plan | None) -> Any:
        """A window for calls with arguments like these."""
        program, backend, gradient, own = self.program, self.backend, self.gradient, self.own
        if self.wrapped is not None:
            return self.wrapped.window(program, backend, arguments, plan, own)
        if self.compiled is not None and gradient is not None and own is None:
            make = self.compiled.window_of(program, gradient)
            if make is not None:
                return make(program, gradient, backend, arguments, plan)
        across = program.across
        merges = [] if across is None else reductions_of(across, program.memory)
        if gradient is not None and program.skip is None:
            window = program, gradient, backend, arguments, plan, own
            return Distributed(merges, *window) if self.is_distributed else Window(*window)
        return self._window_of_calls(arguments, merges)

    def _window_of_calls(self, arguments: Arguments, merges: Sequence[Reduction]) -> Any:
        """A window that calls a function for each micro-batch, and folds its values: any grad_fn,
        and gradients where autograd may not add them by itself.
        """
        program, backend, own, gradient = self.program, self.backend, self.own, None
        function: Any = program.grad_fn
        if own is None and isinstance(function, GradientFunction):
            gradient = function
            if self.gradient is None:  # in a transform: torch.func differentiates
                function = gradient.bound(backend)
            else:
                # Autograd cannot take back what it has added: a gradient that may be left out is
                # computed alone, and looked at first.
                function = lambda *args, **kwargs: value_of(gradient, backend, args, kwargs)
        calls = program, function, arguments, gradient, merges, self.gradient is not None
        if program.skip is None:
            return Called(*calls)
        return program.skip.in_torch.SkippingCalls(own and own.module, *calls)


def _compiled() -> Any:
    """The tool for what torch.compile has made; None where it is missing."""
    with suppress(ModuleNotFoundError):
        return import_module("funcga.tools.compiled.in_torch")
    return None


def cut(
    program: Program,
    backend: Backend,
    args: Args,
    may_be_short: bool,
) -> tuple[Arguments, Sequence[tuple[int, int]], Take | None]:
    """(the arguments; the first row of each micro-batch, and its rows; how these are taken, if not
    as they follow each other, as views).
    """
    arguments = _read(program, args, backend)
    rows = arguments.rows(may_be_empty=may_be_short)
    devices, take = rows_by_device(program, arguments, rows)
    sizes = program.split.groups(rows // devices, devices) if rows else []
    return arguments, starts([(count, each * devices) for count, each in sizes]), take


def views_of(
    arguments: Arguments, cuts: Sequence[tuple[int, int]], state: list[Any], take: Take | None
) -> Iterable[Args]:
    """The arguments of each micro-batch: as views, or each taken when it is asked for."""
    leaves = [leaf for part in arguments.parts for leaf in part.leaves]
    axes = [axis for part in arguments.parts for axis in part.axes]
    kinds = {*map(type, leaves)}, {*map(type, axes)}
    is_dense = kinds == ({torch.Tensor}, {int}) and {*map(_LAYOUT, leaves)} == {torch.strided}
    if take is not None or not is_dense or True in map(_IS_NESTED, leaves):
        one_by_one = partial(arguments.cut, state=state, narrow=take or arrays.slice)
        return starmap(one_by_one, cuts)
    # The usual case: one call cuts a tensor into all of its views, before a backward pass leaves a
    # cold cache.
    sizes = [size for _, size in cuts]
    of_parts: list[Iterable[Tree]] = []
    for part in arguments.parts:
        pairs = zip(part.leaves, part.axes, strict=True)
        pieces = [torch.split_with_sizes(leaf, sizes, axis) for leaf, axis in pairs]  # type: ignore[arg-type]
        if not pieces:
            of_parts.append(repeat(part.value, len(sizes)))
        elif part.value is part.leaves[0]:  # a tensor, and no tree
            of_parts.append(pieces[0])
        else:
            of_parts.append(
                map(partial(trees.unflatten, part.structure), zip(*pieces, strict=True))
            )
    return [*zip(*of_parts, strict=True)]


def weights_of(
    program: Program,
    arguments: Arguments,
    cuts: Sequence[tuple[int, int]],
    take: Take | None,
) -> list[Any]:
    """The weight of each micro-batch; those that a device knows are read at once, in one wait."""
    views, sizes = views_of(arguments, cuts, arguments.state, take), [size for _, size in cuts]
    return [*on_host([*map(program.weigh, repeat(arguments), views, sizes)])]


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
    return leaf.clone() if arrays.is_array(leaf) else leaf


def _copied_rows(array: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
    """`size` rows from `start` on, in memory of their own.

    A kernel may round differently where an array begins in the middle of a cache line, and where
    the rows of a micro-batch begin depends on what stands before them.
    """
    return arrays.slice(array, axis, start, size).clone()


def _read(program: Program, args: Args, backend: Backend) -> Arguments:
    """The arguments of a call. Raises FuncgaError for a PackedSequence that is to be cut, or whose
    rows are to be counted.
    """
    arguments = program.read(args, backend)
    split = [part.value for part in arguments.parts if part.axes]
    counts_rows = any(program.split) or program.weight is None
    if counts_rows and any(map(_is_packed, trees.flatten(split, _is_packed)[0])):
        raise FuncgaError(
            "an argument holds a PackedSequence, whose rows are time steps of all sequences "
            "together: they can neither be cut nor say what it weighs. Pass the padded "
            "sequences and their lengths, and pack them in loss_fn: pack_padded_sequence(x, "
            "lengths, batch_first=True, enforce_sorted=False). Or stream micro-batches that "
            "are packed: stream(grad_fn, weight=lambda packed, y: len(y))."
        )
    return arguments


def _is_packed(node: object) -> bool:
    return isinstance(node, PackedSequence)


def alone(grad_fn: GradientFunction, backend: Backend) -> GradFn:
    """The gradient function for a call outside of any window."""
    is_compiled = torch.compiler.is_compiling()
    if is_compiled or arrays.in_transform():
        return grad_fn.bound(backend, counts=not is_compiled)

    def gradient(*args: Tree, **kwargs: Tree) -> Tree:
        return value_of(grad_fn, backend, args, kwargs, torch.is_grad_enabled())

    return _private.untraced(gradient, False)
