"""What the benchmarks count in JAX, and which contenders are right: structure, never time."""

import jax
import pytest

from benchmarks import in_jax
from benchmarks.cases import Case
from benchmarks.comparison import difference
from benchmarks.truth import COLUMNS

FEW_SCALARS = 256  # bytes: a tally


@pytest.fixture(scope="module", autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # as optax needs it
        yield


def figures(group):
    """Of each contender, all of which compute what the first of them computes."""
    first, *others = (group.arrays(call()) for call in group.calls.values())
    assert all(difference(other, first) <= group.tolerance for other in others)
    return {key: group.structure(key) for key in group.calls}


def test_one_device():
    group = in_jax.gradients(Case("", "update", "jax", "tiny", n=4))
    found = figures(group)
    assert {*found} == {"funcga", "scan", "optax_microbatch_mean", "optax_microbatch_sum"}
    ours, scan = found["funcga"], found["scan"]
    assert ours["peak_bytes"] <= scan["peak_bytes"] + FEW_SCALARS
    assert ours["traces"] == scan["traces"] == 1
    assert ours["ops"] <= scan["ops"] + 4
    assert ours["bytes_accessed"] <= scan["bytes_accessed"] * 1.001
    for rival in ("optax_microbatch_mean", "optax_microbatch_sum"):
        assert ours["peak_bytes"] <= found[rival]["peak_bytes"]
        assert ours["traces"] < found[rival]["traces"]
    assert group.about["parameters"] == 12 * 64 * 65


@pytest.fixture(scope="module")
def answers():
    case = Case("", "exactness", "jax", only=("funcga", "optax_multi_steps"))
    return in_jax.exactness(case)["contenders"]


def test_ours_is_right(answers):
    errors = answers["funcga"]["errors"]
    assert {*errors} == {*COLUMNS}
    assert max(errors["uneven tokens"], errors["partial window"]) <= 1e-6
    assert errors["bfloat16 sums"] <= 2**-8  # the result's own rounding
    assert answers["funcga"]["refused"] == {}
