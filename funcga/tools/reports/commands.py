"""What the commands share: objects by `FILE.py:NAME`, and what is installed."""

import difflib
import importlib.metadata
import importlib.util
import platform
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from funcga import __version__
from funcga.errors import FuncgaError
from funcga.tools.reports.tables import text_table


class Loaded(NamedTuple):
    """An object, the name that it has, and the module that it is in."""

    value: Any
    name: str
    module: ModuleType


def load_object(where: str, definition: str) -> Loaded:
    """The object of `FILE.py:NAME`; of `FILE.py` alone, that of the name which the definition has.

    The file is run as Python runs a script, with its own folder first in sys.path, but not as
    `__main__`. Raises FuncgaError for whatever the file raises, and if there is no such file or
    name: then it offers names of the file, and the definition, such as `problem =
    funcga.checks.Problem(...)`.
    """
    # A colon may also stand in a path, so the name begins after ".py:".
    file, _, name = where.partition(".py:")
    path = Path(file if file.endswith(".py") else f"{file}.py")
    default = definition.split()[0]
    name = name or default
    if not path.is_file():
        raise FuncgaError(
            f"{where}: there is no file {path}. Write FILE.py:{default}, a path from the current "
            "folder."
        )
    module = _module(path)
    variables = vars(module)
    if name not in variables:
        # The names closest to the one that was asked for, else the last ones: results stand at the
        # end of a file.
        names = [
            each
            for each, value in variables.items()
            if not each.startswith("_") and not isinstance(value, ModuleType)
        ]
        offered = difflib.get_close_matches(name, names, n=3) or names[-6:]
        raise FuncgaError(
            f"{where}: {path} has no `{name}`, but {', '.join(offered) or 'nothing'}. Write "
            f"{path}:NAME of what is meant, or add it: {definition}."
        )
    return Loaded(variables[name], name, module)


_PREFIX = "funcga_loaded_"


def _module(path: Path) -> ModuleType:
    name = f"{_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    # Under a prefix in sys.modules: `blamed` knows it by that, and pickle finds it.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise FuncgaError(f"{path} does not import: {blamed(error)}") from error
    return module


def blamed(error: BaseException) -> str:
    """An error in a line: its type and text, and the last line of a loaded file that it came
    through.
    """
    files = {module.__file__ for name, module in sys.modules.items() if name.startswith(_PREFIX)}
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files
    ]
    where = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


# -- versions and devices, as `python -m funcga info` shows them

PACKAGES = (
    "torch",
    "jax",
    "jaxlib",
    "optax",
    "numpy",
    "ml_dtypes",
    "matplotlib",
    "scikit-learn",
    "flax",
    "equinox",
    "transformers",
    "accelerate",
    "lightning",
    "peft",
)


def _version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The versions of what the figures of a report depend on, by name."""
    names = ("torch", "jax", "jaxlib", "optax", "numpy")
    ours = {"python": platform.python_version(), "funcga": __version__}
    return ours | {name: version for name in names if (version := _version(name))}


def show() -> None:
    """Prints the versions and the devices as a table."""
    devices_of = {}  # the frameworks alone have devices
    for name in ("torch", "jax"):
        with suppress(ModuleNotFoundError):
            side = importlib.import_module(f"funcga.tools.trees.in_{name}")
            devices_of[name] = side.devices()
    lines = [["package", "version", "devices"]]
    lines += [["python", platform.python_version(), platform.platform()]]
    lines += [["funcga", __version__, ""]]
    lines += [
        [name, _version(name) or "not installed", ", ".join(devices_of.get(name, ()))]
        for name in PACKAGES
    ]
    print(text_table(lines))
