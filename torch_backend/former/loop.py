"""The loop over the micro-batches."""

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from funcga._backend import Backend
from funcga._call import Memory, Program
from funcga._call.arguments import Argument, Arguments, groups, starts
from funcga._call.supported import MODULE
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction
from funcga._types import GradFn, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import Fold
from torch_backend import arrays, trees
from torch_backend.dtensor import devices_of_rows, is_dtensor, local_rows
from torch_backend.engine.called import calling
from torch_backend.former import Window
from torch_backend.former.alone import value_alone
from torch_backend.former.buffers import Buffers
from torch_backend.former.dropping import (
    DroppingBuffers,
    buffers_of,
    fold_or_drop,
    put_back,
    statistics_of,
)
from torch_backend.former.inputs import DifferentiatedArguments, detached, with_a_blank_row
from torch_backend.former.layout import Layout, StepCache
from torch_backend.former.passes import Pass
from torch_backend.former.window import Engine
from torch_backend.modules import trainable
from torch_backend.modules.checks import check_no_wrapped_module_in, check_unfrozen
from torch_backend.randomness import devices_of, generator_states, put_generator_states
from torch_backend.reduce import Reduction, reductions_of
from torch_backend.reduce.agreement import progress_of
from torch_backend.reduce.telling import telling as telling_windows
from torch_backend.replicas import Listener, are_processes
from torch_backend.wrapped.gradient import ModuleGradient


def window_of(program: Program, backend: Backend) -> Window:
    """The window for a program. Engine: funcga made the gradient function, and autograd computes
    it. ModuleWindow or PipelineWindow: that of a wrapped module, or of a pipeline. Calls: any other
    function; and funcga's own in transforms of torch.func, and with drop=.
    """
    grad_fn = program.grad_fn
    if dist.is_available() and dist.is_initialized():
        check_unwrapped(grad_fn, program.memory)
    if isinstance(grad_fn, ModuleGradient):
        return _window_of_module(program, grad_fn, backend)
    reductions = [] if program.across is None else reductions_of(program, backend)
    if not isinstance(grad_fn, GradientFunction):
        return Calls(program, grad_fn, reductions)
    gradient = grad_fn
    # Autograd cannot run inside of a transform of torch.func.
    if arrays.in_transform():
        return Calls(program, gradient.bound(backend), reductions, gradient)
    if program.dropping is not None:
        # Autograd cannot take back what it has added, so each gradient is computed alone, and
        # looked at first.
        alone = partial(value_alone, gradient, backend)
        return Calls(program, alone, reductions, gradient, records=True)
    cache = program.memory.keep(StepCache)
    inputs = DifferentiatedArguments(gradient, backend, cache.indices_of)
    is_uninterrupted = bool(program.n or program.microbatch_size) and program.weight is None
    return Engine(program, Pass(inputs, is_uninterrupted), cache, next(iter(reductions), None))


def _window_of_module(program: Program, gradient: ModuleGradient, backend: Backend) -> Window:
    if program.dropping is None or gradient.kind != MODULE:  # others drop what they have reduced
        return gradient.window(program, backend)
    gradient.check_not_traced()
    reductions = [] if program.across is None else reductions_of(program, backend)
    return Calls(program, gradient, reductions, gradient.parts, records=True)


def check_unwrapped(grad_fn: GradFn, memory: Memory) -> None:
    """Raises FuncgaError for a loss that uses a wrapped module: it would get gradients that
    nobody reduces.
    """
    # Once a step is seen to use none, it is not looked at again.
    if _NotWrapped not in memory.kept and check_no_wrapped_module_in(grad_fn):
        memory.keep(_NotWrapped)


class _NotWrapped:
    """Kept by a step whose gradient function was seen to use no wrapped module."""


# A micro-batch: the arguments that it is cut from, its first row on each device, and how many rows
# it has on each; None for all.
Microbatch = tuple[Arguments, int, int | None]


def accumulate(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(args, kwargs): the fold of the program over the micro-batches cut from args."""

    def fold(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        if program.totals is not None:
            kwargs = with_totals(program, backend, args, kwargs)
        with window_of(program, backend) as window:
            args, kwargs = (
                window.detached(args),
                detached(kwargs, window.records) if kwargs else kwargs,
            )
            known = program.memory.keep(LastCut)
            arguments = known.arguments_like_last(program, backend, args)
            if arguments is not None:
                cuts, devices = known.cuts, 1
            else:
                arguments = program.read(args, backend)
                cuts, devices = cut(program, arguments, window.may_be_short)
                known.note(arguments, cuts)
            microbatches = iter([(arguments, start, count) for start, count in cuts])
            views = None
            if devices == 1 and not (program.is_exact or arguments.state):
                # Views take no memory. Between two backward passes, where nothing of this is in the
                # caches, each would take three times as long.
                views = iter([arguments.cut(start, count, []) for start, count in cuts])
            return run_window(
                program, window, microbatches, lambda: arguments, kwargs, devices, views
            )

    return fold


class LastCut:
    """Kept by a step: how it cut its last batch.

    One of the same structure, shapes and dtypes is cut alike, without being read. Only a batch of
    plain tensors is noted, none of which is threaded.
    """

    def __init__(self) -> None:
        self.parts: list[Argument] | None = (
            None  # without values, and with shapes and dtypes in place of leaves
        )
        self.cuts: Sequence[tuple[int, int]] = ()

    def note(self, arguments: Arguments, cuts: Sequence[tuple[int, int]]) -> None:
        """Remembers how these arguments are cut."""
        self.cuts, self.parts = cuts, None
        if all(type(leaf) is torch.Tensor and type(axis) is int for leaf, axis in arguments):
            self.parts = [
                part._replace(
                    value=None, leaves=[*map(_SHAPE, part.leaves), *map(_DTYPE, part.leaves)]
                )
                for part in arguments.parts
            ]

    def arguments_like_last(
        self, program: Program, backend: Backend, args: tuple[Tree, ...]
    ) -> Arguments | None:
        """The arguments, if they are cut as the last ones were; None if they have to be read."""
        if self.parts is None or len(args) != len(self.parts):
            return None
        parts = []
        for arg, last in zip(args, self.parts, strict=True):
            leaves: list[Any] = []
            if last.in_axes is not None:
                leaves, structure = trees.flatten(arg)
                # A nested tensor may be plain, and has no shape.
                is_plain = {*map(type, leaves)} <= _PLAIN and not any(map(_IS_NESTED, leaves))
                if not is_plain or structure != last.structure:
                    return None
                if [*map(_SHAPE, leaves), *map(_DTYPE, leaves)] != last.leaves:
                    return None
            parts.append(last._replace(value=arg, leaves=leaves))
        return Arguments(tuple(parts), program.grad_fn, backend, program.in_axes is None)


_SHAPE, _DTYPE, _IS_NESTED = (operator.attrgetter(name) for name in ("shape", "dtype", "is_nested"))
_PLAIN = {torch.Tensor}


def with_totals(
    program: Program, backend: Backend, args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> dict[str, Tree]:
    """The keyword arguments of grad_fn with the totals of the window."""
    # What is passed whole, such as the parameters, is not counted.
    split = [part.value if part.axes else None for part in program.read(args, backend).parts]
    return {**kwargs, "totals": accumulate(program.counting(backend), backend)(tuple(split), {})}


def cut(
    program: Program, arguments: Arguments, may_be_short: bool
) -> tuple[Sequence[tuple[int, int]], int]:
    """((first row, rows) of every micro-batch, both on one device; how many devices they take
    rows of at once).
    """
    _check_not_packed(arguments)
    rows = arguments.rows(may_be_empty=may_be_short)
    # A micro-batch of a DTensor takes equally many rows of each device, so that no row travels.
    # From here on rows are counted on one device.
    is_plain = all(type(leaf) is torch.Tensor for part in arguments.parts for leaf in part.leaves)
    devices = 1 if is_plain else _devices(program, arguments)
    n, size, rows = program.n, program.microbatch_size, rows // devices
    if size is not None:
        size = max(1, size // devices)
    return starts(groups(rows, n, size)) if rows else (), devices


def _check_not_packed(arguments: Arguments) -> None:
    """Raises FuncgaError for a PackedSequence that is to be cut, or whose rows are to be
    counted.
    """
    for part in arguments.parts:
        # The usual arguments, a tensor and a dict of tensors, have no node below the top.
        if not part.axes or part.structure.num_nodes <= 1 + part.structure.num_leaves * (
            type(part.value) is dict
        ):
            continue
        nodes = trees.flatten(part.value, lambda node: isinstance(node, PackedSequence))[0]
        if any(isinstance(node, PackedSequence) for node in nodes):
            raise FuncgaError(
                "an argument holds a PackedSequence, whose rows are time steps of all sequences "
                "together: they can neither be cut nor say what it weighs. Pass the padded "
                "sequences and their lengths, and pack them in loss_fn: pack_padded_sequence(x, "
                "lengths, batch_first=True, enforce_sorted=False). Or stream micro-batches that "
                "are packed: stream(grad_fn, weight=lambda packed, y: len(y))."
            )


def _devices(program: Program, arguments: Arguments) -> int:
    """How many devices micro-batches take rows of at once; 1 where it matters which rows are
    together.
    """
    devices = devices_of_rows(arguments)
    folds = [fold for fold in trees.flatten(program.fold)[0] if isinstance(fold, Fold)]
    # Only sums and extremes come out the same whichever rows share a micro-batch.
    if arguments.state or any(fold.reducer.monoid.collective is None for fold in folds):
        return 1
    return devices


def stream(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(leading, microbatches, kwargs): the fold of the program over an iterable of
    micro-batches.
    """

    def fold(
        leading: tuple[Tree, ...], items: Iterator[tuple[Tree, ...]], kwargs: dict[str, Tree]
    ) -> Tree:
        if program.totals is not None and program.device is not None:
            ((totals,),) = moved(iter([(kwargs["totals"],)]), torch.device(program.device))
            kwargs = {**kwargs, "totals": totals}
        with window_of(program, backend) as window:
            leading, kwargs = (
                window.detached(leading, leading=True),
                detached(kwargs, window.records) if kwargs else kwargs,
            )
            count = (
                len(program.in_axes) if isinstance(program.in_axes, tuple | list) else len(leading)
            )
            without = lambda: program.read((*leading, *[None] * (count - len(leading))), backend)
            microbatches = _read(program, window, leading, items, backend)
            return run_window(program, window, microbatches, without, kwargs)

    return fold


def _read(
    program: Program,
    window: Window,
    leading: tuple[Tree, ...],
    items: Iterator[tuple[Tree, ...]],
    backend: Backend,
) -> Iterator[Microbatch]:
    if program.device is not None:
        items = moved(items, torch.device(program.device))
    for item in items:
        arguments = program.read((*leading, *detached(item, window.records)), backend)
        if program.weight is None:
            _check_not_packed(arguments)
        # The arguments hold the item. Without these references one micro-batch lives at a time.
        del item
        yield arguments, 0, None
        del arguments


def _stream(device: torch.device) -> torch.Stream | None:
    """A new stream of the device; None if that is the host, or has only one stream, as Apple's
    does.
    """
    if device.type in ("cpu", "meta") or not hasattr(torch.get_device_module(device), "Stream"):
        return None
    return torch.Stream(device)


def moved(items: Iterator[tuple[Tree, ...]], device: torch.device) -> Iterator[tuple[Tree, ...]]:
    """The items with their tensors on the device. Each is copied while the one before it is
    computed with.

    Where the device has streams, a second one copies while kernels for the last item still run.
    From pinned memory the host does not wait for the copy either.
    """
    copies = _stream(device)

    def begin() -> tuple[Tree, ...] | None:
        item = next(items, None)
        if item is None:
            return None
        leaves, structure = trees.flatten(item)
        with copies or nullcontext():
            leaves = [
                leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
        moved: tuple[Tree, ...] = trees.unflatten(structure, leaves)
        return moved

    item = begin()
    while item is not None:
        if copies is not None:
            computing = torch.accelerator.current_stream(device)
            computing.wait_stream(copies)
            # The memory was allocated on the copying stream. The allocator must not reuse it while
            # the computing one still reads it.
            for leaf in trees.flatten(item)[0]:
                if isinstance(leaf, torch.Tensor):
                    leaf.record_stream(computing)
        # No reference stays in this frame, so the consumer alone decides how long the item lives.
        holder = [item]
        del item
        yield holder.pop()
        item = begin()


def untraced(
    fold: Callable[..., Any],
    why: str = "funcga accumulates here; compile the loss, and not the step",
) -> Callable[..., Any]:
    """The function, which torch.compile runs as it is, and leaves out of its graph."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(f"{why}")  # of a variable torch.compile would not read the text
    # torch.compiler.disable imports torch._dynamo, which takes seconds. Without it nothing is
    # compiled.
    if "torch._dynamo" not in sys.modules:
        return fold
    untraced: Callable[..., Any] = torch.compiler.disable(fold)  # type: ignore[no-untyped-call]
    return untraced


def run_window(
    program: Program,
    window: Window,
    microbatches: Iterator[Microbatch],
    without: Callable[[], Arguments],
    kwargs: dict[str, Tree],
    devices: int = 1,
    views: Iterator[tuple[Tree, ...]] | None = None,
) -> Tree:
    """The result of a window of these micro-batches; `without()` returns the arguments of a window
    that has none.

    `views` are what each micro-batch is called with, where that is cut already.
    """
    take = local_rows if devices != 1 else _copied_rows if program.is_exact else None
    microbatch = next(microbatches, None)
    if microbatch is None:
        return _result_of_nothing(program, window, without(), kwargs)
    state = _initial(microbatch[0]) if microbatch[0].state else []
    while microbatch is not None:
        arguments, start, size = microbatch
        # A window that looks ahead must know whether this is the last one before it folds. It pays
        # with the memory of a second micro-batch.
        microbatch = next(microbatches, None) if window.looks_ahead else None
        args = next(views) if views is not None else arguments.cut(start, size, state, take)
        rows = None if size is None else size * devices
        weight = rows if program.weight is None and rows else program.weigh(arguments, args, rows)
        is_last = window.looks_ahead and microbatch is None
        fold = window.fold if program.dropping is None else partial(fold_or_drop, window, state)
        state = fold(arguments, args, kwargs, weight, last=is_last)
        if not window.looks_ahead:
            # This one is freed before the next one is read, so that one lives at a time.
            del arguments, args
            microbatch = next(microbatches, None)
    result = window.result(state)
    return result if program.observers is None else program.observed(result, kwargs)


def _result_of_nothing(
    program: Program, window: Window, arguments: Arguments, kwargs: dict[str, Tree]
) -> Tree:
    """The result of a window without micro-batches, on a replica."""
    result = window.result_without_microbatches(arguments, kwargs, _initial(arguments))
    return result if program.observers is None else program.observed(result, kwargs, arguments)


def _copied_rows(array: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
    """`size` rows from `start` on, in memory of their own.

    A kernel may round differently where an array begins in the middle of a cache line, and where
    the rows of a micro-batch begin depends on what stands before them. New memory always begins at
    one.
    """
    return arrays.slice(array, axis, start, size).clone()


def _initial(arguments: Arguments) -> list[Any]:
    """The initial state in memory of its own: grad_fn may update it in place, as BatchNorm does
    with its buffers.
    """
    return [
        arrays.owned(leaf, (leaf,)) if arrays.is_array(leaf) else leaf for leaf in arguments.state
    ]


class Calls:
    """One window of any grad_fn, which is called for each micro-batch.

    `reductions`: what merges it over replicas, one after the other. `gradient`: funcga's own
    gradient function, if grad_fn is made of one. `records`: whether grad_fn itself runs on
    autograd, and takes its arguments as they are.
    """

    looks_ahead = False

    def __init__(
        self,
        program: Program,
        grad_fn: GradFn,
        reductions: list[Reduction],
        gradient: GradientFunction | None = None,
        records: bool = False,
    ):
        self.program, self.grad_fn = program, grad_fn
        self.reductions, self.gradient = reductions, gradient
        self.records = records
        owner = grad_fn if isinstance(grad_fn, ModuleGradient) else None
        self.parameters = [] if owner is None else owner.parameters()
        # What a module writes in a forward pass, which a micro-batch that is dropped takes back.
        self.module = None if owner is None or program.dropping is None else owner.module
        self.statistics_before = statistics_of(self.module)
        # Where gradients are to lie that are DTensors.
        self.parameters_by_leaf: dict[int, torch.Tensor] = {}
        self.buffers: Buffers | None = None
        # What hears collectives of the loss over the groups that gradients travel over.
        self.own_groups = [Listener(reduction.replicas.group) for reduction in reductions]
        self.may_be_short = bool(reductions)
        # True if in_axes was left at its default, which passes the first argument whole.
        no_axes = program.in_axes is None and program.default_in_axes is None
        self.assumes_whole = no_axes and gradient is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        for reduction in self.reductions if error[0] is not None else ():
            reduction.give_up()

    def detached(self, args: tuple[Tree, ...], leading: bool = False) -> tuple[Tree, ...]:
        """The arguments without graphs: torch.func records a second graph for tensors that
        require grad.
        """
        if self.records:
            return args
        if self.gradient is not None and not leading:
            for argnum in self.gradient.arg_indices(len(args)):
                check_unfrozen(trees.flatten(args[argnum])[0], args[argnum], self.gradient, argnum)
        return tuple([detached(arg) for arg in args])

    def fold(
        self,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
        last: bool,
    ) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        args, kwargs = self._with_derivatives(arguments, args, kwargs, weight)
        statistics = statistics_of(self.module)
        value = self._called(arguments, args, kwargs)
        if self.program.dropping is not None and any(
            listener.heard for listener in self.own_groups
        ):
            raise FuncgaError(
                f"drop={self.program.dropping.scope!r} was given together with across=, and the "
                "loss itself calls collectives of that group, as a SyncBatchNorm layer does: what "
                "one replica drops is a part of what the others have computed. Leave drop out; or "
                "compute the loss of each replica's own rows."
            )
        if self.program.observers is not None:
            value = self.program.readings(value, arguments).measured(value, weight)
        if self.buffers is None:
            outputs, leaves = self.program.bind(value, arguments)
            self.buffers = buffers_of(self.program)(Layout(outputs))
            if self.records and any(map(is_dtensor, leaves)):
                self.parameters_by_leaf = self._parameters_by_leaf(outputs, args)
            for reduction in self.reductions:
                reduction.begin(self.buffers, leaves)
        else:
            leaves = self.buffers.outputs.leaves(value, f"micro-batch {self.buffers.steps + 1}")
        del value
        with nullcontext() if self.buffers.pure else torch.no_grad():
            state = self.buffers.add(leaves, weight)
        if isinstance(self.buffers, DroppingBuffers):
            put_back(statistics, self.buffers.kept)
        return state

    def _with_derivatives(
        self, arguments: Arguments, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar
    ) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """The arguments, constants if the micro-batch is left out: a NaN would have NaN as its
        derivative.
        """
        program, backend, counts = self.program, arguments.backend, None
        if not arrays.in_transform():
            return args, kwargs
        leaves, structure = trees.flatten((args, kwargs))
        constants = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if isinstance(weight, torch.Tensor) and program.weighs_all(backend):
            counts = weight != 0
        if program.dropping is not None:
            # It is evaluated to be looked at, and then once more, with the same random numbers.
            devices = devices_of(leaves)
            generators = generator_states(devices)
            called, named = trees.unflatten(structure, constants)
            outputs, value = program.bind(self.grad_fn(*called, **named), arguments)
            put_generator_states(devices, generators)
            keep = arrays.as_array(
                program.dropping.keeps(outputs, program.dropping.tested(outputs), value, weight)
            )
            counts = keep if counts is None else keep & counts
        if counts is None:
            return args, kwargs
        for leaf_index, (leaf, constant) in enumerate(zip(leaves, constants, strict=True)):
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                leaves[leaf_index] = torch.where(counts.to(leaf.device), leaf, constant)
        return trees.unflatten(structure, leaves)  # type: ignore[no-any-return]

    def _called(
        self, arguments: Arguments, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        """grad_fn's output."""
        if self.records:
            # Parameters that require grad ask for a second derivative otherwise.
            with torch.no_grad():
                return self.grad_fn(*args, **kwargs)
        if not self.assumes_whole:
            return self.grad_fn(*args, **kwargs)
        # The gradient function of a module that it calls sees what the call is a part of.
        outer, calling.microbatch = calling.microbatch, (arguments, args)
        try:
            return self.grad_fn(*args, **kwargs)
        finally:
            calling.microbatch = outer

    def _parameters_by_leaf(
        self, outputs: Outputs, args: tuple[Tree, ...]
    ) -> dict[int, torch.Tensor]:
        """The parameters, by the leaf indices of their gradients in the output."""
        assert self.gradient is not None
        gradient = self.gradient.gradient_in(outputs.value_of(range(len(outputs.folds))))
        if isinstance(self.grad_fn, ModuleGradient):
            params: Tree = trainable(self.grad_fn.module)
        else:
            params = [args[argnum] for argnum in self.gradient.arg_indices(len(args))]
        return dict(zip(trees.flatten(gradient)[0], trees.flatten(params)[0], strict=True))

    def result(self, state: list[Any]) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        assert self.buffers is not None
        with nullcontext() if self.buffers.pure else torch.no_grad():
            self.buffers.settle(self.parameters_by_leaf)
            result = self._merged(self.buffers, state)
        dropping = self.program.dropping
        if dropping is not None and dropping.scope == "window":
            put_back(self.statistics_before, self.buffers.rejected == 0)
        return result

    def _merged(self, buffers: Buffers, state: list[Any]) -> Tree:
        """The result of these buffers, which the reductions have begun with."""
        for reduction in self.reductions:
            state = reduction.finish(state)
        return buffers.result(state)

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Any]
    ) -> Tree:
        """The result on a replica that has nothing to fold."""
        first, *others = self.reductions
        if not others:
            bind = lambda value: self.program.bind(value, arguments)[0]
            known = trees.flatten([part.value for part in arguments.parts])[0]
            buffers = first.take_part(buffers_of(self.program), bind, [*known, *self.parameters])
            return self._merged(buffers, state)
        # All replicas of the first group may be without rows. What the others count is like the
        # totals of a row of zeros, which are not added.
        outputs, leaves = self.program.bind(
            self.grad_fn(*with_a_blank_row(arguments).cut(0, 1, state)), arguments
        )
        buffers = Buffers(Layout(outputs))
        for reduction in self.reductions:
            reduction.begin(buffers, leaves)
        return self._merged(buffers, state)


def telling(programs: Sequence[Program], backend: Backend) -> AbstractContextManager[object] | None:
    """The context of a call that folds these programs one after the other, in which other
    processes are told of an error; None if they are folded by one process, or one program.
    """
    program = programs[0]
    if not (isinstance(program.grad_fn, ModuleGradient) or are_processes(program.across)):
        return None
    if program.totals is not None:
        programs = [program.counting(backend), *programs]
    context: AbstractContextManager[object] = untraced(telling_windows)(
        [(progress_of(each.memory), partial(window_of, each, backend)) for each in programs]
    )
    return context


def is_traced(tree: Any) -> bool:
    """Whether these arguments belong to a program that is being compiled."""
    return torch.compiler.is_compiling()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory has run out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = (
        "DefaultCPUAllocator: can't allocate memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
