"""What pipelines use of torch that is private."""


def loss_of_schedule(schedule: object, otherwise: object) -> object:
    """The loss that a schedule of torch.distributed.pipelining was built with.

    If that does not tell, the schedule is taken to have the loss that it was given, `otherwise`.
    """
    return getattr(schedule, "_loss_fn", otherwise)


def has_weight_passes(schedule: object) -> bool:
    """Whether a schedule computes gradients of parameters in passes of their own, as zero-bubble
    schedules do.

    Its actions tell, such as 0W1. Without them it is not known.
    """
    return "W" in str(getattr(schedule, "pipeline_order", None))
