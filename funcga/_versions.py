"""What is installed, in which versions, and on which devices it runs, as `python -m funcga info`
shows it.
"""

import importlib.metadata
import importlib.util
import platform

from funcga import __version__
from funcga._backend.dispatch import load
from funcga._tables import rich_table
from funcga.errors import FuncgaError

PACKAGES = (
    "torch",
    "jax",
    "jaxlib",
    "optax",
    "numpy",
    "ml_dtypes",
    "rich",
    "matplotlib",
    "scikit-learn",
    "flax",
    "equinox",
    "transformers",
)


def installed() -> dict[str, str | None]:
    """The version of every package that funcga works with, None for one that is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The versions of what the figures of a report depend on, by name."""
    names = ("torch", "jax", "jaxlib", "optax", "numpy")
    ours = {"python": platform.python_version(), "funcga": __version__}
    return ours | {name: version for name in names if (version := _version(name))}


def devices() -> dict[str, list[str]]:
    """The devices of each framework that is installed, which this imports."""
    return {name: load(name).arrays.devices() for name in ("torch", "jax") if _is_found(name)}


def show() -> None:
    """None; prints the versions and the devices as a table."""
    from rich.console import Console

    # The frameworks alone have devices.
    devices_of = devices()
    lines = [["python", platform.python_version(), platform.platform()], ["funcga", __version__]]
    lines += [
        [name, version or "not installed", ", ".join(devices_of.get(name, ()))]
        for name, version in installed().items()
    ]
    Console(highlight=False).print(rich_table(("package", "version", "devices"), lines))


def check_installed(*modules: str) -> None:
    """Raises FuncgaError that names the packages which are missing, and the extra that has them."""
    missing = [_DISTRIBUTIONS.get(module, module) for module in modules if not _is_found(module)]
    if missing:
        raise FuncgaError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and "
            f"this command needs {'it' if len(missing) == 1 else 'them'}: pip install "
            "'funcga[parity]'"
        )


# Where a package is not installed by the name that it is imported by.
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    # A ValueError where it is None in sys.modules, as a package that must not be imported is.
    except (ImportError, ValueError):
        return False
