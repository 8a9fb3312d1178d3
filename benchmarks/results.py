"""The results of a run as one JSON file: what was measured, on which machine, with which versions."""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import Case, cases
from benchmarks.comparison import Figures
from funcga.errors import FuncgaError
from funcga.tools.reports.commands import versions as own_versions

FORMAT = 1
ROOT = Path(__file__).parent.parent

_RIVALS = ("accelerate", "lightning-fabric", "torchopt", "transformers")
_RIVALS += ("gradcache", "open_clip_torch", "sentence-transformers")


class Results(NamedTuple):
    """Figures by the names of the cases, and what they depend on. Only files that agree in the rest are added to."""

    mode: str
    device: str
    machine: dict[str, Any]
    versions: dict[str, str]
    cases: dict[str, Figures]

    def plus(self, case: Case, figures: Figures) -> "Results":
        """These, and the figures of a case, measured now; in the order of the mode's cases."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = {**self.cases, case.name: {"case": case._asdict(), "when": now, **figures}}
        places = {known.name: place for place, known in enumerate(cases(self.mode, self.device))}
        names = sorted(found, key=lambda name: places.get(name, len(places)))
        return self._replace(cases={name: found[name] for name in names})

    def has(self, case: Case) -> bool:
        """Whether the case is there, with all the contenders that it is to have."""
        if case.name not in self.cases:
            return False
        there = Case.of(self.cases[case.name]["case"])
        covered = not there.only or (bool(case.only) and {*case.only} <= {*there.only})
        return covered and there._replace(only=()) == case._replace(only=())


def empty(mode: str, device: str) -> Results:
    """The results of a run that is to begin, here and now."""
    return Results(mode, device, machine(device), versions(), {})


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on: `accelerator` is None on the CPU.

    Raises FuncgaError if torch does not have the device.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
        "accelerator": _accelerator(device),
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _accelerator(device: str) -> str | None:
    if device == "cpu":
        return None
    import torch

    index = int(device.partition(":")[2] or 0)
    if index >= (count := torch.cuda.device_count()):
        raise FuncgaError(
            f"--device {device}: torch {torch.__version__} has {count} CUDA devices here. Leave --device out to "
            "measure on the CPU, or install a torch that is built for this GPU."
        )
    return str(torch.cuda.get_device_name(index))


def versions() -> dict[str, str]:
    """The versions of what the figures depend on; that of funcga has a digest of its sources."""
    found = own_versions()
    for name in _RIVALS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"funcga": f"{found['funcga']} ({_digest()})"}


def _digest() -> str:
    files = [file for package in ("funcga", "torch_backend", "jax_backend") for file in (ROOT / package).rglob("*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:8]


def saved(results: Results, file: Path) -> None:
    """None; the file has these results, or, if this is interrupted, those that it had."""
    own = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        own.write_text(json.dumps({"format": FORMAT, **results._asdict()}, indent=1) + "\n")
        os.replace(own, file)
    finally:
        own.unlink(missing_ok=True)


def loaded(file: Path) -> Results:
    """The results in a file. Raises FuncgaError if it is none of results, or of another format."""
    try:
        found = json.loads(file.read_text())
        form = found.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FuncgaError(f"{file} has no results of benchmarks. Write --out with the name of another file.") from error
    if form != FORMAT:
        raise FuncgaError(
            f"{file} has format {form}, and this program reads format {FORMAT}. Measure again: --again, or --out with "
            "the name of another file."
        )
    return Results(**found)


def resumed(file: Path, fresh: Results) -> Results:
    """The results in the file, to add to, or `fresh` ones if there is no file.

    Raises FuncgaError if the file is of another mode, device, machine or of other versions: figures of one file are of
    one run.
    """
    if not file.exists():
        return fresh
    there = loaded(file)
    for field in ("mode", "device", "machine", "versions"):
        old, new = getattr(there, field), getattr(fresh, field)
        if old != new:
            raise FuncgaError(
                f"{file} has results of another {field.removesuffix('s')}: {_difference(old, new)}. Figures of one "
                "file are of one run: --again replaces it, --out FILE writes another."
            )
    return there


def _difference(old: Any, new: Any) -> str:
    if not isinstance(old, dict):
        return f"{old!r}, and this run is {new!r}"
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "; ".join(f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in changed)
