"""The states of the global generators, for what is to draw the same once more."""

from collections.abc import Sequence

import torch


def devices_of(leaves: Sequence[object]) -> list[torch.device]:
    """The devices of these whose random numbers a function of them may draw, besides the host's."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
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
