"""The tool that finds how many micro-batches a batch needs to fit in memory, without running them.

    plan = funcga.plan(grad_fn, params, batch, memory="14 GiB")
    step = funcga.accumulate(grad_fn, plan.n)

The search and the table are in this file. The memory of a window is measured in `in_torch.py`, on
fake tensors, and in `in_jax.py`, by XLA. It stands on the core's programs and loops
(`funcga._call`, the backends' `loop` and `passes`); nothing stands on it, but `n="auto"` asks for
it by name.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from funcga._backend import Backend
from funcga._call import Memory, Program, backend_of_call, read_program, step_program
from funcga._call.arguments import Split
from funcga._types import Args, GradFn, Kwargs, Tree, TreeFn
from funcga.errors import FuncgaError
from funcga.folds import mean
from funcga.tools.reports.tables import text_table


def side(backend: Backend) -> Any:
    """The module of a framework, which measures the memory of a window without running it. Both
    have the same functions.
    """
    return import_module(f"funcga.tools.plan.in_{backend.name}")


@dataclass(frozen=True)
class PlanRow:
    """The memory of a step with one number of micro-batches.

    Attributes:
        n: The number of micro-batches.
        microbatch_size: The number of rows of the largest of them.
        peak_bytes: The largest number of bytes held at one time: parameters, batch and state are
            among them.
        fits: Whether that is no more than the memory.
        parts: The bytes by what they are.
    """

    n: int | None
    microbatch_size: int
    peak_bytes: int
    fits: bool
    parts: dict[str, int]


@dataclass(frozen=True)
class Plan(PlanRow):
    """How many micro-batches fit, and what they take; `print(plan)` shows the table.

    Attributes:
        n: The smallest number of micro-batches that fits; None if not even one row at a time does.
        microbatch_size: The number of rows of the largest of them; 1 if none fits.
        peak_bytes: The largest number of bytes that they hold at one time.
        fits: Whether that is no more than the memory.
        parts: These bytes by what they are.
        memory: The bytes that there are.
        rows: A `PlanRow` for each n that was looked at.
        whole_batch: About how many rows fit without accumulation, as one micro-batch; None if all
            do, or none does.

    Example:
        >>> gradient = funcga.value_and_grad(lambda w, x: ((x @ w) ** 2).mean())
        >>> plan = funcga.plan(gradient, torch.ones(1000), torch.ones(64, 1000), memory="1 MiB")
        >>> plan.n, plan.microbatch_size, plan.fits
        (1, 64, True)
    """

    memory: int
    rows: tuple[PlanRow, ...]
    whole_batch: int | None = None

    def table(self) -> str:
        """A line for each n: the rows of a micro-batch, the peak, and what it consists of."""
        names = [*self.parts]
        lines = [["n", "rows", "peak", "fits", *names]]
        for row in self.rows:
            fits = ("yes" if row.fits else "no") + (" <" if row.n == self.n else "")
            sizes = [size_of(row.parts.get(name, 0)) for name in names]
            peak = size_of(row.peak_bytes)
            lines.append([str(row.n), str(row.microbatch_size), peak, fits, *sizes])
        return text_table(lines, right=True)

    def __str__(self) -> str:
        memory = size_of(self.memory)
        if self.fits:
            said = (
                f"n={self.n}, micro-batches of {self.microbatch_size} rows: "
                f"{size_of(self.peak_bytes)} of {memory}."
            )
        else:
            said = (
                f"One row at a time takes {size_of(self.peak_bytes)}, and there are {memory}: no n "
                "fits."
            )
        if self.whole_batch is not None:
            said += (
                f"\nA batch of about {self.whole_batch} rows fits without accumulation. A small "
                "batch may train as well, if the half-life of Adam's second moment stays the same "
                "in tokens (Marek et al. 2025)."
            )
        return f"{self.table()}\n\n{said}"


def plan(
    grad_fn: GradFn,
    *args: Tree,
    memory: int | str | None = None,
    state: Tree = None,
    **kwargs: Tree,
) -> Plan:
    """Finds the smallest n for which `accumulate(grad_fn, n)(*args, **kwargs)` fits in memory.

    Nothing is run. In torch the step runs on fake tensors (FakeTensorMode), and every allocation is
    recorded, so the peak is exact in torch's own bytes; workspaces of libraries and fragmentation
    come on top. In JAX the peak is XLA's figure for the compiled step: arguments, results and
    temporaries, without results that reuse the memory of arguments.

    The peak is about linear in the rows of a micro-batch, so only a few n are measured: 1, 2, the
    number of rows, and the ones that the line suggests. In JAX it is less linear, and a smaller n
    may fit as well.

    The arguments may be real arrays or shapes: tensors on `torch.device("meta")`,
    `jax.ShapeDtypeStruct`. Meta tensors are planned for torch's default device. Functions compiled
    by `torch.compile` are planned as if they were not compiled, which usually takes more memory. A
    loss that reads numbers, such as with `.item()`, cannot be planned, nor can a pipeline.

    In torch a step with `across=`, or of a module in DDP or FSDP, is planned as if all replicas had
    the rows of this one. Nothing is sent, so one replica may plan alone; the peak of a wrapped
    module is within 5 %. In JAX plan `jax_backend.replicated(step, mesh)`: bytes and rows are those
    of one device.

    Args:
        grad_fn: As for `accumulate`; or a step made by `accumulate` or `coupled`, with its options,
            such as accumulate(grad_fn, 1, weight=...), in JAX also a replicated one. Its n is
            ignored.
        *args: The arguments of the step: parameters and a whole batch.
        memory: The available bytes, including the arguments: a number, or a string such as "14 GiB"
            or "800 MB". By default what is free on the device of the arguments.
        state: A tree of arrays that also have to fit, such as the state of an optimizer.
        **kwargs: Keyword arguments of grad_fn, passed whole.

    Returns:
        A Plan. Pass its `n` to `accumulate`, which refuses the None of a plan that does not fit.

    Raises:
        FuncgaError: If an argument is invalid, or the step cannot be planned.

    Example:
        >>> loss_fn = lambda params, x: torch.tanh(x @ params["w"]).square().mean()
        >>> params = {"w": torch.empty(512, 512, device="meta")}
        >>> x = torch.empty(4096, 512, device="meta")
        >>> plan = funcga.plan(funcga.value_and_grad(loss_fn), params, x, memory="16 MiB")
        >>> plan.fits, plan.n > 1, plan.peak_bytes <= plan.memory
        (True, True, True)
        >>> step = funcga.accumulate(funcga.value_and_grad(loss_fn), plan.n)
    """
    # Of a step in `jax_backend.replicated`, which says what it wraps.
    on_each = getattr(grad_fn, "on_each", None)
    step = grad_fn if on_each is None else grad_fn.step  # type: ignore[attr-defined]
    job = getattr(step, "coupled", None)  # of a step of `coupled`, which has its program
    program = step_program(step) if job is None else job.program
    if on_each is not None and program is None:
        raise FuncgaError(
            "the plan of a replicated function was asked for, and what runs on every device is no "
            "step of accumulate or coupled, so nothing says what its n is. Plan such a step alone, "
            "replicated(funcga.accumulate(grad_fn, "
            '1, across="data"), mesh), and count the state of an optimizer in: plan(..., '
            "state=tx.init(params))."
        )
    program = program or read_program(grad_fn, mean(), None, None, None)
    backend = backend_of_call(program.grad_fn, args, kwargs)
    count = None if memory is None else read_memory(memory)
    counting = getattr(step, "counting", None)
    return planned(program, backend, args, kwargs, count, state, job, on_each, counting)


def planned(
    program: Program,
    backend: Backend,
    args: Args,
    kwargs: Kwargs,
    memory: int | None = None,
    state: Tree = None,
    job: Any = None,
    on_each: Any = None,
    counting: Any = None,
) -> Plan:
    """The Plan of a program, or of a step of `coupled` if there is a job; `on_each` runs it on
    every device of a mesh. `counting`: the program that counts a batch first.
    """
    own = side(backend)
    measured: dict[int, dict[str, int]] = {}

    def window(program: Program) -> TreeFn:
        step = (
            (counting or backend.loop).accumulate(program, backend)
            if job is None
            else replace(job, program=program, step=None).passes(backend)
        )
        return step if on_each is None else partial(on_each, step)

    def peak(n: int) -> int:
        if n not in measured:
            kept = Memory(program.memory.step)
            of_n = replace(program, split=Split(n), memory=kept)
            measured[n] = own.peak(of_n, window, args, kwargs, backend)
            if state is not None:
                measured[n]["state"] = own.nbytes(state)
        return sum(measured[n].values())

    rows = own.rows(program, args, backend, on_each)
    if memory is None:
        peak(1)
        memory = _free_memory(backend, (args, kwargs, state), measured[1])
    n = smallest_that_fits(peak, rows, memory)
    table = {
        k: PlanRow(k, _size(rows, k), peak(k), peak(k) <= memory, parts)
        for k, parts in sorted(measured.items())
    }
    whole = _whole_batch([*table.values()], rows, memory)
    best = vars(table[n]) | {"n": n if table[n].fits else None}
    return Plan(**best, memory=memory, rows=tuple(table.values()), whole_batch=whole)


# -- the search


def smallest_that_fits(peak: Callable[[int], int], rows: int, memory: int) -> int:
    """The smallest n from 1 to `rows` whose peak is no more than the memory; `rows` if none is.

    The peak is taken to fall with the rows of the largest micro-batch, and to be about linear in
    them for n >= 2.
    """
    if peak(1) <= memory:
        return 1
    if peak(rows) > memory:
        return rows
    if peak(2) <= memory:
        return 2
    # Invariant: `too_few` micro-batches do not fit, and `enough` do. Where the line between their
    # peaks meets the memory is looked at next, until the line rules out everything below `enough`.
    too_few, enough = 2, rows
    while enough - too_few > 1:
        large, small = _size(rows, too_few), _size(rows, enough)
        slope = (peak(too_few) - peak(enough)) / max(1, large - small)
        # Of all n with micro-batches of that size the smallest.
        n = _size(rows, small + int((memory - peak(enough)) / slope))
        if n >= enough:
            break
        n = max(n, too_few + 1)
        too_few, enough = (too_few, n) if peak(n) <= memory else (n, enough)
    return enough


def _size(rows: int, n: int) -> int:
    """The rows of the largest of n micro-batches; and the smallest n for micro-batches of so
    many rows.
    """
    return -(-rows // n)


def _whole_batch(table: list[PlanRow], rows: int, memory: int) -> int | None:
    """About how many rows fit without accumulation, by the line between the peaks of two n; None
    if they are not there.
    """
    first, second, last = table[0], table[:2][-1], table[-1]
    more_rows = second.microbatch_size - last.microbatch_size
    bytes_of_row = (second.peak_bytes - last.peak_bytes) / max(1, more_rows)
    if bytes_of_row <= 0:
        return None
    fitting = rows - math.ceil((first.peak_bytes - memory) / bytes_of_row)
    return fitting if 0 < fitting < rows else None


# -- bytes


def read_memory(memory: int | str) -> int:
    """A number of bytes > 0, such as 14000000000, "14 GB" or "14 GiB". Raises FuncgaError for
    anything else.
    """
    pattern = r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B)?\s*"
    match = re.fullmatch(pattern, str(memory), re.IGNORECASE)
    count = 0
    if match:
        prefix = (match[2] or "").upper()
        count = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(prefix))
    if not count:
        raise FuncgaError(
            f"memory is {memory!r}, which is no number of bytes. Write an int, or a string: "
            'memory="14 GiB", "800 MB".'
        )
    return count


def size_of(count: int) -> str:
    """A readable number of bytes: `1.50 GiB`."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.2f} {'KMGT'[power - 1]}iB" if power else f"{count} B"


def _free_memory(backend: Backend, tree: Tree, parts: dict[str, int]) -> int:
    """The available bytes for a call: what is free, plus those of its arguments that are there."""
    own, leaves = side(backend), backend.trees.flatten(tree)[0]
    free = own.free_memory(leaves)
    held = ("arguments", "parameters", "batch", "buckets", "state")
    shapes: int = own.nbytes([leaf for leaf in leaves if own.is_shape(leaf)])
    there = sum(parts.get(name, 0) for name in held) - shapes
    return int(_free_on_host() if free is None else free) + there


def _free_on_host() -> int:
    """The available bytes of main memory. Raises FuncgaError if the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable:"))
            return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        raise FuncgaError(
            "this system does not say how much memory is free, and no memory= was given. Say it: "
            'plan(grad_fn, params, batch, memory="14 GiB").'
        ) from None
