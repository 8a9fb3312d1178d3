"""Modules as pure functions: losses of a module, as functions of its parameters.

Only torch has this file: models of JAX are functions of their parameters as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from funcga._types import LossFn
from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.modules import layers
from torch_backend.modules.checks import (
    ModuleLoss,
    Tensors,
    by_what_they_replace,
    check_module_and_loss,
    check_none_frozen,
    check_not_scripted,
    check_not_wrapped,
)
from torch_backend.modules.layers import Walk, check_no_max_norm, named, owners
from torch_backend.modules.visits import Output, Visit, with_state


def pure_loss(
    module: nn.Module, loss_fn: LossFn, *, buffers: bool = False, statistics: bool = False
) -> "PureLoss":
    """`loss(params, *batch)`, pure, from `loss_fn(module, *batch)`: its value where the module has
    these parameters.

    The module is left as it was, its parameters, buffers and `.grad`s too, whatever happens. The
    loss works in torch.func and torch.compile. In `accumulate` and `stream` over
    `funcga.grad(loss)` the parameters are in the module during a micro-batch; between two of them
    it has its own. Another thread that uses the module meanwhile is refused. Give it to
    `funcga.grad` as it is if the module has checkpoints: they run it again in the backward pass,
    and find the parameters only then. More terms of the loss can be written in loss_fn, which has
    the parameters as `module.parameters()`.

    `params` are `{name: tensor}`, such as `torch_backend.trainable(module)`, the parameters that
    require grad. Those that are not given are the module's own, as they are: they are not copied,
    and get no gradient. A parameter that the module uses under several names, tied, has one of
    them. What is left out and requires grad is recorded, as in a loop by hand; frozen by
    requires_grad_(False), its activations are not kept.

    Args:
        module: any module, in train or eval mode as it is at the time of a call.
        loss_fn: `loss_fn(module, *batch)` returns a scalar, or (scalar, aux) for has_aux=True.
        buffers: if False, every call sees the module's own buffers, and what it writes to them, as
            BatchNorm does its running statistics, is dropped. If True, they are an argument and a
            result: `loss(params, buffers, *batch) -> (loss, buffers)`, or `(loss, (aux, buffers))`;
            `{name: tensor}` as `dict(module.named_buffers())`. To thread them through a window they
            are CARRY among the arguments and carry() among the folds;
            `module.load_state_dict(buffers, strict=False)` writes them back.
        statistics: if True, what the BatchNorm layers see of a micro-batch is a result:
            `loss(params, *batch) -> (loss, statistics)`, or `(loss, (aux, statistics))`; `{name of
            the layer: tensor [3, channels]}`, a leaf for the fold `pooled()`, which makes of them
            what the layers saw of the window, as if of one batch. With `running_buffers` the
            running statistics are updated once a window. It is for layers in train mode that have
            running statistics, which loss_fn must not read meanwhile, and not for torch.compile,
            though the module may be compiled. Each micro-batch is still normalised by its own
            statistics, so that the gradient is not that of the whole batch, and what a layer behind
            another BatchNorm sees depends on n.

    Returns:
        A function for `funcga.grad` and `funcga.value_and_grad`, torch.func, or to be called by
        itself.

    Raises:
        FuncgaError: for names that the module does not have, for gradients of frozen parameters,
            for modules wrapped in DDP or FSDP, whose gradients would silently not be reduced, for a
            micro-batch with one value per channel of a BatchNorm layer, for an embedding with
            max_norm that would shorten a row, and for a module that another thread uses. With
            statistics=True if there is no such layer, if one runs twice in a forward pass, or is a
            SyncBatchNorm.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> loss_fn = lambda model, x, y: F.cross_entropy(model(x), y)
        >>> params = torch_backend.trainable(model)
        >>> x, y = torch.randn(10, 3), torch.randint(2, (10,))
        >>> loss = torch_backend.pure_loss(model, loss_fn)
        >>> step = funcga.accumulate(funcga.value_and_grad(loss), n=4)
        >>> value, grads = step(params, x, y)

        >>> loss = torch_backend.pure_loss(model, loss_fn, buffers=True)
        >>> gradient = funcga.value_and_grad(loss, has_aux=True)
        >>> fold = ((funcga.mean(), funcga.carry()), funcga.mean())
        >>> step = funcga.accumulate(gradient, n=4, in_axes=(None, funcga.CARRY, 0, 0), fold=fold)
        >>> (value, buffers), grads = step(params, dict(model.named_buffers()), x, y)

        >>> loss = torch_backend.pure_loss(model, loss_fn, statistics=True)
        >>> gradient = funcga.value_and_grad(loss, has_aux=True)
        >>> fold = ((funcga.mean(), funcga.pooled()), funcga.mean())
        >>> step = funcga.accumulate(gradient, n=4, fold=fold)
        >>> (value, statistics), grads = step(params, x, y)
        >>> buffers = torch_backend.running_buffers(model, statistics)
        >>> model.load_state_dict(buffers, strict=False).unexpected_keys
        []
    """
    check_module_and_loss(module, loss_fn, "pure_loss")
    check_not_scripted(module)
    check_not_wrapped(module)
    if buffers and statistics:
        raise FuncgaError(
            "pure_loss was given buffers=True and statistics=True: running statistics are threaded "
            "from one micro-batch to the next, or pooled over them all. Give one of the two."
        )
    return PureLoss(module, loss_fn, buffers, statistics, _Calling(module))


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """`{name: parameter}` of the module's parameters that require grad, as
    `module.named_parameters()` names them.

    What a `pure_loss`, or `torch.func.functional_call`, takes as params where some are frozen, as
    in LoRA: the others are the module's own there. They cost no gradient and no memory, and no
    optimizer moves them.

    Args:
        module: any module. A parameter that it uses under several names, tied, is named once.

    Returns:
        A new dict of the module's own parameters, in the module's order.

    Raises:
        FuncgaError: if no parameter requires grad, or `module` is not a module.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        >>> model[0] = model[0].requires_grad_(False)
        >>> list(torch_backend.trainable(model))
        ['1.weight', '1.bias']
        >>> loss_fn = lambda model, x, y: F.mse_loss(model(x), y)
        >>> loss = torch_backend.pure_loss(model, loss_fn)
        >>> step = funcga.accumulate(funcga.value_and_grad(loss), n=4)
        >>> x, y = torch.randn(10, 3), torch.randn(10, 1)
        >>> value, grads = step(torch_backend.trainable(model), x, y)
        >>> torch_backend.assign_grads(model, grads)
    """
    if not isinstance(module, nn.Module):
        raise FuncgaError(
            f"trainable was given {type(module).__name__} as its module. Pass the module whose "
            "parameters are trained: torch_backend.trainable(model)."
        )
    return layers.trainable(module)


@dataclass(frozen=True, eq=False)
class PureLoss(ModuleLoss):
    """A pure function of a module's parameters. Made by `pure_loss`."""

    calling: "_Calling"
    walk: Walk = field(default_factory=Walk, repr=False)

    def __call__(self, params: Tensors, *args: object, **kwargs: object) -> Output:
        """The loss of a batch with these parameters; with the buffers, if they are threaded."""
        if torch.compiler.is_compiling():
            return self._traced(params, *args, **kwargs)
        with self.entered(params) as loss:
            return loss(*args, **kwargs)

    def entered(self, params: Tensors, recorded: bool = False) -> Visit:
        """A context in which the module has these parameters, and its value is called as
        `loss(*batch)`.

        `recorded`: parameters that are left out require grad if the module's own do. Functions that
        recompute in the backward pass may be recorded for their sake alone.

        It can be entered again and again. While it is entered, other threads that want to put
        parameters into the module, or into one that overlaps with it, are refused.
        """
        return Visit(self, params, recorded, self.walk)

    def _traced(self, params: Tensors, *args: object, **kwargs: object) -> Output:
        """The same by functional_call, which torch.compile knows, also in a loop."""
        if self.statistics:
            raise FuncgaError(
                "pure_loss(..., statistics=True) is in a function that torch.compile compiles, "
                "where layers cannot be watched. Call the step without torch.compile; the module "
                "itself may be compiled. Or thread the buffers: buffers=True."
            )
        parts = [*owners(self.module)]
        check_no_max_norm(parts)
        parameters = named(parts, _private.PARAMETERS)
        by_what_they_replace(params, parameters, "parameters")
        check_none_frozen(params, parameters)
        buffers = dict(self.module.named_buffers())
        threaded: Tensors = {}
        if self.buffers:
            threaded, args = args[0], args[1:]  # type: ignore[assignment]
            by_what_they_replace(threaded, named(parts, _private.BUFFERS), "buffers")
            buffers.update(threaded)
        output, after = self.calling.functional(self.loss_fn, params, buffers, args, kwargs)
        return (
            with_state(output, {name: after[name] for name in threaded}) if self.buffers else output
        )


class _Calling(nn.Module):
    """A module around the module, so that functional_call runs loss_fn on it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(
        self,
        loss_fn: LossFn,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        returns_buffers: bool,
    ) -> tuple[Output, dict[str, torch.Tensor]]:
        output = loss_fn(self.module, *args, **kwargs)
        buffers = self.module.named_buffers() if returns_buffers else ()
        return output, {name: buffer.detach() for name, buffer in buffers}

    def functional(
        self,
        loss_fn: LossFn,
        params: Tensors,
        buffers: Tensors,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        returns_buffers: bool = True,
    ) -> tuple[Output, dict[str, torch.Tensor]]:
        """(what loss_fn returns for the module with these tensors, its buffers afterwards), by
        functional_call.
        """
        # The buffers are copied: functional_call lets the module write to the tensors that it gets.
        tensors = {f"module.{name}": tensor for name, tensor in params.items()}
        tensors |= {f"module.{name}": tensor.clone() for name, tensor in buffers.items()}
        result: tuple[Output, dict[str, torch.Tensor]] = torch.func.functional_call(
            self, tensors, (loss_fn, args, kwargs, returns_buffers)
        )
        return result
