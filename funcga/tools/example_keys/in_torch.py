"""Randomness that belongs to an example, and not to the micro-batch that it happens to be in.

The keys are those of SplitMix: Steele, Lea and Flood (2014), "Fast splittable pseudorandom number
generators".
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from funcga._fold import kind
from funcga._types import Args, Array, R, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees

# The step from one number of a stream to the next, and the two factors of the mix. They are
# unsigned numbers of 64 bits, written as the int64 of the same bits: sums and products wrap around
# alike.
_GAMMA, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def example_keys(key: Scalar, indices: Array) -> torch.Tensor:
    """A random key for each example, made of one key and the example's index: an argument that is
    split like any other.

    As the keys do not depend on n, what is drawn from them does not either.

    Args:
        key: an int, or a 0-d tensor of one, such as another key: `example_keys(seed, epoch)` is
            that of an epoch, without which an example has the same noise in each.
        indices: integers [rows], where the examples are in the dataset, on any device; or a number,
            for one key.

    Returns:
        int64 in the shape of the indices: seeds.

    Raises:
        FuncgaError: for anything but integers. Torch itself refuses numbers of more than 64 bits.

    Example:
        >>> epoch, indices = 0, torch.arange(4)
        >>> keys = torch_backend.example_keys(torch_backend.example_keys(1234, epoch), indices)
        >>> keys.shape, keys.dtype
        (torch.Size([4]), torch.int64)
    """
    index_of_example = _integers(indices)
    # The mixed key is the start of a stream of numbers. Each example gets the number at its index.
    start = _mixed(_integers(key, index_of_example.device) + _GAMMA)
    return _mixed(start + (index_of_example + 1) * _GAMMA)


def _integers(value: Array, device: torch.device | None = None) -> torch.Tensor:
    """The value as int64, by default where it lies, wherever new tensors do."""
    array = torch.as_tensor(value, device=device or getattr(value, "device", None))
    if kind(array.dtype) != "int":
        raise FuncgaError(
            f"a key or index is {arrays.describe(value)}: they are integers, or tensors of some: "
            "torch_backend.example_keys(0, torch.arange(len(x)))."
        )
    return array.to(torch.int64)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix: every bit of a number of 64 depends on every bit that came in."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    # A logical shift: torch's own repeats the sign, and the mask sets those bits to 0.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sampled(
    sampler: Callable[..., torch.Tensor], keys: torch.Tensor, shape: tuple[int, ...] = ()
) -> torch.Tensor:
    """Noise `[rows, *shape]`, each row drawn with the key of its example: the same in every split
    of a batch.

    Every row has a generator of its own, so a loop goes over the rows, and a CUDA device is waited
    for: for noise of a whole micro-batch at once see `seeded`. (Torch's generators on the CPU take
    32 bits of a seed: of a million examples some hundred pairs draw the same.)

    Args:
        sampler: `sampler(shape, generator=..., device=...)`, as torch.rand or torch.randn.
        keys: int64 [rows], of `example_keys`.
        shape: that of the noise of one example.

    Returns:
        What the sampler has drawn, stacked.

    Example:
        >>> keys = torch_backend.example_keys(1234, torch.arange(4))
        >>> kept = torch_backend.sampled(torch.rand, keys, (16,)) < 0.9
        >>> kept.shape
        torch.Size([4, 16])
    """
    generator = torch.Generator(keys.device)
    rows = [
        sampler(shape, generator=generator.manual_seed(seed), device=keys.device)
        for seed in keys.tolist()
    ]
    return torch.stack(rows) if rows else sampler((0, *shape), device=keys.device)


# The generators are global: one thread at a time seeds them.
_SEEDING = threading.RLock()


def seeded(loss_fn: Callable[..., R]) -> Callable[..., R]:
    """`loss(params, keys, *batch)`: `loss_fn(params, *batch)` with torch's random numbers seeded by
    the keys.

    So what dropout and everything else in a loss draws from torch's global generators is a pure
    function of the keys of the micro-batch: other noise in each micro-batch, the same in each run,
    and the generators are as before. It is that of the first of its examples, so it changes with n;
    noise that does not is `sampled`. One thread at a time runs in it, as the generators are global.
    It is not for torch.compile, which seeds by itself, nor for torch.func.vmap.

    Args:
        loss_fn: of parameters, or of a module, for `pure_loss`.

    Returns:
        A function with one argument more, after the first: int64 [rows] of `example_keys`, on the
        CPU, or the host waits for them.

    Raises:
        FuncgaError: for other keys, and for keys that are not as many as the rows.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1))
        >>> loss_fn = torch_backend.seeded(lambda model, x, y: F.mse_loss(model(x), y))
        >>> loss = torch_backend.pure_loss(model, loss_fn)
        >>> step = funcga.accumulate(funcga.value_and_grad(loss), 4)
        >>> keys = torch_backend.example_keys(1234, torch.arange(10))
        >>> x, y = torch.randn(10, 3), torch.randn(10, 1)
        >>> value, grads = step(torch_backend.trainable(model), keys, x, y)
    """

    @functools.wraps(loss_fn, updated=())
    def loss(params: Tree, keys: torch.Tensor, *batch: Tree, **kwargs: Tree) -> R:
        with _SEEDING, _seeded(_seed(keys, batch), (params, *batch)):
            return loss_fn(params, *batch, **kwargs)

    # The signature of loss_fn is not that of loss, which has one parameter more.
    del loss.__wrapped__
    loss.loss_fn = loss_fn  # type: ignore[attr-defined]
    return loss


def _seed(keys: torch.Tensor, batch: Args) -> int:
    rows = {len(tensor) for tensor in trees.tensors_in(batch) if tensor.ndim}
    # Of the batch in the place of the keys a row would be read as a seed, and with keys of more
    # rows every micro-batch would draw the same.
    are_keys = isinstance(keys, torch.Tensor) and keys.dtype == torch.int64 and keys.ndim == 1
    if not are_keys or (rows and len(keys) not in rows):
        raise FuncgaError(
            f"keys are {arrays.describe(keys)}, and the micro-batch has {max(rows, default=0)} "
            "rows: keys are int64[rows], one for each row, and stand before the batch. Call it as "
            "loss(params, torch_backend.example_keys(0, indices), *batch), and split the keys with "
            "the batch, as accumulate does by itself: in_axes=(None, 0, 0)."
        )
    return int(keys[0])


@contextmanager
def _seeded(seed: int, args: Args) -> Iterator[None]:
    """A context in which the global generators, of the host and of the devices of the arguments,
    begin at a seed.
    """
    leaves = trees.flatten(args)[0]
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    devices = devices_of(leaves + [param for each in modules for param in each.parameters()])
    before = generator_states(devices)
    generators = [torch.Generator(), *map(torch.Generator, devices)]
    seeded = [generator.manual_seed(seed).get_state() for generator in generators]
    put_generator_states(devices, seeded)
    try:
        yield
    finally:
        put_generator_states(devices, before)


# --- the states of global generators, for what is to draw the same once more


def devices_of(leaves: Sequence[object]) -> list[torch.device]:
    """The devices of these whose random numbers a function of them may draw, besides the host's."""
    devices = {tensor.device for tensor in trees.tensors_in(leaves)}
    return [device for device in devices if device.type not in ("cpu", "meta")]


def generator_states(devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """The states of the generators of the host and of these devices."""
    states = [torch.get_rng_state()]
    for device in devices:
        # Not all of these functions take a device.
        with torch.accelerator.device_index(device.index):
            states.append(torch.get_device_module(device).get_rng_state())
    return states


def put_generator_states(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> None:
    """Puts states of the generators back."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).set_rng_state(state)
