"""The first pass of a loss that needs the whole batch: the fold of the summaries, which keeps one graph at most."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._coupled import Coupled, Summaries
from funcga._types import Scalar, Tree
from torch_backend import _private, trees
from torch_backend.coupled.parameters import Parameters
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.layout import Layout
from torch_backend.engine.window import begun_by_others, detached, reductions_of
from torch_backend.randomness import generator_states, put_generator_states
from torch_backend.reduce import Reduction
from torch_backend.wrapped.window import with_a_blank_row


class FirstPass:
    """The window of the first pass. It notes what the second one needs to go the same way.

    The graph of the last of `count` micro-batches is kept if there is a `recorded` summary function: that of the second
    pass, which finds the parameters where they are recorded.
    """

    records = looks_ahead = False

    def __init__(
        self, job: Coupled, program: Program, backend: Backend, parameters: Parameters, args: Tree, count: int,
        recorded: Callable[..., Tree] | None,
    ):  # fmt: skip
        self.job, self.program, self.parameters, self.count, self.recorded = job, program, parameters, count, recorded
        self.reductions = [] if program.across is None else reductions_of(program, backend)
        self.may_be_short = bool(self.reductions)
        self.buffers: Buffers | None = None
        self.likes: list[torch.Tensor | None] = []
        self.weights: list[Scalar] = []
        self.kept: Tree = None  # what the last micro-batch has returned, with its graph
        self.offsets: list[int] = []  # of this replica's rows in each collected leaf
        self.starts: list[list[int]] = []  # of each micro-batch among them
        self.replicas = 1  # how many have something to fold
        self.devices = _devices([*trees.flatten(args)[0], *parameters.tensors()])
        self.generators: list[list[torch.Tensor]] = []  # before each micro-batch
        self.put_back = parameters.snapshot()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            for reduction in self.reductions:
                reduction.give_up()

    def detached(self, args: tuple[Tree, ...], leading: bool = False) -> tuple[Tree, ...]:
        """The arguments without graphs."""
        return tuple([detached(arg) for arg in args])

    # --- the micro-batches

    def fold(
        self, arguments: Arguments, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar, last: bool
    ) -> list[Any]:
        """Folds the summary of one micro-batch in, and returns the state that is threaded to the next."""
        self.generators.append(generator_states(self.devices))
        self.weights.append(weight)
        is_last = len(self.weights) == self.count
        # What weighs nothing may have to be masked in the second pass.
        is_masked = self.parameters.is_wrapped and not isinstance(weight, torch.Tensor) and not weight
        if is_last and self.recorded is not None and not is_masked:
            # Before, nothing was recorded, and autocast must not take a cast of a parameter from there.
            _forget_casts()
            with torch.enable_grad():
                self.kept = self.recorded(*args, **kwargs)
            value = detached(self.kept)
        else:
            value = self.program.grad_fn(*args, **kwargs)
        if is_last and self.parameters.is_padded:
            self._pad(args, kwargs, ran=len(self.weights))
        if self.buffers is None:
            leaves = self._begin(value, arguments)
        else:
            leaves = self.buffers.outputs.leaves(value, f"micro-batch {len(self.weights)}")
        assert self.buffers is not None
        return self.buffers.add(leaves, weight)

    def _begin(self, value: Tree, arguments: Arguments) -> list[Any]:
        outputs, leaves = self.program.bind(value, arguments)
        self.buffers = Buffers(Layout(outputs))
        self.likes = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        return leaves

    def _pad(self, args: tuple[Tree, ...], kwargs: dict[str, Tree], ran: int) -> None:
        """Runs the module as often as other replicas do, for a wrapper that communicates in each forward pass."""
        put_back = self.parameters.snapshot()
        for _ in range((self.program.n or 0) - ran):
            self.program.grad_fn(*args, **kwargs)
        put_back()

    # --- what they have come to, on all replicas

    def result(self, state: list[Any]) -> Summaries:
        """The summaries of all micro-batches."""
        buffers = self.buffers
        assert buffers is not None
        buffers.settle({})
        self._note_rows(buffers)
        for reduction in self.reductions:
            reduction.begin(buffers, self.likes)
            state = reduction.finish(state)
            self._note_replicas(reduction)
        return self._summaries(buffers, state)

    def result_without_microbatches(self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Any]) -> Summaries:
        """The summaries of the other replicas, on one that has no micro-batch."""
        if self.parameters.is_wrapped:
            # A row of zeros shows what is folded, and runs the module as the others do.
            args = with_a_blank_row(arguments).cut(0, 1, state)
            put_back = self.parameters.snapshot()
            value = self.program.grad_fn(*args, **kwargs)
            put_back()
            if self.parameters.is_padded:
                self._pad(args, kwargs, ran=1)
            self._begin(value, arguments)
            return self.result(state)
        (reduction,) = self.reductions
        buffers = begun_by_others(lambda value: self.program.bind(value, arguments)[0], reduction, arguments)
        return self._summaries(buffers, reduction.finish(state))

    def _note_rows(self, buffers: Buffers) -> None:
        """Notes which rows of what is collected are those of each micro-batch."""
        for leaf_index, fold in zip(buffers.outputs.collected, buffers.outputs.collected_folds, strict=True):
            sizes = [chunk.shape[fold.fold.reducer.monoid.axis or 0] for chunk in buffers.collected[leaf_index]]
            self.starts.append([*itertools.accumulate(sizes, initial=0)])
            self.offsets.append(0)

    def _note_replicas(self, reduction: Reduction) -> None:
        """Notes where the rows of this replica begin, and how many replicas have something to fold."""
        buffers, channel = reduction.buffers, reduction.replicas.channel
        for position, leaf_index in enumerate(buffers.outputs.collected):
            axis = buffers.outputs.collected_folds[position].fold.reducer.monoid.axis or 0
            self.offsets[position] += sum(chunk.shape[axis] for chunk in buffers.collected[leaf_index][: channel.rank])
        if reduction is self.reductions[0]:
            self.replicas = reduction.folded
        else:
            self.replicas = sum(channel.gathered(self.replicas))

    def _summaries(self, buffers: Buffers, state: list[Any]) -> Summaries:
        buffers.hold_in(1.0)
        outputs, tally = buffers.outputs, buffers.tally
        collected = [
            torch.cat(buffers.collected.pop(leaf_index), dim=fold.fold.reducer.monoid.axis or 0).to(fold.result_dtype)
            for leaf_index, fold in zip(outputs.collected, outputs.collected_folds, strict=True)
        ]
        return Summaries(self.job, outputs, buffers.reduced, collected, state, lambda fold: tally)

    # --- what the second pass asks

    def begin_second(self) -> None:
        """Remembers how the generators and buffers are to be in the end."""
        self.generators_after, self.put_after = generator_states(self.devices), self.parameters.snapshot()
        self.is_rewound = False
        _forget_casts()

    def again(
        self, number: int, summarise: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        """What the micro-batch of this number has returned, with its graph: kept, or recorded by `summarise`."""
        if self.kept is not None:
            kept, self.kept = self.kept, None
            return kept
        if not self.is_rewound:
            # Only now, as the graph that was kept may hold on to buffers.
            self.put_back()
            self.is_rewound = True
        put_generator_states(self.devices, self.generators[number])
        return summarise(*args, **kwargs)

    def rows(self, number: int, position: int, cotangent: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        """Those of the micro-batch of this number, in the cotangent of the collected leaf at this position."""
        return cotangent.narrow(axis, self.offsets[position] + self.starts[position][number], size)

    def end_second(self) -> None:
        """Leaves the generators and buffers as a single pass would."""
        if self.generators:
            put_generator_states(self.devices, self.generators_after)
        self.put_after()


def _devices(leaves: Sequence[Any]) -> list[torch.device]:
    """The devices of these whose random numbers a summary may draw, besides the host's."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return [device for device in devices if device.type not in ("cpu", "meta")]


def _forget_casts() -> None:
    """Drops what autocast has cached."""
    if _private.is_any_autocast_enabled():
        torch.clear_autocast_cache()
