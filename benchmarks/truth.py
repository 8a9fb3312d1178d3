"""Who is right: problems on which loops go wrong, and their true gradients, in NumPy's float64.

All are made from seed 0, so they are the same in every framework. A model predicts the next token from the last: rows
are nine tokens of a vocabulary of 16, those that are 0 are padding at the end, and its loss is the mean over the tokens
that are predicted and are not padding. The other model is a weighted sum of a row's sixteen elements.
"""

from typing import NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]

COLUMNS = ("uneven tokens", "partial window", "bfloat16 sums", "uneven ranks")
_VOCABULARY, _WIDTH, _LENGTH = 16, 8, 9


class Question(NamedTuple):
    """A window that is to be accumulated, and the gradient of all its rows at once.

    `rows` has an array for each replica; those of tokens are int64, all others float32 that bfloat16 holds exactly.
    Parameters are float32, of `dtype` in the framework: `embedding` [16, 8] and `linear` [8, 16], or `w` [16].
    """

    column: str
    rows: list[np.ndarray]
    size: int  # rows of a micro-batch
    n: int  # micro-batches that are planned for each replica
    params: Arrays
    truth: Arrays  # float64
    dtype: str = "float32"

    @property
    def of_tokens(self) -> bool:
        """Is it of the model that predicts tokens? Then a micro-batch's weight is how many it predicts."""
        return "embedding" in self.params


def questions(replicas: int = 1, even_shapes: bool = False) -> list[Question]:
    """Those that apply to so many replicas, of which each has rows of its own.

    "uneven ranks" is of two: one has three micro-batches, the other has one; with `even_shapes` both have two of as
    many rows, but of very different numbers of tokens.
    """
    made = [_uneven_tokens(replicas), _partial_window(replicas), _sums(replicas)]
    return made if replicas == 1 else [*made, _uneven_devices() if even_shapes else _uneven_ranks()]


def _uneven_tokens(replicas: int) -> Question:
    """Four micro-batches of two rows, of 16, 2, 11 and 3 tokens to predict."""
    return _of_tokens("uneven tokens", [(9, 9, 2, 2, 9, 4, 3, 2)] * replicas, n=4)


def _partial_window(replicas: int) -> Question:
    """Five micro-batches come, and eight were planned."""
    return _of_tokens("partial window", [(9,) * 10] * replicas, n=8)


def _uneven_ranks() -> Question:
    return _of_tokens("uneven ranks", [(9,) * 6, (9,) * 2], n=3)


def _uneven_devices() -> Question:
    return _of_tokens("uneven ranks", [(9,) * 4, (2,) * 4], n=2)


def _of_tokens(column: str, lengths: list[tuple[int, ...]], n: int) -> Question:
    rng = np.random.default_rng(0)
    shapes = {"embedding": (_VOCABULARY, _WIDTH), "linear": (_WIDTH, _VOCABULARY)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    rows = [np.stack([_row(rng, length) for length in of_one]) for of_one in lengths]
    return Question(column, rows, 2, n, params, token_gradient(params, np.concatenate(rows)))


def _row(rng: np.random.Generator, length: int) -> np.ndarray:
    tokens = rng.integers(1, _VOCABULARY, _LENGTH)
    return np.where(np.arange(_LENGTH) < length, tokens, 0)


def token_gradient(params: Arrays, rows: np.ndarray) -> Arrays:
    """The gradient of the mean cross entropy over the tokens that are predicted, by hand, in float64."""
    embedding, linear = params["embedding"].astype(np.float64), params["linear"].astype(np.float64)
    last, following = rows[:, :-1].ravel(), rows[:, 1:].ravel()
    last, following = last[following != 0], following[following != 0]
    hidden = embedding[last]
    probabilities = np.exp(hidden @ linear)
    probabilities /= probabilities.sum(1, keepdims=True)
    of_logits = (probabilities - np.eye(_VOCABULARY)[following]) / len(following)
    gradient = np.zeros_like(embedding)
    np.add.at(gradient, last, of_logits @ linear.T)
    return {"embedding": gradient, "linear": hidden.T @ of_logits}


def _sums(replicas: int) -> Question:
    """1,024 micro-batches of one row, between 1/2 and 1: sums in bfloat16 stop growing at 256, about a third."""
    rng = np.random.default_rng(0)
    rows = [(rng.integers(64, 128, (1024, 16)) / 128).astype(np.float32) for _ in range(replicas)]
    truth = {"w": np.concatenate(rows).astype(np.float64).mean(0)}
    return Question("bfloat16 sums", rows, 1, 1024, {"w": np.ones(16, np.float32)}, truth, "bfloat16")


def error(gradients: Arrays, question: Question) -> float:
    """The largest difference from the truth, over the truth's largest element."""
    largest = max(np.abs(g).max() for g in question.truth.values())
    return float(max(np.abs(gradients[name] - g).max() for name, g in question.truth.items()) / largest)
