"""The statistics of BatchNorm layers in torch: what they see of a micro-batch, as a result of the
loss, and the running ones after a window.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from funcga._types import Args, LossFn
from funcga.errors import FuncgaError
from funcga.normalizers import Pooled
from funcga.statistics import batch_moments, running_statistics
from torch_backend import _private
from torch_backend.modules.visits import with_state

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def watched(loss_fn: LossFn) -> LossFn:
    """`loss_fn(module, *batch)` with the statistics of the batch beside its aux: `{name of the
    layer: count, mean and population variance, stacked}`; zeros for a layer that did not run.

    It is for a pure loss, whose module has buffers of its own for each micro-batch: here the layers
    write what they see of it to these. With momentum 1, torch's own kernel writes the mean and the
    variance of the batch in the place of the running ones.
    """

    @wraps(loss_fn, updated=())
    def loss(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise FuncgaError(
                "pure_loss(..., statistics=True) is in a function that torch.compile compiles, "
                "where layers cannot be watched. Call the step without torch.compile; the module "
                "itself may be compiled. Or thread the buffers: buffers=True."
            )
        counts = dict[str, int]()
        with _watching(module, counts) as layers:
            output = loss_fn(module, *args, **kwargs)
        # They are copies: a checkpoint runs the forward pass again later, and overwrites the
        # buffers.
        return with_state(
            output, {name: _leaf(name, layer, counts.get(name)) for name, layer in layers.items()}
        )

    return loss


@contextmanager
def _watching(module: nn.Module, counts: dict[str, int]) -> Iterator[dict[str, _BatchNorm]]:
    """A context with the layers in train mode that have running statistics: they write those of the
    batch alone, to tensors of their own. `counts` gets the values for each channel, by the name of
    a layer that runs. Raises FuncgaError if one is synced.
    """
    layers = {name: layer for name, layer in _layers(module).items() if layer.training}
    for name, layer in layers.items():
        if isinstance(layer, nn.SyncBatchNorm):
            raise FuncgaError(
                f"`{name}` is a SyncBatchNorm, whose statistics are those of all replicas already, "
                "with the count of one. Use BatchNorm, and let funcga merge them: accumulate(..., "
                "fold=..., across=group)."
            )

    def count(name: str, layer: _BatchNorm, args: Args, kwargs: Any) -> None:
        if not layer.training:  # it tracks nothing
            return
        if name in counts:
            raise FuncgaError(
                f"the BatchNorm layer `{name}` ran twice in one forward pass: its statistics are "
                "then those of two batches. Use a layer for each of the two, or thread the "
                "buffers: pure_loss(module, loss_fn, buffers=True)."
            )
        x = args[0] if args else kwargs["input"]
        counts[name] = x.numel() // layer.num_features

    momenta = {name: layer.momentum for name, layer in layers.items()}
    hooks = []
    try:
        for name, layer in layers.items():
            buffers = layer.__dict__[_private.BUFFERS]
            buffers |= {
                key: torch.zeros_like(buffers[key])
                for key in _STATISTICS
                if buffers.get(key) is not None
            }
            layer.momentum = 1.0
            hooks.append(layer.register_forward_pre_hook(partial(count, name), with_kwargs=True))
        yield layers
    finally:
        for hook in hooks:
            hook.remove()
        for name, layer in layers.items():
            layer.momentum = momenta[name]


def _leaf(name: str, layer: Any, count: int | None) -> torch.Tensor:
    """Count, mean and population variance of the micro-batch; `count` is None if it did not run."""
    batches, running_mean = layer.num_batches_tracked, layer.running_mean
    # Two witnesses have to agree on whether the layer ran: the hook, and the number of batches,
    # which only its own forward() adds to. The kernel's writes to the statistics raise no version.
    has_version = batches is not None and not batches.is_inference()
    if has_version and (_private.version(batches) > 0) != (count is not None):
        raise FuncgaError(
            f"what the BatchNorm layer `{name}` saw of the micro-batch is not known: its forward() "
            "is not that of torch.nn.BatchNorm, or was called by name, or compiled by itself. Call "
            "the layer as it is, layer(x), or thread the buffers: "
            "pure_loss(module, loss_fn, buffers=True)."
        )
    count, seen = count or 0, {"mean": running_mean.detach(), "var": layer.running_var.detach()}
    leaf: torch.Tensor = batch_moments(seen, count)
    # Torch writes the unbiased variance; a fold needs that of the population.
    leaf[2] *= (count - 1) / count if count else 1
    return leaf


def running_buffers(module: nn.Module, pooled: Mapping[str, Pooled]) -> dict[str, torch.Tensor]:
    """The module's running statistics after one more batch, for `module.load_state_dict`.

    They are what torch computes of one batch: `running_mean`, `running_var` (of the unbiased
    variance) and `num_batches_tracked`, with each layer's momentum; None is the average over all
    batches. A layer that no micro-batch has run stays as it is.

    Args:
        module: the module with the BatchNorm layers. It is left as it is.
        pooled: `{name of the layer: Pooled}`, what `fold=funcga.pooled()` makes of `pure_loss(...,
            statistics=True)`.

    Returns:
        `{name of the buffer: tensor}`, new tensors in the buffers' dtypes.

    Raises:
        FuncgaError: for anything that is not pooled, or has another shape than the layer's.
        KeyError: for layers that the module does not have.

    Example:
        >>> model = nn.BatchNorm1d(3)
        >>> loss_fn = lambda model, x: model(x).square().mean()
        >>> loss = torch_backend.pure_loss(model, loss_fn, statistics=True)
        >>> fold = ((funcga.mean(), funcga.pooled()), funcga.mean())
        >>> step = funcga.accumulate(funcga.value_and_grad(loss, has_aux=True), n=4, fold=fold)
        >>> (value, statistics), grads = step(torch_backend.trainable(model), torch.randn(10, 3))
        >>> sorted(torch_backend.running_buffers(model, statistics))
        ['num_batches_tracked', 'running_mean', 'running_var']
    """
    layers, after = _layers(module, remove_duplicate=False), dict[str, torch.Tensor]()
    for name, statistics in pooled.items():
        layer, prefix = layers[name], f"{name}." if name else ""
        batches, share = layer.num_batches_tracked, layer.momentum
        if batches is not None:
            # A layer that has seen nothing has had no batch.
            batches = batches + (isinstance(statistics, Pooled) and (statistics.count > 0).any())
            after[f"{prefix}num_batches_tracked"] = batches
        if share is None:  # the average over all batches
            share = 0.0 if batches is None else 1 / batches.clamp(min=1)
        old = {name: {"mean": layer.running_mean, "var": layer.running_var}}
        with torch.no_grad():
            new = running_statistics(old, {name: statistics}, share=share, unbiased=True)[name]
        after |= {f"{prefix}running_{key}": value for key, value in new.items()}
    return after


def _layers(module: nn.Module, **options: Any) -> dict[str, _BatchNorm]:
    """The BatchNorm layers, of any number of dimensions, with running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules(**options)
        if isinstance(layer, _BatchNorm)
        and layer.track_running_stats
        and layer.running_mean is not None
    }
