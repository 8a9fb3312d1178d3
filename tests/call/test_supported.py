"""The table of what is supported: it is what the documentation prints, and each refusal in it is raised when a step is made."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import funcga
from funcga._call import OwningGradient
from funcga._call.supported import EXCLUSIVE, SUPPORTED

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "accumulate.md").read_text()
OPTIONS = {
    'drop="microbatch"': {"drop": "microbatch"},
    'drop="window"': {"drop": "window"},
    "drop=": {"drop": "window"},
    "drop_if=": {"drop": "window", "drop_if": lambda output: False},
    "observe=": {"observe": funcga.gradient_norms()},
    'n="auto"': {"n": "auto"},
    "across=": {"across": "data"},
    "totals=": {"totals": lambda x: len(x)},
    "scatter=": {"across": SimpleNamespace(scatter=0)},
}
CELLS = [(kind, feature) for kind, row in SUPPORTED.items() for feature in row]


def written():
    """The two tables, in Markdown."""
    features = [*next(iter(SUPPORTED.values()))]
    reasons = [*dict.fromkeys(why for row in SUPPORTED.values() for why in row.values() if why is not True)]
    lines = ["| the gradient is that of | " + " | ".join(f"`{feature}`" for feature in features) + " |"]
    lines.append("|---" * (len(features) + 1) + "|")
    for kind, row in SUPPORTED.items():
        cells = ["yes" if why is True else f"no ({reasons.index(why) + 1})" for why in row.values()]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {why[0].upper()}{why[1:]}" for number, why in enumerate(reasons, start=1)]
    pairs = [
        "| | | |",
        "|---|---|---|",
        *(f"| `{one}` | `{other}` | {why} |" for (one, other), why in EXCLUSIVE.items()),
    ]
    return "\n".join([*lines, "", *notes, "", "And whatever the gradient function is:", "", *pairs])


def test_the_documentation_has_the_table():
    assert written() in PAGE


class Owning(OwningGradient):
    def __init__(self, kind):
        self.of = kind

    @property
    def kind(self):
        return self.of


def make(grad_fn, *options):
    given = {"n": 2}
    for option in options:
        given |= option
    return funcga.accumulate(grad_fn, **given)


@pytest.mark.parametrize(("kind", "feature"), CELLS, ids=" ".join)
def test_each_entry_holds_when_a_step_is_made(kind, feature):
    why = SUPPORTED[kind][feature]
    if why is True:
        make(Owning(kind), OPTIONS[feature])
        return
    with pytest.raises(funcga.FuncgaError) as caught:
        make(Owning(kind), OPTIONS[feature])
    assert why in str(caught.value)


@pytest.mark.parametrize("pair", EXCLUSIVE, ids=" ".join)
def test_what_does_not_go_together_is_refused(pair):
    scaled = "scaled=True" in pair
    gradient = funcga.grad(lambda w, x, *, totals=None: (w * x).mean(), scaled=scaled)
    with pytest.raises(funcga.FuncgaError, match="was given together with"):
        make(gradient, *(OPTIONS[feature] for feature in pair if feature in OPTIONS))
