"""What the commands share: objects by `FILE.py:NAME`, and what is installed."""

import importlib.metadata
import importlib.util
import platform
import sys
import traceback
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
    name: then it shows the definition, such as `problem = funcga.checks.Problem(...)`.
    """
    # A colon may also stand in a path, so the name begins after ".py:".
    file, _, name = where.partition(".py:")
    path = Path(file if file.endswith(".py") else f"{file}.py")
    name = name or definition.split()[0]
    loaded = f"{_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(loaded, path)
    assert spec is not None
    assert spec.loader is not None
    # Under a prefix in sys.modules: `blamed` knows it by that, and pickle finds it.
    module = sys.modules[loaded] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise FuncgaError(f"{path} does not import: {blamed(error)}") from error
    variables = vars(module)
    if name not in variables:
        raise FuncgaError(
            f"{where}: {path} has no `{name}`. Write {path}:NAME of what is meant, or add it: "
            f"{definition}."
        )
    return Loaded(variables[name], name, module)


_PREFIX = "funcga_loaded_"


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
    "rich",
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
    lines = [["package", "version", "devices"]]
    lines += [["python", platform.python_version(), platform.platform()]]
    lines += [["funcga", __version__, ""]]
    for name in PACKAGES:
        version, devices = _version(name), list[str]()
        # The frameworks alone have devices.
        if version and name in ("torch", "jax"):
            devices = importlib.import_module(f"funcga.tools.trees.in_{name}").devices()
        lines.append([name, version or "not installed", ", ".join(devices)])
    print(text_table(lines))
