"""Modules as pure functions: losses of a module, as functions of its parameters.

Only torch has this file: models of JAX are functions of their parameters as they are.
"""

import torch
from torch import nn

from funcga._tools import load
from funcga._types import LossFn
from funcga.errors import FuncgaError
from torch_backend.modules.checks import check_not_wrapped
from torch_backend.modules.layers import trainable as trainable
from torch_backend.modules.visits import PureLoss as PureLoss


def pure_loss(
    module: nn.Module, loss_fn: LossFn, *, buffers: bool = False, statistics: bool = False
) -> PureLoss:
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
            BatchNorm does its running statistics, is lost. If True, they are an argument and a
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
            though the module may be compiled; without such a layer the result is {}. Each
            micro-batch is still normalised by its own statistics, so that the gradient is not that
            of the whole batch, and what a layer behind another BatchNorm sees depends on n.

    Returns:
        A function for `funcga.grad` and `funcga.value_and_grad`, torch.func, or to be called by
        itself.

    Raises:
        FuncgaError: for names that the module does not have, for gradients of frozen parameters,
            for modules wrapped in DDP or FSDP, whose gradients would silently not be reduced, for
            an embedding with max_norm, and for a module that another thread uses. With
            statistics=True if a BatchNorm layer runs twice in a forward pass, or is a
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
    check_not_wrapped(module)
    if buffers and statistics:
        raise FuncgaError(
            "pure_loss was given buffers=True and statistics=True: running statistics are threaded "
            "from one micro-batch to the next, or pooled over them all. Give one of the two."
        )
    if statistics:
        loss_fn = load("statistics.in_torch", "statistics=True").watched(loss_fn)
    for name, part in module.named_modules():
        _check_part(name, part)
    return PureLoss(module, loss_fn, buffers)


def _check_part(name: str, part: nn.Module) -> None:
    """Raises FuncgaError for a part of a module that cannot have other parameters, or changes its
    own.
    """
    where = f"the part `{name}` of the module" if name else "the module"
    if isinstance(part, torch.jit.ScriptModule):
        raise FuncgaError(
            f"{where} is one of TorchScript, whose parameters cannot be replaced by others for a "
            "pure loss. Use the module that it was made of; or "
            "torch_backend.module_value_and_grad(module, loss_fn), which runs on the module's own "
            "parameters."
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        raise FuncgaError(
            f"{where} is an embedding with max_norm={part.max_norm}: its forward pass shortens "
            "rows in place, and a pure loss changes no parameter. Make it without max_norm, and "
            "shorten the rows between two steps, in torch.no_grad(): "
            f"embedding.weight.renorm_({part.norm_type}, 0, {part.max_norm}). Or use "
            "torch_backend.module_value_and_grad."
        )
