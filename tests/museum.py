"""The museum of wrong gradients: public bugs, each computed the way it was, and the right way with funcga.

An exhibit is a function that returns a wrong tree, a right one and the true one: float64 autograd on the whole batch.
`python -m tests.museum` writes their table into docs/museum.md.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import funcga
import jax_backend
import torch_backend

PAGE = Path(__file__).parent.parent / "docs" / "museum.md"
N = 4  # the micro-batches of a window
SUM_IN_FLOAT32, FLOAT64 = 1e-6, 1e-12


@dataclass(frozen=True)
class Exhibit:
    hall: str
    threads: tuple[str, ...]  # "owner/repository#number"
    computed: str  # what the loop computed
    instead: str  # what to write with funcga
    run: Callable[[], tuple[object, object, object]]  # the wrong tree, the right one and the true one
    limit: float = FLOAT64

    @property
    def name(self) -> str:
        return self.run.__name__

    @functools.cache  # noqa: B019 - exhibits live as long as this module
    def trees(self) -> tuple[object, object, object]:
        return self.run()

    @property
    def said(self) -> str:
        """What the doctor says of the loop that computed the wrong tree."""
        watched = getattr(self.trees()[0], "watched", None)
        if watched is None:
            return "\N{EN DASH}"
        names = [f'"{cause.name}"' for cause in watched.causes]
        return ", ".join(names) or ("nothing" if watched.ok else "that it cannot tell")


EXHIBITS: list[Exhibit] = []


def exhibit(hall, *threads, computed, instead, limit=FLOAT64):
    return lambda run: EXHIBITS.append(Exhibit(hall, threads, computed, instead, run, limit)) or run


# The common problem: sentences of different lengths, a linear classifier of their tokens, in float64.
LENGTHS = [6, 5, 5, 4, 3, 2, 1, 1]
CLASSES, FEATURES = 4, 5
_random = np.random.default_rng(0)
_labels = np.where(np.arange(6) < np.array(LENGTHS)[:, None], _random.integers(CLASSES, size=(8, 6)), -100)
_x = _random.normal(size=(8, 6, FEATURES)) + np.arange(8)[:, None, None] / 4  # rows that differ, as shards of data do
BATCH = {"x": torch.from_numpy(_x), "labels": torch.from_numpy(_labels)}
PARAMS = {"w": torch.from_numpy(_random.normal(size=(FEATURES, CLASSES))), "b": torch.zeros(CLASSES).double()}


def logits(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def token_loss(params, batch, reduction="mean"):
    return F.cross_entropy(logits(params, batch).flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


sum_of_token_losses = partial(token_loss, reduction="sum")


def count_tokens(batch):
    return (batch["labels"] != -100).sum()


def by_autograd(loss, params, *batch):
    """The gradient by torch.autograd alone, without funcga."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves, *batch), list(leaves.values())), strict=True))


def rows(batch, start, stop):
    return {name: leaf[start:stop] for name, leaf in batch.items()}


def microbatches(batch, size=2):
    return [rows(batch, start, start + size) for start in range(0, len(batch["x"]), size)]


def total(gradients, scale=1.0):
    return {name: sum(gradient[name] for gradient in gradients) * scale for name in gradients[0]}


class Looped(dict):
    """The gradient that a loop leaves to its last step, and what the doctor says of the loop: `.watched`."""


def looped(loss, *windows, divisor=1, before=None, after=None):
    """Runs a loop of `.backward()` over windows of micro-batches.

    divisor: of each loss; before, after: called with the optimizer before and after each backward.
    """
    leaves = {name: p.detach().clone().requires_grad_() for name, p in PARAMS.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.0)
    with funcga.watch(optimizer=optimizer) as watched:
        for window in windows:
            optimizer.zero_grad()
            for part in window:
                if before:
                    before(optimizer)
                (loss(leaves, part) / divisor).backward()
                if after:
                    after(optimizer)
            optimizer.step()
    gradient = Looped({name: leaf.grad for name, leaf in leaves.items()})
    gradient.watched = watched
    return gradient


DENOMINATORS, REPLICAS, NUMBERS, UPDATES, ROWS = (
    "Wrong denominators",
    "Wrong averages over replicas",
    "Wrong sums",
    "What belongs to an update, done for every micro-batch",
    "Rows that see each other",
)


@exhibit(
    DENOMINATORS,
    "Lightning-AI/pytorch-lightning#2199",
    "ml-explore/mlx-lm#1413",
    computed="each micro-batch's mean over its own tokens, and the mean of these means",
    instead="`weight=count_tokens`",
)
def uneven_tokens():
    wrong = looped(token_loss, microbatches(BATCH), divisor=N)
    right = funcga.accumulate(funcga.grad(token_loss), N, weight=count_tokens)(PARAMS, BATCH)
    return wrong, right, by_autograd(token_loss, PARAMS, BATCH)


@exhibit(
    DENOMINATORS,
    "keras-team/keras#20241",
    computed="the plain mean over micro-batches of 3, 3 and 2 rows",
    instead="nothing: rows are the default weight",
)
def smaller_microbatch():
    batch = BATCH | {"labels": BATCH["labels"].clamp(min=0)}  # every token counts
    wrong = looped(token_loss, microbatches(batch, 3), divisor=3)
    right = funcga.accumulate(funcga.grad(token_loss), microbatch_size=3)(PARAMS, batch)
    return wrong, right, by_autograd(token_loss, PARAMS, batch)


@exhibit(
    DENOMINATORS,
    "huggingface/transformers#46204",
    computed="the loss of labels that are shifted by one, divided by the number of all labels",
    instead='`weight=lambda b: (b["labels"][:, 1:] != -100).sum()`',
)
def shifted_labels():
    def loss(params, batch, reduction="mean"):
        shifted = {"x": batch["x"][:, :-1], "labels": batch["labels"][:, 1:]}
        return token_loss(params, shifted, reduction)

    # Two tokens or more in each micro-batch, as a causal model has them.
    batch = BATCH | {"labels": torch.where(torch.arange(6) < 2, BATCH["labels"].clamp(min=0), BATCH["labels"])}
    summed = partial(loss, reduction="sum")
    wrong = looped(summed, microbatches(batch), divisor=count_tokens(batch))
    count = lambda batch: (batch["labels"][:, 1:] != -100).sum()
    right = funcga.accumulate(funcga.grad(summed), N, fold=funcga.per_weight(), weight=count)(PARAMS, batch)
    return wrong, right, by_autograd(loss, PARAMS, batch)


@exhibit(
    DENOMINATORS,
    "pytorch/pytorch#72047",
    computed="the plain mean over micro-batches of `CrossEntropyLoss(weight=...)`, which divides by the class weights of its rows",
    instead='`weight=lambda b: class_weights[b["labels"]].sum()`, which is what the loss divides by',
)
def class_weights():
    weights = torch.tensor([1.0, 10.0, 2.0, 0.5]).double()
    batch = {"x": BATCH["x"][:, 0], "labels": torch.tensor([0, 1, 3, 3, 2, 1, 0, 3])}
    loss = lambda params, batch: F.cross_entropy(logits(params, batch), batch["labels"], weight=weights)
    wrong = looped(loss, microbatches(batch), divisor=N)
    weight = lambda batch: weights[batch["labels"]].sum()
    right = funcga.accumulate(funcga.grad(loss), N, weight=weight)(PARAMS, batch)
    return wrong, right, by_autograd(loss, PARAMS, batch)


@exhibit(
    DENOMINATORS,
    "Lightning-AI/pytorch-lightning#19987",
    "jingyaogong/minimind#749",
    computed="the last window of an epoch has 2 micro-batches, and their losses are divided by n = 4",
    instead="`for window in funcga.windows(loader, 4)`, `stream`",
)
def last_window():
    batch = BATCH | {"labels": BATCH["labels"].clamp(min=0)}  # every token counts, so that n alone is wrong here
    last = rows(batch, 0, 4)
    wrong = looped(token_loss, microbatches(batch), microbatches(last), divisor=N)
    *_, window = funcga.windows([*microbatches(batch), *microbatches(last)], N)  # a window of four, and one of two
    step = funcga.stream(funcga.grad(token_loss), weight=count_tokens)
    return wrong, step(PARAMS, window), by_autograd(token_loss, PARAMS, last)


@exhibit(
    DENOMINATORS,
    "karpathy/nanoGPT#168",
    computed="the sum of n mean losses, so that clipping is n times as strict and epsilon n times as small",
    instead="nothing: the fold of a mean is a mean",
)
def not_divided():
    batch = BATCH | {"labels": BATCH["labels"].clamp(min=0)}
    wrong = looped(token_loss, microbatches(batch))
    right = funcga.accumulate(funcga.grad(token_loss), N)(PARAMS, batch)
    return wrong, right, by_autograd(token_loss, PARAMS, batch)


@exhibit(
    DENOMINATORS,
    "modelscope/ms-swift#10117",
    "unslothai/unsloth-zoo#1023",
    computed="sums of losses, divided by the tokens of the window (`num_items_in_batch`) and then by n as well",
    instead="`fold=funcga.per_weight(), weight=count_tokens`",
)
def divided_twice():
    tokens = float(count_tokens(BATCH))
    scaled = lambda params, batch: sum_of_token_losses(params, batch) / tokens
    wrong = looped(scaled, microbatches(BATCH), divisor=N)
    step = funcga.accumulate(funcga.grad(sum_of_token_losses), N, fold=funcga.per_weight(), weight=count_tokens)
    return wrong, step(PARAMS, BATCH), by_autograd(token_loss, PARAMS, BATCH)


@exhibit(
    DENOMINATORS,
    "NVIDIA-NeMo/Automodel#3359",
    computed="a loss divided by the tokens of the window, plus an auxiliary loss for every micro-batch that is not divided",
    instead="both terms as means over tokens, `weight=count_tokens`",
)
def auxiliary_loss():
    def router_z_loss(params, batch):
        return 0.1 * logits(params, batch).logsumexp(-1)[batch["labels"] != -100].square().mean()

    tokens = float(count_tokens(BATCH))
    one_micro_batch = lambda params, batch: sum_of_token_losses(params, batch) / tokens + router_z_loss(params, batch)
    wrong = looped(one_micro_batch, microbatches(BATCH))
    loss = lambda params, batch: token_loss(params, batch) + router_z_loss(params, batch)
    right = funcga.accumulate(funcga.grad(loss), N, weight=count_tokens)(PARAMS, BATCH)
    return wrong, right, by_autograd(loss, PARAMS, BATCH)


@exhibit(
    DENOMINATORS,
    "verl-project/verl#5625",
    "verl-project/verl#7200",
    computed="a policy's loss over the tokens of each micro-batch, weighed by its completions, with a penalty over completions",
    instead="`fold=funcga.sum(), totals=count`",
)
def policy_loss():
    batch = BATCH | {"advantage": torch.linspace(-1, 2, 8).double()}

    def sums(params, batch):
        labels, scores = batch["labels"], logits(params, batch).log_softmax(-1)
        chosen = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        surprise = -batch["advantage"][:, None] * chosen * (labels != -100)
        return surprise.sum(), scores[:, 0].exp().square().sum()

    def loss(params, batch, *, totals):
        of_tokens, of_completions = sums(params, batch)
        return of_tokens / totals["tokens"] + 0.1 * of_completions / totals["completions"]

    count = lambda batch: {"tokens": count_tokens(batch), "completions": len(batch["x"])}
    alone = lambda params, batch: loss(params, batch, totals=count(batch))
    wrong = looped(alone, microbatches(batch), divisor=N)
    right = funcga.accumulate(funcga.grad(loss), N, fold=funcga.sum(), totals=count)(PARAMS, batch)
    return wrong, right, by_autograd(alone, PARAMS, batch)


def log_likelihood(params, batch):
    """Of each row's labels: the sum over its tokens."""
    return -F.cross_entropy(logits(params, batch).transpose(1, 2), batch["labels"], reduction="none").sum(1)


@exhibit(
    DENOMINATORS,
    "modelscope/ms-swift#10144",
    computed="DPO on packed rows: the mean over the 1 or 3 pairs of each, and the mean of these means",
    instead="`weight=count_pairs`",
)
def packed_pairs():
    def loss(params, pack):
        labels = pack["labels"]
        rejected = pack | {"labels": torch.where(labels == -100, labels, (labels + 1) % CLASSES)}
        return -F.logsigmoid(log_likelihood(params, pack) - log_likelihood(params, rejected)).mean()

    packs = [rows(BATCH, start, stop) for start, stop in ((0, 1), (1, 4), (4, 5), (5, 8))]
    count_pairs = lambda pack: len(pack["x"])
    right = funcga.stream(funcga.grad(loss), weight=count_pairs)(PARAMS, packs)
    return looped(loss, packs, divisor=N), right, by_autograd(loss, PARAMS, BATCH)


@exhibit(
    DENOMINATORS,
    "huggingface/trl#5619",
    "huggingface/trl#6024",
    computed="sums of losses, divided by a `num_items_in_batch` that counts a generation batch of two windows",
    instead="`fold=funcga.per_weight(), weight=count_tokens`, whatever the loader counts",
)
def items_of_two_windows():
    items = 2 * count_tokens(BATCH)  # of a generation batch, whose second window has as many
    step = funcga.accumulate(funcga.grad(sum_of_token_losses), N, fold=funcga.per_weight(), weight=count_tokens)
    wrong = looped(sum_of_token_losses, microbatches(BATCH), divisor=items)
    return wrong, step(PARAMS, BATCH), by_autograd(token_loss, PARAMS, BATCH)


@exhibit(
    REPLICAS,
    "huggingface/transformers#34242",
    computed="the mean over each replica's own tokens, averaged over the replicas, as DDP does",
    instead='`weight=count_tokens, across="data"`',
)
def uneven_tokens_on_replicas():
    halves = [rows(BATCH, 0, 4), rows(BATCH, 4, 8)]
    wrong = total([by_autograd(token_loss, PARAMS, half) for half in halves], 1 / 2)

    def jax_loss(params, batch):
        scores = jax.nn.log_softmax(batch["x"] @ params["w"] + params["b"])
        counts = batch["labels"] != -100
        picked = jnp.take_along_axis(scores, jnp.where(counts, batch["labels"], 0)[..., None], -1)[..., 0]
        return -jnp.where(counts, picked, 0).sum() / jnp.maximum(counts.sum(), 1).astype(picked.dtype)

    count = lambda batch: (batch["labels"] != -100).sum()
    with jax.enable_x64(True):
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        step = funcga.accumulate(jax.grad(jax_loss), 2, weight=count, across="data")
        grads = jax_backend.replicated(step, mesh)(funcga.to_jax(PARAMS), funcga.to_jax(BATCH))
        right = funcga.to_torch(jax.device_get(grads))
    return wrong, right, by_autograd(token_loss, PARAMS, BATCH)


@exhibit(
    REPLICAS,
    "pytorch/pytorch#67253",
    computed="replicas with 6 and 2 rows, whose gradients DDP divides by the number of replicas",
    instead="`across=group`: the sums of the replicas are merged with their weights",
)
def uneven_rows_on_replicas():
    batch = BATCH | {"labels": BATCH["labels"].clamp(min=0)}
    shares = [rows(batch, 0, 6), rows(batch, 6, 8)]
    gradients = [by_autograd(token_loss, PARAMS, share) for share in shares]
    accumulator = funcga.Accumulator(funcga.mean())  # what `across=` merges
    states = [
        accumulator.update(accumulator.init(PARAMS), gradient, weight=len(share["x"]))
        for gradient, share in zip(gradients, shares, strict=True)
    ]
    right = accumulator.finalize(accumulator.merge(*states))
    return total(gradients, 1 / 2), right, by_autograd(token_loss, PARAMS, batch)


@exhibit(
    REPLICAS,
    "NVIDIA/Megatron-LM#7513",
    computed="context parallelism over two ranks: the mean over the tokens in each one's half of the sequences, averaged as if "
    "the halves were other sequences",
    instead="`weight=count_tokens, across=` with a group of all of these ranks",
)
def halves_of_sequences():
    halves = [{name: leaf[:, part] for name, leaf in BATCH.items()} for part in (slice(0, 3), slice(3, 6))]
    gradients = [by_autograd(token_loss, PARAMS, half) for half in halves]
    accumulator = funcga.Accumulator(funcga.mean())  # what `across=` merges
    states = [
        accumulator.update(accumulator.init(PARAMS), gradient, weight=count_tokens(half))
        for gradient, half in zip(gradients, halves, strict=True)
    ]
    right = accumulator.finalize(accumulator.merge(*states))
    return total(gradients, 1 / 2), right, by_autograd(token_loss, PARAMS, BATCH)


@exhibit(
    NUMBERS,
    "deepspeedai/DeepSpeed#1800",
    computed="512 bfloat16 gradients, added in bfloat16: terms that are small compared with the sum are rounded away",
    instead="nothing: sums of bfloat16 are float32",
    limit=SUM_IN_FLOAT32,
)
def bfloat16_sums():
    x = torch.from_numpy(np.random.default_rng(1).uniform(0.5, 1.5, size=(512, 8))).bfloat16()
    w = torch.zeros(8).bfloat16()
    wrong = torch.zeros_like(w)
    for row in x:  # the gradient of (x @ w).mean() is the row
        wrong += row
    step = funcga.accumulate(funcga.grad(lambda w, x: (x @ w).mean()), 512, fold=funcga.mean(out_dtype="float32"))
    return {"w": wrong.double() / 512}, {"w": step(w, x)}, {"w": x.double().mean(0)}


@exhibit(
    NUMBERS,
    "allenai/OLMo-core#657",
    "pytorch/pytorch#116349",
    computed="a micro-batch whose labels are all masked: its mean loss is 0 / 0, and so is the loss of the window",
    instead="`weight=count_tokens`: a micro-batch of weight 0 is left out, whatever its loss is",
)
def masked_microbatch():
    batch = BATCH | {"labels": BATCH["labels"].where(torch.arange(8)[:, None] < 6, -100)}
    wrong = looped(token_loss, microbatches(batch), divisor=N)
    wrong["loss"] = sum(token_loss(PARAMS, part) for part in microbatches(batch)) / N
    loss, grads = funcga.accumulate(funcga.value_and_grad(token_loss), N, weight=count_tokens)(PARAMS, batch)
    return wrong, grads | {"loss": loss}, by_autograd(token_loss, PARAMS, batch) | {"loss": token_loss(PARAMS, batch)}


@exhibit(
    NUMBERS,
    "pytorch/pytorch#36601",
    computed="`scaler.update()` after every micro-batch: the loss scale doubles in the middle of a window, and the whole window "
    "is divided by the last scale",
    instead="`multi_steps(loss_scaled(tx), n)`: a window has one scale",
)
def changing_loss_scale():
    loss = lambda params, batch: sum_of_token_losses(params, batch) / float(count_tokens(BATCH))
    scales = [1024.0, 1024.0, 2048.0, 2048.0]
    parts = microbatches(BATCH)
    scaled = [total([by_autograd(loss, PARAMS, part)], scale) for part, scale in zip(parts, scales, strict=True)]
    wrong = total(scaled, 1 / scales[-1])

    sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=1.0)
    tx = funcga.multi_steps(funcga.transforms.loss_scaled(sgd, init_scale=1024.0), N, fold=funcga.sum())
    state = tx.init(PARAMS)
    gradient = funcga.value_and_grad(loss, scaled=True)
    for part in parts:
        _, grads = gradient(PARAMS, part, loss_scale=state.inner.scale)
        updates, state = tx.update(grads, state, PARAMS)
    right = {name: -update for name, update in updates.items()}  # SGD of learning rate 1
    return wrong, right, by_autograd(token_loss, PARAMS, BATCH)


@exhibit(
    UPDATES,
    "huggingface/transformers#986",
    "huggingface/transformers#1563",
    computed="`clip_grad_norm_` after every `backward()`, so that early micro-batches are clipped again and again",
    instead="`multi_steps(chain(clip_grad_norm(0.5), tx), n)`, or `clip_grad_norm_` after `assign_grads`",
)
def clipped_every_time():
    loss = lambda params, batch: sum_of_token_losses(params, batch) / float(count_tokens(BATCH))
    norm = 0.2

    def clipped(grads):
        copies = {name: nn.Parameter(g.clone()) for name, g in grads.items()}
        for copy, g in zip(copies.values(), grads.values(), strict=True):
            copy.grad = g.clone()
        nn.utils.clip_grad_norm_(copies.values(), norm)
        return {name: copy.grad for name, copy in copies.items()}

    clip = lambda optimizer: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], norm)
    wrong = looped(loss, microbatches(BATCH), after=clip)

    sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=1.0)
    tx = funcga.multi_steps(torch_backend.chain(torch_backend.clip_grad_norm(norm), sgd), N)
    state = tx.init(PARAMS)
    for part in microbatches(BATCH):
        grads = funcga.grad(token_loss)(PARAMS, part)
        updates, state = tx.update(grads, state, PARAMS, weight=count_tokens(part))
    right = {name: -update for name, update in updates.items()}
    return wrong, right, clipped(by_autograd(token_loss, PARAMS, BATCH))


@exhibit(
    UPDATES,
    "NovaSky-AI/SkyRL#2008",
    computed="gradients zeroed when a request begins, so that each request erases the ones before it",
    instead="`Accumulator`: a request adds to its state, and `finalize` gives what the step gets",
)
def erased_by_requests():
    loss = lambda params, batch: sum_of_token_losses(params, batch) / count_tokens(BATCH)
    accumulator = funcga.Accumulator(funcga.mean())
    state = accumulator.init(PARAMS)
    for request in microbatches(BATCH):
        state = accumulator.update(state, funcga.grad(token_loss)(PARAMS, request), weight=count_tokens(request))
    wrong = looped(loss, microbatches(BATCH), before=torch.optim.Optimizer.zero_grad)
    return wrong, accumulator.finalize(state), by_autograd(token_loss, PARAMS, BATCH)


@exhibit(
    UPDATES,
    "NVIDIA/Megatron-LM#7186",
    "allenai/open-instruct#1498",
    computed="every micro-batch is taken for the end of a window, and the next one clears the sum: the step gets the last one, "
    "divided by n",
    instead="nothing: a window is an argument, and its end need not be marked",
)
def every_one_a_boundary():
    batch = BATCH | {"labels": BATCH["labels"].clamp(min=0)}

    def clear(optimizer, is_boundary=True):  # for all but the last it should be False
        if is_boundary:
            optimizer.zero_grad()

    wrong = looped(token_loss, microbatches(batch), divisor=N, before=clear)
    right = funcga.accumulate(funcga.grad(token_loss), N)(PARAMS, batch)
    return wrong, right, by_autograd(token_loss, PARAMS, batch)


@exhibit(
    UPDATES,
    "huggingface/trl#7265",
    computed="a running mean of rewards, updated and read in each micro-batch: each has a baseline of its own",
    instead="`accumulate` the mean reward of the window first, and pass the baseline to the loss",
)
def running_baseline():
    mean_reward = lambda params, batch: log_likelihood(params, batch).mean()
    loss = lambda params, batch, baseline: -F.logsigmoid(log_likelihood(params, batch) - baseline).mean()
    # The running mean of 4 rows of earlier windows, and of more rows.
    updated = lambda rows, mean, more, reward: (rows * mean + more * float(reward)) / (rows + more)
    earlier = 4, -3.0
    seen = [*earlier]

    def with_running_baseline(params, part):
        more = len(part["x"])
        seen[:] = seen[0] + more, updated(*seen, more, mean_reward(params, part).detach())
        return loss(params, part, baseline=seen[1])

    def with_one_baseline(reward):
        return partial(loss, baseline=updated(*earlier, 8, reward))

    wrong = looped(with_running_baseline, microbatches(BATCH), divisor=N)
    reward = funcga.accumulate(mean_reward, N)(PARAMS, BATCH)
    right = funcga.accumulate(funcga.grad(with_one_baseline(reward)), N)(PARAMS, BATCH)
    return wrong, right, by_autograd(with_one_baseline(mean_reward(PARAMS, BATCH)), PARAMS, BATCH)


def moved(params):
    """How far the parameters have come."""
    return total([params, total([PARAMS], -1.0)])


def train(learning_rates):
    """Parameters after one update of plain gradient descent by each learning rate, on the whole batch."""
    params = PARAMS
    for learning_rate in learning_rates:
        params = total([params, total([by_autograd(token_loss, params, BATCH)], -learning_rate)])
    return params


@exhibit(
    UPDATES,
    "Lightning-AI/pytorch-lightning#1476",
    "huggingface/accelerate#963",
    computed="`scheduler.step()` after every micro-batch: a warm-up of 16 updates is over after 4",
    instead="`multi_steps(from_optimizer(..., scheduler=...), n)`: schedules count updates",
)
def schedule_of_microbatches():
    warm_up = lambda count: 0.1 * min(1.0, count / 16)
    wrong = train([warm_up(N * update) for update in range(4)])

    sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=warm_up)
    tx = funcga.multi_steps(sgd, N)
    params, state = PARAMS, tx.init(PARAMS)
    for part in 4 * microbatches(BATCH):
        grads = funcga.grad(token_loss)(params, part)
        updates, state = tx.update(grads, state, params, weight=count_tokens(part))
        params = torch_backend.apply_updates(params, updates)
    return moved(wrong), moved(params), moved(train([warm_up(update) for update in range(4)]))


@exhibit(
    UPDATES,
    "keras-team/keras#19990",
    computed="weight decay in every micro-batch, so n times per update",
    instead="`multi_steps(tx, n)`: the optimizer runs once per window",
)
def decay_of_microbatches():
    learning_rate, decay = 0.1, 0.1
    step = total([by_autograd(token_loss, PARAMS, BATCH)], -learning_rate)
    decayed = lambda times: total([PARAMS], (1 - learning_rate * decay) ** times)
    wrong, exact = (moved(total([decayed(times), step])) for times in (N, 1))

    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD, lr=learning_rate, weight_decay=decay), N)
    state = tx.init(PARAMS)
    for part in microbatches(BATCH):
        grads = funcga.grad(token_loss)(PARAMS, part)
        updates, state = tx.update(grads, state, PARAMS, weight=count_tokens(part))
    return wrong, updates, exact


@exhibit(
    ROWS,
    "pytorch/pytorch#46516",
    "andreped/GradientAccumulator#6",
    computed="BatchNorm's running statistics, updated n times per update, from the variances within micro-batches",
    instead="`pure_loss(model, loss_fn, statistics=True)`, `fold=pooled()`, `running_buffers`",
)
def running_statistics():
    x = BATCH["x"][:, 0]
    layer = lambda: nn.BatchNorm1d(FEATURES).double()
    buffers = lambda layer: {name: b.clone() for name, b in layer.named_buffers() if b.dtype == torch.float64}
    wrong, whole, model = layer(), layer(), layer()
    for start in range(0, len(x), 2):
        wrong(x[start : start + 2])
    whole(x)
    loss = torch_backend.pure_loss(model, lambda model, x: model(x).square().mean(), statistics=True)
    fold = ((funcga.mean(), funcga.pooled()), funcga.mean())
    step = funcga.accumulate(funcga.value_and_grad(loss, has_aux=True), N, fold=fold)
    (_, statistics), _ = step(dict(model.named_parameters()), x)
    model.load_state_dict(torch_backend.running_buffers(model, statistics), strict=False)
    return buffers(wrong), buffers(model), buffers(whole)


@exhibit(
    ROWS,
    "huggingface/sentence-transformers#1822",
    "openai/CLIP#25",
    computed="a contrastive loss for every micro-batch, in which a row has only the negatives of its own micro-batch",
    instead="`coupled(summary_fn, loss_fn, n)`, whose summary is the embeddings",
)
def in_batch_negatives():
    image, text = BATCH["x"][:, 0], BATCH["x"][:, 1]
    encode = lambda params, image, text: (image @ params["w"], text @ params["w"] + params["b"])
    contrast = lambda a, b: F.cross_entropy(a @ b.T, torch.arange(len(a)))
    loss = lambda params, image, text: contrast(*encode(params, image, text))
    parts = [(image[start : start + 2], text[start : start + 2]) for start in range(0, 8, 2)]
    wrong = looped(lambda params, part: loss(params, *part), parts, divisor=N)
    _, right = funcga.coupled(encode, lambda params, s: contrast(*s), N)(PARAMS, image, text)
    return wrong, right, by_autograd(loss, PARAMS, image, text)


def error(tree, true):
    """The largest difference, relative to the largest element of the true tree; NaN if there is one."""
    scale = max(float(leaf.abs().max()) for leaf in true.values())
    differences = [(tree[name].double() - leaf.double()).abs().max() for name, leaf in true.items()]
    return float(torch.stack(differences).max()) / scale


def table():
    """The tables of the page, a hall each, with the figures of this run."""
    lines = []
    for hall in dict.fromkeys(exhibit.hall for exhibit in EXHIBITS):
        lines += [
            "",
            f"## {hall}",
            "",
            "| found in | it computed | off by | [the doctor](howto/doctor.md#what-it-says) says | write |",
        ]
        lines += ["|---|---|---|---|---|"]
        for item in EXHIBITS:
            if item.hall == hall:
                wrong, _, true = item.trees()
                off = error(wrong, true)
                links = ", ".join(
                    f"[{thread.replace('#', ' #')}](https://github.com/{thread.replace('#', '/issues/')})"
                    for thread in item.threads
                )
                figure = "NaN" if math.isnan(off) else f"{100 * off:.0f}\N{NO-BREAK SPACE}%"
                lines.append(f"| {links} | {item.computed} | {figure} | {item.said} | {item.instead} |")
    return "\n".join([*lines[1:], ""])


def with_table(page):
    """The text of the page, with the tables of this run between its marks."""
    before, rest = page.split("<!-- exhibits -->\n")
    return f"{before}<!-- exhibits -->\n{table()}<!-- /exhibits -->\n{rest.split('<!-- /exhibits -->' + chr(10))[1]}"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    PAGE.write_text(with_table(PAGE.read_text()))
