"""The loop over the micro-batches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from funcga._backend.protocols import Backend
from funcga._call.arguments import Arguments, groups, starts
from funcga._call.program import Program
from funcga._grad import GradientFunction, bound
from funcga.errors import FuncgaError
from funcga.folds import Fold
from torch_backend import arrays, trees
from torch_backend.dtensor import devices_of, narrow
from torch_backend.engine.buffers import Buffers, Layout
from torch_backend.engine.recording import is_recorded
from torch_backend.engine.transfer import moved
from torch_backend.engine.window import Engine, detached
from torch_backend.modules.checks import check_no_wrapped_module_in, check_unfrozen
from torch_backend.reduce.agreement import Progress
from torch_backend.reduce.reduction import Reduction
from torch_backend.wrapped.gradient import ModuleGradient
from torch_backend.wrapped.window import Driven

# The arguments that a micro-batch comes from, its first row on each device and how many, None for all, and the devices.
_Microbatch = tuple[Arguments, int, int | None, int]


def accumulate(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(args, kwargs): the fold of the program over the micro-batches cut from args."""

    def fold(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        window = _window(program, backend)
        with window.reduction or nullcontext():
            return fold_window(window, args, kwargs)

    def fold_window(window: "_Window", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = window.detached(args), _detached_kwargs(kwargs, window)
        arguments = program.read(args, backend)
        if isinstance(window, Driven) and window.driver.name and not arguments.rows(may_be_empty=True):
            return window.without_rows(arguments, _copied(arguments), kwargs)
        cuts = _cuts(program, arguments, across=window.reduction is not None)
        if window.reduction is None:
            return _fold(program, window, cuts, kwargs)
        return _fold_across(program, window, cuts, kwargs, arguments)

    return fold if program.across is None else _untraced(fold)


def _untraced(fold: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch.compile is to leave it: what replicas do next is not known when it traces."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break("funcga merges over replicas here; compile the loss instead")
    if "torch._dynamo" not in sys.modules:  # which nobody else should have to import
        return fold
    untraced: Callable[..., Any] = torch.compiler.disable(fold)  # type: ignore[no-untyped-call]
    return untraced


def _cuts(program: Program, arguments: Arguments, across: bool) -> Iterator[_Microbatch]:
    """The micro-batches; `across` replicas one may have fewer rows than n, or none."""
    wrapped = isinstance(program.grad_fn, ModuleGradient) and bool(program.grad_fn.driver.name)
    rows = arguments.rows(may_be_empty=across)
    # rows of several devices at once are other rows together, which sums and extremes alone do not show
    devices = devices_of(arguments)
    if devices > 1 and (arguments.state or any(f.reducer.monoid.collective is None for f in _folds(program))):
        devices = 1
    rows, size = rows // devices, program.microbatch_size
    n = min(program.n, rows) if (across or wrapped) and program.n is not None else program.n
    found = groups(rows, n, None if size is None else max(1, size // devices)) if rows else []
    return ((arguments, start, size, devices) for start, size in starts(found))


def _folds(program: Program) -> list[Fold]:
    return [fold for fold in trees.flatten(program.fold)[0] if isinstance(fold, Fold)]


def stream(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(leading, microbatches, kwargs): the fold of the program over an iterable of micro-batches."""

    def fold(leading: tuple[Any, ...], microbatches: Iterator[tuple[Any, ...]], kwargs: dict[str, Any]) -> Any:
        window = _window(program, backend)
        with window.reduction or nullcontext():
            return fold_window(window, leading, microbatches, kwargs)

    def fold_window(
        window: "_Window", leading: tuple[Any, ...], microbatches: Iterator[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> Any:
        leading, kwargs = window.detached(leading, leading=True), _detached_kwargs(kwargs, window)
        items = _items(program, window, leading, microbatches, backend)
        if window.reduction is not None:
            return _fold_across(program, window, items, kwargs, _unfed(program, leading, backend))
        return _fold(program, window, items, kwargs)

    return fold if program.across is None else _untraced(fold)


def _items(
    program: Program,
    window: "_Window",
    leading: tuple[Any, ...],
    microbatches: Iterator[tuple[Any, ...]],
    backend: Backend,
) -> Iterator[_Microbatch]:
    if program.device is not None:
        microbatches = moved(microbatches, torch.device(program.device), backend)
    for item in microbatches:
        arguments = program.read((*leading, *detached(item, not isinstance(window, _Calls))), backend)
        del item  # so that no more than one micro-batch is held
        yield arguments, 0, None, 1
        del arguments


def _fold(program: Program, window: "_Window", microbatches: Iterator[_Microbatch], kwargs: dict[str, Any]) -> Any:
    state = None
    with window:
        if isinstance(window, Driven) and not isinstance(microbatches, _Ahead):
            microbatches = _Ahead(microbatches)
        for microbatch in microbatches:
            last = isinstance(microbatches, _Ahead) and microbatches.last
            state = _fold_one(program, window, microbatch, state, kwargs, last)
            del microbatch  # so that no more than one is held
        assert state is not None
        return window.result(state)


def _fold_one(
    program: Program,
    window: "_Window",
    microbatch: _Microbatch,
    state: list[Any] | None,
    kwargs: dict[str, Any],
    last: bool,
) -> list[Any]:
    arguments, start, size, devices = microbatch
    state = _copied(arguments) if state is None else state
    args = arguments.cut(start, size, state, None if devices == 1 else narrow)
    weight = program.weigh(arguments, args, None if size is None else size * devices)
    return window.fold(arguments, args, kwargs, weight, last)


class _Ahead:
    """The micro-batches, one of them taken ahead, and whether the one that was given out is the `last`."""

    def __init__(self, microbatches: Iterator[_Microbatch]):
        self.microbatches = microbatches
        self.next = next(microbatches, None)

    @property
    def last(self) -> bool:
        return self.next is None

    def __iter__(self) -> "_Ahead":
        return self

    def __next__(self) -> _Microbatch:
        if self.next is None:
            raise StopIteration
        found, self.next = self.next, None
        self.next = next(self.microbatches, None)
        return found


def _fold_across(
    program: Program, window: "_Window", microbatches: Iterator[_Microbatch], kwargs: dict[str, Any],
    arguments: Arguments,
) -> Any:  # fmt: skip
    """The same over all replicas; one that has no micro-batch takes part in the reduction. `arguments` are its own."""
    assert window.reduction is not None
    ahead = _Ahead(microbatches)
    if ahead.next is not None:
        return _fold(program, window, ahead, kwargs)
    if isinstance(window, Driven):
        return window.unfed(arguments, _copied(arguments))
    devices = [
        leaf.device for part in arguments.parts for leaf in trees.flatten(part.value)[0] if arrays.is_array(leaf)
    ]
    device = devices[0] if devices else torch.device("cpu")

    window.reduction.take_part(lambda value: program.bind(value, arguments)[0], device)
    state = window.reduction.finish(_copied(arguments))
    return window.reduction.buffers.result(state)


def _unfed(program: Program, leading: tuple[Any, ...], backend: Backend) -> Arguments:
    """The arguments of a stream without any micro-batch, with None in its place."""
    count = len(program.in_axes) if isinstance(program.in_axes, tuple | list) else len(leading)
    return program.read((*leading, *[None] * (count - len(leading))), backend)


def _detached_kwargs(kwargs: dict[str, Any], window: "_Window") -> Any:
    return detached(kwargs, not isinstance(window, _Calls)) if kwargs else kwargs


def _window(program: Program, backend: Backend) -> "_Window":
    """How a window is folded: by autograd where funcga made the gradient function, else by calling grad_fn.

    A module that reduces gradients by itself is driven.

    Autograd cannot run in a torch.func transform, nor be traced by torch.compile.
    """
    if program.across is not None and arrays.in_transform():
        raise _differentiated_across()
    gradient = program.grad_fn
    if _NotWrapped not in program.kept and check_no_wrapped_module_in(gradient):
        program.keep(_NotWrapped)
    if isinstance(gradient, ModuleGradient):
        return Driven(program, gradient, backend)
    replicas = program.replicas(backend)
    reduction = None if replicas is None else Reduction(program.keep(Progress, program.step), replicas)
    if isinstance(gradient, GradientFunction) and not (torch.compiler.is_compiling() or arrays.in_transform()):
        return Engine(program, gradient, backend, reduction)
    return _Calls(bound(program, backend), backend, reduction, gradient)


class _NotWrapped:
    """Kept by a step whose gradient function was seen to use no wrapped module."""


def _differentiated_across() -> FuncgaError:
    if is_recorded():
        return FuncgaError(
            "across= was given to a step inside of a loss that is being differentiated, and the merge over replicas "
            "has no derivative. Leave it out there. If the step is a constant for that loss, run it under "
            "torch.no_grad()."
        )
    return FuncgaError(
        "across= was given inside of a torch.func transform, where replicas cannot be merged. Take the transform on "
        "each replica, inside of grad_fn."
    )


class _Calls:
    """One window of any grad_fn: `fold` each micro-batch, then take the `result`."""

    def __init__(self, program: Program, backend: Backend, reduction: Reduction | None, gradient: Any):
        self.program, self.backend, self.reduction, self.gradient = program, backend, reduction, gradient
        self.buffers: Buffers | None = None

    def detached(self, args: tuple[Any, ...], leading: bool = False) -> tuple[Any, ...]:
        """The arguments without graphs: torch.func records a second graph for tensors that require grad."""
        if isinstance(self.gradient, GradientFunction):
            for i in self.gradient.places(len(args)) if not leading else ():
                check_unfrozen(trees.flatten(args[i])[0], args[i], self.gradient, i)
        return tuple([detached(arg) for arg in args])

    def __enter__(self) -> "_Calls":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def fold(
        self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Any, last: bool
    ) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        value = self.program.grad_fn(*args, **kwargs)
        if self.buffers is None:
            outputs, leaves = self.program.bind(value, arguments)
            self.buffers = Buffers(Layout(outputs))
            if self.reduction is not None:
                self.reduction.begin(self.buffers, leaves)
        else:
            leaves = self.buffers.outputs.leaves(value, f"micro-batch {self.buffers.steps + 1}")
        del value
        with nullcontext() if self.buffers.pure else torch.no_grad():
            return self.buffers.add(leaves, weight)

    def result(self, state: list[Any]) -> Any:
        """The normalised result, in the structure of grad_fn's output."""
        assert self.buffers is not None
        with nullcontext() if self.buffers.pure else torch.no_grad():
            self.buffers.settle({})
            if self.reduction is not None:
                state = self.reduction.finish(state)
            return self.buffers.result(state)


_Window = Engine | Driven | _Calls


def _copied(arguments: Arguments) -> list[Any]:
    """The initial state, which grad_fn may update in place as BatchNorm does its buffers, in memory of its own."""
    return [arrays.owned(leaf, (leaf,)) if arrays.is_array(leaf) else leaf for leaf in arguments.state]


def is_traced(tree: Any) -> bool:
    """Whether these arguments are those of a program that is being compiled."""
    return torch.compiler.is_compiling()


def finished(tree: Any) -> Any:
    """The tree when it is computed, or the error that computing it raises."""
    return tree  # memory is allocated when a kernel is launched, and what fails then is raised then


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory has run out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("DefaultCPUAllocator: can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
