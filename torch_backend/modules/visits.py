"""Visits: a thread puts tensors into a module and takes them out again, while other threads may
not.

Only torch has this file: in JAX the arrays of a model are arguments.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from funcga.errors import FuncgaError
from torch_backend import _private, arrays
from torch_backend._private import BUFFERS, PARAMETERS
from torch_backend.modules.checks import (
    ModuleLoss,
    Tensors,
    by_what_they_replace,
    check_hooks_called,
    check_initialised,
    check_not_wrapped,
)
from torch_backend.modules.layers import (
    Own,
    Walk,
    Watch,
    call_loss,
    check_no_max_norm,
    named,
    own_of,
)

Table = dict[str, torch.Tensor | None]
Space = dict[str, Table]  # the `__dict__` of a part
# What loss_fn returns: a scalar, or (scalar, aux).
Output = object

_NOTHING = nullcontext()


class Visit:
    """A context in which the module of a loss has other parameters, and copies of its buffers:
    `loss(*batch)`.

    Its own tables are never written to. It may be entered again and again: in between the module
    has its own parameters, and other threads may enter.

    Parameters that are not among `params` stay, detached from any graph, except in a transform: a
    stand-in of a loss around this one keeps its graph. `recorded`: a parameter that stays is a leaf
    if it requires grad.
    """

    def __init__(self, loss: ModuleLoss, params: Tensors, recorded: bool, walk: Walk):
        check_not_wrapped(loss.module)
        self.loss, self.params, self.recorded, self.walk = loss, params, recorded, walk
        self.parts = walk.through(loss.module)
        self.own: Own | None = None  # the module's own parameters, once this is prepared
        self.in_use: Collection[int] = ()  # what `give_back` ends
        # The `__dict__`s of the parts that have parameters, what stands in for each table there,
        # and the module's own tables during a visit; then the same of buffers.
        self.with_parameters: list[Space] = []
        self.stand_ins: list[Table] = []
        self.parameters: list[Table] = []
        self.with_buffers: list[Space] = []
        self.buffers: list[Table] = []
        self.empty: list[Table] = []  # the tables of modules without buffers
        self.is_prepared = False
        self.watch: Watch | None = None

    def __enter__(self) -> Callable[..., Output]:
        self.reserve()
        # The module may have new tensors since the last time, and has to get those back. A part
        # that is used in two places has its table here twice, so all tables are read before one is
        # replaced.
        self.parameters = [space[PARAMETERS] for space in self.with_parameters]
        self.buffers = [space[BUFFERS] for space in self.with_buffers]
        for space, stand_in in zip(self.with_parameters, self.stand_ins, strict=True):
            space[PARAMETERS] = stand_in.copy()
        # Around the loss of a module without buffers there is nothing to do.
        acts = self.buffers or self.loss.buffers or self.watch is not None
        return self if acts else partial(call_loss, self.loss.loss_fn, self.loss.module)

    def __exit__(self, *error: object) -> None:
        for space, original in zip(self.with_parameters, self.parameters, strict=True):
            space[PARAMETERS] = original
        for space, original in zip(self.with_buffers, self.buffers, strict=True):
            space[BUFFERS] = original
        if any(self.empty):  # the loss has registered some
            for registered in self.empty:
                registered.clear()
        self.give_back()

    def reserve(self) -> None:
        """Keeps other threads out of the module, which keeps its own parameters.

        Raises FuncgaError as a visit does. Otherwise `give_back` has to follow.
        """
        self.in_use = IN_USE.begin(self.parts.ids)
        try:
            if not self.is_prepared or any(self.empty):
                self._prepare()
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Lets other threads enter."""
        IN_USE.end(self.in_use)

    def _prepare(self) -> None:
        """Works out what stands in for the parameters: the same whenever the visit begins again."""
        spaces = self.parts.spaces
        check_no_max_norm(self.parts.owners)
        self.own = own_of(self.parts)
        self._check_initialised(self.own.entries.values)
        places = self.walk.places_of(self.params, self.own)
        # The engine puts the hooks of a parameter on its leaf, and autograd calls them there.
        # torch.func calls none.
        if _private.transforms():
            check_hooks_called(self.params, named(self.parts.owners, PARAMETERS))
        # Whole tables are exchanged, in the `__dict__` of each part: the module's own are not
        # written to.
        self.with_parameters = [space for space in spaces if space[PARAMETERS]]
        given = [*self.params.values()]
        stand_ins = iter(
            [
                self._stand_in(tensor, None if place is None else given[place])
                for tensor, place in zip(self.own.entries.values, places, strict=True)
            ]
        )
        self.stand_ins = [
            dict(zip(space[PARAMETERS], stand_ins, strict=False)) for space in self.with_parameters
        ]
        self.with_buffers = [space for space in spaces if space[BUFFERS]]
        # Where there are no buffers, no table is exchanged. Buffers that the loss registers there
        # are removed afterwards.
        self.empty = [space[BUFFERS] for space in spaces if not space[BUFFERS]]
        if self.loss.statistics and self.watch is None:
            self.watch = Watch(self.loss.module)
        self.is_prepared = True

    def _check_initialised(self, parameters: Sequence[object]) -> None:
        buffers = [buffer for space in self.parts.spaces for buffer in space[BUFFERS].values()]
        if arrays.has_lazy([*parameters, *buffers]):
            check_initialised(self.loss.module)

    def __call__(self, *args: object, **kwargs: object) -> Output:
        """The loss of a batch, on copies of the module's own buffers, or of those that are
        threaded.
        """
        loss, threaded = self.loss, dict[str, torch.Tensor]()
        if loss.buffers:
            threaded, args = args[0], args[1:]  # type: ignore[assignment]
        self._put_buffers(
            by_what_they_replace(threaded, named(self.parts.owners, BUFFERS), "buffers")
            if loss.buffers
            else {}
        )
        with _NOTHING if self.watch is None else self.watch.watching():
            output = call_loss(loss.loss_fn, loss.module, *args, **kwargs)
        if self.watch is not None:
            return with_state(output, self.watch.statistics())
        if not loss.buffers:
            return output
        # They are copied: a checkpoint runs the forward pass again later, and writes to the buffers
        # once more.
        after = named(self.parts.owners, BUFFERS)
        return with_state(output, {name: after[name].detach().clone() for name in threaded})

    def _put_buffers(self, values: Mapping[int, torch.Tensor]) -> None:
        """Puts copies in the place of the buffers: of these values, by buffer ids, or of the
        buffers themselves.
        """
        # Each micro-batch gets new ones: writes through `.data` or a NumPy array cannot be seen, so
        # none can be reused.
        if not self.buffers:
            return
        copies = _copies([tensor for table in self.buffers for tensor in table.values()], values)
        for space, table in zip(self.with_buffers, self.buffers, strict=True):
            space[BUFFERS] = {
                name: None if tensor is None else copies[id(tensor)]
                for name, tensor in table.items()
            }

    def _stand_in(
        self, tensor: torch.Tensor | None, replacement: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What stands in for a parameter, which remembers it; `replacement` is None if none is
        given.
        """
        if tensor is None or replacement is tensor:
            return tensor
        if replacement is not None:
            # An alias is marked, and not the caller's own tensor, which may be a parameter
            # elsewhere.
            if not (self.recorded or arrays.in_transform()):
                replacement = (
                    replacement[...] if replacement.requires_grad else replacement.detach()
                )
        else:
            if hasattr(tensor, "_stands_in") and arrays.in_transform():
                return tensor
            # A leaf only if autograd is to record what is not differentiated, as a loop by hand
            # would.
            replacement = tensor.detach()
            if self.recorded and tensor.requires_grad:
                replacement.requires_grad_()
        replacement._stands_in = tensor  # type: ignore[attr-defined]
        return replacement


def with_state(output: Output, state: dict[str, torch.Tensor]) -> tuple[Output, Output]:
    """What loss_fn returned, with a state beside its aux."""
    if isinstance(output, tuple | list) and len(output) == 2:
        return output[0], (output[1], state)
    return output, state


def _copies(
    buffers: list[torch.Tensor | None], values: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Copies by the ids of the buffers. Buffers that share memory have copies that share memory
    likewise.
    """
    memories: dict[int, dict[int, torch.Tensor]] = {}
    for buffer in buffers:
        if buffer is not None:
            memories.setdefault(_memory(buffer), {})[id(buffer)] = buffer
    copies: dict[int, torch.Tensor] = {}
    # Most buffers have a memory of their own.
    for sharing in memories.values():
        if len(sharing) == 1:
            copies.update(
                {key: values.get(key, buffer).detach().clone() for key, buffer in sharing.items()}
            )
            continue
        copies.update(_copies_in_one_memory([*sharing.values()]))
        for key in sharing.keys() & values.keys():
            copies[key].detach().copy_(values[key])
    return copies


def _memory(tensor: torch.Tensor) -> int:
    """A number that is the same for tensors whose copies can share memory as they do."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_neg():
        return id(tensor)
    try:
        return _private.storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # of a torch.func transform
        return id(tensor)


def _copies_in_one_memory(sharing: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    storage = sharing[0].untyped_storage().clone()  # type: ignore[no-untyped-call]
    copies: dict[int, torch.Tensor] = {}
    # Autograd records them as views of one tensor, so it knows that writing to one changes the
    # others.
    with torch.inference_mode(False), torch.enable_grad():
        wholes: dict[torch.dtype, torch.Tensor] = {}
        for tensor in sharing:
            if tensor.dtype not in wholes:
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                wholes[tensor.dtype] = whole.set_(
                    storage, 0, (storage.nbytes() // tensor.itemsize,), (1,)
                )
            view = wholes[tensor.dtype].as_strided(
                tensor.size(), tensor.stride(), tensor.storage_offset()
            )
            copies[id(tensor)] = view.conj() if tensor.is_conj() else view
    return copies


class _InUse:
    """What one thread uses alone: parts of modules that have other parameters meanwhile, and
    parameters whose `.grad`s hold its sums. Both are known by their ids.

    A process has each module once, so it has one of these for all of its threads.
    """

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), dict[int, int]()

    def begin(self, ids: Iterable[int]) -> Collection[int]:
        """Uses these in this thread, and returns what is to end: all but what the thread uses
        already.

        Raises FuncgaError if another thread uses one of them.
        """
        thread, begun = threading.get_ident(), {*ids}
        with self.lock:
            shared = begun & self.threads.keys()
            if any(self.threads[key] != thread for key in shared):
                raise FuncgaError(
                    "two threads use one module at the same time, and would find parameters or "
                    "gradients of each other in it. Give each thread a module of its own: "
                    "copy.deepcopy(module)."
                )
            begun -= shared
            self.threads.update(dict.fromkeys(begun, thread))
        return begun

    def end(self, begun: Iterable[int]) -> None:
        """Ends what `begin` has begun."""
        with self.lock:
            for key in begun:
                del self.threads[key]

    @contextmanager
    def using(self, ids: Iterable[int]) -> Iterator[None]:
        """A context in which these are used."""
        begun = self.begin(ids)
        try:
            yield
        finally:
            self.end(begun)


IN_USE = _InUse()
