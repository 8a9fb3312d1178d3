"""The built-in problems, as trees of NumPy arrays, and the problem that the command line names."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from funcga._types import Args, Array, Tree
from funcga.errors import FuncgaError
from funcga.folds import per_weight
from funcga.tools.parity import Problem
from funcga.tools.reports.commands import load_object
from funcga.tools.trees.rules import AXES, torch_to_flax

PAD = 255
"""The token that fills a row up: the byte 0xFF, which is no letter."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.5},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "adam": {"lr": 0.01},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
}
"""The options of the optimizers of a training, which both frameworks share."""

# Of the text. With several thousand tokens, torch's own float32 gradient of the whole batch (not
# the accumulated one) is more than 2e-6 from its float64 gradient: layer_norm's backward adds up
# rows one after the other.
_ROWS, _LENGTH = 40, 48
_WIDTH, _BLOCKS = 32, 2  # of its transformer


def digits(seed: int = 0) -> Problem:
    """The 1,797 handwritten digits of scikit-learn, a mean over rows."""
    random = np.random.default_rng(seed)
    params = {"hidden": _linear(random, 64, 32), "output": _linear(random, 32, 10)}
    return _problem(
        "digits",
        "mean cross-entropy of an MLP (64-32-10, tanh) on handwritten digits; fold=funcga.mean()",
        params,
        _digits(),
        optimizers=tuple(OPTIMIZERS),
    )


def cnn(seed: int = 0) -> Problem:
    """A convolutional network on the digits, in each framework's own layout of the weights."""
    random = np.random.default_rng(seed)
    shapes = {"conv1": (8, 1, 3, 3), "conv2": (16, 8, 3, 3), "output": (10, 16)}
    params = {
        name: {
            "weight": _normal(random, *shape, fan_in=int(np.prod(shape[1:]))),
            "bias": _normal(random, shape[0]),
        }
        for name, shape in shapes.items()
    }
    images, labels = _digits(_EVEN)
    return _problem(
        "cnn",
        "mean cross-entropy of two convolutions on handwritten digits; OIHW in torch, HWIO in "
        "JAX; fold=funcga.mean()",
        params,
        (images.reshape(-1, 8, 8), labels),
        jax_params={
            name: {"kernel": AXES["oi->io"](layer["weight"]), "bias": layer["bias"]}
            for name, layer in params.items()
        },
        rules=torch_to_flax,
        reduction=64 * len(labels),
        optimizers=("adamw",),
    )


def text(seed: int = 0) -> Problem:
    """Rows of random letters, longest first, a sum over the letters that are to be predicted."""
    random = np.random.default_rng(seed + 1)
    tokens = random.integers(ord("a"), ord("z") + 1, (_ROWS, _LENGTH), dtype=np.int32)
    # As a loader that buckets by length would: micro-batches then differ most in their number of
    # targets.
    lengths = np.sort(random.integers(2, _LENGTH + 1, _ROWS))[::-1]
    tokens[np.arange(_LENGTH) >= lengths[:, None]] = PAD
    return _problem(
        "text",
        "summed cross-entropy of a small causal transformer, letter by letter; "
        "fold=funcga.per_weight()",
        _transformer(random),
        (tokens,),
        fold=per_weight(),
        weight=count_targets,
        reduction=int((lengths - 1).sum()),  # the first letter is not predicted
        optimizers=("adamw",),
    )


PROBLEMS: dict[str, Callable[..., Problem]] = {"digits": digits, "cnn": cnn, "text": text}


def count_targets(tokens: Array) -> Array:
    """The number of tokens that are to be predicted: a 0-d integer array of the tokens'
    framework.
    """
    return (tokens[:, 1:] != PAD).sum()


def _problem(name: str, about: str, params: Tree, batch: Args, **options: Any) -> Problem:
    torch_loss, jax_loss = (
        vars(importlib.import_module(f"funcga.tools.parity.in_{framework}"))[f"{name}_loss"]
        for framework in ("torch", "jax")
    )
    return Problem(params, batch, torch_loss, jax_loss, name=name, about=about, **options)


_EVEN = 1792
"""Rows that 2, 4 and 8 divide, as all 1,797 of `digits` do not: JAX then compiles half as much."""


def _digits(rows: int | None = None) -> tuple[Array, Array]:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    return images[:rows] / 16, labels[:rows].astype(np.int32)


def _transformer(random: np.random.Generator) -> Tree:
    return {
        "embed": {
            "token": _normal(random, 256, _WIDTH),
            "position": _normal(random, _LENGTH - 1, _WIDTH),
        },
        "blocks": {
            "qkv": _normal(random, _BLOCKS, _WIDTH, 3 * _WIDTH, fan_in=_WIDTH),
            "out": _normal(random, _BLOCKS, _WIDTH, _WIDTH, fan_in=_WIDTH),
            "up": _normal(random, _BLOCKS, _WIDTH, 4 * _WIDTH, fan_in=_WIDTH),
            "down": _normal(random, _BLOCKS, 4 * _WIDTH, _WIDTH, fan_in=4 * _WIDTH),
        },
        "norm": {"scale": 1 + _normal(random, _WIDTH), "bias": _normal(random, _WIDTH)},
    }


def _linear(random: np.random.Generator, inputs: int, outputs: int) -> dict[str, Array]:
    return {"weight": _normal(random, inputs, outputs), "bias": _normal(random, outputs)}


def _normal(random: np.random.Generator, *shape: int, fan_in: int = 64) -> Array:
    return random.standard_normal(shape) / fan_in**0.5


def chosen(where: str, seed: int) -> Problem:
    """The problem that the command line names.

    Args:
        where: A built-in problem, or `FILE.py:NAME` of a Problem or of a function that returns one.
        seed: What a function gets that has a parameter `seed`.

    Raises:
        FuncgaError: If there is no such object, or it is not a Problem with a loss.
    """
    if where in PROBLEMS:
        return PROBLEMS[where](seed)
    definition = "problem = funcga.checks.Problem(params, batch, torch_loss=..., jax_loss=...)"
    value, name, _ = load_object(where, definition)
    if callable(value):
        value = value(seed=seed) if "seed" in inspect.signature(value).parameters else value()
    if not (isinstance(value, Problem) and value.losses):
        raise FuncgaError(
            f"{where} is no funcga.checks.Problem with a torch_loss, a jax_loss or both, nor a "
            f"function that returns one: {definition}."
        )
    # In a report a problem without a name goes by its variable.
    return value if value.name else replace(value, name=name)
