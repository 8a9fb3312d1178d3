"""What is used of JAX that it does not promise to keep is taken away, and the numbers are right still."""

import importlib
import re
import sys
from pathlib import Path

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
from funcga.tools.scan_layers import programs_in_jax as jaxprs
from jax_backend import _private
from tests.kits import JAX, LIMITS, difference

ROOT = Path(__file__).parent.parent.parent


def model():
    """params, batch and a mean loss of a model that is scanned over its layers."""
    keys = jax.random.split(jax.random.key(0))
    params = {"layers": jax.random.normal(keys[0], (3, 4, 4)) / 2}
    loss = lambda p, x: (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])[0] ** 2).mean()
    return params, jax.random.normal(keys[1], (16, 4)), loss


def check_right(scans):
    """A step and one over replicas against the whole batch; and unless it is about scans, in jit, a stream, and replicated."""
    params, batch, loss = model()
    gradient = jax.value_and_grad(loss)
    full = gradient(params, batch)
    step = funcga.accumulate(gradient, 4, weight=lambda x: (x[:, 0] > -9).sum())
    over = funcga.accumulate(gradient, 2, across="data")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(over, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    results = [step(params, batch), jax.jit(mapped)(params, batch)]
    if not scans:
        results.append(jax.jit(step)(params, batch))
        results.append(funcga.stream(gradient)(params, [batch[:10], batch[10:]]))
        results.append(jax_backend.replicated(over, mesh)(params, batch))
    for result in results:
        assert difference(JAX, result, full) <= LIMITS["float32"]
    return jax_backend.hlo.folded_in_place(step, params, batch)


def without(attribute):
    """A function in the place of `can_repeat`, for which operations lack the attribute."""

    class Without:
        def __init__(self, whole):
            self.whole = whole

        def __getattr__(self, name):
            if name == attribute:
                raise AttributeError(name)
            found = getattr(self.whole, name)
            return Without(found) if name == "primitive" else found

    original = jaxprs.can_repeat
    return lambda equation: original(Without(equation))


IN_PLACE = ["output[1]['layers']"]


@pytest.mark.parametrize(
    ("name", "instead", "in_place"),
    [
        ("TRACE_STATE", _private.TRACE_STATE, IN_PLACE),  # nothing is missing
        # without a way to repeat an operation, scans are left as they are
        ("can_repeat", without("get_bind_params"), []),
        ("can_repeat", without("ctx"), []),
        ("SCAN_PARAMETERS", jaxprs.SCAN_PARAMETERS - {"reverse"}, []),
        ("SCAN_PARAMETERS", jaxprs.SCAN_PARAMETERS - {"jaxpr"}, []),
        ("has_effects", lambda program: True, []),
        ("TRACE_STATE", None, IN_PLACE),
        ("TRACER", None, IN_PLACE),
        ("varying", lambda aval: None, IN_PLACE),
        ("scope_of", lambda equation: "", []),  # by which the report finds them
    ],
)
def test_without_it_the_numbers_are_right(name, instead, in_place, monkeypatch):
    monkeypatch.setattr(jaxprs if hasattr(jaxprs, name) else _private, name, instead)
    assert check_right(scans=in_place == []) == in_place


@pytest.mark.parametrize("name", ["Literal", "jaxpr_as_fun"])
def test_without_what_programs_are_made_of_the_tool_is_left_out(name, monkeypatch):
    monkeypatch.delattr(jax.extend.core, name)
    for module in ("in_jax", "programs_in_jax"):
        monkeypatch.delitem(sys.modules, f"funcga.tools.scan_layers.{module}", raising=False)
    monkeypatch.delattr(funcga.tools.scan_layers, "programs_in_jax")
    with pytest.raises(ImportError):
        importlib.import_module("funcga.tools.scan_layers.in_jax")
    params, batch, loss = model()
    gradient = jax.value_and_grad(loss)
    assert difference(JAX, funcga.accumulate(gradient, 4)(params, batch), gradient(params, batch)) <= LIMITS["float32"]


def test_without_the_state_of_traces_every_call_counts_as_traced(monkeypatch):
    monkeypatch.setattr(_private, "TRACE_STATE", None)
    params, batch, loss = model()
    with pytest.raises(funcga.FuncgaError, match='n="auto"'):
        funcga.accumulate(jax.value_and_grad(loss), "auto")(params, batch)


def test_all_that_is_private_stands_in_two_files():
    """One of the backend, and one of the tool that writes programs anew."""
    private = re.compile(
        r"jax\._src|jax\.core\.|jax\.extend\.core\.|manual_axis_type|\.vma\b|get_bind_params|ctx\.manager|ft_in|source_info"
    )
    paths = [*(ROOT / "jax_backend").glob("*.py"), *(ROOT / "funcga" / "tools" / "scan_layers").glob("*.py")]
    for path in paths:
        lines = [line for line in path.read_text().splitlines() if private.search(line) and "import" not in line]
        assert path.name in ("_private.py", "programs_in_jax.py") or not lines, (path.name, lines)
