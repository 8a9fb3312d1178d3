"""Repetition: whether the same arguments give the same result, which all else rests on."""

from typing import Any, NamedTuple

import numpy as np

from funcga._backend.prefixes import leaf_paths
from funcga._verify.probe import Probe, as_numbers, random_states, restore
from funcga._verify.tolerance import limit_of, relative
from funcga._verify.verdict import Cause


class Seen(NamedTuple):
    """What was seen of a call: values and a text that all calls of a pure function share, and how it computes."""

    values: list[Any]
    program: str
    eps: float
    draws: bool
    mixed: bool


def watch(probe: Probe, args: tuple[Any, ...]) -> Seen:
    """What is seen of one call."""
    values, *rest = probe.own.watch(probe.raw, args, probe.kwargs)
    return Seen([as_numbers(value, probe.backend) for value in values], *rest)


def impurities(probe: Probe) -> tuple[Seen, list[Cause]]:
    """What is seen of a call, and what makes the next one different: written arguments, randomness, state.

    The global random generators are as before.
    """
    states, args = random_states(probe), probe.gathered(probe.every)
    before = _held(probe, args)
    try:
        first = watch(probe, args)
        written = _written(probe, before, args)
        if written:
            return first, [written]
        second = watch(probe, args)
        if _alike(first, second):
            return first, []
        restore(probe, states)
        third = watch(probe, args)
    finally:
        restore(probe, states)
    return first, [_randomness(first, second) if _alike(first, third) else _state(first, second)]


def _alike(a: Seen, b: Seen) -> bool:
    return a.program == b.program and len(a.values) == len(b.values) and _apart(a, b) <= 1


def _apart(a: Seen, b: Seen) -> float:
    """The largest difference of two calls, in units of what rounding may be."""
    limit, worst = limit_of(a.eps), 0.0
    for x, y in zip(a.values, b.values, strict=True):
        if x is not None and y is not None:
            found = relative(x, y, float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) + limit.floor / limit.relative)
            worst = max(worst, found / limit.relative if found == found else np.inf)
    return worst


def _held(probe: Probe, args: tuple[Any, ...]) -> list[Any]:
    return [as_numbers(leaf, probe.backend) for leaf in probe.backend.trees.flatten((args, probe.kwargs))[0]]


def _written(probe: Probe, before: list[Any], args: tuple[Any, ...]) -> Cause | None:
    after = _held(probe, args)
    for i, (x, y) in enumerate(zip(before, after, strict=True)):
        if x is not None and not np.array_equal(x, y, equal_nan=True):
            path = leaf_paths((args, probe.kwargs), probe.backend.trees, "")[i]
            return Cause(
                "state",
                "The call writes to its arguments, so the next micro-batch sees other ones.",
                "compute new arrays instead of writing in place: `x = x * 2`, not `x.mul_(2)`",
                f"the argument at {path.removeprefix('[0]')} of the arguments was changed by a call",
            )
    return None


def _randomness(a: Seen, b: Seen) -> Cause:
    return Cause(
        "randomness",
        "Two calls with the same arguments differ, and no longer do so once the random generators are put back: the "
        "loss draws random numbers, as dropout does. n micro-batches draw others than one batch, so they agree on "
        "average only.",
        "module.eval(), or dropout p=0, where you compare; or draw per row, from a key or a mask that is split with "
        "the batch",
        _difference(a, b),
    )


def _state(a: Seen, b: Seen) -> Cause:
    return Cause(
        "state",
        "Two calls with the same arguments differ, whatever the random generators are: something outlives a call, "
        "and the result depends on how often it was called.",
        "pass the state in and return it: in_axes=(None, funcga.CARRY, 0), fold=(funcga.mean(), funcga.carry())",
        _difference(a, b),
    )


def _difference(a: Seen, b: Seen) -> str:
    if a.program != b.program or len(a.values) != len(b.values):
        return "the function traces to another program the second time"
    worst = _apart(a, b) * limit_of(a.eps).relative
    return f"two calls with the same arguments differ by {worst:.1e}, relative to the largest element"


def written(probe: Probe) -> Cause | None:
    """State that a loss writes to where its framework raises: a gradient of it cannot even be computed."""
    try:
        probe.values(probe.every)
    except Exception as error:
        if not probe.own.is_write(error):
            raise
        named = ", ".join(probe.own.batch_normalisers(probe.program.grad_fn)[:3])
        return Cause(
            "state",
            "The loss writes to tensors that it closes over, as BatchNorm in training mode does to its running "
            "statistics, and torch.func computes no gradient of that.",
            "module.eval(); or torch_backend.pure_loss(module, loss_fn), which leaves the buffers of the module alone",
            f"the call raised {type(error).__name__}{named and f'; in the loss are {named}'}",
        )
    return None


def written_later(probe: Probe, first: list[Any], limit: Any) -> Cause | None:
    """State that shows only after calls with other rows."""
    again = probe.call(probe.every)
    for x, y in zip(first, again, strict=True):
        if x is not None and relative(x, y, float(np.abs(x).max(initial=0.0)) + limit.floor / limit.relative) > (
            limit.relative
        ):
            seen = Seen(first, "", 2.3e-16 if limit.relative < 1e-6 else 1.2e-7, False, False)
            return _state(seen, seen._replace(values=again))
    return None
