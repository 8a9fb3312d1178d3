"""The layers of a module, and those that change themselves: BatchNorm its running statistics,
embeddings their rows.

Only torch has this file: layers of torch keep their state in themselves, in JAX it is an argument
and a result.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from funcga._types import R
from funcga.errors import FuncgaError, TooFewRowsError, refuses_arguments, similar
from funcga.normalizers import Pooled
from funcga.statistics import described, fits, update
from torch_backend import _private, arrays
from torch_backend.modules.checks import (
    Tensors,
    by_what_they_replace,
    check_initialised,
    check_none_frozen,
    nothing_to_train,
)

Owners = list[tuple[str, nn.Module]]


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module and those inside, by the prefix of the names of their parameters and buffers."""
    waiting = [("", module)]
    while waiting:
        prefix, owner = waiting.pop()
        yield prefix, owner
        waiting += [
            (f"{prefix}{name}.", part)
            for name, part in owner.__dict__[_private.PARTS].items()
            if part is not None
        ]


class Entries(NamedTuple):
    """What stands in the tables of some modules, one after the other: how many each has, the
    names, and the values.
    """

    counts: list[int]
    names: list[str]
    values: list[Any]

    def are(self, before: "Entries") -> bool:
        """Whether these are the same objects as before, under the same names."""
        is_named_alike = before.counts == self.counts and before.names == self.names
        return is_named_alike and all(map(operator.is_, before.values, self.values))


def _entries(tables: Sequence[dict[str, Any]]) -> Entries:
    names, values = chain.from_iterable(tables), chain.from_iterable(map(dict.values, tables))
    return Entries([*map(len, tables)], [*names], [*values])


def _are_same(tables: Sequence[dict[str, Any]], before: list[Any]) -> bool:
    values = [*chain.from_iterable(map(dict.values, tables))]
    return len(values) == len(before) and all(map(operator.is_, values, before))


class Parts:
    """A module and those inside, as they were when it was walked through: its `owners`, and
    their `__dict__`s.
    """

    def __init__(self, module: nn.Module):
        self.owners = [*owners(module)]
        self.spaces = [owner.__dict__ for _, owner in self.owners]
        self.inside = _entries(self.tables(_private.PARTS))
        # The parts that have parameters or buffers. Others, such as an activation, may be in any
        # number of modules.
        self.ids = frozenset(
            [id(s) for s in self.spaces if s[_private.PARAMETERS] or s[_private.BUFFERS]]
        )

    def tables(self, kind: str) -> list[dict[str, Any]]:
        """The tables of this kind that they have now: `PARAMETERS`, `BUFFERS` or `PARTS`."""
        return [space[kind] for space in self.spaces]

    def are_those_of(self, module: nn.Module) -> bool:
        """Whether they are this module's still: none was put in, taken out or renamed."""
        return self.owners[0][1] is module and _entries(self.tables(_private.PARTS)).are(
            self.inside
        )


class Own(NamedTuple):
    """The parameters that a module has now, in the order of its owners, and which of them
    require grad.
    """

    parts: Parts  # the same object for as long as these are the same
    entries: Entries
    require_grad: list[bool]

    def is_as(self, before: "Own | None") -> bool:
        """Whether these are the same tensors as before, under the same names, and all that is
        said of them holds.
        """
        if (
            before is None
            or before.parts is not self.parts
            or before.require_grad != self.require_grad
        ):
            return False
        return self.entries.are(before.entries)


def own_of(parts: Parts) -> Own:
    """The parameters of a module with these parts."""
    entries = _entries(parts.tables(_private.PARAMETERS))
    return Own(parts, entries, [p is not None and p.requires_grad for p in entries.values])


class Walk:
    """What is known of a module for as long as no part of it is put in, taken out or renamed: its
    parts.

    And for as long as its parameters stay the same: those that are trained, and what others
    replace.
    """

    def __init__(self) -> None:
        self.known: Parts | None = None
        self.trained: tuple[Own, dict[str, nn.Parameter]] | None = None
        # The names and shapes of given parameters, the module's own, and where the given ones stand
        # among these.
        self.places: tuple[list[str], list[torch.Size], Own, list[int | None]] | None = None

    def __reduce__(self) -> tuple[type["Walk"], tuple[()]]:
        return Walk, ()  # a copy of the module has other parts

    def through(self, module: nn.Module) -> Parts:
        """The parts: the same object for as long as they are the same."""
        if self.known is None or not self.known.are_those_of(module):
            self.known = Parts(module)
        return self.known

    def ids(self, module: nn.Module) -> Collection[int]:
        """The ids of the parts that have parameters or buffers."""
        try:
            return self.through(module).ids
        except KeyError:  # a part of TorchScript has other tables, which are no dicts
            return ()

    def trainable(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """`{name: parameter}` of those that require grad; the same dict for as long as they stay
        the same.
        """
        try:
            own = own_of(self.through(module))
        except KeyError:  # of TorchScript
            return trainable(module)
        if self.trained is None or not own.is_as(self.trained[0]):
            self.trained = own, trainable(module)
        return self.trained[1]

    def still_finds(self, params: dict[str, nn.Parameter]) -> bool:
        """Whether the module has the parts and the parameters that `trainable` found last."""
        if self.trained is None:  # of TorchScript, whose parts stay the same
            return True
        if self.trained[1] is not params:
            return False
        parts, entries, _ = self.trained[0]
        return _are_same(parts.tables(_private.PARTS), parts.inside.values) and _are_same(
            parts.tables(_private.PARAMETERS), entries.values
        )

    def places_of(self, params: Tensors, own: Own) -> list[int | None]:
        """For each of the module's own parameters the one of `params` that stands in for it; None
        for one that stays.

        Raises FuncgaError for what the module does not have, or has frozen.
        """
        if self.places is not None and isinstance(params, dict):
            names, shapes, before, places = self.places
            values = params.values()
            is_known = (
                names == [*params] and _TENSORS.issuperset(map(type, values)) and own.is_as(before)
            )
            # Pair by pair: lists of shapes would be thousands of objects for the garbage collector
            # to go through.
            if is_known and all(map(operator.eq, map(_SHAPE, values), shapes)):
                return places
        parameters = named(own.parts.owners, _private.PARAMETERS)
        chosen = by_what_they_replace(params, parameters, "parameters")
        check_none_frozen(params, parameters)
        place_of = {key: place for place, key in enumerate(chosen)}
        places = [place_of.get(id(tensor)) for tensor in own.entries.values]
        self.places = [*params], [*map(_SHAPE, params.values())], own, places
        return places


_TENSORS, _SHAPE = {torch.Tensor, nn.Parameter}, operator.attrgetter("shape")


def named(owners: Owners, table: str) -> dict[str, torch.Tensor]:
    """What the owners have in a table, `PARAMETERS` or `BUFFERS`, by all of its names in the
    module.
    """
    return {
        prefix + name: tensor
        for prefix, owner in owners
        for name, tensor in owner.__dict__[table].items()
        if tensor is not None
    }


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """`{name: parameter}` of those that require grad. Raises FuncgaError if none does."""
    trained = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    if not trained:
        raise nothing_to_train(module)
    return trained


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
        FuncgaError: for layers that the module does not have, and for anything that is not pooled.

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
    tracking = {
        name: layer
        for name, layer in module.named_modules(remove_duplicate=False)
        if _tracks(layer)
    }
    if not isinstance(pooled, Mapping):
        raise FuncgaError(
            f"the pooled statistics are of type {type(pooled).__name__}; they are a dict of a "
            "layer's name to a Pooled, as accumulate returns of pure_loss(module, loss_fn, "
            "statistics=True)."
        )
    after: dict[str, torch.Tensor] = {}
    for name, statistics in pooled.items():
        if name not in tracking:
            raise FuncgaError(
                f"the module has no `{name}`{similar(name, tracking)} among its BatchNorm layers "
                "with running statistics: "
                f"{', '.join(f'`{layer}`' for layer in tracking) or 'there is none'}."
            )
        buffers = _after_one_more(name, tracking[name], statistics)
        after |= {f"{name}.{key}" if name else key: value for key, value in buffers.items()}
    return after


def _tracks(layer: nn.Module) -> TypeGuard[nn.BatchNorm1d]:
    """Whether this is a BatchNorm layer, of any number of dimensions, with running statistics."""
    return (
        isinstance(layer, _private.BatchNorm)
        and layer.track_running_stats
        and layer.running_mean is not None
    )


def _after_one_more(name: str, layer: nn.BatchNorm1d, pooled: Pooled) -> dict[str, torch.Tensor]:
    """The buffers of a layer after one more batch. Raises FuncgaError for anything that is not
    pooled.
    """
    mean, variance, count = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None
    assert variance is not None
    if not fits(pooled, mean):
        raise FuncgaError(
            f"the statistics of `{name}` are {described(pooled, arrays)}, and the layer's are "
            f"{arrays.describe(mean)}. Fold them with pooled(): fold=((funcga.mean(), "
            "funcga.pooled()), funcga.mean()) for funcga.value_and_grad(loss, has_aux=True); of "
            "micro-batches that come one by one, in a funcga.Accumulator(funcga.pooled())."
        )
    after: dict[str, torch.Tensor] = {}
    share: float | torch.Tensor | None = layer.momentum
    # A layer that has seen nothing has had no batch.
    if count is not None:
        after["num_batches_tracked"] = count + (pooled.count > 0).any().to(torch.int64)
    if share is None:  # the average over all batches
        share = 1 / after["num_batches_tracked"].clamp(min=1) if after else 0.0
    with torch.no_grad():
        after["running_mean"], after["running_var"] = update(
            mean, variance, pooled, share, True, arrays
        )
    return after


class Watch:
    """Watches the BatchNorm layers of a module: in its context they write what they see of a
    micro-batch.

    With momentum 1, torch's own kernel writes the mean and the variance of the batch in the place
    of the running ones. Afterwards the layers are as before, but for their buffers, which the
    caller restores.
    """

    def __init__(self, module: nn.Module):
        self.layers = _watched(module)
        self.counts: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The forward pass of one micro-batch."""
        self.counts = {}
        momenta = {name: layer.momentum for name, layer in self.layers.items()}
        hooks = []
        try:
            for name, layer in self.layers.items():
                # The layer writes into tensors of its own, and to these the statistics of the batch
                # alone.
                buffers = layer.__dict__[_private.BUFFERS]
                buffers |= {
                    key: torch.zeros_like(buffers[key])
                    for key in _STATISTICS
                    if buffers.get(key) is not None
                }
                layer.momentum = 1.0
                hooks.append(
                    layer.register_forward_pre_hook(partial(self._count, name), with_kwargs=True)
                )
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name, layer in self.layers.items():
                layer.momentum = momenta[name]

    def _count(
        self,
        name: str,
        layer: nn.BatchNorm1d,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, torch.Tensor],
    ) -> None:
        if not layer.training:  # it tracks nothing
            return
        if name in self.counts:
            raise FuncgaError(
                f"the BatchNorm layer `{name}` ran twice in one forward pass: its statistics are "
                "then those of two batches. Use a layer for each of the two, or thread the "
                "buffers: pure_loss(module, loss_fn, buffers=True)."
            )
        x = args[0] if args else kwargs["input"]
        self.counts[name] = x.numel() // layer.num_features

    def statistics(self) -> dict[str, torch.Tensor]:
        """`{name: leaf}`: count, mean and population variance of the micro-batch, stacked; zeros if
        it did not run.

        They are copies: a checkpoint runs the forward pass again later, and overwrites the buffers.
        """
        return {name: self._leaf(name, layer) for name, layer in self.layers.items()}

    def _leaf(self, name: str, layer: nn.BatchNorm1d) -> torch.Tensor:
        running_mean, running_var, batches = (
            layer.running_mean,
            layer.running_var,
            layer.num_batches_tracked,
        )
        assert running_mean is not None
        assert running_var is not None
        ran = name in self.counts
        # Two witnesses have to agree on whether the layer ran: the hook, and the number of batches,
        # which only its own forward() adds to. The kernel's writes to the statistics raise no
        # version.
        if (
            batches is not None
            and not batches.is_inference()
            and ran != (_private.version(batches) > 0)
        ):
            raise _unknown(name, ran)
        dtype = arrays.accumulator_dtype(running_mean.dtype)
        mean, variance = running_mean.detach().to(dtype), running_var.detach().to(dtype)
        count = self.counts.get(name, 0)
        # Torch writes the unbiased variance; a fold needs that of the population.
        biased = variance * ((count - 1) / count) if count else variance
        return torch.stack((torch.full_like(mean, count), mean, biased))


def _unknown(name: str, ran: bool) -> FuncgaError:
    why = (
        "it ran and did not update its running statistics, as a forward pass of your own may not. "
        "Use that of torch.nn.BatchNorm"
        if ran
        else (
            "it ran without its hooks, as one does whose forward() is called by name, or that was "
            "compiled by itself. Call the layer as it is, layer(x)"
        )
    )
    return FuncgaError(
        f"what the BatchNorm layer `{name}` saw of the micro-batch is not known: {why}, or thread "
        "the buffers: pure_loss(module, loss_fn, buffers=True)."
    )


def _watched(module: nn.Module) -> dict[str, nn.BatchNorm1d]:
    """The layers in train mode that have running statistics. Raises FuncgaError if there is
    none, or one is synced.
    """
    layers = {
        name: layer for name, layer in module.named_modules() if _tracks(layer) and layer.training
    }
    for name, layer in layers.items():
        if isinstance(layer, nn.SyncBatchNorm):
            raise FuncgaError(
                f"`{name}` is a SyncBatchNorm, whose statistics are those of all replicas already, "
                "with the count of one. Use BatchNorm, and let funcga merge them: accumulate(..., "
                "fold=..., across=group)."
            )
    if not layers:
        raise FuncgaError(
            f"statistics=True, and {type(module).__name__} has no BatchNorm layer that would "
            "update running statistics: one in train mode, with track_running_stats=True. Call "
            "module.train(), or leave statistics=True out."
        )
    return layers


def call_loss(loss_fn: Callable[..., R], module: nn.Module, *args: object, **kwargs: object) -> R:
    """`loss_fn(module, *args, **kwargs)`.

    Raises FuncgaError if loss_fn does not take so many arguments, and for one value per channel of
    a BatchNorm layer.
    """
    try:
        return loss_fn(module, *args, **kwargs)
    except TypeError as error:
        # The words for `totals` are those of the step.
        if "'totals'" in str(error) or not refuses_arguments(loss_fn, 1 + len(args), kwargs, error):
            raise
        raise FuncgaError(
            "loss_fn is called with the module and then each argument of the micro-batch, "
            f"{1 + len(args)} in all: {error}. Write it with the module first, lambda module, x, "
            "y: F.mse_loss(module(x), y) for batches (x, y), or lambda module, batch: ... for "
            "batches in a dict. A list of micro-batches, or a DataLoader, is folded by "
            "funcga.stream."
        ) from error
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        layer, x = _private.layer_and_input_of(error)
        if layer is None:
            raise
        name = next((name for name, inner in module.named_modules() if inner is layer), "")
        raise TooFewRowsError(
            f"the BatchNorm layer `{name}` was given {arrays.describe(x)}: in training mode it "
            "normalises by the variance of the micro-batch, and one value for each channel has "
            "none. Make micro-batches of 2 rows and more, the last one too: a smaller n, or a "
            "microbatch_size that does not leave one row over; or use its running statistics: "
            "module.eval()."
        ) from error


def check_no_max_norm(owners: Owners) -> None:
    """Raises FuncgaError for an embedding that shortens rows of its weights, as a pure loss
    changes no parameter.
    """
    for prefix, layer in owners:
        if layer.__dict__.get("max_norm") is not None and isinstance(
            layer, nn.Embedding | nn.EmbeddingBag
        ):
            name, most = prefix.removesuffix("."), layer.max_norm
            which = f"the embedding `{name}`" if name else "the embedding"
            raise FuncgaError(
                f"{which} has max_norm={most}, with which its forward pass shortens rows in place, "
                "and a pure loss changes no parameter. Make it without max_norm, and shorten the "
                "rows between two steps, in torch.no_grad(): "
                f"embedding.weight.renorm_({layer.norm_type}, 0, {most}). Or use "
                "torch_backend.module_value_and_grad."
            )


Buffers = list[tuple[torch.Tensor, torch.Tensor]]  # the buffers of a module, and values of them


def buffers_of(module: nn.Module | None) -> Buffers:
    """The buffers of a module, such as running statistics, and copies of them."""
    if module is None:
        return []
    check_initialised(module)
    return [(buffer, buffer.detach().clone()) for buffer in module.buffers()]


def put_back(before: Buffers) -> None:
    """Gives buffers the values that they had before."""
    with torch.no_grad():
        for buffer, values in before:
            if buffer is not values:
                buffer.copy_(values)
