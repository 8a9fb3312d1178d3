"""The loop over the micro-batches."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from funcga.arguments import Arguments, groups, starts
from funcga.backend import Backend
from funcga.gradients import GradientFunction
from funcga.program import Program
from torch_backend import arrays
from torch_backend.buffers import Buffers
from torch_backend.engine import Engine

# What one micro-batch needs: the arguments it comes from, how to cut them given the threaded state, and its rows.
_Microbatch = tuple[Arguments, Callable[[list[Any]], tuple[Any, ...]], Callable[[], int]]


def accumulate(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(args, kwargs): the fold of the program over the micro-batches cut from args."""

    def fold(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = _detached((args, kwargs), backend)
        arguments = program.read(args, backend)
        found = groups(arguments.rows(), program.n, program.microbatch_size)
        return _fold(program, _cuts(arguments, starts(found)), _copied(arguments), kwargs, backend)

    return fold


def _cuts(arguments: Arguments, found: Iterator[tuple[int, int]]) -> Iterator[_Microbatch]:
    for start, size in found:
        yield arguments, lambda state, a=start, b=size: arguments.cut(a, b, state), lambda b=size: b  # type: ignore[misc]


def stream(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(leading, microbatches, kwargs): the fold of the program over an iterable of micro-batches."""

    def fold(leading: tuple[Any, ...], microbatches: Iterator[tuple[Any, ...]], kwargs: dict[str, Any]) -> Any:
        leading, kwargs = _detached((leading, kwargs), backend)
        return _fold(program, _items(program, leading, microbatches, backend), None, kwargs, backend)

    return fold


def _items(
    program: Program, leading: tuple[Any, ...], microbatches: Iterator[tuple[Any, ...]], backend: Backend
) -> Iterator[_Microbatch]:
    for item in microbatches:
        arguments = program.read((*leading, *_detached(item, backend)), backend)
        del item  # so that no more than one micro-batch is held
        yield arguments, lambda state, a=arguments: a.cut(0, None, state), arguments.rows  # type: ignore[misc]
        del arguments


def _fold(
    program: Program,
    microbatches: Iterator[_Microbatch],
    state: list[Any] | None,
    kwargs: dict[str, Any],
    backend: Backend,
) -> Any:
    with _window(program, backend) as window:
        for arguments, cut, rows in microbatches:
            state = _copied(arguments) if state is None else state
            args = cut(state)
            weight = program.weigh(arguments, args, rows)
            state = window.fold(arguments, args, kwargs, weight)
            del args, arguments, cut, rows
        assert state is not None
        return window.result(state)


def _window(program: Program, backend: Backend) -> "Engine | _Calls":
    """How a window is folded: by autograd where funcga made the gradient function, else by calling grad_fn.

    Autograd cannot run in a torch.func transform, nor be traced by torch.compile.
    """
    if isinstance(program.grad_fn, GradientFunction) and not (torch.compiler.is_compiling() or arrays.in_transform()):
        return Engine(program, program.grad_fn, backend)
    return _Calls(program.bound(backend))


class _Calls:
    """One window of any grad_fn: `fold` each micro-batch, then take the `result`."""

    def __init__(self, program: Program):
        self.program = program
        self.buffers: Buffers | None = None

    def __enter__(self) -> "_Calls":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def fold(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Any) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        value = self.program.grad_fn(*args, **kwargs)
        if self.buffers is None:
            outputs, leaves = self.program.bind(value, arguments)
            self.buffers = Buffers(outputs)
        else:
            leaves = self.buffers.outputs.leaves(value, f"micro-batch {self.buffers.tally.steps + 1}")
        del value
        return self.buffers.add(leaves, weight)

    def result(self, state: list[Any]) -> Any:
        """The normalised result, in the structure of grad_fn's output."""
        assert self.buffers is not None
        return self.buffers.result(state)


def _copied(arguments: Arguments) -> list[Any]:
    """The initial state, which grad_fn may update in place as BatchNorm does its buffers, in memory of its own."""
    return [arrays.owned(leaf) if arrays.is_array(leaf) else leaf for leaf in arguments.state()]


def _detached(tree: Any, backend: Backend) -> Any:
    """The tree without the graphs of its tensors: torch.func records a second graph for those that require grad."""
    if arrays.in_transform():
        return tree
    leaves, structure = backend.trees.flatten(tree)
    if not any(map(_has_graph, leaves)):
        return tree
    return backend.trees.unflatten(structure, [leaf.detach() if _has_graph(leaf) else leaf for leaf in leaves])


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
