"""Visits: a thread puts tensors into a module and takes them out again, and other threads wait meanwhile."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from funcga.errors import FuncgaError
from torch_backend import arrays

# A module's own table of its parameters, or of its buffers, as it is in the module's `__dict__`.
Table = dict[str, Any]


class Visit:
    """A context in which a module holds other parameters, and buffers. Its own tables of them are left alone.

    It may be entered again and again. Between two times the module has its own parameters, and other threads may enter.

    `choose(held)`, called when the visit begins for the first time, returns what stands in for the parameters that the
    module holds: tensors by the id of what they stand in for. What is not chosen stays, without a graph of its own; but
    what belongs to a loss around this one, which is differentiated too, keeps its graph. `recorded`: what is not chosen
    is a leaf, if it requires grad.
    """

    def __init__(
        self,
        module: nn.Module,
        choose: Callable[[dict[str, torch.Tensor]], dict[int, torch.Tensor]],
        recorded: bool = False,
    ):
        self.owners, self.choose, self.recorded = [*owners(module)], choose, recorded
        self.taken = frozenset([id(owner) for _, owner in self.owners])
        self.thread = 0  # which one is in it
        # for each owner that has parameters, or buffers, its `__dict__`; what stands in for its table; its own table
        self.spaces: list[Table] = []
        self.parameters: list[Table] = []
        self.own_parameters: list[Table] = []
        self.buffered: list[Table] = []
        self.own_buffers: list[Table] = []
        self.empty: list[Table] = []  # tables of buffers, of those that have none

    def __enter__(self) -> "Visit":
        _begin(self)
        try:
            if not self.spaces or any(self.empty):
                self._prepare()
        except BaseException:
            _end(self)
            raise
        self.own_parameters = [space["_parameters"] for space in self.spaces]
        self.own_buffers = [space["_buffers"] for space in self.buffered]
        for space, parameters in zip(self.spaces, self.parameters, strict=True):
            space["_parameters"] = parameters.copy()
        return self

    def __exit__(self, *error: object) -> None:
        for space, parameters in zip(self.spaces, self.own_parameters, strict=True):
            space["_parameters"] = parameters
        for space, buffers in zip(self.buffered, self.own_buffers, strict=True):
            space["_buffers"] = buffers
        if any(self.empty):  # what was registered meanwhile
            for table in self.empty:
                table.clear()
        _end(self)

    def _prepare(self) -> None:
        """Works out what stands in for the parameters: the same whenever the visit begins again."""
        spaces = [owner.__dict__ for _, owner in self.owners]
        chosen = {**_placed_around(), **self.choose(named(self.owners, "_parameters"))}
        self.spaces = [space for space in spaces if space["_parameters"]]
        self.parameters = [
            {key: held if held is None else self._stand_in(held, chosen) for key, held in space["_parameters"].items()}
            for space in self.spaces
        ]
        self.buffered = [space for space in spaces if space["_buffers"]]
        self.empty = [space["_buffers"] for space in spaces if not space["_buffers"]]

    def _stand_in(self, held: torch.Tensor, chosen: Mapping[int, torch.Tensor]) -> torch.Tensor:
        found = chosen.get(id(held))
        if found is not None and not self.recorded:
            return found  # which may be the caller's own
        if found is None:
            found = held.detach().requires_grad_() if self.recorded and held.requires_grad else held.detach()
        if found is not held:
            found._stands_in = self.thread, held  # type: ignore[attr-defined]
        return found

    def buffers(self) -> list[torch.Tensor]:
        """The module's own buffers; those that several of its parts hold more than once."""
        return [held for table in self.own_buffers for held in table.values() if held is not None]

    def put(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Lets the module hold these in place of its own buffers, which are known by their ids."""
        for space, table in zip(self.buffered, self.own_buffers, strict=True):
            space["_buffers"] = {key: own if own is None else copies[id(own)] for key, own in table.items()}

    def replaced(self) -> dict[int, Any]:
        """The module's own parameters, by the ids of what stands in for them."""
        pairs = [*zip(self.parameters, self.own_parameters, strict=False)]
        return {id(held): own[key] for table, own in pairs for key, held in table.items() if key in own}


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module and those inside, by the prefix of the names of what they hold."""
    waiting = [("", module)]
    while waiting:
        prefix, owner = waiting.pop()
        yield prefix, owner
        if owner._modules:
            waiting += [(f"{prefix}{name}.", child) for name, child in owner._modules.items() if child is not None]


def named(owners: list[tuple[str, nn.Module]], table: str) -> dict[str, torch.Tensor]:
    """What is in a table of the owners, `_parameters` or `_buffers`, by all of its names in the module."""
    return {
        prefix + key: held
        for prefix, owner in owners
        for key, held in owner.__dict__[table].items()
        if held is not None
    }


# The visits that go on now, first those that began first; and the threads that each waiting thread waits for. What a
# process has of each module, it has once: hence what tells its threads apart belongs to the process.
_VISITS: list[Visit] = []
_WAITING: dict[int, set[int]] = {}
_LOCK = threading.RLock()
_CHANGED = threading.Condition(_LOCK)


def _begin(visit: Visit) -> None:
    """Waits until no other thread is in the module. Raises FuncgaError if they would wait for one another."""
    visit.thread = threading.get_ident()
    with _LOCK:
        if _VISITS and (holders := _holders(visit)):
            _wait(visit, holders)
        _VISITS.append(visit)


def _end(visit: Visit) -> None:
    with _LOCK:
        _VISITS.remove(visit)
        if _WAITING:
            _CHANGED.notify_all()


def _holders(visit: Visit) -> set[int]:
    """The other threads that are in the module, or in one that overlaps with it."""
    return {v.thread for v in _VISITS if v.thread != visit.thread and not v.taken.isdisjoint(visit.taken)}


def _wait(visit: Visit, holders: set[int]) -> None:
    own, known, seen, since = visit.thread, set[int](), 0.0, 0.0
    while holders:
        worked = sum(map(_worked, holders))
        if holders != known or worked - seen > _LITTLE:
            known, seen, since = holders, worked, time.monotonic()
        if _wait_for(holders, own) or time.monotonic() - since > _PATIENCE:
            raise _deadlock(visit.owners[0][1])
        _WAITING[own] = holders
        try:
            _CHANGED.wait(_PATIENCE / 10)
        finally:
            del _WAITING[own]
        holders = _holders(visit)


# A thread that is in a module, and has done next to nothing for so many seconds, is taken to wait for the one that
# waits for it: in `Thread.join`, of which nobody is told.
_PATIENCE, _LITTLE = 30.0, 0.01


def _worked(thread: int) -> float:
    """The seconds that a thread has worked for; where the system does not tell, it never rests."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock(thread))


def _wait_for(threads: set[int], own: int) -> bool:
    """Whether one of these threads waits for the thread that asks, itself or through others."""
    seen, waiting = set[int](), [*threads]
    while waiting:
        thread = waiting.pop()
        if thread not in seen:
            seen.add(thread)
            waiting += _WAITING.get(thread, ())
    return own in seen


def _deadlock(module: nn.Module) -> FuncgaError:
    return FuncgaError(
        f"two threads would wait for one another for ever: this one wants to put parameters into a module of type "
        f"{type(module).__name__}, which another thread is using, and that one waits for this one. Give each thread a "
        f"module of its own: copy.deepcopy(module)."
    )


def _placed_around() -> dict[int, torch.Tensor]:
    """What the losses around this one, if they are differentiated, have put into modules, by its ids."""
    own = threading.get_ident()
    visits = _VISITS if arrays.in_transform() else ()
    tables = [table for visit in visits if visit.thread == own for table in visit.parameters]
    return {id(held): held for table in tables for held in table.values() if held is not None}


def own_parameters(tensors: list[Any]) -> list[Any]:
    """The tensors; for one that another thread has put into a module, where it was read, the module's own parameter."""
    own = threading.get_ident()
    # of visits one inside of the other the innermost is the last that began; of a copy, as others come and go meanwhile
    for visit in reversed([*_VISITS]):
        if visit.thread != own:
            replaced = visit.replaced()
            tensors = [replaced.get(id(tensor), tensor) for tensor in tensors]
    return [_original(tensor, own) for tensor in tensors]


def _original(tensor: Any, own: int) -> Any:
    """The same for a tensor of funcga's, which may be read while the other thread is in the module, and used later."""
    while (stands_in := getattr(tensor, "_stands_in", None)) is not None and stands_in[0] != own:
        tensor = stands_in[1]
    return tensor
