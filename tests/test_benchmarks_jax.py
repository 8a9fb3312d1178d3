"""What the benchmarks count in JAX, and which contenders are right: structure, never time."""

import jax
import ml_dtypes
import numpy as np
import pytest

from benchmarks import in_jax
from benchmarks.cases import Case
from benchmarks.comparison import difference
from benchmarks.jax_measure import instructions
from benchmarks.registry import baseline, keys
from benchmarks.truth import COLUMNS, error, questions, token_gradient

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


def test_devices_reduce_once_outside_of_loops():
    n, layers = 3, 8
    only = ("funcga", "optax_microbatch_mean")
    group = in_jax.gradients(Case("", "update", "jax_devices", "scanned", n=n, ranks=2, only=only))
    found = figures(group)
    ours, jit, by_hand = (found[key] for key in ("funcga", "jit", "optax_microbatch_mean"))
    assert (ours["collectives"], by_hand["collectives"]) == (1, 1)
    assert jit["collectives"] == n * (layers + 1)  # each layer's gradient, and the loss
    gradient = group.about["parameter_bytes"]
    assert gradient < ours["wire_bytes"] <= gradient + FEW_SCALARS
    assert jit["wire_bytes"] == n * (gradient + 4)
    assert ours["peak_bytes"] <= min(jit["peak_bytes"], by_hand["peak_bytes"])


def test_an_optimizer_reads_and_writes_less():
    group = in_jax.windows(Case("", "update", "jax_optimizer", "small", only=("funcga_split",)))
    found = figures(group)
    ours, theirs = found["funcga_split"], found["optax_multi_steps"]
    count = group.about["parameters"] * group.about["n"]
    assert ours["bytes_accessed"] / count <= 24  # read, read and write 4 bytes, and an eighth of an update
    assert theirs["bytes_accessed"] / count >= 90
    assert ours["peak_bytes"] <= theirs["peak_bytes"]


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


def test_a_scan_by_hand_is_wrong_by_what_arithmetic_says(answers):
    tokens, _, sums = questions()
    scan, multi_steps = answers["scan"]["errors"], answers["optax_multi_steps"]["errors"]
    parts = [token_gradient(tokens.params, rows) for rows in np.split(tokens.rows[0], tokens.n)]
    mean = {name: np.mean([part[name] for part in parts], 0) for name in tokens.truth}
    assert scan["uneven tokens"] == pytest.approx(error(mean, tokens), rel=1e-5)
    assert multi_steps["uneven tokens"] == pytest.approx(error(mean, tokens), rel=1e-5)
    total = np.zeros(16, ml_dtypes.bfloat16)
    for row in sums.rows[0].astype(ml_dtypes.bfloat16):
        total = total + row
    assert scan["bfloat16 sums"] == pytest.approx(error({"w": total.astype(float) / sums.n}, sums), rel=1e-5)
    assert multi_steps["bfloat16 sums"] <= 2**-8
    assert scan["partial window"] is None
    assert "cannot reshape" in answers["scan"]["refused"]["partial window"]
    assert multi_steps["partial window"] == 1  # no update yet


def test_devices_with_uneven_tokens():
    case = Case("", "exactness", "jax_devices", ranks=2)
    question = questions(2, even_shapes=True)[-1]
    of_devices = [token_gradient(question.params, rows) for rows in question.rows]
    mean = {name: np.mean([part[name] for part in of_devices], 0) for name in question.truth}
    found, _ = in_jax.contenders("jax_devices", "exactness", ("funcga", "optax_microbatch_mean"))
    wrong = {c.key: in_jax.answers(case, c, [question])["errors"]["uneven ranks"] for c in found if c.key != "jit"}
    assert wrong == {
        "funcga": pytest.approx(0, abs=1e-6),
        "optax_microbatch_mean": pytest.approx(error(mean, question), rel=1e-5),
    }


@pytest.mark.parametrize("setting", ["jax", "jax_devices", "jax_optimizer"])
def test_a_folder_has_its_loop(setting):
    assert baseline(setting) in keys(setting)


PROGRAM = """
HloModule jit_f, is_scheduled=true

%fused (param_0: f32[3]) -> f32[3] {
  %param_0 = f32[3]{0} parameter(0)
  %sine = f32[3]{0} sine(%param_0), metadata={op_name="jit(f)/sin(x)"}
  ROOT %negate = f32[3]{0} negate(%sine)
}

%body (carry: (s32[], f32[3])) -> (s32[], f32[3]) {
  %carry = (s32[], f32[3]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[3]{0} get-tuple-element(%carry), index=1
  %y = f32[3]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %next = (s32[], f32[3]{0}) tuple(%i, %y)
}

ENTRY %main (x: f32[3]) -> f32[3] {
  %x.1 = f32[3]{0} parameter(0)
  %start = (s32[], f32[3]{0}) tuple(%x.1)
  %loop = (s32[], f32[3]{0}) while(%start), condition=%none, body=%body
  ROOT %end = f32[3]{0} get-tuple-element(%loop), index=1
}
"""


def test_a_fusion_is_one_instruction():
    assert instructions(PROGRAM) == 2  # the fusion and the loop
    compiled = lambda f: jax.jit(f).lower(np.ones((4, 4), np.float32)).compile().as_text()
    assert instructions(compiled(lambda x: x)) <= 1
    assert instructions(compiled(lambda x: jax.numpy.tanh(x @ x) @ x)) >= 3
