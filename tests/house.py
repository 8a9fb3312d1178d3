"""The library in numbers: how large each package is, how a call runs through it, what its types say.

`python -m tests.house` prints the table; `tests/test_house.py` holds the rows that do not depend on the machine. Size is
counted in tokens of code, since lines grow dense where they are counted: no comment, docstring, newline or indent.
"""

import ast
import io
import itertools
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("funcga", "torch_backend", "jax_backend")


def files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


# Tools use the library from outside, and each can be taken away, with those that stand on it: its modules, and the
# tools that it stands on. All else is the core.
TOOLS = {
    "trees of two frameworks": (("funcga/tools/trees/", "funcga/trees.py"), ()),
    "what reports share": (("funcga/tools/reports/",), ("trees of two frameworks",)),
    "compare": (("funcga/tools/compare/",), ("trees of two frameworks", "what reports share")),
    "verify": (("funcga/tools/verify/",), ("compare", "coupled")),
    "doctor": (("funcga/tools/doctor/", "funcga/_pytest.py"), ("verify",)),
    "finite numbers": (("funcga/tools/finite/",), ()),
    "same replicas": (("funcga/tools/check_replicas/",), ()),
    "coupled": (("funcga/tools/coupled/",), ("example keys",)),
    "observe": (("funcga/tools/observe/", "funcga/observers.py"), ("finite numbers",)),
    "dropping": (("funcga/tools/dropping/",), ("finite numbers",)),
    "totals": (("funcga/tools/totals/",), ()),
    "reproducible": (("funcga/tools/reproducible/",), ()),
    "windows by weight": (("funcga/tools/window_size/",), ("finite numbers",)),
    "loss scale": (("funcga/tools/loss_scale/",), ("finite numbers",)),
    "objects of nnx": (("funcga/tools/nnx_in_jax.py",), ()),
    "example keys": (("funcga/tools/example_keys/",), ()),
    "fused gradients": (("funcga/tools/fused/",), ()),
    "FSDP1": (("funcga/tools/fsdp1/",), ()),
    "compiled micro-steps": (("funcga/tools/compiled/",), ()),
    "batch statistics": (("funcga/tools/statistics/", "funcga/statistics.py"), ()),
    "scans over layers": (("funcga/tools/scan_layers/",), ()),
    "what XLA has made": (("funcga/tools/hlo/", "jax_backend/hlo.py"), ("scans over layers",)),
    "optimizers": (("funcga/tools/optimizers/",), ()),
    "optax on tensors": (("funcga/tools/optax_on_tensors/",), ("trees of two frameworks", "optimizers")),
    "parity": (("funcga/tools/parity/",), ("verify", "optimizers")),
    "plan": (("funcga/tools/plan/",), ("what reports share",)),
    "packs": (("funcga/tools/pack/",), ()),
    "pipelines": (("funcga/tools/pipelines/",), ()),
    "commands": (("funcga/tools/commands/", "funcga/__main__.py"), ("parity", "plan", "doctor")),
}
# Tools with a budget of their own, which their issues have set: they are in no other row.
NEW = {"doctor": "tokens of the doctor", "packs": "tokens of packs"}
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_tokens(source: str) -> int:
    """The tokens of code: all but comments, docstrings, newlines and indents.

    How lines are broken makes no difference: a text in several pieces is one token, and a comma before a bracket that
    closes is none.
    """
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type != tokenize.COMMENT and token.type not in _LAYOUT and token.start[0] not in docstrings
    ]
    broken = sum(
        (one.type == other.type == tokenize.STRING) or (one.string == "," and other.string in ")]}")
        for one, other in itertools.pairwise(tokens)
    )
    return len(tokens) - broken


def tokens() -> dict[str, int]:
    """The tokens of the library, the core, the core's torch side, each tool, and each package."""
    of_file = {path.relative_to(ROOT).as_posix(): code_tokens(path.read_text()) for path in files()}
    of = lambda prefixes: sum(count for path, count in of_file.items() if path.startswith(prefixes))
    of_tools = {f"tool: {name}": of(prefixes) for name, (prefixes, _) in TOOLS.items()}
    total = sum(of_file.values())
    packages = {path.rsplit("/", 1)[0] + "/" for path in of_file}
    of_packages = {
        package: sum(count for path, count in of_file.items() if path.rsplit("/", 1)[0] + "/" == package)
        for package in sorted(packages)
    }
    core = total - sum(of_tools.values())
    tools = tuple(prefix for prefixes, _ in TOOLS.values() for prefix in prefixes)
    torch = of("torch_backend/") - sum(
        count for path, count in of_file.items() if path.startswith("torch_backend/") and path.startswith(tools)
    )
    return {"library": total, "core": core, "core, torch": torch, **of_tools, **of_packages}


def largest_class() -> tuple[int, str]:
    """How many attributes the class with most of them sets on itself, and its name."""
    return max(
        (
            len(
                {
                    target.attr
                    for target in ast.walk(node)
                    if isinstance(target, ast.Attribute)
                    and isinstance(target.ctx, ast.Store)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                }
            ),
            node.name,
        )
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )


def sizes() -> dict[str, float]:
    """Files, tokens, and what the code is written with."""
    anys = attributes = skips = 0
    of_new = tuple(str(ROOT / prefix) for name in NEW for prefix in TOOLS[name][0])
    counted_files = [path for path in files() if not str(path).startswith(of_new)]
    for path in counted_files:
        source = path.read_text()
        skips += source.count("# fmt: skip")
        for node in ast.walk(ast.parse(source)):
            anys += isinstance(node, ast.Name) and node.id == "Any"
            attributes += (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr", "setattr")
            )
        anys += len(re.findall(r"(?m)^from typing import .*\bAny\b", source))
    counted = tokens()
    new = {row: counted[f"tool: {name}"] for name, row in NEW.items()}
    return {
        "files": len(counted_files),
        "tokens": counted["library"] - sum(new.values()),
        **new,
        "tokens of the core": counted["core"],
        "tokens of the core, torch": counted["core, torch"],
        "tokens of tools": counted["library"] - counted["core"] - sum(new.values()),
        "attributes of a class": largest_class()[0],
        "fmt: skip": skips,
        "Any": anys,
        "getattr": attributes,
        "lines of tests": sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")),
        "files of tests that import what is private": len(private_tests()),
    }


def private_tests() -> list[Path]:
    """The files of tests that import a module of the library that no user imports."""
    return [
        path for path in (ROOT / "tests").rglob("*.py") if any(map(_is_private, _imported(ast.parse(path.read_text()))))
    ]


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_private(name: str) -> bool:
    package, *parts = name.split(".")
    if package not in PACKAGES or not parts:
        return False
    if any(part.startswith("_") for part in parts):
        return True
    module = ROOT / package / parts[0]  # those of funcga whose names do not begin so are public, and one of JAX's
    return package != "funcga" and parts[0] != "hlo" and (module.is_dir() or module.with_suffix(".py").exists())


def complexities() -> dict[str, int]:
    """The cyclomatic complexity of each function, as radon counts it."""
    from radon.visitors import ComplexityVisitor

    found = {}
    for path in files():
        visitor = ComplexityVisitor.from_code(path.read_text())
        functions = [*visitor.functions, *(method for cls in visitor.classes for method in cls.methods)]
        for function in functions:
            found[f"{path.relative_to(ROOT)}:{function.lineno} {function.fullname}"] = function.complexity
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """Which modules of ours each module imports anywhere, also inside functions and for types only."""
    names = {module_name(path) for path in files()}
    graph: dict[str, set[str]] = {}
    for path in files():
        used = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used |= {
                    f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in names else node.module or ""
                    for alias in node.names
                }
        graph[module_name(path)] = (used & names) - {module_name(path)}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules of which each imports each, directly or not."""
    reach = {name: set(used) for name, used in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    knots = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}
    return [set(knot) for knot in knots]


def trace(call: Callable[[], object]) -> tuple[int, int, int]:
    """How many named functions of ours a call enters, how many times, and in how many files."""
    entered: list[tuple[str, str, int]] = []
    packages = tuple(str(ROOT / package) for package in PACKAGES)

    def profile(frame, event, _):
        code = frame.f_code
        # comprehensions are frames of their own up to Python 3.11, and lambdas have no name
        if event == "call" and code.co_filename.startswith(packages) and not code.co_name.startswith("<"):
            entered.append((code.co_filename, code.co_qualname, code.co_firstlineno))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(set(entered)), len(entered), len({name for name, *_ in entered})


def torch_call() -> Callable[[], object]:
    """A warm call in torch."""
    import torch

    import funcga

    params = {"w": torch.ones(3), "b": torch.zeros(())}
    batch = torch.ones(8, 3)
    step = funcga.accumulate(funcga.value_and_grad(lambda p, x: ((x * p["w"]).sum(1) + p["b"]).square().mean()), 4)
    step(params, batch)
    return lambda: step(params, batch)


def jax_call() -> Callable[[], object]:
    """The first call in JAX."""
    import jax.numpy as jnp

    import funcga

    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    batch = jnp.ones((8, 3))
    loss = lambda p, x: jnp.square((x * p["w"]).sum(1) + p["b"]).mean()
    funcga.accumulate(funcga.value_and_grad(loss), 4)(params, batch)  # what is imported once is not of the call
    return lambda: funcga.accumulate(funcga.value_and_grad(lambda p, x: 2 * loss(p, x)), 4)(params, batch)


def multi_steps_call() -> Callable[[], object]:
    """A warm update of multi_steps in torch, the one that ends a window."""
    import torch

    import funcga

    params = {"w": torch.ones(3), "b": torch.zeros(())}
    sgd = (lambda params: (), lambda grads, state, params=None: ({k: -0.1 * g for k, g in grads.items()}, state))
    tx = funcga.multi_steps(sgd, 2)
    grads = {"w": torch.ones(3), "b": torch.ones(())}
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(grads, state, params)
    return lambda: tx.update(grads, state, params)


TRACES = {"torch, warm": torch_call, "JAX, first": jax_call, "torch multi_steps, warm": multi_steps_call}


def import_time() -> tuple[float, int]:
    """Milliseconds that `import funcga` takes in a new process, the median of 15, and the modules it loads."""
    program = "import sys, time; b = len(sys.modules); t = time.perf_counter(); import funcga; print(1e3 * (time.perf_counter() - t), len(sys.modules) - b)"
    runs = [
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.split()
        for _ in range(15)
    ]
    return statistics.median(float(run[0]) for run in runs), int(runs[0][1])


def table() -> Iterator[tuple[str, object]]:
    for name, make in TRACES.items():
        yield f"{name}: functions, calls, files", trace(make())
    yield from sizes().items()
    yield from ((f"tokens: {name}", count) for name, count in [*tokens().items()][3:])
    yield "class with the most attributes", largest_class()
    worst = max(complexities().items(), key=lambda item: item[1])
    yield "most complex function", worst
    yield "import cycles", [sorted(cycle) for cycle in cycles(imports())]
    yield "import funcga: ms, modules", import_time()


if __name__ == "__main__":
    for name, value in table():
        print(f"{name:45} {value}")
