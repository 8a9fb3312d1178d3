"""Losses of modules, as pure functions of the parameters."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from funcga.errors import FuncgaError, similar
from torch_backend import _private, arrays
from torch_backend.engine.hooks import check_hooks_known
from torch_backend.modules.batch_norm import Watch, called
from torch_backend.modules.copies import copied
from torch_backend.modules.embeddings import bounded, check_unbounded, within_norm
from torch_backend.modules.frozen import check_none_frozen
from torch_backend.modules.guards import check_module_and_loss, check_not_scripted, check_not_wrapped
from torch_backend.modules.visits import Visit, named, owners


def pure_loss(
    module: nn.Module, loss_fn: Callable[..., Any], *, buffers: bool = False, statistics: bool = False
) -> "PureLoss":
    """`loss(params, *batch)`, pure, from `loss_fn(module, *batch)`: its value where the module has these parameters.

    module: any module, in train or eval mode as it is at the time of a call. It is left as it was, its parameters,
        buffers and `.grad`s too, whatever happens.
    loss_fn: `loss_fn(module, *batch)` returns a scalar, or (scalar, aux) for has_aux=True.
    params: `{name: tensor}` as `dict(module.named_parameters())`, or `torch_backend.trainable(module)` where some are
        frozen; those that are not given are the module's own. A parameter that the module uses under several names,
        tied, has one of them. What is left out and requires grad is recorded, as in a loop by hand; frozen by
        requires_grad_(False), its activations are not kept.
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
    in the module during a micro-batch; between two of them it has its own. Other threads that use the module through a
    pure_loss wait meanwhile. Give it to `funcga.grad` as it is if the module has checkpoints: they run it again in the
    backward pass, and find the parameters only then. More terms of the loss can be written in loss_fn, which has them
    as `module.parameters()`.
    Raises FuncgaError for names that the module does not have, for gradients of frozen parameters, for modules wrapped
    in DDP or FSDP, whose gradients would silently not be reduced, for a micro-batch with one value per channel of a
    BatchNorm layer, for an embedding with max_norm that would shorten a row, and where threads would wait for one
    another for ever; with statistics=True if there is no such layer, if one runs twice in a forward pass, or is a
    SyncBatchNorm.

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
        check_unbounded(self.module)
        held = [*owners(self.module)]
        parameters = named(held, "_parameters")
        _checked(params, parameters, "parameters")
        check_none_frozen(params, parameters)
        given = dict(self.module.named_buffers())
        own: Mapping[str, torch.Tensor] = {}
        if self.buffers:
            own, args = args[0], args[1:]
            _checked(own, named(held, "_buffers"), "buffers")
            given.update(own)
        tensors = {f"module.{name}": tensor for name, tensor in params.items()}
        tensors |= {f"module.{name}": tensor.clone() for name, tensor in given.items()}
        output, after = torch.func.functional_call(self.call, tensors, (self.loss_fn, *args), kwargs)
        return _with_state(output, {name: after[name] for name in own}) if self.buffers else output

    def entered(self, params: Mapping[str, torch.Tensor], recorded: bool = False) -> "Entrance":
        """A context, `loss(*batch)` while the parameters are in the module, which is as before when it is left.

        `recorded`: parameters that are not given require grad if the module's own do, as functions that recompute in
        the backward pass may be recorded for the sake of these alone.

        It can be entered again and again. Meanwhile other threads wait that want to put parameters into the module, or
        into one that overlaps with it.
        """
        return Entrance(self, params, recorded)

    def isolated(self, visit: Visit, *args: Any, **kwargs: Any) -> Any:
        """The loss, on copies of the module's own buffers."""
        _isolate(visit)
        return called(self.loss_fn, self.module, *args, **kwargs)

    def watched(self, watch: Watch, visit: Visit, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """(loss, statistics), on copies of the module's own buffers."""
        _isolate(visit)
        with watch.micro_batch():
            output = called(self.loss_fn, self.module, *args, **kwargs)
        return _with_state(output, watch.statistics())

    def threaded(
        self, visit: Visit, given: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, tuple[Any, Any] | dict[str, torch.Tensor]]:
        """(loss, buffers) on copies of the given buffers, and of the module's own where none is given."""
        own = named(visit.owners, "_buffers")
        tensors = _checked(given, own, "buffers")
        visit.put(copied({id(held): (held, tensors.get(id(held), held)) for held in own.values()}))
        output = called(self.loss_fn, self.module, *args, **kwargs)
        found = named(visit.owners, "_buffers")
        # copies, as a checkpoint runs the forward pass again when the loss is already there
        return _with_state(output, {name: found[name].detach().clone() for name in given})


def _isolate(visit: Visit) -> None:
    """Puts copies where the module's own buffers are."""
    if visit.buffered:
        visit.put(copied({id(held): (held, held) for held in visit.buffers()}))


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


def _checked(tensors: Mapping[str, torch.Tensor], held: dict[str, torch.Tensor], what: str) -> dict[int, torch.Tensor]:
    """The given tensors by the id of what they replace. Raises FuncgaError for names that are not the module's."""
    spell = f"dict(module.named_{what}())"
    if not isinstance(tensors, Mapping):
        raise FuncgaError(
            f"the {what} of a pure_loss are of type {type(tensors).__name__}; they are a dict of name to tensor, such "
            f"as {spell}."
        )
    if held.keys() >= tensors.keys():
        replaced = [held[name] for name in tensors]
        placed = dict(zip(map(id, replaced), tensors.values(), strict=True))
        fits = [getattr(tensor, "shape", None) for tensor in tensors.values()] == [tensor.shape for tensor in replaced]
        if fits and len(placed) == len(tensors):
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


class Entrance:
    """A context in which the parameters are in the module of a loss: `loss(*batch)`. It can be entered again."""

    def __init__(self, loss: PureLoss, params: Mapping[str, torch.Tensor], recorded: bool):
        check_not_wrapped(loss.module)
        self.loss, self.params = loss, params
        self.visit = Visit(loss.module, self._chosen, recorded)
        self.embeddings = bounded(self.visit.owners)
        self.watch: Watch | None = None
        self.stack: ExitStack | None = None
        self.function: Callable[..., Any] = partial(loss.threaded if loss.buffers else loss.isolated, self.visit)

    def _chosen(self, held: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        found = _checked(self.params, held, "parameters")
        check_none_frozen(self.params, held)
        if _private.transforms():
            check_hooks_known(self.params, held)
        return found

    def __enter__(self) -> Callable[..., Any]:
        if not (self.loss.statistics or self.embeddings):
            self.visit.__enter__()
            return self.function
        with ExitStack() as stack:
            stack.enter_context(self.visit)
            stack.enter_context(within_norm(self.embeddings))
            if self.loss.statistics:
                if self.watch is None:
                    self.watch = Watch(self.loss.module)
                    self.function = partial(self.loss.watched, self.watch, self.visit)
                stack.enter_context(self.watch.watching())
            self.stack = stack.pop_all()
        return self.function

    def __exit__(self, *error: Any) -> None:
        (self.visit if self.stack is None else self.stack).__exit__(*error)
