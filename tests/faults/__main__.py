"""`python -m tests.faults`: is each seeded fault noticed, and by which test?

For every fault, the library is copied to a folder of its own and patched there, and pytest runs the tests named with the
fault against that copy. What takes longest to import is imported once, and each pytest is forked from there.
"""

import argparse
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from tests import conftest, faults

# None of them may import the library, nor start a thread or a device.
PRELOADED = ("pytest", "hypothesis", "torch.distributed.fsdp", "torch._dynamo", "jax.numpy", "optax", "equinox")
GOOD = ("killed", "passes", "found")


def main():
    options = arguments().parse_args()
    chosen = [fault for area in options.area or faults.areas() for fault in faults.faults(area)]
    chosen = [fault for fault in chosen if not options.id or fault.id in options.id]
    if not chosen:
        sys.exit("no such fault")
    if options.sound:
        chosen.insert(0, without_fault(chosen))
    started, counts = time.monotonic(), {}
    width = max(len(fault.id) for fault in chosen)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        preload()
        for fault, verdict, seconds, by in ran(chosen, options, Path(folder)):
            counts[verdict] = counts.get(verdict, 0) + 1
            print(f"{verdict:<14} {fault.area:<12} {fault.id:<{width}} {seconds:6.1f} s  {by}", flush=True)
    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    print(
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items()), f"in {time.monotonic() - started:.0f} s"
    )
    sys.exit(0 if set(counts) <= set(GOOD) else 1)


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--area", nargs="+", choices=faults.areas(), help="only the faults of these files")
    parser.add_argument("--id", nargs="+", help="only these faults")
    parser.add_argument("--find", nargs="+", metavar="TESTS", help="run these tests, and list all of them that fail")
    parser.add_argument("--first", action="store_true", help="with --find: only the first that fails")
    parser.add_argument("--sound", action="store_true", help="first run the same tests without a fault: all must pass")
    parser.add_argument("--limit", type=float, default=300, help="seconds, after which the tests of a fault hang")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="so many faults at a time")
    return parser


def without_fault(chosen):
    return faults.Fault("", "nothing", "", "", "", "", tuple(dict.fromkeys(t for f in chosen for t in f.killed_by)))


def preload():
    conftest.compile_quickly()  # JAX reads it once, when it is imported
    conftest.share_what_is_compiled()
    warnings.filterwarnings("ignore", message=r".*os\.fork\(\)")  # nothing has run yet, so no thread can hold a lock
    for name in PRELOADED:
        importlib.import_module(name)
    assert not set(faults.PACKAGES) & set(sys.modules)
    gc.freeze()  # a process that looks for garbage among these would copy them


def ran(chosen, options, folder):
    """Each fault as its tests end, with the verdict, the seconds it took, and by which tests or why."""
    waiting, running = list(chosen), {}
    try:
        while waiting or running:
            while waiting and len(running) < options.j:
                fault = waiting.pop(0)
                if fault.file and fault.patched() is None:
                    yield fault, "does not apply", 0, f"`old` does not stand exactly once in {fault.file}"
                    continue
                copy = copied(fault, folder / fault.id)
                running[forked(fault, copy, options)] = (fault, copy, time.monotonic())
            time.sleep(0.02)
            for pid, (fault, copy, started) in list(running.items()):
                seconds = time.monotonic() - started
                has_ended = os.waitpid(pid, os.WNOHANG)[0] == pid
                if has_ended:
                    verdict, by = judged(fault, copy, options)
                elif seconds > options.limit and fault.file:
                    end(pid)
                    verdict, by = "HANGS", "none of its tests has a limit of its own"
                else:
                    continue
                del running[pid]
                yield fault, verdict, seconds, by
                shutil.rmtree(copy)
    finally:
        for pid in running:
            end(pid)


def end(pid):
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def copied(fault, copy):
    """A folder like this checkout: the library is copied, with what Python has compiled of it, all else is linked to."""
    copy.mkdir()
    for path in faults.ROOT.iterdir():
        if path.name in faults.PACKAGES:
            shutil.copytree(path, copy / path.name)
        elif not path.name.startswith((".pytest_cache", ".hypothesis", ".git")):
            (copy / path.name).symlink_to(path)
    if fault.file:
        (copy / fault.file).write_text(fault.patched())
        for compiled in (copy / fault.file).parent.glob(f"__pycache__/{Path(fault.file).stem}.*"):
            compiled.unlink()
    return copy


def forked(fault, copy, options):
    """The process that runs the tests of a fault, in a session of its own, with all processes that they start."""
    pid = os.fork()
    if pid == 0:
        run_and_end(fault, copy, options)
    return pid


def run_and_end(fault, copy, options):
    os.setsid()
    log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run_tests(copy, options.find or fault.killed_by, stops=(options.first or not options.find) and bool(fault.file))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # and what the tests have started


def run_tests(copy, tests, stops):
    import pytest

    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(p for p in sys.path if p and Path(p).resolve() != faults.ROOT.resolve())]
    noticed = Noticed(copy)
    quietly = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # as plugins are
    argv = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *quietly, *(["-x"] if stops else [])]
    if all(test.startswith("tests/simulated/") for test in tests):
        argv.append("--device=simulated")
    noticed.code = int(pytest.main([*argv, *tests], plugins=[noticed]))
    for package in faults.PACKAGES:
        if package in sys.modules:
            assert Path(sys.modules[package].__file__).parent == copy / package, sys.modules[package].__file__
    (copy / "noticed.json").write_text(json.dumps({k: v for k, v in vars(noticed).items() if k != "copy"}))


class Noticed:
    """A plugin of pytest: what failed."""

    def __init__(self, copy):
        self.copy, self.failed, self.broken, self.passed, self.code = copy, [], [], 0, 0

    def pytest_runtest_logreport(self, report):
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        self.passed += report.when == "call" and report.passed

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.append(report.nodeid)


def judged(fault, copy, options):
    path = copy / "noticed.json"
    if not path.exists():
        tail = (copy / "log").read_text()[-1500:]
        return "DIES", f"the process of the tests ended:\n{tail}"
    noticed = json.loads(path.read_text())
    if noticed["broken"] or (noticed["code"] not in (0, 1)):
        tail = (copy / "log").read_text()[-1500:]
        return "DOES NOT RUN", f"{', '.join(noticed['broken'])} (a fault has to be one of behaviour):\n{tail}"
    if not fault.file:
        return (
            ("FAILS", "\n".join(noticed["failed"])) if noticed["failed"] else ("passes", f"{noticed['passed']} tests")
        )
    if not noticed["failed"]:
        return "SURVIVED", f"{noticed['passed']} tests passed"
    return ("found" if options.find else "killed"), "\n    ".join(
        ["", *noticed["failed"]] if options.find else noticed["failed"]
    )


if __name__ == "__main__":
    main()
