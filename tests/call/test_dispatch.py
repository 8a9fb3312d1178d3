"""Which framework owns a call, and what funcga says about arrays of neither."""

import jax.numpy as jnp
import numpy as np
import torch

import funcga


def owner(*trees):
    """What the step is given, if the gradient function is one of neither framework."""
    found = funcga.accumulate(lambda *args: args[-1], 1, in_axes=(None,) * (len(trees) - 1) + (0,))(*trees)
    return type(found).__module__.split(".")[0].removesuffix("lib")


def test_the_owner_of_the_arrays():
    """NumPy's join the others; without others they are JAX's."""
    tensor, array = torch.ones(1), jnp.ones(1)
    assert (
        owner(3, "a", tensor) == owner(np.ones(1), torch.nn.Parameter(tensor)) == owner(np.ones(1), tensor) == "torch"
    )
    assert owner({"a": [array]}, None, array) == owner(np.ones(1), array) == "jax"
    assert owner([np.float32(1)], np.ones(1)) == "jax"
