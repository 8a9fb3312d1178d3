"""One case in a process of its own, or in one for each rank: reads the case and writes its figures, both as JSON.

python -m benchmarks.worker CASE FILE
"""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.comparison import Figures


def figures(case: Case) -> Figures:
    """What the case has measured; among ranks, what this one has."""
    side = importlib.import_module("benchmarks.in_" + case.setting.partition("_")[0])
    with side.started(case):
        return side.exactness(case) if case.kind == "exactness" else side.update(case)


def main(case: str, file: str) -> None:
    """None; the first rank's figures are in the file."""
    warnings.simplefilter("ignore")  # what the rivals warn of is theirs to mend
    made = figures(Case.of(json.loads(case)))
    if os.environ.get("RANK", "0") == "0":
        Path(file).write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
