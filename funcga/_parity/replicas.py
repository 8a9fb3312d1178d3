"""Replicas: a problem accumulated over several of them, in processes of their own, against one device.

As a program, this is what such a process runs: torch has one for each replica, JAX one that has as many devices.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from funcga._accumulate import accumulate
from funcga._loading import blamed
from funcga._parity.problems import Choice, chosen
from funcga._parity.sides import Result, Side
from funcga._types import Array
from funcga.errors import FuncgaError


class Merged(NamedTuple):
    """What was found of the same rows by replicas, accumulated, and by one device at once. `rows`: of each replica."""

    accumulated: Result
    full: Result
    rows: list[int]


def over_replicas(choice: Choice, side: Side, n: int, count: int) -> Merged:
    """The Merged of a side over so many replicas, each with n micro-batches of its own rows.

    In torch replicas differ by a row, if the rows do not divide; JAX leaves out the rows that are too many. Raises
    FuncgaError with the last line that the processes have written, if they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The processes find the problem as the command line named it; the first one writes the result to a file.
        file = Path(folder) / "merged.npz"
        options = [*choice, side.framework, side.dtype, side.device, n, count, file]
        command = [sys.executable, *_launcher(side.framework, count), "-m", __name__, *map(str, options)]
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(count), "OMP_NUM_THREADS": "1"}
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False, timeout=_TIMEOUT
            )
        except subprocess.TimeoutExpired as error:
            raise FuncgaError(f"--ranks: {side.label} over {count} replicas took more than {_TIMEOUT} s.") from error
        if process.returncode or not file.exists():
            raise FuncgaError(f"--ranks: {side.label} over {count} replicas failed: {_reason(process.stderr)}")
        return _read(file)


_TIMEOUT = 1800  # seconds


def _launcher(framework: str, count: int) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return run if framework == "torch" else []


def _reason(text: str) -> str:
    # A launcher puts a prefix before each line, and lines of its own after the last one of ours.
    ours = [line[line.index("funcga: ") :] for line in text.splitlines() if "funcga: " in line]
    return (ours or text.strip().splitlines() or ["nothing was written"])[-1].removeprefix("funcga: ")


def _read(file: Path) -> Merged:
    with np.load(file) as arrays:
        accumulated, full = (_result(arrays, run) for run in ("accumulated", "full"))
        return Merged(accumulated, full, arrays["rows"].tolist())


def _result(arrays: Mapping[str, Array], run: str) -> Result:
    # A path may have slashes of its own, so only the first two are ours.
    gradients = {key.split("/", 2)[2]: arrays[key] for key in arrays if key.startswith(f"{run}/g/")}
    return Result(arrays[f"{run}/loss"], gradients)


def _work(side: Side, n: int, count: int) -> Merged | None:
    """The Merged; None in all processes but the first."""
    problem = side.problem
    step = partial(accumulate, side.gradient, n, fold=problem.fold, weight=problem.weight, in_axes=problem.in_axes)
    with side.running():
        rows = side.own.rows_of_replicas(side.arguments.rows(), count)
        result = side.own.over_replicas(step, side.arguments, rows)
    return None if result is None else Merged(side.result(result), side.full(sum(rows)), rows)


def _write(file: Path, merged: Merged) -> None:
    arrays: dict[str, Array] = {"rows": np.asarray(merged.rows)}
    for run, result in (("accumulated", merged.accumulated), ("full", merged.full)):
        arrays[f"{run}/loss"] = result.loss
        arrays |= {f"{run}/g/{path}": leaf for path, leaf in result.gradient.items()}
    np.savez(file, **arrays)


def _own_device(framework: str, device: str) -> str:
    """The device of this process: on a machine with several GPUs every replica of torch has one of its own."""
    return f"{device}:{os.environ['LOCAL_RANK']}" if (framework, device) == ("torch", "cuda") else device


def main() -> None:
    """None; writes the Merged of a replica's side to a file, as the command line of this program says."""
    parser = argparse.ArgumentParser()
    for name in ("where", "seed", "name", "framework", "dtype", "device", "n", "count", "file"):
        parser.add_argument(name)
    options = parser.parse_args()
    try:
        problem = chosen(Choice(options.where, int(options.seed), options.name))
        side = Side(problem, options.framework, options.dtype, _own_device(options.framework, options.device))
        merged = _work(side, int(options.n), int(options.count))
    except Exception as error:
        sys.exit(f"funcga: {error if isinstance(error, FuncgaError) else blamed(error)}")
    if merged is not None:
        _write(Path(options.file), merged)


if __name__ == "__main__":
    main()
