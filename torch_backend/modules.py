"""Losses of modules, as pure functions of the parameters."""

import math
import threading
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from funcga.errors import FuncgaError, similar
from torch_backend import arrays
from torch_backend.batch_norm import Watch, called
from torch_backend.guards import check_module_and_loss, check_not_scripted, check_not_wrapped


def pure_loss(
    module: nn.Module, loss_fn: Callable[..., Any], *, buffers: bool = False, statistics: bool = False
) -> "PureLoss":
    """`loss(params, *batch)`, pure, from `loss_fn(module, *batch)`: its value where the module has these parameters.

    module: any module, in train or eval mode as it is at the time of a call. It is left as it was, its parameters,
        buffers and `.grad`s too, whatever happens.
    loss_fn: `loss_fn(module, *batch)` returns a scalar, or (scalar, aux) for has_aux=True.
    params: `{name: tensor}` as `dict(module.named_parameters())`, all of them or those that are trained; the others are
        the module's own. A parameter that the module uses under several names, tied, has one of them.
    buffers: False, and every call sees the module's own buffers, while what it writes to them, as BatchNorm does its
        running statistics, is dropped. True, and they are an argument and a result:
        `loss(params, buffers, *batch) -> (loss, buffers)`, or `(loss, (aux, buffers))`; `{name: tensor}` as
        `dict(module.named_buffers())`. To thread them through a window they are CARRY among the arguments and carry()
        among the folds; `module.load_state_dict(buffers, strict=False)` writes them back.
    statistics: True, and what its BatchNorm layers see of a micro-batch is a result: `loss(params, *batch) ->
        (loss, statistics)`, or `(loss, (aux, statistics))`; `{name of the layer: tensor [3, channels]}`, a leaf for the
        fold `pooled()`, which makes of them what the layers saw of the window, as if of one batch; with
        `running_buffers` the running statistics are updated once a window. For layers in train mode that have running
        statistics. Each micro-batch is still normalised by its own, so that the gradient is not that of the whole
        batch, and what a layer behind another BatchNorm sees depends on n. Meanwhile loss_fn must not read the
        running ones. Not in torch.compile, though the module may be compiled.

    It works in torch.func and torch.compile. In `accumulate` and `stream` over `funcga.grad(loss)` the parameters are
    put into the module once for a window; other threads that use the module through a pure_loss wait until then. Give
    it to `funcga.grad` as it is if the module has checkpoints: they run it again in the backward pass, and find the
    parameters only then. More terms of the loss can be written in loss_fn, which has them as `module.parameters()`.
    Raises FuncgaError for names that the module does not have, for modules wrapped in DDP or FSDP, whose gradients
    would silently not be reduced, and for a micro-batch with one value per channel of a BatchNorm layer; with
    statistics=True if there is no such layer, if one runs twice in a forward pass, or is a SyncBatchNorm.

    >>> loss = torch_backend.pure_loss(model, lambda model, x, y: F.cross_entropy(model(x), y))
    >>> step = funcga.accumulate(funcga.value_and_grad(loss), n=8)
    >>> value, grads = step(dict(model.named_parameters()), x, y)

    >>> gradient = funcga.value_and_grad(torch_backend.pure_loss(model, loss_fn, buffers=True), has_aux=True)
    >>> fold = ((funcga.mean(), funcga.carry()), funcga.mean())
    >>> step = funcga.accumulate(gradient, n=8, in_axes=(None, funcga.CARRY, 0, 0), fold=fold)
    >>> (value, buffers), grads = step(dict(model.named_parameters()), dict(model.named_buffers()), x, y)

    >>> gradient = funcga.value_and_grad(torch_backend.pure_loss(model, loss_fn, statistics=True), has_aux=True)
    >>> step = funcga.accumulate(gradient, n=8, fold=((funcga.mean(), funcga.pooled()), funcga.mean()))
    >>> (value, statistics), grads = step(dict(model.named_parameters()), x, y)
    >>> model.load_state_dict(torch_backend.running_buffers(model, statistics), strict=False)
    """
    check_module_and_loss(module, loss_fn, "pure_loss")
    check_not_scripted(module)
    check_not_wrapped(module)
    if buffers and statistics:
        raise FuncgaError(
            "pure_loss was given buffers=True and statistics=True: running statistics are threaded from one "
            "micro-batch to the next, or pooled over them all. Give one of the two."
        )
    return PureLoss(module, loss_fn, buffers, statistics, _Call(module))


@dataclass(frozen=True, eq=False)
class PureLoss:
    """A pure function of a module's parameters. Made by `pure_loss`."""

    module: nn.Module
    loss_fn: Callable[..., Any]
    buffers: bool
    statistics: bool
    call: "_Call"

    def __call__(self, params: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch with these parameters; with the buffers, if they are threaded."""
        if torch.compiler.is_compiling():
            return self._traced(params, *args, **kwargs)
        with self.entered(params) as loss:
            return loss(*args, **kwargs)

    def _traced(self, params: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """The same by functional_call, which torch.compile knows, also in a loop."""
        if self.statistics:
            raise FuncgaError(_UNWATCHED)
        parameters, buffers, _ = _walk(self.module)
        _checked(params, parameters, "parameters")
        given = dict(self.module.named_buffers())
        own: Mapping[str, torch.Tensor] = {}
        if self.buffers:
            own, args = args[0], args[1:]
            _checked(own, buffers, "buffers")
            given.update(own)
        tensors = {f"module.{name}": tensor for name, tensor in params.items()}
        tensors |= {f"module.{name}": tensor.clone() for name, tensor in given.items()}
        output, after = torch.func.functional_call(self.call, tensors, (self.loss_fn, *args), kwargs)
        return _with_state(output, {name: after[name] for name in own}) if self.buffers else output

    def entered(self, params: Mapping[str, torch.Tensor], recorded: bool = False) -> "_Visit":
        """A context, `loss(*batch)` while the parameters are in the module, which is as before when it is left.

        `recorded`: parameters that are not given require grad if the module's own do, as functions that recompute in
        the backward pass may be recorded for the sake of these alone.

        Meanwhile other threads wait that want to put parameters into the module, or into one that overlaps with it.
        """
        return _Visit(self, params, recorded)

    def _isolated(
        self,
        buffers: "list[_Slot]",
        tables: "_Tables",
        copies: dict[int, tuple[Any, float]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The loss, on copies of the module's own buffers."""
        _refill(buffers, tables, copies)
        return called(self.loss_fn, self.module, *args, **kwargs)

    def _watched(
        self,
        watch: Watch,
        buffers: "list[_Slot]",
        tables: "_Tables",
        copies: dict[int, tuple[Any, float]],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """(loss, statistics), on copies of the module's own buffers."""
        _refill(buffers, tables, copies)
        with watch.micro_batch():
            output = called(self.loss_fn, self.module, *args, **kwargs)
        return _with_state(output, watch.statistics())

    def _threaded(
        self, buffers: "list[_Slot]", given: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """(loss, buffers) on copies of the given buffers, and of the module's own where none is given."""
        tensors = _checked(given, buffers, "buffers")
        copies = {id(held): tensors.get(id(held), held).detach().clone() for *_, held in buffers}
        _fill(buffers, copies)
        output = called(self.loss_fn, self.module, *args, **kwargs)
        # a copy, as a checkpoint runs the forward pass again when the loss is already there
        found = {name: table[key].detach().clone() for table, key, name, _ in buffers}
        return _with_state(output, {name: found[name] for name in given})


_UNWATCHED = (
    "pure_loss(..., statistics=True) is in a function that torch.compile compiles, where layers cannot be watched. "
    "Call the step without torch.compile; the module itself may be compiled. Or thread the buffers: buffers=True."
)


def _with_state(output: Any, state: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    if isinstance(output, tuple | list) and len(output) == 2:
        return output[0], (output[1], state)
    return output, state


class _Call(nn.Module):
    """A module around the module, so that functional_call runs loss_fn on it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, loss_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        output = loss_fn(self.module, *args, **kwargs)
        return output, {name: buffer.detach() for name, buffer in self.module.named_buffers()}


# Where a module holds a tensor: `table[key]`, its name in the outermost module, and the tensor. No NamedTuple, which
# takes a call to make.
_Slot = tuple[MutableMapping[str, Any], str, str, torch.Tensor]
# A module's own table of parameters or buffers, and what it held.
_Table = tuple[dict[str, Any], dict[str, Any]]


class _Tables(NamedTuple):
    """The tables of a module and of those inside: of parameters, of buffers, and of those of buffers that are empty."""

    parameters: list[_Table]
    buffers: list[_Table]
    empty: list[dict[str, Any]]

    def restore_buffers(self) -> None:
        """Lets those of buffers hold what they held."""
        _restore(self.buffers)
        if any(self.empty):
            for table in self.empty:
                table.clear()

    def restore(self) -> None:
        """Lets all of them hold what they held."""
        _restore(self.parameters)
        self.restore_buffers()

    def ids(self) -> set[int]:
        """By which they are known."""
        return {id(table) for table, _ in (*self.parameters, *self.buffers)}.union(map(id, self.empty))


def _restore(tables: list[_Table]) -> None:
    for table, held in tables:
        table.clear()
        table.update(held)


def _walk(module: nn.Module) -> tuple[list[_Slot], list[_Slot], _Tables]:
    """The slots of its parameters and of its buffers, and the tables that they are in, or may be put in."""
    parameters: list[_Slot] = []
    buffers: list[_Slot] = []
    tables = _Tables([], [], [])
    waiting = [("", module)]
    while waiting:
        prefix, owner = waiting.pop()
        own, state, children = owner._parameters, owner._buffers, owner._modules
        if own:
            tables.parameters.append((own, own.copy()))
            parameters += [(own, key, prefix + key, held) for key, held in own.items() if held is not None]
        if state:
            tables.buffers.append((state, state.copy()))
            buffers += [(state, key, prefix + key, held) for key, held in state.items() if held is not None]
        else:
            tables.empty.append(state)
        if children:
            waiting += [(f"{prefix}{name}.", child) for name, child in children.items() if child is not None]
    return parameters, buffers, tables


def _fill(
    slots: list[_Slot], tensors: Mapping[int, torch.Tensor], outer: Collection[int] = (), recorded: bool = False
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Puts the tensors where those of these ids are held; what is not given stays, without a graph of its own.

    But tensors of the ids `outer` keep theirs: they belong to a loss around this one, which is differentiated too.
    `recorded`: what is not given is a leaf, if it requires grad.

    Returns (what is there now, what was before), by the id of the former.
    """
    placed = {}
    for table, key, _, held in slots:
        found = tensors.get(id(held))
        if found is None:
            found = held if id(held) in outer else held.detach()
            if recorded and id(held) not in outer and held.requires_grad:
                found.requires_grad_()
        table[key] = tensor = found
        placed[id(tensor)] = tensor, held
    return placed


def _refill(slots: list[_Slot], tables: _Tables, copies: dict[int, tuple[Any, float]]) -> None:
    """Puts copies where the module's own buffers are, new ones in each layer that the last micro-batch wrote to.

    All of the layer's, as the kernel of BatchNorm writes to running statistics without telling autograd.
    """
    tables.restore_buffers()
    if not slots:
        return
    known = [(table, held, *copies.get(id(held), (None, 0))) for table, _, _, held in slots]
    written = {id(table) for table, _, copy, version in known if copy is None or _version(copy) != version}
    for held in {id(held): held for table, held, *_ in known if id(table) in written}.values():
        copy = held.detach().clone()
        copies[id(held)] = copy, _version(copy)
    for table, key, _, held in slots:  # one that several layers hold is one copy
        table[key] = copies[id(held)][0]


def _version(tensor: torch.Tensor) -> float:
    """A number that changes when it is written to; NaN, which is no number's equal, where that is not known."""
    return tensor._version if not tensor.is_inference() else math.nan


def _checked(tensors: Mapping[str, torch.Tensor], slots: list[_Slot], what: str) -> dict[int, torch.Tensor]:
    """The given tensors by the id of what they replace. Raises FuncgaError for names that are not the module's."""
    spell = f"dict(module.named_{what}())"
    if not isinstance(tensors, Mapping):
        raise FuncgaError(
            f"the {what} of a pure_loss are of type {type(tensors).__name__}; they are a dict of name to tensor, such "
            f"as {spell}."
        )
    held = {name: tensor for _, _, name, tensor in slots}
    placed: dict[int, torch.Tensor] = {}
    if held.keys() >= tensors.keys():
        own = [held[name] for name in tensors]
        placed = dict(zip(map(id, own), tensors.values(), strict=True))
        fits = [getattr(tensor, "shape", None) for tensor in tensors.values()] == [tensor.shape for tensor in own]
        if fits and len(placed) == len(own):
            return placed
    raise _misfit(tensors, held, what, spell)


def _misfit(tensors: Mapping[str, torch.Tensor], held: dict[str, torch.Tensor], what: str, spell: str) -> FuncgaError:
    """The first that a module does not take."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        own = held.get(name)
        if own is None:
            return FuncgaError(
                f"the module has no `{name}`{similar(name, held)} among its {what}. Their names are those of {spell}."
            )
        if getattr(tensor, "shape", None) != own.shape:
            return FuncgaError(
                f"`{name}` is {arrays.describe(tensor)}, and the module's own is {arrays.describe(own)}. Give "
                f"each of the {what} in the shape that it has there: {spell}."
            )
        twin = first.setdefault(id(own), name)
        if twin != name:
            break
    return FuncgaError(
        f"`{twin}` and `{name}` are one tensor in the module, tied: give one of the two names, as {spell} does."
    )


class _Visit:
    """A context in which a thread has put parameters into the module of a loss."""

    def __init__(self, loss: PureLoss, params: Mapping[str, torch.Tensor], recorded: bool):
        self.loss, self.params, self.recorded = loss, params, recorded
        self.watching: Any = nullcontext()

    def __enter__(self) -> Callable[..., Any]:
        module = self.loss.module
        check_not_wrapped(module)
        with _CHANGED:
            while _is_occupied(module):
                _CHANGED.wait()
            parameters, buffers, tables = _walk(module)
            # (what is there now, what was before), by the id of the former
            own = _checked(self.params, parameters, "parameters")
            self.placed = _fill(parameters, own, _placed_around(), self.recorded)
            self.thread, self.tables, self.taken = threading.get_ident(), tables, tables.ids()
            _VISITS.append(self)
        if self.loss.buffers:
            return partial(self.loss._threaded, buffers)
        if not self.loss.statistics:
            return partial(self.loss._isolated, buffers, tables, {})
        try:
            self.watching = Watch(module).watching()
            return partial(self.loss._watched, self.watching.__enter__(), buffers, tables, {})
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self.watching.__exit__(*error)
        finally:
            self._leave()

    def _leave(self) -> None:
        with _CHANGED:
            self.tables.restore()
            _VISITS.remove(self)
            _CHANGED.notify_all()


# The visits that go on now, first those that began first. It is asked of each table, as the modules of two losses may
# overlap, a model and its encoder; and of those of buffers too, as layers may have nothing else.
_VISITS: list[_Visit] = []
_CHANGED = threading.Condition()


def _is_occupied(module: nn.Module) -> bool:
    others = [visit.taken for visit in _visits_of_others()]
    tables = [id(t) for owner in module.modules() for t in (owner._parameters, owner._buffers)] if others else []
    return any(not taken.isdisjoint(tables) for taken in others)


def own_parameters(tensors: list[Any]) -> list[Any]:
    """The tensors; for one that another thread has put into a module, where it was read, the module's own parameter."""
    others = _visits_of_others()
    return [_own_parameter(tensor, others) for tensor in tensors] if others else tensors


def _own_parameter(tensor: Any, visits: list[_Visit]) -> Any:
    for visit in reversed(visits):  # of visits one inside of the other the innermost is the last that began
        tensor = visit.placed.get(id(tensor), (None, tensor))[1]
    return tensor


def _placed_around() -> set[int]:
    """The ids of what the losses around this one, if they are differentiated, have put into modules."""
    own = threading.get_ident()
    visits = _VISITS if arrays.in_transform() else ()
    return {key for visit in visits if visit.thread == own for key in visit.placed}


def _visits_of_others() -> list[_Visit]:
    own = threading.get_ident()
    return [visit for visit in [*_VISITS] if visit.thread != own]  # of a copy, as others come and go meanwhile
