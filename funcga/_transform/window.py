"""The states of `multi_steps`: the window, what has been folded since the last update, and what goes with it."""

from typing import Any, NamedTuple

from funcga._fold.tally import Tally


class Window(NamedTuple):
    """What has been folded since the last update, in a state of `multi_steps`.

    `accumulated` has the structure of the gradients: for every leaf an array of its shape, of at least 32 bits, or the
    Parts that its reducer holds. `tally.weight` is two float32 scalars whose sum is exact to 48 bits, or one float64 if
    a gradient is; `tally.steps`, int32, is the number of micro-batches that were folded, and `rejected`, int32, of
    those that were not. `part` says in torch, with across=, whose part of the window it is: int32[2], the replica and
    how many there are, or zeros for the window of all replicas; elsewhere it is empty.
    """

    accumulated: Any
    tally: Tally
    rejected: Any
    part: Any = ()


class Parts(NamedTuple):
    """What a reducer holds of one leaf, where that is several arrays."""

    parts: tuple[Any, ...]


class Dropped(NamedTuple):
    """How many micro-batches have been dropped so far, and how many windows: two 0-d int32 arrays."""

    microbatches: Any
    windows: Any


class MultiStepsState(NamedTuple):
    """The state of `multi_steps`: a tree of arrays that passes through jit, scan, torch.save and checkpoints.

    inner: the state of the wrapped transform. window: what has been folded since the last update. offered: how many
    micro-batches have come since then, folded or not. updates: how many updates there have been. updated: whether the
    last call was one. The counts are 0-d int32 arrays, `updated` is a 0-d bool; in torch they are on the CPU.
    """

    inner: Any
    window: Window
    offered: Any
    updates: Any
    updated: Any
    dropped: Dropped
