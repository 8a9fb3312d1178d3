"""What is installed, in which versions, and on which devices it runs: `python -m funcga info`."""

import importlib.metadata
import importlib.util
import platform

PACKAGES = ("funcga", "torch", "jax", "jaxlib", "optax", "numpy", "ml_dtypes", "rich", "matplotlib", "scikit-learn",
            "flax", "equinox", "transformers")  # fmt: skip


def installed() -> dict[str, str | None]:
    """The version of every package that funcga works with, None for one that is not installed; none is imported."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The versions of what the figures of a report depend on, by name."""
    names = ("funcga", "torch", "jax", "numpy")
    return {"python": platform.python_version()} | {name: found for name in names if (found := _version(name))}


def devices() -> dict[str, list[str]]:
    """The devices of each framework that is installed, which it imports."""
    found = {}
    if importlib.util.find_spec("torch"):
        found["torch"] = importlib.import_module("torch_backend.problems").devices()
    if importlib.util.find_spec("jax"):
        found["jax"] = importlib.import_module("jax_backend.problems").devices()
    return found
