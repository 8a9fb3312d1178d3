"""Replicas that take no part in a window as the others do: they have nothing to fold, or an error
has ended it.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch

from funcga._backend import Backend
from funcga._call import OwningGradient, Program
from funcga._call.arguments import Arguments
from funcga._call.supported import MODULE
from funcga._types import Tree
from torch_backend import _private, trees
from torch_backend.reduce import Reduction, reductions_of
from torch_backend.reduce.agreement import Histories
from torch_backend.replicas import are_processes, explained
from torch_backend.sums import Folding, Sums


def empty_sums(
    merge: Reduction,
    program: Program,
    arguments: Arguments,
    own: Tree = None,
) -> Sums:
    """The empty sums of a replica that has nothing to fold. `own`: the parameters of a module,
    which lie here as their gradients do.
    """
    known = trees.flatten([part.value for part in arguments.parts] if own is None else own)[0]
    device = next((leaf.device for leaf in known if isinstance(leaf, torch.Tensor)), "cpu")

    def rebuild(value: Tree) -> tuple[Folding, dict[int, Any]]:
        likes, structure = trees.flatten(value)
        leaves = [like if like is None else torch.empty_like(like, device=device) for like in likes]
        value = trees.unflatten(structure, leaves)
        if own is not None:  # the others say what theirs are like
            *before, pair = value if program.readings is not None else (value,)
            value = (*before, (pair[0], own)) if before else (pair[0], own)
        outputs, leaves = program.bind(value, arguments)
        return Folding(outputs), dict(enumerate(leaves))

    merge.agree(rebuild=rebuild)
    merge.sums = Sums(Folding(merge.agreement.outputs))
    return merge.sums


def zero_rows(array: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
    """`size` rows of zeros, as `Arguments.cut` takes rows of an empty batch."""
    shape = [*array.shape]
    shape[axis] = size
    return array.new_zeros(shape)


def telling(programs: Sequence[Program], backend: Backend) -> AbstractContextManager[object] | None:
    """The context of a call that folds these programs one after the other, in which other
    processes are told of an error; None if they are folded by one process, or one program.
    """
    program = programs[-1]
    if not (isinstance(program.grad_fn, OwningGradient) or are_processes(program.across)):
        return None
    context: AbstractContextManager[object] = _private.untraced(_telling)(programs, backend)
    return context


@contextmanager
def _telling(programs: Sequence[Program], backend: Backend) -> Iterator[None]:
    """The context itself, in which errors of collectives also say what they mean.

    A window that has not begun begins then, and ends: the others have begun as many, and wait in
    one of them.
    """
    counted = [(each.memory.keep(Histories), each) for each in programs]
    for histories, _ in counted:
        histories.begun = 0
    try:
        with explained():
            yield
    except BaseException:
        for histories, program in counted:
            if not histories.begun:
                with suppress(Exception), _given_up(program, backend):
                    raise RuntimeError from None  # ends a window in which nothing was folded
            for history in histories.values():
                if history.running is not None:
                    history.running.abort()
                # The others may have the result already. Each header says what is finished here, so
                # that the next window is refused on all of them.
                history.finished = min(history.finished, history.begun - 1)
                if history.differs:
                    raise  # the others may have other windows in this call, and wait in none
        raise


def _given_up(program: Program, backend: Backend) -> AbstractContextManager[object]:
    """A window that is counted, and is told to the others where an error ends it."""
    grad_fn, stack = program.grad_fn, ExitStack()
    if isinstance(grad_fn, OwningGradient) and grad_fn.kind != MODULE:
        wrapped: Any = grad_fn
        stack.enter_context(wrapped.window(program, backend, Arguments((), grad_fn, backend), None))
    else:
        reductions_of(program.across, program.memory)
    return stack
