"""The cases of JAX: every contender is compiled once, ahead of time, and that program is timed and analysed."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import jax_workloads
from benchmarks.cases import Case
from benchmarks.comparison import Figures, Group, about, compared
from benchmarks.jax_measure import Programs
from benchmarks.jax_problem import Optimization, Problem, Step
from benchmarks.registry import Contender, baseline, contenders
from benchmarks.truth import COLUMNS, Question, error, questions


def update(case: Case) -> Figures:
    """The figures of a case, or of one point of it."""
    return compared((windows if case.setting == "jax_optimizer" else gradients)(case), case.seconds)


class _Made(NamedTuple):
    programs: Programs
    traces: list[None]  # one for each time that the loss was traced
    call: Any


def gradients(case: Case) -> Group:
    """The contenders of a case that accumulate gradients, compiled."""
    mesh = _mesh(case) if case.setting == "jax_devices" else None
    devices = mesh.devices.size if mesh else 1
    workload = getattr(jax_workloads, case.workload)(case.n * devices, case.value)
    params, batch = _placed(mesh, workload.params, workload.batch)
    n = len(batch) // (workload.size * devices)
    _warm(workload)
    found, left_out = contenders(case.setting, case.kind, case.only)
    made = {}
    for contender in found:
        loss, traces = _counted(workload.loss)
        step = contender.make(Problem(loss, n, workload.size, mesh=mesh))
        programs = Programs()
        program = programs.compiled(step, params, batch)
        made[contender.key] = _Made(programs, traces, functools.partial(_finished, program, params, batch))
    turns = (1, n, n * workload.layers)
    return _group(
        case,
        found,
        left_out,
        calls={key: each.call for key, each in made.items()},
        structure=lambda key: made[key].programs.figures(turns) | {"traces": len(made[key].traces)},
        about=_sizes(n, params),
    )


def _mesh(case: Case) -> Any:
    return jax.make_mesh((case.ranks,), ("data",), (AxisType.Auto,), devices=jax.devices()[: case.ranks])


def _placed(mesh: Any, params: Any, batch: Any) -> Any:
    if mesh is None:
        return params, batch
    return jax.device_put((params, batch), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))


def _warm(workload: Any) -> None:
    """Compiles the gradient, so that the contender who comes first is not alone in paying for what JAX keeps."""
    rows = workload.batch[: workload.size]
    jax.jit(jax.value_and_grad(workload.loss)).lower(workload.params, rows).compile()


def _counted(loss: Any) -> tuple[Any, list[None]]:
    traces: list[None] = []

    def counted(params: Any, rows: Any) -> Any:
        traces.append(None)
        return loss(params, rows)

    return counted, traces


def _finished(program: Any, *args: Any) -> Any:
    return jax.block_until_ready(program(*args))


def _sizes(n: int, params: Any) -> Figures:
    leaves = jax.tree.leaves(params)
    return {
        "n": n,
        "leaves": len(leaves),
        "parameters": sum(leaf.size for leaf in leaves),
        "parameter_bytes": sum(leaf.nbytes for leaf in leaves),
    }


def _group(case: Case, found: list[Contender], left_out: dict[str, str], **parts: Any) -> Group:
    return Group(found, left_out, baseline(case.setting), **{"arrays": _arrays} | parts)


def _arrays(result: Any) -> list[Any]:
    return [np.array(leaf) for leaf in jax.tree.leaves(result)]


def windows(case: Case) -> Group:
    """The contenders of a case that update, compiled."""
    workload = getattr(jax_workloads, case.workload)()
    found, left_out = contenders(case.setting, case.kind, case.only)
    programs = {contender.key: Programs() for contender in found}
    make = lambda contender: contender.make(
        Optimization(optax.adam(1e-3), case.n, workload.params, workload.grads, programs[contender.key])
    )
    return _group(
        case,
        found,
        left_out,
        calls={contender.key: make(contender) for contender in found},
        arrays=lambda window: _arrays(_updated(*window)),
        structure=lambda key: programs[key].figures() | {"compiles": len(programs[key].parts)},
        about=_sizes(case.n, workload.params),
    )


def _updated(params: Any, updates: Any) -> Any:
    return params if updates is None else optax.apply_updates(params, updates)


def exactness(case: Case) -> Figures:
    """By how much each contender is wrong in each column, or with which words it refuses."""
    found, left_out = contenders(case.setting, case.kind, case.only)
    asked = questions(case.ranks, even_shapes=True)
    return {"left_out": left_out, "contenders": {each.key: answers(case, each, asked) for each in found}}


def answers(case: Case, contender: Contender, asked: list[Question]) -> Figures:
    """What a contender makes of the questions, as the results file says it."""
    errors: dict[str, float | None] = dict.fromkeys(COLUMNS)
    refused: dict[str, str] = {}
    for question in asked:
        try:
            errors[question.column] = error(_answer(case, contender, question), question)
        except (TypeError, ValueError) as refusal:
            refused[question.column] = f"{type(refusal).__name__}: {refusal}".partition("\n")[0]
    return about(contender) | {"errors": errors, "refused": refused}


def _answer(case: Case, contender: Contender, question: Question) -> dict[str, Any]:
    """The contender's gradients, as NumPy's float64."""
    mesh = _mesh(case) if case.setting == "jax_devices" else None
    loss, weight = (_token_loss, _predicted) if question.of_tokens else (_weighted_sum, None)
    step: Step = contender.make(Problem(loss, question.n, question.size, weight, mesh))
    params = jax.tree.map(lambda p: jnp.asarray(p, question.dtype), question.params)
    rows = jnp.asarray(np.concatenate(question.rows), jnp.int32 if question.of_tokens else question.dtype)
    _, grads = jax.jit(step)(*_placed(mesh, params, rows))
    return {name: np.asarray(grad, np.float64) for name, grad in grads.items()}


def _token_loss(params: Any, rows: jax.Array) -> jax.Array:
    """The mean cross entropy over the tokens that are predicted and are not padding."""
    last, following = rows[:, :-1], rows[:, 1:]
    scores = jax.nn.log_softmax(params["embedding"][last] @ params["linear"])
    of_tokens = -jnp.take_along_axis(scores, following[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(following != 0, of_tokens, 0)) / jnp.sum(following != 0)


def _predicted(rows: jax.Array) -> jax.Array:
    return jnp.sum(rows[:, 1:] != 0)


def _weighted_sum(params: Any, rows: jax.Array) -> jax.Array:
    return jnp.mean(rows @ params["w"])


@contextlib.contextmanager
def started(case: Case) -> Iterator[None]:
    """The process as the case wants it: on its device, or with as many devices as it has ranks."""
    if case.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", case.ranks)
    assert (platform := jax.default_backend()) in (case.device, {"cuda": "gpu"}.get(case.device)), (
        f"the case is of {case.device}, and JAX has {platform}"
    )
    yield
