"""Randomness that belongs to an example, and not to the micro-batch that it happens to be in."""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from funcga.errors import FuncgaError
from torch_backend import arrays, trees


def example_keys(key: Any, indices: Any) -> torch.Tensor:
    """A random key for each example, made of one key and the example's index: an argument that is split like any other.

    key: an int, or a 0-d int64 tensor such as another key: `example_keys(seed, epoch)` is one for each epoch.
    indices: int64 [rows], where the examples are in the dataset, on any device; or a number, for one key. Returns int64
    of that shape: seeds. As they do not depend on n, what is drawn from them does not either.

    Raises FuncgaError for a key or indices that are no integers.
    Source: Steele, Lea and Flood (2014), "Fast splittable pseudorandom number generators": the finalizer of SplitMix.

    >>> keys = torch_backend.example_keys(seed, indices)
    >>> loss, grads = step(params, keys, x, y)
    """
    _check_integers("key", key, "example_keys(0, indices)")
    _check_integers("indices", indices, "torch.arange(len(x))")
    place = torch.as_tensor(indices)
    start = torch.as_tensor(key, dtype=torch.int64, device=place.device)
    return _mixed(_mixed(start) + place.to(torch.int64) * _GAMMA)


_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # as the sums wrap around, a number of 64 bits may as well be negative
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix: every bit of a number of 64 depends on every bit that came in."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # zeros come in from the left, where torch would repeat the sign


def _check_integers(name: str, given: Any, example: str) -> None:
    if isinstance(given, int) and not isinstance(given, bool):
        return
    if not arrays.is_array(given) or arrays.kind(given.dtype) != "int":
        raise FuncgaError(f"{name} is {arrays.describe(given)}: it must be an integer, or a tensor of some: {example}.")


def sampled(sampler: Callable[..., Any], keys: torch.Tensor, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """Noise [rows, *shape], each row drawn with the key of its example: the same in every split of a batch.

    sampler: `sampler(shape, generator=..., device=...)`, as torch.rand or torch.randn. keys: of `example_keys`. Every
    row has a generator of its own, so a loop goes over the rows, and a CUDA device is waited for: for noise of a whole
    micro-batch at once see `seeded`. Raises FuncgaError for keys that are no int64 [rows].

    >>> kept = torch_backend.sampled(torch.rand, keys, (16,)) < 0.9
    """
    if not isinstance(keys, torch.Tensor) or keys.dtype != torch.int64 or keys.ndim != 1:
        raise FuncgaError(
            f"keys are {arrays.describe(keys)}: there must be one for each row, int64[rows]. Make them where the batch "
            f"is made, keys = torch_backend.example_keys(0, indices), and pass them with it."
        )
    generator = torch.Generator(keys.device)
    rows = [sampler(shape, generator=generator.manual_seed(seed), device=keys.device) for seed in keys.tolist()]
    return torch.stack(rows) if rows else sampler((0, *shape), device=keys.device)


def seeded(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`loss(params, keys, *batch)`: loss_fn(params, *batch) with torch's random numbers seeded by the keys.

    So what dropout and everything else in a loss draws from torch's global generators is a pure function of the keys
    of the micro-batch: other noise in each micro-batch, the same in each run, and the generators are as before. It is
    that of the first of its examples, so it changes with n; noise that does not is `sampled`.

    loss_fn: of parameters, or of a module, for `pure_loss`. keys: int64 [rows] of `example_keys`, on the CPU, or the
    host waits for them. Raises FuncgaError for other keys. Not in torch.compile, which seeds by itself.

    >>> loss_fn = torch_backend.pure_loss(module, torch_backend.seeded(lambda module, x, y: mse_loss(module(x), y)))
    >>> loss, grads = funcga.accumulate(funcga.value_and_grad(loss_fn), 8)(params, keys, x, y)
    """

    @functools.wraps(loss_fn, updated=())
    def loss(params: Any, keys: Any, *batch: Any, **kwargs: Any) -> Any:
        with _seeded(_seed(keys), (params, *batch)):
            return loss_fn(params, *batch, **kwargs)

    del loss.__wrapped__  # it has one parameter more
    return loss


def _seed(keys: Any) -> int:
    if isinstance(keys, torch.Tensor) and keys.dtype == torch.int64 and keys.numel():
        return int(keys.flatten()[0])
    raise FuncgaError(
        f"keys are {arrays.describe(keys)}, and stand before the batch: int64[rows], one for each row. Call it as "
        f"loss(params, torch_backend.example_keys(0, indices), *batch)."
    )


@contextmanager
def _seeded(seed: int, args: Any) -> Any:
    devices = {leaf.device for leaf in trees.flatten(args)[0] if isinstance(leaf, torch.Tensor)}
    devices |= {p.device for module in args if isinstance(module, nn.Module) for p in module.parameters()}
    found = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=found):
        torch.default_generator.manual_seed(seed)
        for device in found:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
