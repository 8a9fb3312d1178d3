"""How long imports take, each in a fresh interpreter, one after another, round after round."""

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.cases import Case
from benchmarks.comparison import Figures
from benchmarks.measure import quartiles

MODULES = {
    "funcga": ("funcga",),
    "torch": ("torch",),
    "torch_funcga": ("torch", "funcga", "torch_backend"),
    "jax": ("jax",),
    "jax_funcga": ("jax", "funcga", "jax_backend"),
    "optax": ("optax",),
    "accelerate": ("accelerate",),
    "lightning_fabric": ("lightning_fabric",),
}
# What an import is more than: its `more_seconds` are the differences within a round.
_WITHOUT = {"torch_funcga": "torch", "jax_funcga": "jax"}

_ROUNDS = 7
_PROGRAM = "import sys, time; start = time.perf_counter(); {}; print(time.perf_counter() - start, len(sys.modules))"


@contextlib.contextmanager
def started(case: Case) -> Iterator[None]:
    """None; this process imports nothing."""
    yield


def update(case: Case) -> Figures:
    """The seconds of each import, and how many modules are there after it."""
    wanted = {key: modules for key, modules in MODULES.items() if not case.only or key in case.only}
    left_out = {key: f"{missing} is not installed" for key, names in wanted.items() if (missing := _missing(names))}
    run = {key: modules for key, modules in wanted.items() if key not in left_out}
    counts = {key: _imported(modules)[1] for key, modules in run.items()}  # and each has its bytecode from now on
    times: dict[str, list[float]] = {key: [] for key in run}
    rounds = _ROUNDS if case.seconds >= 1 else 2
    for _ in range(rounds):
        for key, modules in run.items():
            times[key].append(_imported(modules)[0])
    figures: Figures = {}
    for key, modules in run.items():
        name = f"import {', '.join(modules)}"
        figures[key] = {"name": name, "seconds": quartiles(times[key]), "modules": counts[key]}
        if (less := _WITHOUT.get(key)) in run:
            pairs = zip(times[key], times[less], strict=True)
            figures[key]["more_seconds"] = quartiles([more - without for more, without in pairs])
    return {"rounds": rounds, "left_out": left_out, "contenders": figures}


def _missing(modules: tuple[str, ...]) -> str:
    return next((name for name in modules if importlib.util.find_spec(name) is None), "")


def _imported(modules: tuple[str, ...]) -> tuple[float, int]:
    program = _PROGRAM.format(f"import {', '.join(modules)}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, count = done.stdout.split()
    return float(seconds), int(count)
