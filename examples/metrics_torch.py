"""Loss, accuracy and token counts of every update and of the epoch, whatever the sizes of the micro-batches.

    python examples/metrics_torch.py

Counts are added up and divided once: the accuracy is the right tokens over all tokens, and the loss the sum of losses
over them. By hand one averages the micro-batches' means, as if they had equally many tokens, divides by the number of
micro-batches that was planned, and gets nothing for the last, shorter window. With across= the same metrics are those
of all replicas.
"""

import torch
from sentences import PADDING, count_tokens, microbatch
from torch.nn.functional import cross_entropy

import funcga
import torch_backend


def loss_and_counts(module, tokens, labels):
    """The sum of the losses; the tokens that are told right, and all of them."""
    logits, labels = module(tokens).flatten(0, 1), labels.flatten().long()
    right = (logits.argmax(1) == labels).sum()  # none of the padding: no class is PADDING
    return cross_entropy(logits, labels, reduction="sum"), {"right": right, "tokens": (labels != PADDING).sum()}


FOLD = (funcga.per_weight(), funcga.sum()), funcga.per_weight()


def train(module, loader, n, across=None):
    """{loss, right, tokens} of every update, and of the epoch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_and_counts), has_aux=True)
    step = funcga.stream(gradient, fold=FOLD, weight=count_tokens, across=across)

    total = funcga.Accumulator({"loss": funcga.mean(), "right": funcga.sum(), "tokens": funcga.sum()})
    updates, epoch = [], None
    for window in funcga.windows(loader, n):
        (loss, counts), grads = step(torch_backend.trainable(module), window)
        torch_backend.assign_grads(module, grads)
        optimizer.step()
        updates.append({"loss": loss, **counts})
        epoch = total.update(epoch or total.init(updates[0]), updates[-1], weight=counts["tokens"])
    return updates, total.finalize(epoch)


def shown(metrics):
    """One line."""
    return f"loss {metrics['loss']:.4f}, accuracy {metrics['right']}/{metrics['tokens']}"


def main():
    """Ten micro-batches, four to an update."""
    torch.manual_seed(0)
    updates, epoch = train(torch.nn.Linear(1, 2, bias=False), [microbatch(2 * i, 2) for i in range(10)], 4)
    for i, metrics in enumerate(updates):
        print(f"update {i + 1}: {shown(metrics)}")
    print(f"epoch: {shown(epoch)}")


if __name__ == "__main__":
    main()
