"""What checks take and return.

`funcga.compare` returns a `Report`, `funcga.verify` a `Verdict` and `funcga.plan` a `Plan`; `python
-m funcga parity` takes a `Problem`.

Example:
    >>> report: funcga.checks.Report = funcga.compare({"w": torch.ones(2)}, {"w": torch.ones(2)})
    >>> report.ok
    True
"""

from importlib import import_module
from typing import TYPE_CHECKING

from funcga.errors import needs_numpy

# Each tool loads when it is used, and can be taken away.
if TYPE_CHECKING:
    from funcga.tools.compare.report import Report
    from funcga.tools.parity import Problem
    from funcga.tools.plan import Plan
    from funcga.tools.verify import Verdict
else:
    _LATER = {
        "Plan": "funcga.tools.plan",
        "Problem": "funcga.tools.parity",
        "Report": "funcga.tools.compare.report",
        "Verdict": "funcga.tools.verify",
    }

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module 'funcga.checks' has no attribute {name!r}")
        with needs_numpy(f"funcga.checks.{name}"):
            return vars(import_module(_LATER[name]))[name]


__all__ = ["Plan", "Problem", "Report", "Verdict"]
