"""Several processes of JAX, with some devices each: two processes run all cases, and what they found is asked here.

`python -m tests.jax_backend.test_processes_jax PORT RANK FILE` is one of them. It writes what each case returned, or raised, to the file.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend

LIMIT = 150  # seconds, for both processes together
PROCESSES, DEVICES, ROWS, N = 2, 2, 16, 3


def problem():
    r = np.random.default_rng(5)
    params = {"b": r.normal(size=4), "w": r.normal(size=(3, 4))}
    return params, r.normal(size=(ROWS, 3)), r.integers(0, 5, size=ROWS)


def mean_loss(params, x):
    return (jnp.tanh(x @ params["w"] + params["b"]) ** 2).mean()


def sum_loss(params, batch):
    return (
        ((jnp.tanh(batch["x"] @ params["w"] + params["b"]) ** 2).mean(1)) * batch["tokens"].astype(batch["x"].dtype)
    ).sum()


def mesh():
    return jax.make_mesh((PROCESSES * DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def everywhere(tree):
    return jax.device_put(jax.tree.map(jnp.float32, tree), NamedSharding(mesh(), P()))


def cut(array):
    """The rows of all processes, of which each has brought its own."""
    own = np.split(np.asarray(array), PROCESSES)[jax.process_index()]
    own = own.astype("float32") if own.dtype == "float64" else own
    return jax.make_array_from_process_local_data(NamedSharding(mesh(), P("data")), own)


def told(tree):
    """Every leaf of a tree, as this process sees it."""
    return [np.asarray(leaf.addressable_data(0)).tolist() for leaf in jax.tree.leaves(tree)]


# -- the cases, each of which runs in all processes


def replicated():
    params, x, _ = problem()
    step = funcga.accumulate(jax.value_and_grad(mean_loss), 2, across="data")
    step = jax_backend.replicated(step, mesh())
    params, x = everywhere(params), cut(x)
    return told((step(params, x), jax.jit(step)(params, x)))


def across():
    params, x, tokens = problem()
    fold = partial(funcga.accumulate, fold=funcga.per_weight(), weight=lambda batch: batch["tokens"].sum())
    step = fold(jax.value_and_grad(sum_loss), N, across="data")
    step = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P()))
    return told(step(everywhere(params), {"x": cut(x), "tokens": cut(tokens)}))


def sharded_stream():
    """Fully sharded parameters, outside of jit: no process has them whole, nor their gradients."""
    params, x, _ = problem()
    params = {
        "b": everywhere(params["b"]),
        "w": jax.device_put(jnp.float32(params["w"]), NamedSharding(mesh(), P(None, "data"))),
    }
    loss, grads = funcga.stream(jax.value_and_grad(mean_loss))(params, [cut(x[:8]), cut(x[8:])])
    whole = multihost_utils.process_allgather(grads, tiled=True)
    return [told(loss), list(grads["w"].addressable_data(0).shape), [leaf.tolist() for leaf in jax.tree.leaves(whole)]]


def same_replicas():
    funcga.check_replicas(everywhere(problem()[0]), "data")


def other_replicas():
    params = everywhere(problem()[0])
    pieces = [jnp.full(4, jax.process_index(), jnp.float32, device=device) for device in jax.local_devices()]
    params["b"] = jax.make_array_from_single_device_arrays((4,), NamedSharding(mesh(), P()), pieces)
    funcga.check_replicas(params, "data")


def other_parts():
    """Parts over `model` that differ along `data`, between processes: no process sees both copies of one."""
    grid = jax.make_mesh((PROCESSES, DEVICES), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = NamedSharding(grid, P("model"))
    parts = lambda drift: jax.make_array_from_callback(
        (4,), spec, lambda index: np.arange(4, dtype="float32")[index] + drift
    )
    same = {"a": parts(0), "own": jnp.ones(3), "none": None, "key": jax.random.key(1)}
    funcga.check_replicas(same, "data")
    funcga.check_replicas({"w": parts(jax.process_index())}, "model")
    funcga.check_replicas({**same, "w": parts(jax.process_index())}, "data")


def handed_over():
    tx = funcga.multi_steps(optax.sgd(0.5), N, across="data")
    specs = jax_backend.state_specs(tx)
    init = jax.shard_map(tx.init, mesh=mesh(), in_specs=P(), out_specs=specs)
    funcga.to_numpy(jax.jit(init)(everywhere(problem()[0])))


def trained(saved, file):
    """The params after a window and a half, with the state saved and loaded before the call `saved`."""
    params, x, _ = problem()
    tx, places = funcga.multi_steps(optax.sgd(0.5, momentum=0.9), N, across="data"), mesh()
    specs = jax_backend.state_specs(tx)
    over = partial(jax.shard_map, mesh=places)

    def step(params, state, x):
        own = lax.pcast(params, "data", to="varying")
        updates, state = tx.update(jax.grad(mean_loss)(own, x), state, params, weight=len(x))
        return optax.apply_updates(params, updates), state

    def last(params, state):
        updates, state = tx.flush(state, params)
        return optax.apply_updates(params, updates)

    step = jax.jit(over(step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))
    params = everywhere(params)
    state = jax.jit(over(tx.init, in_specs=P(), out_specs=specs))(params)
    for call in range(5):
        if call == saved:
            state = restored(state, specs, places, file)
        params, state = step(params, state, cut(x * (call + 1)))
    return told(jax.jit(over(last, in_specs=(P(), specs), out_specs=P()))(params, state))


def restored(state, specs, places, file):
    """The state from a file that the first process has written, with the windows of all devices in it."""
    leaves, structure = jax.tree.flatten(state)
    whole = [multihost_utils.process_allgather(leaf, tiled=True) for leaf in leaves]
    if jax.process_index() == 0:
        np.savez(file, *whole)
    multihost_utils.sync_global_devices("saved")
    loaded = np.load(file)
    prefix = jax.tree.broadcast(specs, state, is_leaf=lambda spec: isinstance(spec, P))
    shardings = [NamedSharding(places, spec) for spec in jax.tree.leaves(prefix, is_leaf=lambda s: isinstance(s, P))]
    placed = [jax.device_put(leaf, s) for leaf, s in zip(loaded.values(), shardings, strict=True)]
    return jax.tree.unflatten(structure, placed)


def dead():
    """What a process gets that folds with one which is no more."""
    params, x, _ = problem()
    step = jax_backend.replicated(funcga.accumulate(jax.grad(mean_loss), 2, across="data"), mesh())
    params, x = everywhere(params), cut(x)
    jax.block_until_ready(step(params, x))
    if jax.process_index() == 1:
        os._exit(0)
    for _ in range(3):
        jax.block_until_ready(step(params, x))


def run(port, rank, file):
    with jax.numpy_dtype_promotion("standard"):
        jax.config.update("jax_num_cpu_devices", DEVICES)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{port}", PROCESSES, rank, cluster_detection_method="deactivate", initialization_timeout=60,
            heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10,
        )  # fmt: skip
        found = {}
        saved = Path(file).parent / "state.npz"
        cases = [
            replicated,
            across,
            sharded_stream,
            same_replicas,
            other_replicas,
            other_parts,
            handed_over,
            partial(trained, 4, saved),
            dead,
        ]
        for case in cases:
            name = "_".join([getattr(case, "__name__", "restored"), *map(str, getattr(case, "args", ())[:1])])
            try:
                found[name] = case()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
            Path(file).write_text(json.dumps(found))
        os._exit(0)  # a peer is gone, for which the end of the program would wait


@pytest.fixture(scope="module")
def processes():
    """What every case has returned, or raised, in each of the processes."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        files = [Path(folder) / str(rank) for rank in range(PROCESSES)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.jax_backend.test_processes_jax", str(port), str(rank), str(file)],
                env=environment, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        try:
            printed = [process.communicate(timeout=LIMIT)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert all(file.exists() for file in files), printed
        return [json.loads(file.read_text()) for file in files], printed


def check_told(processes, name, expected):
    for found in processes[0]:
        assert not isinstance(found[name], str), found[name]
        for leaf, own in zip(found[name], jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(leaf, own, rtol=2e-5, atol=1e-7)


def whole(loss, *args):
    """The value and gradient of all rows, on one device in float64."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.value_and_grad(loss)(*jax.tree.map(jnp.asarray, args)))


def test_the_gradient_is_that_of_all_processes(processes):
    params, x, tokens = problem()
    expected = whole(mean_loss, params, x)
    check_told(processes, "replicated", (expected, expected))
    value, grads = whole(sum_loss, params, {"x": x, "tokens": tokens})
    check_told(processes, "across", jax.tree.map(lambda leaf: leaf / tokens.sum(), (value, grads)))


def test_a_stream_over_sharded_parameters(processes):
    params, x, _ = problem()
    value, grads = whole(mean_loss, params, x)
    for found in processes[0]:
        (loss,), shape, leaves = found["sharded_stream"]
        np.testing.assert_allclose(loss, value, rtol=2e-5)
        assert shape == [3, 1]
        for leaf, own in zip(leaves, jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(leaf, own, rtol=2e-5, atol=1e-7)


def test_replicas_of_several_processes(processes):
    for found in processes[0]:
        assert found["same_replicas"] is None
        for name, path in (("other_replicas", "params['b']"), ("other_parts", "params['w']")):
            text = found[name]
            assert text.startswith(f"FuncgaError: `{path}` is not the same on all replicas: "), text
            devices = text.removeprefix(f"FuncgaError: `{path}` is not the same on all replicas: ").split(" hold ")[0]
            assert len({*devices.split(" and ")}) == 2


def test_a_state_in_the_middle_of_a_window(processes):
    """Saved by one process, with the windows of all devices in it, and loaded by all; as if it had not been."""
    params, x, _ = problem()
    momentum = jax.tree.map(np.zeros_like, params)
    for calls in (range(3), range(3, 5)):
        grads = [whole(mean_loss, params, x * (call + 1))[1] for call in calls]
        grads = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *grads)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.5 * m, params, momentum)
    check_told(processes, "restored_4", params)


def test_what_lies_in_other_processes_is_not_handed_over(processes):
    for found in processes[0]:
        assert "which cannot be converted: " in found["handed_over"]
        assert "process_allgather" in found["handed_over"]


def test_a_process_that_dies(processes):
    """The others get an error, well within the limit of these tests."""
    (alive, gone), printed = processes
    assert "dead" not in gone
    assert "JaxRuntimeError" in alive.get("dead", printed[0])


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3])
