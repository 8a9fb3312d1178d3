"""How the core loads tools, which lie in `funcga/tools`: by name alone."""

from importlib import import_module
from typing import Any

from funcga.errors import FuncgaError


def load(name: str, wanted: str) -> Any:
    """The module of a tool, such as "observe" or "observe.in_torch".

    Raises FuncgaError, which says what is `wanted`, where the tool was taken away.
    """
    try:
        return import_module(f"funcga.tools.{name}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("funcga.tools"):
            raise
        raise FuncgaError(
            f"{wanted} needs the tool {error.name}, which was taken out of this installation. "
            "Install funcga as a whole: pip install --force-reinstall funcga."
        ) from error
