"""The problems: real data and seeded parameters as trees of NumPy arrays, and how their loss is folded."""

from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from funcga.folds import Fold, mean, per_weight

PAD = 255
"""The token that fills a row up: the byte 0xFF, which no UTF-8 text contains."""

# Of the text. With several thousand tokens, torch's own float32 gradient of the whole batch (not the accumulated one)
# is more than 2e-6 from its float64 gradient: layer_norm's backward adds up rows one after the other.
_ROWS, _LENGTH = 40, 48
_WIDTH, _HEADS, _BLOCKS = 32, 4, 2  # of its transformer


@dataclass(frozen=True)
class Problem:
    """A loss with its arguments: floats in float64, integers in int32.

    loss: the name of a function of torch_backend.problems and of jax_backend.problems.
    items: int[rows], what each row weighs, counted from the data rather than by `weight`; `unit` is the word for them.
    divisor: what the whole batch's loss and gradients are divided by: all the items for a sum, 1 for a mean.
    """

    name: str
    about: str
    loss: str
    params: Any
    batch: tuple[Any, ...]
    fold: Fold
    weight: Callable[..., Any] | None
    items: Any
    unit: str
    divisor: int


def digits() -> Problem:
    """The 1,797 handwritten digits of scikit-learn, a mean over rows."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    params = {
        "hidden": {"weight": _normal(random, 64, 32), "bias": _normal(random, 32)},
        "output": {"weight": _normal(random, 32, 10), "bias": _normal(random, 10)},
    }
    about = "mean cross-entropy of an MLP (64-32-10, tanh) on handwritten digits; fold=funcga.mean()"
    batch = (images / 16, labels.astype(np.int32))
    return Problem("digits", about, "digits_loss", params, batch, mean(), None, np.ones(len(labels), int), "rows", 1)


def text() -> Problem:
    """Paragraphs of Python's own help as bytes, longest first, a sum over the bytes that are to be predicted."""
    rows = _paragraphs(np.random.default_rng(1))
    tokens = np.full((len(rows), _LENGTH), PAD, dtype=np.int32)
    for row, paragraph in zip(tokens, rows, strict=True):
        row[: len(paragraph)] = list(paragraph)
    items = np.array([len(paragraph) - 1 for paragraph in rows])  # the first byte is not predicted
    about = "summed cross-entropy of a small causal transformer, byte by byte; fold=funcga.per_weight()"
    params = _transformer(np.random.default_rng(2))
    total = int(items.sum())
    return Problem("text", about, "text_loss", params, (tokens,), per_weight(), count_targets, items, "tokens", total)


def count_targets(tokens: Any) -> Any:
    """The number of tokens that are to be predicted: a 0-d integer array of the tokens' framework."""
    return (tokens[:, 1:] != PAD).sum()


def _paragraphs(random: np.random.Generator) -> list[bytes]:
    every = [part.strip().encode() for name in sorted(topics) for part in topics[name].split("\n\n")]
    short = [part for part in every if 2 <= len(part) <= _LENGTH]
    chosen = random.choice(len(short), _ROWS, replace=False)
    # As a loader that buckets by length would: micro-batches then differ most in their number of tokens.
    return sorted((short[i] for i in chosen), key=len, reverse=True)


def _transformer(random: np.random.Generator) -> Any:
    each, head = (_BLOCKS, _WIDTH), _WIDTH // _HEADS
    return {
        "embed": {"token": _normal(random, 256, _WIDTH), "position": _normal(random, _LENGTH - 1, _WIDTH)},
        "blocks": {
            "norm1_scale": 1 + _normal(random, *each),
            "norm1_bias": _normal(random, *each),
            "qkv": _normal(random, *each, 3, _HEADS, head, fan_in=_WIDTH),
            "out": _normal(random, _BLOCKS, _HEADS, head, _WIDTH, fan_in=_WIDTH),
            "norm2_scale": 1 + _normal(random, *each),
            "norm2_bias": _normal(random, *each),
            "up": _normal(random, *each, 4 * _WIDTH, fan_in=_WIDTH),
            "up_bias": _normal(random, _BLOCKS, 4 * _WIDTH),
            "down": _normal(random, _BLOCKS, 4 * _WIDTH, _WIDTH, fan_in=4 * _WIDTH),
            "down_bias": _normal(random, *each),
        },
        "norm": {"scale": 1 + _normal(random, _WIDTH), "bias": _normal(random, _WIDTH)},
    }


def _normal(random: np.random.Generator, *shape: int, fan_in: int = 64) -> Any:
    return random.standard_normal(shape) / fan_in**0.5


PROBLEMS: dict[str, Callable[[], Problem]] = {"digits": digits, "text": text}
