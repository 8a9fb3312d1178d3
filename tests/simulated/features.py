"""What users do on a device: each feature as a step, beside the loop that they would write by hand.

`ACROSS` are the features whose windows replicas merge, `UPDATES` the steps of an optimizer.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import funcga
import torch_backend

ROWS, WIDTH, CLASSES = 32, 8, 3


@dataclass(frozen=True)
class Problem:
    """A model of so many layers on a device, its batch, and the number of its micro-batches."""

    device: str
    n: int = 4
    layers: int = 4  # with two leaves each
    dtype: torch.dtype = torch.float32

    def drawn(self):
        generator = torch.Generator().manual_seed(0)
        normal = lambda *shape: torch.randn(shape, generator=generator).to(self.dtype)
        widths = [WIDTH] * self.layers + [CLASSES]
        params = {}
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            params |= {f"{layer}.w": normal(outputs, inputs) / 2, f"{layer}.b": normal(outputs) / 2}
        x, y = normal(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,), generator=generator)
        mask = torch.rand(ROWS, generator=generator) > 0.3
        return tree_map(lambda leaf: leaf.to(self.device), (params, x, y, mask))

    def microbatches(self, *batch):
        return [*zip(*[leaf.chunk(self.n) for leaf in batch], strict=True)]


def forward(params, x):
    layers = len(params) // 2
    for layer in range(layers):
        x = F.linear(x, params[f"{layer}.w"], params[f"{layer}.b"])
        x = torch.tanh(x) if layer < layers - 1 else x
    return x


def averaged(params, x, y, mask):
    return F.cross_entropy(forward(params, x), y)


def of_tokens(params, x, y, mask):
    """A sum over the rows that count."""
    return (F.cross_entropy(forward(params, x), y, reduction="none") * mask).sum()


def mean_of_tokens(params, x, y, mask):
    return of_tokens(params, x, y, mask) / mask.sum()


def share_of_tokens(params, x, y, mask, *, totals):
    return of_tokens(params, x, y, mask) / totals["tokens"]


def tokens(x, y, mask):
    return mask.sum()


Step = Callable[[], Any]


def by_hand(problem: Problem, loss=averaged, weight=None, sums=False, totals=None, autocast=False) -> Step:
    """The loop: a loss of each micro-batch, scaled, with its backward pass.

    With a weight, losses are means and scaled by it, unless they are `sums`, and the end is divided by the total.
    """
    params, *batch = problem.drawn()
    leaves = {name: leaf.requires_grad_() for name, leaf in params.items()}
    cut = problem.microbatches(*batch)

    def run():
        for leaf in leaves.values():
            leaf.grad = None
        value = total = None
        given = {} if totals is None else {"totals": {"tokens": sum(tokens(*microbatch) for microbatch in cut)}}
        for microbatch in cut:
            with torch.autocast(problem.device, dtype=torch.bfloat16, enabled=autocast):
                scaled = loss(leaves, *microbatch, **given)
            if weight is not None:
                share = weight(*microbatch)
                scaled = scaled if sums else scaled * share
                total = share if total is None else total + share
            elif totals is None:
                scaled = scaled / problem.n
            scaled.backward()
            value = scaled.detach() if value is None else value + scaled.detach()
        grads = [leaf.grad for leaf in leaves.values()]
        if total is not None:
            torch._foreach_div_([*grads, value], total.to(torch.float32))
        return value, dict(zip(leaves, grads, strict=True))

    return run


def accumulated(problem: Problem, loss=averaged, **options) -> Step:
    step = funcga.accumulate(funcga.value_and_grad(loss), problem.n, **options)
    args = problem.drawn()
    return lambda: step(*args)


def streamed(problem: Problem, loss=averaged, **options) -> Step:
    step, (params, *batch) = funcga.stream(funcga.value_and_grad(loss), **options), problem.drawn()
    return lambda: step(params, problem.microbatches(*batch))


class Model(torch.nn.Module):
    def __init__(self, params):
        super().__init__()
        named = {name.replace(".", "_"): torch.nn.Parameter(leaf) for name, leaf in params.items()}
        self.leaves = torch.nn.ParameterDict(named)

    def forward(self, x):
        return forward({name.replace("_", "."): leaf for name, leaf in self.leaves.items()}, x)


def of_module(problem: Problem, **options) -> Step:
    params, *batch = problem.drawn()
    loss = lambda model, x, y, mask: F.cross_entropy(model(x), y)
    step = funcga.accumulate(torch_backend.module_value_and_grad(Model(params), loss), problem.n, **options)
    return lambda: step(*batch)


def autocast(problem: Problem) -> Step:
    step, args = funcga.accumulate(funcga.value_and_grad(averaged), problem.n), problem.drawn()

    def run():
        with torch.autocast(problem.device, dtype=torch.bfloat16):
            return step(*args)

    return run


def compiled(problem: Problem) -> Step:
    return accumulated(problem, torch.compile(averaged, backend="aot_eager"))


@dataclass(frozen=True)
class Feature:
    """`step` makes what a user calls, and `loop` what the user would write without funcga."""

    step: Callable[[Problem], Step]
    loop: Callable[[Problem], Step] = by_hand
    dtype: torch.dtype = torch.float32


def weighed(problem: Problem) -> Step:
    return by_hand(problem, mean_of_tokens, weight=tokens)


def with_options(loss=averaged, made=accumulated, **options):
    return lambda problem: made(problem, **({} if made is of_module else {"loss": loss}), **options)


REPRODUCIBLE = funcga.reproducible(funcga.mean())
FEATURES = {
    "plain": Feature(accumulated),
    "`stream`": Feature(streamed),
    "`module_value_and_grad`": Feature(of_module),
    "16-bit parameters": Feature(accumulated, dtype=torch.bfloat16),
    "autocast": Feature(autocast, lambda problem: by_hand(problem, autocast=True)),
    "`totals=`": Feature(
        with_options(share_of_tokens, fold=funcga.sum(), totals=lambda x, y, mask: {"tokens": mask.sum()}),
        lambda problem: by_hand(problem, share_of_tokens, totals=True),
    ),
    "`weight=` on the device, `mean()`": Feature(with_options(mean_of_tokens, weight=tokens), weighed),
    "`weight=` on the device, `per_weight()`": Feature(
        with_options(of_tokens, fold=funcga.per_weight(), weight=tokens),
        lambda problem: by_hand(problem, of_tokens, weight=tokens, sums=True),
    ),
    "`gradient_norms()`": Feature(with_options(observe=funcga.gradient_norms())),
    "`gradient_noise()`": Feature(with_options(observe=funcga.gradient_noise())),
    '`drop="microbatch"`': Feature(with_options(drop="microbatch")),
    '`drop="window"`': Feature(with_options(drop="window")),
    "`drop=` of a module": Feature(with_options(made=of_module, drop="microbatch")),
    "`drop=`, `weight=` on the device": Feature(
        with_options(mean_of_tokens, drop="microbatch", weight=tokens), weighed
    ),
    "`reproducible(mean())`": Feature(with_options(fold=REPRODUCIBLE)),
    "`drop=`, `reproducible(mean())`": Feature(with_options(fold=REPRODUCIBLE, drop="microbatch")),
    "a compiled loss": Feature(compiled),
}

OPTIONS = {
    "plain": (averaged, {}),
    "`weight=` on the device": (of_tokens, {"fold": funcga.per_weight(), "weight": tokens}),
    "`totals=`": (
        share_of_tokens, {"fold": funcga.sum(), "totals": lambda x, y, mask: {"tokens": mask.sum()}}
    ),
    "`gradient_norms()`": (averaged, {"observe": funcga.gradient_norms()}),
    "`gradient_noise()`": (averaged, {"observe": funcga.gradient_noise()}),
    '`drop="microbatch"`': (averaged, {"drop": "microbatch"}),
    '`drop="window"`': (averaged, {"drop": "window"}),
    "`reproducible(mean())`": (averaged, {"fold": REPRODUCIBLE}),
}  # fmt: skip


def merged(name: str, group: Any, problem: Problem) -> Step:
    """A step of these OPTIONS across the group, each rank of which has its share of the rows."""
    loss, options = OPTIONS[name]
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    step = funcga.accumulate(funcga.value_and_grad(loss), problem.n, across=group, **options)
    params, *batch = problem.drawn()
    own = [leaf.chunk(size)[rank] for leaf in batch]
    return lambda: step(params, *own)


def whole(name: str, problem: Problem) -> Step:
    """The same step of all rows, in one process."""
    loss, options = OPTIONS[name]
    return accumulated(problem, loss, **options)


# --- optimizers, and windows that outlive a call


def gradients(problem: Problem, count=1):
    params = problem.drawn()[0]
    return params, [{name: (k + 1) * 0.1 * leaf for name, leaf in params.items()} for k in range(count)]


def torch_optimizer(problem: Problem) -> Step:
    params, (grads,) = gradients(problem)
    optimizer = torch.optim.AdamW([leaf.requires_grad_() for leaf in params.values()], lr=0.1)
    for leaf, grad in zip(params.values(), grads.values(), strict=True):
        leaf.grad = grad
    return lambda: optimizer.step()


def pure(problem: Problem, donate=False) -> Step:
    tx, (params, (grads,)) = torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), gradients(problem)
    held = [params, tx.init(params)]

    def run():
        params, state = funcga.transforms.apply(tx, grads, held[1], held[0], donate=donate)
        held[:] = [params, state]

    return run


UPDATES = {
    "`torch.optim.AdamW.step`": torch_optimizer,
    "`funcga.transforms.apply(from_optimizer(AdamW), ..., donate=True)`": lambda problem: pure(problem, donate=True),
    "`funcga.transforms.apply(from_optimizer(AdamW), ...)`": pure,
}


def multi_steps(problem: Problem, made) -> Step:
    params, grads = gradients(problem, problem.n)
    weights = [torch.tensor(k + 1, device=problem.device) for k in range(problem.n)]
    tx = made(torch_backend.from_optimizer(torch.optim.SGD, lr=0.1), problem.n)
    held = [tx.init(params)]

    def run():
        for grad, weight in zip(grads, weights, strict=True):
            updates, held[0] = tx.update(grad, held[0], params, weight=weight)
        return updates

    return run


def windows_of_tokens(problem: Problem) -> Step:
    _, *batch = problem.drawn()
    cut = problem.microbatches(*batch)
    return lambda: [*funcga.windows(cut, funcga.transforms.TargetWeight(10.0), weight=tokens)]


WINDOWS = {
    "`multi_steps(tx, n)`": lambda problem: multi_steps(problem, funcga.multi_steps),
    '`multi_steps(tx, n, drop="microbatch")`': lambda problem: multi_steps(
        problem, lambda tx, n: funcga.multi_steps(tx, n, drop="microbatch")
    ),
    "`multi_steps(loss_scaled(tx), n)`": lambda problem: multi_steps(
        problem, lambda tx, n: funcga.multi_steps(funcga.transforms.loss_scaled(tx), n)
    ),
    "`loss_scaled(multi_steps(tx, n))`": lambda problem: multi_steps(
        problem, lambda tx, n: funcga.transforms.loss_scaled(funcga.multi_steps(tx, n))
    ),
    "`windows(..., TargetWeight(...), weight=)`": windows_of_tokens,
}
