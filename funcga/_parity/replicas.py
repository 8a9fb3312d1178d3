"""Replicas: a problem accumulated over several of them, in processes of their own, against one
device.

As a program, this is what such a process runs: torch has one for each replica, JAX one that has as
many devices.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from funcga._accumulate import accumulate
from funcga._commands import blamed
from funcga._parity.problems import Choice, chosen
from funcga._parity.sides import Result, Side
from funcga.errors import FuncgaError

_TIMEOUT = 1800  # seconds


def over_replicas(
    choice: Choice, side: Side, dtypes: Sequence[str], n: int, count: int
) -> dict[str, tuple[Result, Result]]:
    """By dtype, what so many replicas make of n micro-batches each, of their own rows; and one
    device of the same rows.

    In torch replicas differ by a row, if the rows do not divide; JAX leaves out the rows that are
    too many. Raises FuncgaError with the last line that the processes have written, if they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The processes find the problem as the command line named it; the first one writes the
        # results to a file.
        file = Path(folder) / "results.pickle"
        task = json.dumps([choice, side.framework, dtypes, side.device, n, count, str(file)])
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [
            sys.executable,
            *(launcher if side.framework == "torch" else ()),
            "-m",
            __name__,
            task,
        ]
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(count), "OMP_NUM_THREADS": "1"}
        try:
            process = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=environment,
                check=False,
                timeout=_TIMEOUT,
            )
        except subprocess.TimeoutExpired as error:
            raise FuncgaError(
                f"--ranks: {side.label} over {count} replicas took more than {_TIMEOUT} s."
            ) from error
        if process.returncode or not file.exists():
            raise FuncgaError(
                f"--ranks: {side.label} over {count} replicas failed: {_reason(process.stderr)}"
            )
        results: dict[str, tuple[Result, Result]] = pickle.loads(file.read_bytes())
        return results


def _reason(text: str) -> str:
    # A launcher puts a prefix before each line, and lines of its own after the last one of ours.
    ours = [line[line.index("funcga: ") :] for line in text.splitlines() if "funcga: " in line]
    return (ours or text.strip().splitlines() or ["nothing was written"])[-1].removeprefix(
        "funcga: "
    )


def _merged(side: Side, n: int, count: int) -> tuple[Result, Result] | None:
    """(accumulated, of the same rows at once) in the first process."""
    step = partial(accumulate, side.gradient, n, **side.options)
    with side.running():
        merged = side.own.over_replicas(step, side.arguments, count)
        if merged is None:
            return None
        result, rows = merged
        return side.result(result), side.full(rows)


def main() -> None:
    """None; writes what `over_replicas` returns to a file, which the one argument of this
    program names.
    """
    choice, framework, dtypes, device, n, count, file = json.loads(sys.argv[1])
    # On a machine with several GPUs every replica of torch has one of its own.
    if (framework, device) == ("torch", "cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        problem = chosen(Choice(*choice))
        sides = [Side(problem, framework, dtype, n, device) for dtype in dtypes]
        results = {side.dtype: _merged(side, n, count) for side in sides}
        if None not in results.values():
            Path(file).write_bytes(pickle.dumps(results))
    except Exception as error:
        sys.exit(f"funcga: {error if isinstance(error, FuncgaError) else blamed(error)}")


if __name__ == "__main__":
    main()
