"""The structural rows of the table that `python -m tests.house` prints: what must not grow without a decision.

Each limit is a budget: the size that was decided for.
"""

import ast
import subprocess
import sys

from tests import house

MOST = {
    "files": 180,
    "tokens": 168_215,
    "tokens of the core": 83_360,
    "tokens of the core, torch": 42_395,
    "tokens of tools": 84_860,
    "tokens of the doctor": 13_745,
    "tokens of packs": 1_030,
    "attributes of a class": 26,
    "fmt: skip": 0,
    "Any": 655,
    "getattr": 102,
    "files of tests that import what is private": 15,
}
# Functions entered, calls of them, and files that they are in.
CALLS = {"torch, warm": (36, 74, 9), "JAX, first": (84, 163, 20), "torch multi_steps, warm": (34, 80, 9)}


def beyond(found, limits):
    """What exceeds its limit, in words: the limit, what was found, by how much, and what to do."""
    return [
        f"{name}: the limit is {limit:,}, found {found[name]:,}, {found[name] - limit:,} too many. Make something else "
        "smaller; or, where what you add is worth its size, raise the limit in MOST (tests/test_house.py) by that size and "
        "say so in the pull request."
        for name, limit in limits.items()
        if found[name] > limit
    ]


def test_the_library_stays_small():
    exceeded = beyond(house.sizes(), MOST)
    assert not exceeded, "\n".join(exceeded)


def test_a_limit_that_is_exceeded_says_what_to_do():
    [text] = beyond({"files": 5, "tokens": 2_100}, {"files": 5, "tokens": 2_000})
    assert text.startswith("tokens: the limit is 2,000, found 2,100, 100 too many. ")
    assert "raise the limit in MOST" in text


def test_no_function_is_hard_to_follow():
    assert {name: complexity for name, complexity in house.complexities().items() if complexity > 15} == {}


def test_no_module_imports_what_imports_it():
    assert house.cycles(house.imports()) == []


def test_a_call_runs_through_few_functions():
    """In a process of its own: what other tests have imported and configured adds to what a call looks at."""
    program = "from tests import house; print({name: house.trace(make()) for name, make in house.TRACES.items()})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=house.ROOT)
    entered = ast.literal_eval(done.stdout)
    beyond = {
        name: counts for name, counts in entered.items() if any(a > b for a, b in zip(counts, CALLS[name], strict=True))
    }
    assert beyond == {}


def test_the_counters_can_see():
    source = '"""Docstring."""\n# a comment\nfrom typing import Any\n\n\ndef f(x: Any) -> Any:\n    """Docstring."""\n    return getattr(x, "y")  # not a full line\n'
    assert house.code_tokens(source) == 4 + 10 + 7
    assert house.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert house.trace(lambda: None) == (0, 0, 0)
