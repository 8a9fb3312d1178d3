"""What pipelines use of torch that is private."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def loss_of_schedule(schedule: object, otherwise: object) -> object:
    """The loss that a schedule of torch.distributed.pipelining was built with.

    If that does not tell, the schedule is taken to have the loss that it was given, `otherwise`.
    """
    return getattr(schedule, "_loss_fn", otherwise)


def has_weight_passes(schedule: object) -> bool:
    """Whether a schedule computes gradients of parameters in passes of their own, as zero-bubble
    schedules do.

    Its actions tell. Without them it is not known, and the reduction that is missing is found where
    it should have been.
    """
    order: Mapping[int, Sequence[Any]] | None = getattr(schedule, "pipeline_order", None)
    actions = itertools.chain.from_iterable((order or {}).values())
    kinds = [getattr(action, "computation_type", None) for action in actions]
    return any(getattr(kind, "name", None) == "BACKWARD_WEIGHT" for kind in kinds)
