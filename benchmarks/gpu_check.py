"""What funcga does on a GPU, in one run of at most six minutes: `python -m benchmarks.gpu_check` prints tables.

    python -m benchmarks.gpu_check --seconds 340                      # on a machine with a GPU
    python -m benchmarks.gpu_check --device simulated --quick         # anywhere: tests/simulated, in small

Each row is printed as soon as it is known, and an exception is a row, too. An error is the largest difference of a leaf
from the gradient of the whole batch in float64, over the largest element of that. Times are the least of some rounds,
taken by turns; bytes are those at the peak, beyond what was there.
"""

import argparse
import gc
import itertools
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend

Step = Callable[[], Any]
N = 4
DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16


class Run:
    """One run: its options, its time, and what went wrong so far."""

    def __init__(self, options: argparse.Namespace):
        self.seconds, self.is_quick, self.only = options.seconds, options.quick, options.only
        self.is_real = options.device == "cuda"
        self.start, self.wrong = time.perf_counter(), list[str]()
        self.section = ""

    @property
    def left(self) -> float:
        """Seconds."""
        return float(self.seconds - (time.perf_counter() - self.start))

    def row(self, name: str, *cells: object, ok: bool | None = None) -> None:
        """Prints a row, and remembers it if it is wrong."""
        if ok is not None:
            cells = "ok" if ok else "WRONG", *cells
        texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
        print(f"{self.section:9}| {name:44} | {' | '.join(texts)}", flush=True)
        if ok is False:
            self.wrong.append(f"{self.section}: {name}: {' | '.join(texts)}")

    def tried(self, name: str, function: Callable[[], Any]) -> Any:
        """What the function returns; None, and a row, if it raises, or if no time is left."""
        try:
            if self.left < 0:
                raise TimeoutError("no time is left")
            return function()
        except Exception as error:
            frame, lines = traceback.extract_tb(error.__traceback__)[-1], str(error).splitlines() or [""]
            self.row(name, f"{type(error).__name__}: {lines[0][:150]} ({frame.filename}:{frame.lineno})", ok=False)
        finally:
            gc.collect()
        return None

    def synchronize(self) -> None:
        """Waits for the device, if it is a real one."""
        if self.is_real:
            torch.cuda.synchronize()


def to(tree: Any, device: str = "cuda", dtype: torch.dtype = SINGLE) -> Any:
    """The tensors on a device, floats in a dtype."""
    move = lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)
    return tree_map(move, tree)


def error_of(found: Any, wanted: Any) -> float:
    """The largest error of a leaf, over its largest element."""
    pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=True)
    doubles = [(one.detach().to("cpu", DOUBLE), other.detach().to("cpu", DOUBLE)) for one, other in pairs]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in doubles)


# --- problems


def problem(rows: int = 36, width: int = 24, classes: int = 7) -> tuple[Any, ...]:
    """(parameters, x, y, which rows count) in float64, on the host."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=DOUBLE)
    params = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise([width, width, width, classes])):
        params |= {f"{layer}.w": normal(outputs, inputs) / inputs**0.5, f"{layer}.b": normal(outputs) / 9}
    y, mask = torch.randint(0, classes, (rows,), generator=generator), torch.rand(rows, generator=generator) > 0.4
    return params, normal(rows, width), y, mask


def forward(params: Any, x: torch.Tensor) -> torch.Tensor:
    """The logits of a network of three layers."""
    for layer in range(len(params) // 2):
        x = functional.linear(torch.tanh(x) if layer else x, params[f"{layer}.w"], params[f"{layer}.b"])
    return x


def averaged(params: Any, x: Any, y: Any, mask: Any) -> torch.Tensor:
    """A mean over rows."""
    return functional.cross_entropy(forward(params, x), y)


def summed(params: Any, x: Any, y: Any, mask: Any) -> torch.Tensor:
    """A sum over the rows that count."""
    return (functional.cross_entropy(forward(params, x), y, reduction="none") * mask).sum()


def of_tokens(params: Any, x: Any, y: Any, mask: Any) -> torch.Tensor:
    """A mean over the rows that count."""
    return summed(params, x, y, mask) / mask.sum()


def shared(params: Any, x: Any, y: Any, mask: Any, *, totals: Any) -> torch.Tensor:
    """The share of a micro-batch in the mean over all rows that count."""
    return summed(params, x, y, mask) / totals


def tokens(x: Any, y: Any, mask: torch.Tensor) -> torch.Tensor:
    """How many rows count."""
    return mask.sum()


def truth(loss: Callable[..., Any], params: Any, *batch: Any) -> tuple[Any, Any]:
    """(loss, gradients) of the whole batch."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}
    value = loss(leaves, *batch)
    return value.detach(), dict(zip(leaves, torch.autograd.grad(value, [*leaves.values()]), strict=True))


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        rows, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(rows, length, 3, self.heads, width // self.heads)
        attended = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """A language model whose table of tokens is its last layer, too."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*[Block(width, heads) for _ in range(layers)]), nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The output."""
        x = self.tokens(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


def next_token(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """The loss of a language model."""
    logits = model(text[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, SINGLE)), text[:, 1:].flatten())


def next_token_autocast(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """The same under autocast."""
    with torch.autocast("cuda", HALF):
        return next_token(model, text)


# --- features: what makes a step and what it should return, and how far the two may be apart

Made = tuple[Step, Any]
FEATURES: dict[str, tuple[Callable[[], Made], float]] = {}


def of_params(loss: Callable[..., Any] = averaged, whole: Any = None, n: int = N, **options: Any) -> Made:
    """A gradient of parameters."""
    params, *batch = problem()
    step, on_device = funcga.accumulate(funcga.value_and_grad(loss), n, **options), to((params, *batch))
    return partial(step, *on_device), truth(whole or loss, params, *batch)


def of_stream(device: str | None = None, is_pinned: bool = False) -> Made:
    """A stream of micro-batches of 11 rows, the last of 3."""
    params, *batch = problem()
    cut = [*zip(*[leaf.split(11) for leaf in to(batch, "cpu" if device else "cuda")], strict=True)]
    if is_pinned:
        cut = tree_map(torch.Tensor.pin_memory, cut)
    step = funcga.stream(funcga.value_and_grad(averaged), weight=lambda x, y, mask: len(x), device=device)
    return partial(step, to(params), cut), truth(averaged, params, *batch)


def of_model(
    make: Callable[[], nn.Module], loss: Callable[..., Any], batch: Any, dtype: torch.dtype = SINGLE, whole: Any = None
) -> Made:
    """The gradient of a model, with sums in float32."""
    torch.manual_seed(0)
    exact = make().double()
    value = (whole or loss)(exact, *batch)
    grads = torch.autograd.grad(value, [*exact.parameters()])
    model = make().to("cuda", dtype)
    model.load_state_dict(exact.state_dict())
    wide = funcga.mean(out_dtype=SINGLE)
    step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss), N, fold=wide)
    wanted = value.detach(), dict(zip(dict(exact.named_parameters()), grads, strict=True))
    return partial(step, *to(batch, dtype=dtype)), wanted


def of_gpt(loss: Callable[..., Any] = next_token, dtype: torch.dtype = SINGLE) -> Made:
    """The gradient of a language model."""
    text = torch.randint(0, 4096, (8, 17), generator=torch.Generator().manual_seed(0))
    return of_model(lambda: GPT(4096, 128, 1, 4, 16), loss, (text,), dtype, whole=next_token)  # 2**19 elements


def of_images() -> Made:
    """The gradient of convolutions."""
    layers = lambda: (nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 7))
    make = lambda: nn.Sequential(*layers()).to(memory_format=torch.channels_last)
    loss = lambda model, x, y: functional.cross_entropy(model(x), y)
    return of_model(make, loss, (torch.randn(8, 3, 8, 8, dtype=DOUBLE), torch.arange(8) % 7))


def without_rows(**options: Any) -> Made:
    """One micro-batch is NaN: it is dropped, or has a weight of 0 that only the device knows."""
    params, x, y, mask = problem()
    mask[9:18] = False
    arguments = to((params, x, y, mask))
    arguments[1][9:18] = float("nan")
    keep = [*range(9), *range(18, 36)]
    loss = of_tokens if "weight" in options else averaged
    step = funcga.accumulate(funcga.value_and_grad(loss), N, **options)
    return partial(step, *arguments), truth(loss, params, x[keep], y[keep], mask[keep])


def of_observers() -> Made:
    """Norms of the gradients."""
    params, *batch = problem()
    arguments, cut = to((params, *batch)), [*zip(*[leaf.chunk(N) for leaf in batch], strict=True)]
    step = funcga.accumulate(funcga.value_and_grad(averaged), N, observe=funcga.gradient_norms())
    grads = [truth(averaged, params, *microbatch)[1].values() for microbatch in cut]
    each = torch.stack([torch.cat([grad.flatten() for grad in of_one]) for of_one in grads])

    def run() -> Any:
        norms = step(*arguments)[1]
        return norms.microbatches, norms.mean

    return run, (each.norm(dim=1), each.mean(0).norm())


def of_coupled() -> Made:
    """A loss of pairs of rows."""
    params, *batch = problem()
    summary = lambda params, x, y, mask: functional.normalize(forward(params, x), dim=-1)
    loss = lambda params, s: functional.cross_entropy(s @ s.T * 3, torch.arange(len(s), device=s.device))
    step = funcga.coupled(summary, loss, N)
    return partial(step, *to((params, *batch))), truth(lambda p, *b: loss(p, summary(p, *b)), params, *batch)


def of_multi_steps() -> Made:
    """An update of SGD by the gradients of micro-batches, weighted by numbers of the device."""
    params, *batch = problem()
    arguments = to((params, *batch))
    cut = [*zip(*[leaf.chunk(N) for leaf in arguments[1:]], strict=True)]
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD, lr=1.0), N)

    def run() -> Any:
        state = tx.init(arguments[0])
        for microbatch in cut:
            grads = funcga.grad(of_tokens)(arguments[0], *microbatch)
            updates, state = tx.update(grads, state, arguments[0], weight=tokens(*microbatch))
        return updates

    return run, tree_map(torch.neg, truth(of_tokens, params, *batch)[1])


def of_network(loss: Callable[..., Any]) -> Made:
    """A network of two layers whose loss is computed in an unusual way."""
    make = lambda: nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 7))
    usual = lambda model, x, y: functional.cross_entropy(model(x), y)
    return of_model(make, loss, problem()[1:3], whole=usual)


def checkpointed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Its first layers run again in the backward pass."""
    return functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y)


def offloaded(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What it saves is on the host."""
    with torch.autograd.graph.save_on_cpu():
        return functional.cross_entropy(model(x), y)


def in_two_streams(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Its first layer runs in a stream of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        hidden = model[0](x)
    torch.cuda.current_stream().wait_stream(side)
    return functional.cross_entropy(model[2](model[1](hidden)), y)


def of_maxima() -> Made:
    """The largest of the gradients of all micro-batches."""
    params, *batch = problem()
    step = partial(funcga.accumulate(funcga.grad(averaged), N, fold=funcga.max()), *to((params, *batch)))
    cut = zip(*[leaf.chunk(N) for leaf in batch], strict=True)
    grads = [truth(averaged, params, *microbatch)[1] for microbatch in cut]
    return step, {name: torch.stack([each[name] for each in grads]).amax(0) for name in params}


def of_rows() -> Made:
    """Logits of all rows beside a gradient."""
    params, *batch = problem()
    with_logits = lambda params, x, y, mask: (averaged(params, x, y, mask), forward(params, x))
    fold = ((funcga.mean(), funcga.concat()), funcga.mean())
    step = funcga.accumulate(funcga.value_and_grad(with_logits, has_aux=True), N, fold=fold)
    value, grads = truth(averaged, params, *batch)
    return partial(step, *to((params, *batch))), ((value, forward(params, batch[0])), grads)


EXACT = funcga.reproducible(funcga.mean())
FEATURES |= {
    "accumulate": (of_params, 2e-5),
    "accumulate, uneven": (partial(of_params, n=5), 2e-5),
    "weight= on the device, mean()": (partial(of_params, of_tokens, weight=tokens), 2e-5),
    "weight= on the device, per_weight()": (
        partial(of_params, summed, of_tokens, fold=funcga.per_weight(), weight=tokens), 2e-5,
    ),
    "totals=": (partial(of_params, shared, of_tokens, fold=funcga.sum(), totals=tokens), 2e-5),
    "drop=, nothing is bad": (partial(of_params, drop="microbatch"), 2e-5),
    'drop="window", nothing is bad': (partial(of_params, drop="window"), 2e-5),
    "drop=, one NaN": (partial(without_rows, drop="microbatch"), 2e-5),
    "a weight of 0 on the device, NaN": (partial(without_rows, weight=tokens), 2e-5),
    "reproducible(mean())": (partial(of_params, fold=EXACT), 2e-5),
    "gradient_norms()": (of_observers, 1e-4),
    "coupled": (of_coupled, 1e-4),
    "multi_steps, weights on the device": (of_multi_steps, 1e-4),
    "stream, uneven": (of_stream, 2e-5),
    "stream(device=)": (partial(of_stream, "cuda"), 2e-5),
    "stream(device=), pinned": (partial(of_stream, "cuda", True), 2e-5),
    "max()": (of_maxima, 1e-4),
    "has_aux=, concat()": (of_rows, 2e-5),
    "a checkpoint": (partial(of_network, checkpointed), 2e-5),
    "save_on_cpu": (partial(of_network, offloaded), 2e-5),
    "a layer in a stream of its own": (partial(of_network, in_two_streams), 2e-5),
    "convolutions, channels_last": (of_images, 2e-3),
    "a GPT, tied": (of_gpt, 1e-4),
    "a GPT, tied, bfloat16": (partial(of_gpt, dtype=HALF), 6e-2),
    "a GPT, tied, float16": (partial(of_gpt, dtype=torch.float16), 2e-2),
    "a GPT, tied, autocast": (partial(of_gpt, next_token_autocast), 6e-2),
}  # fmt: skip


@contextmanager
def fused_from(elements: int) -> Iterator[None]:
    """A context in which smaller weights than by default have their gradients added in the backward pass."""
    from funcga.tools.fused import in_torch

    before, in_torch.LARGE_ON_DEVICE = in_torch.LARGE_ON_DEVICE, elements
    try:
        yield
    finally:
        in_torch.LARGE_ON_DEVICE = before


def features(run: Run) -> Iterator[tuple[str, Callable[[], Made], float]]:
    """(name, what makes it, limit) of each, also with gradients of large weights added in the backward pass."""
    for name, (make, limit) in FEATURES.items():
        if run.is_real or "pinned" not in name:
            yield name, make, limit
        if "GPT" in name:
            with fused_from(2**19):
                yield f"{name}, fused", make, limit


# --- sections


def right(run: Run) -> None:
    """Every feature against float64."""
    for name, make, limit in features(run):
        made = run.tried(name, make)
        if made is not None:
            step, wanted = made
            errors = run.tried(name, lambda step=step, wanted=wanted: [error_of(step(), wanted) for _ in range(2)])
            if errors is not None:
                run.row(name, max(errors), f"limit {limit:g}", ok=max(errors) <= limit)
    run.tried("bits of exact sums", lambda: same_bits(run))


def same_bits(run: Run) -> None:
    """Micro-batches in another order."""
    params, *batch = to(problem())
    turned = torch.cat([torch.arange(18, 36), torch.arange(18)]).to("cuda")
    step = funcga.accumulate(funcga.grad(averaged), N, fold=EXACT)
    one, other = step(params, *batch), step(params, *[leaf[turned] for leaf in batch])
    run.row("bits of exact sums, reordered", ok=all(map(torch.equal, one.values(), other.values())))


WAITING = ("weight= on the device", "drop=, weight", "a weight of 0", "stream(device=)", "multi_steps", "save_on_cpu")


def waits(run: Run) -> None:
    """From the second window on the host waits for nothing: torch raises where it would."""
    for name, make, _ in features(run):
        if name.startswith(WAITING) and "pinned" not in name:
            continue
        made = run.tried(name, make)
        if made is not None:
            run.tried(name, lambda step=made[0]: without_waiting(run, step))
    run.row("all others", "none")


def without_waiting(run: Run, step: Step) -> None:
    """A window in which torch raises an error where the host would wait."""
    for _ in range(2):
        step()
    run.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def addmm(run: Run) -> None:
    """The operators that gradients of large weights stand on, by themselves."""
    left, right, total = (torch.randn(shape, device="cuda") for shape in ((64, 96), (64, 80), (96, 80)))
    wanted = total.double() + left.to(HALF).double().t() @ right.to(HALF).double()
    product = lambda: torch.addmm(total, left.to(HALF).t(), right.to(HALF), out_dtype=SINGLE, out=total)
    if run.tried("addmm(out_dtype=), in place", product) is not None:
        run.row("addmm(out_dtype=), in place", error := error_of(total, wanted), ok=error < 1e-5)
    index, rows = torch.randint(0, 50, (4000,), device="cuda"), torch.randn(4000, 16, device="cuda")
    zeros = torch.zeros(50, 16, device="cuda")
    same = [zeros.clone().index_put_((index,), rows, accumulate=True) for _ in range(3)]
    run.row("index_put_(accumulate=True), three times", ok=all(torch.equal(same[0], each) for each in same))


def timed(run: Run, steps: list[Step], rounds: int = 3) -> list[tuple[float, int]]:
    """(the least milliseconds, the bytes at the peak) of each, taken by turns."""
    for step in steps * 2:
        step()
    run.synchronize()
    best, peaks = [float("inf")] * len(steps), list[int]()
    for _ in range(1 if run.is_quick else rounds):
        for index, step in enumerate(steps):
            calls, start = 1 if run.is_quick else 5, time.perf_counter()
            for _ in range(calls):
                step()
            run.synchronize()
            best[index] = min(best[index], (time.perf_counter() - start) / calls * 1e3)
    for step in steps:
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        run.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return [*zip(best, peaks, strict=True)]


def beside(run: Run, name: str, steps: dict[str, Step]) -> None:
    """Rows of times and bytes, each over those of the first."""
    figures = run.tried(name, lambda: timed(run, [*steps.values()]))
    for label, (milliseconds, peak) in zip(steps, figures or (), strict=bool(figures)):
        times = f"{milliseconds:.3f} ms", f"x{milliseconds / figures[0][0]:.2f}"
        run.row(f"{name}: {label}", *times, f"{peak / 2**20:.1f} MiB", f"x{peak / max(1, figures[0][1]):.2f}")


def by_hand(model: nn.Module, loss: Callable[..., Any], batch: tuple[Any, ...]) -> Step:
    """The loop that people write."""

    def run() -> Any:
        total: Any = 0
        for microbatch in zip(*[leaf.chunk(N) for leaf in batch], strict=True):
            value = loss(model, *microbatch) / N
            value.backward()
            total = total + value.detach()
        for parameter in model.parameters():
            parameter.grad = None
        return total

    return run


def workloads(run: Run) -> Iterator[tuple[str, nn.Module, Callable[..., Any], tuple[Any, ...]]]:
    """(name, model, loss, batch) of each."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())]
    square = lambda model, x: model(x).square().mean()
    yield "12 layers of 64", nn.Sequential(*layers).to("cuda"), square, (torch.randn(256, 64, device="cuda"),)
    sizes = (512, 32, 2, 2, 16) if run.is_quick else (50257, 768, 12, 12, 512)
    text = torch.randint(0, 512, (8, sizes[-1] + 1), device="cuda")
    yield "GPT-2 small, bfloat16", GPT(*sizes).to("cuda", HALF), next_token, (text,)
    yield "GPT-2 small, autocast", GPT(*sizes).to("cuda"), next_token_autocast, (text,)


OPTIONS: dict[str, dict[str, Any]] = {
    "funcga": {},
    "norms": {"observe": funcga.gradient_norms()},
    "noise": {"observe": funcga.gradient_noise()},
    "drop": {"drop": "microbatch"},
    "reproducible": {"fold": EXACT},
    "weights on the device": {"weight": lambda *batch: (batch[0] > 1).sum()},
}


def steps_of(model: nn.Module, loss: Callable[..., Any], batch: tuple[Any, ...]) -> dict[str, Step]:
    """The loop, and funcga with each of the options."""
    gradient, steps = torch_backend.module_value_and_grad(model, loss), {"loop": by_hand(model, loss, batch)}
    for name, options in OPTIONS.items():
        steps[name] = partial(funcga.accumulate(gradient, N, **options), *batch)
    return steps


def times(run: Run) -> None:
    """Time and bytes at the peak beside a loop."""
    for name, *workload in workloads(run):
        beside(run, name, steps_of(*workload))


def launches(run: Run) -> None:
    """Kernels and copies of a window, and how often the host waits in it."""
    for name, *workload in workloads(run):
        for label, step in steps_of(*workload).items():
            found = run.tried(f"{name}: {label}", partial(counted, run, step))
            if found is not None:
                run.row(f"{name}: {label}", *found)


def counted(run: Run, step: Step) -> tuple[int, int]:
    """(kernels and copies, waits of the host) of one window."""
    for _ in range(2):
        step()
    if not run.is_real:
        from tests.simulated import Events

        with Events() as events:
            step()
        return events.launches, events.waits
    from torch.profiler import ProfilerActivity, profile

    run.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
    names = [event.name for event in profiled.events()]
    launched = sum("Launch" in name or name in ("cudaMemcpyAsync", "cudaMemsetAsync") for name in names)
    return launched, sum("Synchronize" in name and "Device" not in name for name in names)


def fused(run: Run) -> None:
    """From which size on it pays to add the gradient of a weight in the backward pass."""
    for dtype, width in itertools.product((SINGLE, HALF), (768,) if run.is_quick else (1024, 2048, 4096, 8192)):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(2)]).to("cuda", dtype)
        x = torch.randn(N * (8 if run.is_quick else 1024), width, device="cuda", dtype=dtype)
        gradient = torch_backend.module_value_and_grad(model, lambda model, x: model(x).float().square().mean())
        step = partial(funcga.accumulate(gradient, N), x)
        with fused_from(2**19):
            beside(run, f"2 x {width}^2, {str(dtype)[6:]}", {"off": partial(unfused, step), "on": step})


def unfused(step: Step) -> Any:
    """The step with all gradients computed by autograd alone."""
    with torch_backend.fused_gradients(False):
        return step()


def graphs(run: Run) -> None:
    """Windows in a CUDA graph, replayed."""
    if not run.is_real:
        return run.row("needs a GPU", "left out")
    for name, make, limit in features(run):
        if not name.startswith((*WAITING, "coupled")):
            run.tried(name, partial(replayed, run, name, make, limit))
    return None


def replayed(run: Run, name: str, make: Callable[[], Made], limit: float) -> None:
    """One feature, captured and replayed."""
    (step, wanted), side = make(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    first = [leaf.clone() for leaf in tree_leaves(captured)]
    graph.replay()
    error, is_same = error_of(first, wanted), all(map(torch.equal, first, tree_leaves(captured)))
    run.row(name, error, f"twice alike: {is_same}", ok=error <= limit)


def compiled(run: Run) -> None:
    """A compiled loss."""
    params, *batch = to(problem(64, 64))
    wanted = truth(averaged, *problem(64, 64))
    eager = partial(funcga.accumulate(funcga.value_and_grad(averaged), N), params, *batch)
    for mode in ("default", "reduce-overhead") if run.is_real else ("aot_eager",):
        torch._dynamo.reset()
        options = {"mode": mode} if run.is_real else {"backend": mode}
        loss = torch.compile(averaged, **options)
        step = partial(funcga.accumulate(funcga.value_and_grad(loss), N), params, *batch)
        results = run.tried(mode, lambda step=step: [step() for _ in range(4)])
        if results is not None:
            errors = [error_of(result, wanted) for result in results]
            run.row(mode, max(errors), ok=max(errors) < 1e-4)
            beside(run, mode, {"eager": eager, "compiled loss": step})


def streams(run: Run) -> None:
    """stream(device=): right while kernels still run, beside a copy by hand, and what 40 windows leave reserved."""
    size, rows = (64, 16) if run.is_quick else (4096, 2048)
    weight = torch.randn(size, size, device="cuda") / size**0.5
    items = [(torch.full((rows, size), k + 1.0),) for k in range(6)]
    items = tree_map(torch.Tensor.pin_memory, items) if run.is_real else items
    there, gradient = to(items), funcga.value_and_grad(last_reads_first)
    moved, plain = funcga.stream(gradient, device="cuda"), funcga.stream(gradient)
    wanted = plain(weight, there)
    before = torch.cuda.memory_reserved()
    for window in range(1, 41):
        error = error_of(moved(weight, items), wanted)
        if window in (1, 10, 40) or error > 1e-3:
            reserved = f"reserved beyond the start: {(torch.cuda.memory_reserved() - before) / 2**20:.0f} MiB"
            run.row(f"window {window}", error, reserved, ok=error <= 1e-3)
    copied = lambda: plain(weight, [(x.to("cuda", non_blocking=True),) for (x,) in items])
    steps = {"there already": lambda: plain(weight, there), "stream(device=)": lambda: moved(weight, items)}
    beside(run, "6 micro-batches", {**steps, "copied by hand": copied})


def last_reads_first(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A loss that reads its rows at its end: memory that is used again too early shows."""
    hidden = x
    for _ in range(6):
        hidden = torch.tanh(hidden @ weight)
    return (hidden * x).mean()


SECTIONS = {
    "right": right, "waits": waits, "addmm": addmm, "streams": streams, "compile": compiled, "graph": graphs,
    "launches": launches, "time": times, "fused": fused,
}  # fmt: skip


def check(run: Run) -> None:
    """Runs the sections that were asked for."""
    for section in run.only:
        run.section = section
        if run.left < 20:
            run.row("no time is left", f"{run.left:.0f} s")
            continue
        run.tried("the section", partial(SECTIONS[section], run))
        run.row("-" * 44, f"{run.left:.0f} s left")


def options_of(argv: list[str] | None) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "simulated"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="sizes for a CPU, each once")
    parser.add_argument("--seconds", type=float, default=340, help="no section begins later")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS], default=[*SECTIONS], metavar="SECTION")
    return parser.parse_args(argv)


def out_of_time(*_: object) -> NoReturn:
    """Ends what runs now."""
    raise TimeoutError("no time is left")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 if nothing was wrong or raised, 1 if something was, 2 without a device."""
    options = options_of(argv)
    if options.device == "simulated":
        from tests import simulated

        simulated.install()
    if not torch.cuda.is_available():
        sys.stderr.write("gpu_check: this machine has no GPU that torch can use. Write --device simulated.\n")
        return 2
    run = Run(options)
    versions = f"torch {torch.__version__}", f"CUDA {torch.version.cuda}", f"Python {sys.version.split()[0]}"
    run.row("this", torch.cuda.get_device_name(0), *versions, f"funcga {funcga.__version__}")
    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(int(options.seconds) + 15)  # ends what hangs, and the table stays
    try:
        check(run)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    print(f"\n{len(run.wrong)} that raised or were wrong", *run.wrong, sep="\n  ")
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
