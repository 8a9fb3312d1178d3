"""Recording: whether a step is part of a loss that is differentiated, and by what.

Only torch has this file: every transform of JAX shows in the types of what it traces.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from funcga.errors import FuncgaError

_RECORDED: ContextVar[bool] = ContextVar("recorded", default=False)
# How many losses are being recorded, in all threads. torch.compile can guard a global, but no context variable. If the
# loss is another thread's, the compiled function records a graph that nobody needs, and returns the same numbers.
_recordings = 0


class recording_loss(AbstractContextManager[None]):  # noqa: N801 - a context, as torch.no_grad
    """A context in which autograd records a loss, or runs parts of it again: steps inside of it are differentiated."""

    def __enter__(self) -> None:
        global _recordings
        self.token = _RECORDED.set(True)
        _recordings += 1

    def __exit__(self, *error: Any) -> None:
        global _recordings
        _RECORDED.reset(self.token)
        _recordings -= 1


def is_recorded() -> bool:
    """Whether the present computation is part of a loss that autograd records for funcga."""
    return (_recordings > 0 if torch.compiler.is_compiling() else _RECORDED.get()) and torch.is_grad_enabled()


def is_constant(loss: torch.Tensor) -> bool:
    """Whether a loss without a graph is a number other than 0. A batch that is masked completely has a loss of 0."""
    return abs(loss.detach().item()) > 0


def switched_off() -> FuncgaError:
    """The error for a loss that changes what its own gradient is taken with respect to."""
    return FuncgaError(
        "loss_fn calls requires_grad_() on a parameter that it is given, whose gradient is being taken. Leave what is "
        "frozen out of the parameters, as a pure_loss allows; or use p.detach() in loss_fn."
    )
