"""Replicas that take no part in a window as the others do: they have nothing to fold, or an error
has ended it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from funcga._backend import Backend
from funcga._call import OwningGradient, Program
from funcga._call.arguments import Arguments
from funcga._call.supported import MODULE
from funcga._types import Tree
from torch_backend import _private, trees
from torch_backend.reduce import Reduction, reductions_of
from torch_backend.reduce import telling as telling_windows
from torch_backend.replicas import are_processes
from torch_backend.sums import Folding, Sums


def adopted(
    merge: Reduction,
    program: Program,
    arguments: Arguments,
    own: Tree = None,
) -> Sums:
    """The empty sums of a replica that has nothing to fold. `own`: the parameters of a module,
    which lie here as their gradients do.
    """
    known = trees.flatten([part.value for part in arguments.parts] if own is None else own)[0]
    devices = [leaf.device for leaf in known if isinstance(leaf, torch.Tensor)]
    device = next(iter(devices), "cpu")

    def rebuild(value: Tree) -> tuple[Folding, list[Any]]:
        likes, structure = trees.flatten(value)
        leaves = [like if like is None else torch.empty_like(like, device=device) for like in likes]
        value = trees.unflatten(structure, leaves)
        if own is not None:  # the others say what theirs are like
            value = _with_gradients(program, value, own)
        outputs, leaves = program.bind(value, arguments)
        return Folding(outputs), leaves

    merge.agree(rebuild=rebuild)
    merge.sums = Sums(Folding(merge.agreement.outputs))
    return merge.sums


def with_a_blank_row(arguments: Arguments) -> Arguments:
    """The arguments of an empty batch, with one row of zeros in it."""
    parts = []
    for part in arguments.parts:
        leaves = [*part.leaves]
        for index, axis in enumerate(part.axes):
            if isinstance(axis, int) and leaves[index] is not None:
                shape = [*leaves[index].shape]
                shape[axis] = 1
                leaves[index] = leaves[index].new_zeros(shape)
        parts.append(part._replace(leaves=leaves))
    return replace(arguments, parts=tuple(parts))


def _with_gradients(program: Any, result: Tree, grads: Tree) -> Tree:
    """The result of a window, (value, gradients), with other gradients."""
    if program.watch is None:
        return result[0], grads
    before, (value, _) = result
    return before, (value, grads)


def telling(programs: Sequence[Program], backend: Backend) -> AbstractContextManager[object] | None:
    """The context of a call that folds these programs one after the other, in which other
    processes are told of an error; None if they are folded by one process, or one program.
    """
    program = programs[0]
    if not (isinstance(program.grad_fn, OwningGradient) or are_processes(program.across)):
        return None
    if program.prologue is not None:
        programs = [program.prologue.program(program, backend), *programs]
    context: AbstractContextManager[object] = _private.untraced(telling_windows)(
        [(each.memory, partial(_given_up, each, backend)) for each in programs]
    )
    return context


def _given_up(program: Program, backend: Backend) -> AbstractContextManager[object]:
    """A window that is counted, and is told to the others where an error ends it."""
    grad_fn, stack = program.grad_fn, ExitStack()
    if isinstance(grad_fn, OwningGradient) and grad_fn.kind != MODULE:
        wrapped: Any = grad_fn
        stack.enter_context(wrapped.window(program, backend, Arguments((), grad_fn, backend), None))
    else:
        reductions_of(program.across, program.memory)
    return stack
