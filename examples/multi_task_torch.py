"""Multi-task training with one task per micro-batch: a head for each task, whose loss is a mean over its own items.

    python examples/multi_task_torch.py

The loader yields micro-batches of one task each, in any order: sentences with a topic, sentences with a tag for each
word, and sentences with a score, some of which are missing. The loss of a window is a weighted sum of three means: over
sentences, over words, and over known scores. No weight of a micro-batch is right for all three, so `totals=` first
counts the items of each task in the window. A micro-batch returns its sum over the total of its task, and the fold is
a sum.

`(loss / n).backward()` weighs a task by the number of its micro-batches. With the number of micro-batches of the same
task as n, a word still counts for more in a micro-batch of few words; that loop is right where all micro-batches of a
task have equally many items.

A head that no micro-batch of a window uses has a gradient of zeros. AdamW moves it all the same, by its momentum and by
weight decay. A loop leaves `.grad` at None, and AdamW skips the head: pass None to `assign_grads` for that, as here.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import funcga
import torch_backend

VOCABULARY, TOPICS, TAGS, PAD = 40, 5, 6, 0
COEFFICIENTS = {"topic": 1.0, "tags": 1.0, "score": 0.5}


class Model(nn.Module):
    """A shared encoder of sentences, and a head for each task."""

    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.encoder = nn.GRU(width, width, batch_first=True)
        outputs = {"topic": TOPICS, "tags": TAGS, "score": 1}
        self.heads = nn.ModuleDict({task: nn.Linear(width, size) for task, size in outputs.items()})

    def forward(self, task, tokens):
        """An output for each word if these are tagged, else for each sentence."""
        hidden, _ = self.encoder(self.embed(tokens))
        is_word = (tokens != PAD)[..., None]
        return self.heads[task](hidden if task == "tags" else (hidden * is_word).sum(1) / is_word.sum(1))


def count_items(task, tokens, target):
    """The sentences, words or known scores of a micro-batch."""
    return (~target.isnan()).sum() if task == "score" else (target != -100).sum()


def count(*microbatch):
    """The same for every task, which `totals=` adds up."""
    return {task: count_items(*microbatch) if task == microbatch[0] else 0 for task in COEFFICIENTS}


def summed_loss(model, task, tokens, target):
    """The sum over the items of a micro-batch, with the coefficient of its task."""
    output = model(task, tokens)
    if task == "score":
        return COEFFICIENTS[task] * (output[:, 0] - target)[~target.isnan()].square().sum()
    return COEFFICIENTS[task] * cross_entropy(output.movedim(-1, 1), target, reduction="sum")


def loss_fn(model, task, tokens, target, *, totals):
    """The part that a micro-batch has in the loss of its window."""
    return summed_loss(model, task, tokens, target) / totals[task].clamp(min=1)


def whole(model, window):
    """The gradient of the loss of the window, by plain autograd."""
    sums, counts = dict.fromkeys(COEFFICIENTS, 0), dict.fromkeys(COEFFICIENTS, 0)
    for microbatch in window:
        sums[microbatch[0]] += summed_loss(model, *microbatch)
        counts[microbatch[0]] += count_items(*microbatch)
    loss = sum(sums[task] / counts[task] for task in COEFFICIENTS)
    return torch.autograd.grad(loss, [*model.parameters()])


def usual_loop(model, window, n):
    """The gradient of `(loss / n).backward()`, where n may be a number for each task."""
    model.zero_grad()
    for microbatch in window:
        loss = summed_loss(model, *microbatch) / count_items(*microbatch)
        (loss / n[microbatch[0]]).backward()
    return [p.grad for p in model.parameters()]


def drawn(task, rows):
    """Sentences of up to 12 words. The topic is that of the first word, the tags are of each, the score is a mean."""
    lengths = torch.randint(1, 13, (rows, 1))
    tokens = torch.randint(1, VOCABULARY, (rows, 12)).masked_fill(torch.arange(12) >= lengths, PAD)
    if task == "topic":
        return task, tokens, tokens[:, 0] % TOPICS
    if task == "tags":
        return task, tokens, (tokens % TAGS).masked_fill(tokens == PAD, -100)
    score = tokens.sum(1) / lengths[:, 0] / VOCABULARY
    return task, tokens, score.masked_fill(torch.rand(rows) < 0.4, torch.nan)


def main(updates=40):
    """The gradient of one window, and the loss of some updates."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Model()
    gradient = torch_backend.module_value_and_grad(model, loss_fn)
    step = funcga.stream(gradient, fold=funcga.sum(), totals=count)

    tasks = ["topic", "tags", "tags", "score", "topic", "tags", "tags"]
    window = [drawn(task, rows) for task, rows in zip(tasks, (8, 6, 3, 10, 2, 6, 1), strict=True)]
    expected = whole(model, window)
    apart = lambda grads: max(abs(a - b).max() for a, b in zip(grads, expected, strict=True))
    off = lambda grads: (apart(grads) / max(abs(g).max() for g in expected)).item()
    print(f"three tasks, 7 micro-batches: off by {off(step(window)[1].values()):.0e}")
    by_window = usual_loop(model, window, dict.fromkeys(tasks, len(tasks)))
    print(f"the usual loop, with n of the window: {off(by_window):.0%}", end="")
    print(f", of the task: {off(usual_loop(model, window, {task: tasks.count(task) for task in tasks})):.0%}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for update in range(updates):
        tasks = ["tags", "tags", "topic", "score" if update % 2 else "topic"]
        loss, grads = step([drawn(task, rows=16) for task in tasks])
        unused = [name for name, grad in grads.items() if not grad.any()]
        torch_backend.assign_grads(model, {**grads, **dict.fromkeys(unused)})
        optimizer.step()
        if update % 13 == 0:
            print(f"update {update + 1}: loss {loss:.2f}, unused: {', '.join(unused) or 'nothing'}")


if __name__ == "__main__":
    main()
