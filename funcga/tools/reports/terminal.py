"""Reports on a terminal, which `rich` colours if it is installed; anywhere else they are plain."""

import sys
from importlib.util import find_spec
from typing import Any

STYLES = {
    "bold": r"(?m)^\d+\. .+$",
    "green": (
        r"(?m)^Every target weighs the same|\b(is exact|are close|exact$|within$|the same\.$|yes <)"
    ),
    "red": r"(?m)\b(NOT exact|not close|DIFFERENT|BEYOND$|no n fits)|! \w+$",
    "yellow": r"\bcannot be told|Note:",
    "cyan": r"(?<=Fix: ).+",
}
_ASCII = str.maketrans("▁▂▃▄▅▆▇█", "12345678")


def show(text: str) -> None:
    """Prints a report: in colour on a terminal, and in ASCII where the output has no bars."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    if console := _console(sys.stdout):
        console.print(coloured(text), soft_wrap=True)
    else:
        print(text, flush=True)


def show_progress(text: str) -> None:
    """Writes a line to standard error, if that is a terminal, which what comes next overwrites."""
    if console := _console(sys.stderr):
        # At the right end, where a shorter line that overwrites it leaves it readable.
        line = text.rjust(console.width - 1)
        console.print(line, end="\r", style="dim", highlight=False)


def _console(file: Any) -> Any:
    """Where rich prints; None for plain text."""
    # A script may have put a writer of its own there.
    if not getattr(file, "isatty", bool)() or find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(file=file)


def coloured(text: str) -> Any:
    """A report as rich shows it. It needs rich."""
    from rich.text import Text

    result = Text(text)
    for style, pattern in STYLES.items():
        result.highlight_regex(pattern, style)
    return result
