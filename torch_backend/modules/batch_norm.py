"""What BatchNorm layers see of each micro-batch, and the running statistics of them all as if of one batch.

Only torch has this file: layers of torch keep their statistics in themselves, in JAX they are an argument and a result.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from funcga._statistics import described, fits, update
from funcga.errors import FuncgaError, TooFewRowsError, similar
from funcga.normalizers import Pooled
from torch_backend import arrays


def running_buffers(module: nn.Module, pooled: Mapping[str, Pooled]) -> dict[str, torch.Tensor]:
    """`{name: tensor}`, the module's running statistics after one more batch, for `module.load_state_dict`.

    As torch computes them of one batch: running_mean, running_var (of the unbiased variance) and num_batches_tracked,
    one more, with each layer's momentum; None is the average over all batches. They are new tensors in the buffers'
    dtypes. A layer that no micro-batch has run stays as it is.

    pooled: `{name of the layer: Pooled}`, what fold=funcga.pooled() makes of `pure_loss(..., statistics=True)`.
    Raises FuncgaError for layers that the module does not have, and for what is not pooled.

    >>> module.load_state_dict(torch_backend.running_buffers(module, statistics), strict=False)
    """
    tracking = {name: layer for name, layer in module.named_modules(remove_duplicate=False) if _tracks(layer)}
    if not isinstance(pooled, Mapping):
        raise FuncgaError(
            f"the pooled statistics are of type {type(pooled).__name__}; they are a dict of a layer's name to a "
            f"Pooled, as accumulate returns of pure_loss(module, loss_fn, statistics=True)."
        )
    after: dict[str, torch.Tensor] = {}
    for name, found in pooled.items():
        if name not in tracking:
            raise FuncgaError(
                f"the module has no `{name}`{similar(name, tracking)} among its BatchNorm layers with running "
                f"statistics: {', '.join(f'`{known}`' for known in tracking) or 'there is none'}."
            )
        _check_pooled(name, found, tracking[name])
        after |= {f"{name}.{key}" if name else key: value for key, value in _moved(tracking[name], found).items()}
    return after


def _tracks(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None


def _check_pooled(name: str, found: Any, layer: nn.Module) -> None:
    own: Any = layer.running_mean
    if not fits(found, own):
        raise FuncgaError(
            f"the statistics of `{name}` are {described(found, arrays)}, and the layer's are "
            f"{arrays.describe(own)}. Fold them with pooled(): fold=((funcga.mean(), funcga.pooled()), funcga.mean()) "
            f"for funcga.value_and_grad(loss, has_aux=True); of micro-batches that come one by one, in a "
            f"funcga.Accumulator(funcga.pooled())."
        )


def _moved(layer: Any, pooled: Pooled) -> dict[str, torch.Tensor]:
    """The buffers of a layer after one more batch."""
    mean, variance, share, made = layer.running_mean, layer.running_var, layer.momentum, {}
    if layer.num_batches_tracked is not None:
        made["num_batches_tracked"] = layer.num_batches_tracked + (pooled.count > 0).any().to(torch.int64)
    if share is None:  # the average over all batches
        share = 1 / made["num_batches_tracked"].clamp(min=1) if made else 0.0
    with torch.no_grad():
        made["running_mean"], made["running_var"] = update(mean, variance, pooled, share, True, arrays)
    return made


class Watch:
    """The BatchNorm layers of a module, watched: a context in which they write what they see of each micro-batch.

    With momentum 1 torch's own kernel writes the mean and the variance of the batch where the running ones are. When
    the context is left the layers are as they were; their buffers are put back by the caller.
    """

    def __init__(self, module: nn.Module):
        self.layers = _watched(module)
        self.counts: dict[str, int] = {}
        self.open = False

    @contextmanager
    def watching(self) -> Iterator["Watch"]:
        """The watch itself, while the layers are watched."""
        momenta = [layer.momentum for layer in self.layers.values()]
        hooks: list[Any] = []
        try:
            for name, layer in self.layers.items():
                layer.momentum = 1.0
                hooks.append(layer.register_forward_pre_hook(self._counting(name), with_kwargs=True))
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            for layer, momentum in zip(self.layers.values(), momenta, strict=True):
                layer.momentum = momentum

    def _counting(self, name: str) -> Any:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (self.open and layer.training):
                return  # a checkpoint, which runs the forward pass again; or a pass that tracks nothing
            if name in self.counts:
                raise FuncgaError(
                    f"the BatchNorm layer `{name}` ran twice in one forward pass: its statistics are then those of "
                    f"two batches. Use a layer for each of the two, or thread the buffers: "
                    f"pure_loss(module, loss_fn, buffers=True)."
                )
            x = args[0] if args else kwargs["input"]
            self.counts[name] = x.numel() // layer.num_features

        return hook

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """The forward pass of one micro-batch: the layers write into tensors of their own."""
        self.counts = {}
        for layer in self.layers.values():
            for key in _KEYS:
                if layer._buffers.get(key) is not None:
                    layer._buffers[key] = torch.zeros_like(layer._buffers[key])
        self.open = True
        try:
            yield
        finally:
            self.open = False

    def statistics(self) -> dict[str, torch.Tensor]:
        """`{name: leaf}`: count, mean and population variance of the micro-batch, stacked; zeros for what did not run.

        A copy, as a checkpoint runs the forward pass again when the loss is already there.
        """
        return {name: self._leaf(name, layer) for name, layer in self.layers.items()}

    def _leaf(self, name: str, layer: Any) -> torch.Tensor:
        ran, batches = name in self.counts, layer.num_batches_tracked
        unknown = batches is None or batches.is_inference()
        wrote = ran if unknown else batches._version > 0  # the kernel's own writes do not count as versions
        if ran != wrote:
            why = (
                "it ran without its hooks, as one does whose forward() is called by name, or that was compiled by "
                "itself. Call the layer as it is, layer(x)"
                if wrote
                else "it ran and did not update its running statistics, as a forward pass of your own may not. Use "
                "that of torch.nn.BatchNorm"
            )
            raise FuncgaError(
                f"what the BatchNorm layer `{name}` saw of the micro-batch is not known: {why}, or thread the buffers: "
                f"pure_loss(module, loss_fn, buffers=True)."
            )
        dtype = arrays.accumulator_dtype(layer.running_mean.dtype)
        mean, variance = layer.running_mean.detach().to(dtype), layer.running_var.detach().to(dtype)
        count = self.counts.get(name, 0)
        biased = variance * ((count - 1) / count) if count else variance
        return torch.stack((torch.full_like(mean, count), mean, biased))


_KEYS = ("running_mean", "running_var", "num_batches_tracked")


def _watched(module: nn.Module) -> dict[str, Any]:
    """The layers in train mode that have running statistics. Raises FuncgaError if there is none, or one is synced."""
    found = {name: layer for name, layer in module.named_modules() if _tracks(layer) and layer.training}
    for name, layer in found.items():
        if isinstance(layer, nn.SyncBatchNorm):
            raise FuncgaError(
                f"`{name}` is a SyncBatchNorm, whose statistics are those of all replicas already, with the count of "
                f"one. Use BatchNorm, and let funcga merge them: accumulate(..., fold=..., across=group)."
            )
    if not found:
        raise FuncgaError(
            f"statistics=True, and {type(module).__name__} has no BatchNorm layer that would update running "
            f"statistics: one in train mode, with track_running_stats=True. Call module.train(), or leave "
            f"statistics=True out."
        )
    return found


def _too_few_rows(error: ValueError, module: nn.Module) -> TooFewRowsError | None:
    if "more than 1 value per channel" not in str(error):
        return None
    for frame, _ in walk_tb(error.__traceback__):
        layer = frame.f_locals.get("self")
        if isinstance(layer, _BatchNorm) and isinstance(x := frame.f_locals.get("input"), torch.Tensor):
            name = next((name for name, inner in module.named_modules() if inner is layer), "")
            return TooFewRowsError(
                f"the BatchNorm layer `{name}` was given {arrays.describe(x)}: in training mode it normalises by the "
                f"variance of the micro-batch, and one value for each channel has none. Make micro-batches of 2 rows "
                f"and more, the last one too: a smaller n, or a microbatch_size that does not leave one row over; or "
                f"use its running statistics: module.eval()."
            )
    return None


def called(loss_fn: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`loss_fn(module, *args, **kwargs)`. Raises FuncgaError for one value per channel of a BatchNorm layer."""
    try:
        return loss_fn(module, *args, **kwargs)
    except ValueError as error:
        refusal = _too_few_rows(error, module)
        if refusal is None:
            raise
        raise refusal from error
