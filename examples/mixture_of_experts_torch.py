"""A mixture of experts with its load-balancing loss, exact in micro-batches of texts of different lengths.

    python examples/mixture_of_experts_torch.py

The loss is a cross entropy plus the load-balancing loss of the Switch Transformer: E * sum(share * probability), where
share is the part of the tokens that an expert got, and probability what the router gave it on average. Both are means
over the tokens of the batch. The product of two means is no mean: accumulated as usual, every micro-batch has to be
balanced by itself, as if a text on one subject needed all experts alike. `funcga.coupled` folds the means, whose size
is that of the experts, and the cross entropy beside them; a micro-batch weighs as many as it has tokens.

Source: Fedus, Zoph and Shazeer (2022), "Switch Transformers".
"""

import torch
from by_hand import apart
from torch import nn
from torch.nn.functional import cross_entropy, one_hot, pad
from training import PAD, paragraphs

import funcga
import torch_backend

EXPERTS = 4


class Mixture(nn.Module):
    """Bytes in, logits of the next byte out. Each token is sent to one of the experts."""

    def __init__(self, width=32):
        super().__init__()
        self.embedding, self.before = nn.Embedding(256, width), nn.Embedding(256, width)
        self.router = nn.Linear(width, EXPERTS)
        expert = lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))
        self.output = nn.Linear(width, 256)

    def forward(self, tokens):
        """The logits, [rows, length, 256], and the router's probabilities, [rows, length, EXPERTS]."""
        x = self.embedding(tokens) + self.before(pad(tokens[:, :-1], (1, 0)))
        probabilities = self.router(x).softmax(-1)
        chosen = one_hot(probabilities.argmax(-1), EXPERTS)
        sent = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            here = chosen[..., index].bool()
            sent[here] = expert(x[here]) * probabilities[here][:, index, None]
        return self.output(x + sent), probabilities


def statistics(model, tokens):
    """The summary of a micro-batch: three means over the tokens that are to be predicted."""
    logits, probabilities = model(tokens[:, :-1])
    there = tokens[:, 1:] != PAD
    return {
        "cross_entropy": cross_entropy(logits[there], tokens[:, 1:][there]),
        "share": one_hot(probabilities[there].argmax(-1), EXPERTS).to(logits.dtype).mean(0),
        "probability": probabilities[there].mean(0),
    }


def balance(model, s):
    """The load-balancing loss of the statistics of the whole batch: 1 if all experts get equally much."""
    return EXPERTS * (s["share"] * s["probability"]).sum()


def total(model, s):
    """The loss that is trained."""
    return s["cross_entropy"] + 0.1 * balance(model, s)


def count_tokens(tokens):
    """The weight of a micro-batch: how many tokens are to be predicted."""
    return (tokens[:, 1:] != PAD).sum()


def in_two_passes(model, loss_fn, n):
    """(loss, gradients) of a batch as a function of it, exact for every n."""
    gradient = torch_backend.module_value_and_grad(model, statistics)
    return funcga.coupled(gradient, loss_fn, n, fold=funcga.mean(), weight=count_tokens)


def plainly(model, loss_fn, n):
    """The same loss, accumulated as usual, with the right weights."""
    of_rows = lambda model, tokens: loss_fn(model, statistics(model, tokens))
    return funcga.accumulate(torch_backend.module_value_and_grad(model, of_rows), n, weight=count_tokens)


def main():
    """A few updates; then the gradients of one batch, in two passes and plainly."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    texts, model = torch.from_numpy(paragraphs()).long(), Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = in_two_passes(model, total, n=8)
    for update in range(24):
        loss, grads = step(texts[torch.randperm(len(texts))[:48]])
        torch_backend.assign_grads(model, grads)
        optimizer.step()
        if update % 8 == 7:
            print(f"update {update + 1}: loss {loss:.3f}")

    for name, loss_fn in (("the whole loss", total), ("its load balancing", balance)):
        _, whole = plainly(model, loss_fn, n=1)(texts[:48])
        _, exact = in_two_passes(model, loss_fn, n=8)(texts[:48])
        _, plain = plainly(model, loss_fn, n=8)(texts[:48])
        print(f"{name}: {apart(exact, whole):.0e} off in two passes, {apart(plain, whole):.1%} off plainly")


if __name__ == "__main__":
    main()
