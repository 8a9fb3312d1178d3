"""How the core loads tools, which lie in `funcga/tools`: by name, at their first use."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from funcga.errors import FuncgaError


def load(name: str, wanted: str) -> Any:
    """The module of a tool, such as "coupled" or "coupled.in_torch".

    Raises FuncgaError, which says what is `wanted`, where the tool was taken away.
    """
    return _imported(f"funcga.tools.{name}", wanted)


def _imported(module: str, wanted: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "numpy":  # which torch does not need
            raise FuncgaError(
                f"numpy is not installed, and {wanted} needs it. Install it: pip install numpy"
            ) from error
        if not str(error.name).startswith("funcga.tools"):
            raise
        raise FuncgaError(
            f"{wanted} needs the tool {error.name}, which was taken out of this installation. "
            "Install funcga as a whole: pip install --force-reinstall funcga."
        ) from error


def later(package: str, names_in: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """The `__getattr__` of a package whose other names load when they are first used: `names_in`
    has those of each module. `package.name` in the module `package.name` is the module itself.
    """
    modules = {name: module for module, names in names_in.items() for name in names}

    def value_of(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        wanted = f"{package}.{name}"
        module = _imported(modules[name], wanted)
        value = module if modules[name] == wanted else vars(module)[name]
        # Kept in the package, so that the next look finds it without this function.
        vars(sys.modules[package])[name] = value
        return value

    return value_of
