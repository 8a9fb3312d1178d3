"""What is used of JAX that it does not promise to keep is taken away, and the numbers are right still."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
from jax_backend import _private
from tests.kits import JAX, LIMITS, difference

ROOT = Path(__file__).parent.parent.parent


def model():
    """params, batch and a mean loss of a model that is scanned over its layers."""
    keys = jax.random.split(jax.random.key(0))
    params = {"layers": jax.random.normal(keys[0], (3, 4, 4)) / 2}
    loss = lambda p, x: (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])[0] ** 2).mean()
    return params, jax.random.normal(keys[1], (16, 4)), loss


def check_right():
    """A step outside of jit and inside, a stream, and a step over replicas, all against the whole batch."""
    params, batch, loss = model()
    gradient = jax.value_and_grad(loss)
    full = gradient(params, batch)
    step = funcga.accumulate(gradient, 4, weight=lambda x: (x[:, 0] > -9).sum())
    over = funcga.accumulate(gradient, 2, across="data")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(over, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    for result in (
        step(params, batch),
        jax.jit(step)(params, batch),
        funcga.stream(gradient)(params, [batch[:10], batch[10:]]),
        jax.jit(mapped)(params, batch),
        jax_backend.replicated(over, mesh)(params, batch),
    ):
        assert difference(JAX, result, full) <= LIMITS["float32"]
    return jax_backend.hlo.folded_in_place(step, params, batch)


def test_with_everything():
    assert check_right() == ["output[1]['layers']"]
    assert None not in (_private.TRACE_STATE, _private.TRACER, _private.varying(jax.typeof(jnp.ones(2))))


@pytest.mark.parametrize("name", ["ARRAY_TYPE", "LITERAL", "AS_FUNCTION"])
def test_without_what_programs_are_made_of_scans_are_left_as_they_are(name, monkeypatch):
    monkeypatch.setattr(_private, name, () if name == "LITERAL" else None)
    assert check_right() == []


@pytest.mark.parametrize("attribute", ["get_bind_params", "ctx"])
def test_without_a_way_to_repeat_an_operation_scans_are_left_as_they_are(attribute, monkeypatch):
    class Without:
        """An operation that lacks the attribute."""

        def __init__(self, whole):
            self.whole = whole

        def __getattr__(self, name):
            if name == attribute:
                raise AttributeError(name)
            found = getattr(self.whole, name)
            return Without(found) if name == "primitive" else found

    original = _private.can_repeat
    monkeypatch.setattr(_private, "can_repeat", lambda equation: original(Without(equation)))
    assert check_right() == []


@pytest.mark.parametrize("parameter", ["reverse", "jaxpr"])
def test_a_scan_that_is_described_in_another_way_is_left_as_it_is(parameter, monkeypatch):
    monkeypatch.setattr(_private, "SCAN_PARAMETERS", _private.SCAN_PARAMETERS - {parameter})
    assert check_right() == []


def test_without_the_state_of_traces_every_call_counts_as_traced(monkeypatch):
    monkeypatch.setattr(_private, "TRACE_STATE", None)
    assert check_right() == ["output[1]['layers']"]
    params, batch, loss = model()
    with pytest.raises(funcga.FuncgaError, match='n="auto"'):
        funcga.accumulate(jax.value_and_grad(loss), "auto")(params, batch)


def test_without_the_class_of_tracers(monkeypatch):
    found = []
    jax.jit(lambda x: found.append((_private.is_traced(x), x)))(1.0)
    monkeypatch.setattr(_private, "TRACER", None)
    jax.jit(lambda x: found.append((_private.is_traced(x), x)))(1.0)
    assert [is_traced for is_traced, _ in found] == [True, True]
    assert not _private.is_traced(jnp.ones(3))
    assert not _private.is_traced(3.0)
    check_right()


def test_without_types_that_say_where_arrays_differ(monkeypatch):
    monkeypatch.setattr(_private, "varying", lambda aval: None)
    check_right()


def test_without_names_of_operations(monkeypatch):
    monkeypatch.setattr(_private, "scope_of", lambda equation: "")
    check_right()


def test_without_the_names_of_types_scans_are_left_as_they_are(monkeypatch):
    """Every effect counts, and every call of a jitted function."""
    monkeypatch.setattr(_private, "has_effects", lambda program: True)
    assert check_right() == []


def test_options_that_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(_private, "QUICK", {**_private.QUICK, "xla_no_such_option": 0})
    _private.quick_to_compile.cache_clear()
    options = _private.quick_to_compile()
    assert "xla_no_such_option" not in options
    assert jax.jit(lambda x: 2 * x, compiler_options=options)(3) == 6


def test_all_that_is_private_stands_in_one_file():
    private = re.compile(
        r"jax\._src|jax\.core\.|jax\.extend\.core\.|manual_axis_type|\.vma\b|get_bind_params|ctx\.manager|ft_in|source_info"
    )
    for path in (ROOT / "jax_backend").glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if private.search(line) and "import" not in line]
        assert path.name == "_private.py" or not lines, (path.name, lines)
