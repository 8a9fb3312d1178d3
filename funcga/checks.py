"""What checks take and return.

`funcga.compare` returns a `Report`, `funcga.verify` a `Verdict` and `funcga.plan` a `Plan`; `python
-m funcga parity` takes a `Problem`.

Example:
    >>> report: funcga.checks.Report = funcga.compare({"w": torch.ones(2)}, {"w": torch.ones(2)})
    >>> report.ok
    True
"""

from typing import TYPE_CHECKING

from funcga._tools import later

# Each tool loads when it is used, and can be taken away.
if TYPE_CHECKING:
    from funcga.tools.compare.report import Report
    from funcga.tools.parity import Problem
    from funcga.tools.plan import Plan
    from funcga.tools.verify import Verdict
else:
    __getattr__ = later(
        __name__,
        {
            "funcga.tools.plan": ("Plan",),
            "funcga.tools.parity": ("Problem",),
            "funcga.tools.compare.report": ("Report",),
            "funcga.tools.verify": ("Verdict",),
        },
    )


__all__ = ["Plan", "Problem", "Report", "Verdict"]
