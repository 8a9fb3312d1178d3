"""The page: the whole report as one self-contained file of HTML."""

import io
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from funcga._cli.information import versions
from funcga._parity import report
from funcga._parity.run import CAUSES, Findings
from funcga._parity.verdict import verdict
from funcga.errors import FuncgaError


def page(every: Sequence[Findings]) -> str:
    """The page of all problems: tables, verdicts and pictures; it loads nothing.

    Raises FuncgaError where jinja2 or matplotlib is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined

        from funcga._parity.pictures import picture
    except ImportError as error:
        raise FuncgaError(f"--html needs {error.name}, which is not installed: pip install 'funcga[parity]'") from error
    template = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    ).from_string(files("funcga._parity").joinpath("page.html").read_text(encoding="utf-8"))
    problems = [
        {
            "findings": findings,
            "lines": report.lines(findings),
            "verdict": verdict(findings),
            "title": report.title(findings).split("\n"),
            "picture": _svg(picture([findings])),
        }
        for findings in every
    ]
    return template.render(
        problems=problems,
        ok=all(findings.ok for findings in every),
        conclusion=report.conclusion(every).plain,
        versions=versions(),
        causes=CAUSES,
        figure=report.figure,
    )


def _svg(figure: Any) -> str:
    """The figure as an element of a page."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text that can be searched
        figure.savefig(text, format="svg", metadata={"Date": None})
    made = text.getvalue()
    return made[made.index("<svg") :]
