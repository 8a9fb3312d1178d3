"""Who is right about a loss over the whole batch: each contender against autograd over all rows at once, in float64."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.comparison import Figures, about
from benchmarks.registry import Contender, contenders
from benchmarks.torch_pairs import VOCABULARY, Pairs, contrastive, loss_of
from benchmarks.torch_problem import Problem

TEMPERATURE = "temperature"
COLUMNS = ("all other parameters", TEMPERATURE, "a ragged last micro-batch", "dropout")

_SIZE, _LENGTH = 8, 12


class _Question(NamedTuple):
    """A window of so many rows; `of_temperature` asks for the gradient of logit_scale, else for that of all others."""

    column: str
    rows: int = 3 * _SIZE
    dropout: float = 0.0
    of_temperature: bool = False


_QUESTIONS = (
    _Question(COLUMNS[0]),
    _Question(TEMPERATURE, of_temperature=True),
    _Question(COLUMNS[2], rows=3 * _SIZE - 2),
    _Question(COLUMNS[3], dropout=0.1),
)


def asked(case: Case) -> Figures:
    """What comes of each question."""
    found, left_out = contenders(case.setting, case.kind, case.only)
    figures = {
        c.key: {**about(c), "errors": {question.column: _error(c, question) for question in _QUESTIONS}, "refused": {}}
        for c in found
    }
    return {"left_out": left_out, "contenders": figures}


def _error(contender: Contender, question: _Question) -> float:
    """The largest difference from the true gradient, over its largest element: of the parameters that are asked for.

    With dropout, a tool may take the masks of its first pass or of its last one, but one of them throughout.
    """
    torch.manual_seed(0)
    module = _Drawn(32, 2, 16, question.dropout).double()
    batch = torch.randint(0, VOCABULARY, (question.rows, 2, _LENGTH))
    step = contender.make(Problem(module, loss_of, -(-len(batch) // _SIZE), _SIZE))
    _, found = step(batch)
    calls, names = module.calls, [name for name in found if (name == "logit_scale") == question.of_temperature]
    truths = [_true_gradient(module, batch, draws) for draws in (calls, calls[::-1])]
    return min(_difference([found[name] for name in names], [truth[name] for name in names]) for truth in truths)


def _difference(found: list[Tensor], truth: list[Tensor]) -> float:
    largest = max(each.abs().max() for each in truth)
    return float(max((one - other).abs().max() for one, other in zip(found, truth, strict=True)) / largest)


_Call = tuple[Tensor, Tensor]  # sequences, and the state of the generator


class _Drawn(Pairs):
    """Pairs that writes down what it is asked to embed, and what the generator's state was before that."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.calls: list[_Call] = []

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings; the call is appended to `calls`."""
        self.calls.append((tokens, torch.get_rng_state()))
        return super().embed(tokens)


def _true_gradient(module: Pairs, batch: Tensor, calls: Sequence[_Call]) -> dict[str, Tensor]:
    """The gradient of the whole batch, with the dropout masks that each sequence was given in its first of the calls.

    Contenders go through the sequences in different orders and chunks, and so draw different masks.
    """
    embeddings: dict[int, Tensor] = {}
    sequences = batch.flatten(0, 1)
    for tokens, state in calls:
        places = [_place(row, sequences) for row in tokens]
        if all(place in embeddings for place in places):
            continue  # another pass
        torch.set_rng_state(state)
        embeddings.update(zip(places, Pairs.embed(module, tokens), strict=True))
    both = torch.stack([embeddings[place] for place in range(len(sequences))]).unflatten(0, batch.shape[:2])
    loss = contrastive(*both.unbind(1), module.logit_scale, None)
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def _place(row: Tensor, rows: Tensor) -> int:
    """Which of the rows this one is."""
    return int((rows == row).all(1).nonzero()[0])
