"""Masked LM, label smoothing, class weights and seq2seq with padding: the weight is what cross_entropy divides by.

    python examples/text_torch.py

`cross_entropy(..., reduction="mean")` divides by

- the number of labels that are not `ignore_index`: the masked tokens of a masked language model, whose other labels
  are -100; the target tokens of an encoder-decoder with teacher forcing, without their padding;
- with `label_smoothing=`, the same number, in both of its terms;
- with `weight=`, the sum of the class weights of these labels, also with label smoothing.

The mean over micro-batches of such means is another loss, unless all of them divide by the same number. With that
number as `weight=`, the default fold, a mean, gives the gradient of the whole batch. A micro-batch without a masked
token has a loss of 0 / 0, which makes the loss of the usual loop NaN. Here its weight is 0, and it is left out.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import funcga
import torch_backend

PAD, MASK, FIRST, VOCABULARY, LENGTH, WIDTH = 0, 1, 2, 20, 12, 16
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


class Encoder(nn.Module):
    """A small BERT: scores of every token, [rows, length, classes]."""

    def __init__(self, body=None, classes=VOCABULARY):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.body = body or nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, classes)

    def embed(self, tokens):
        """Each token, and where it stands."""
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]

    def forward(self, tokens):
        """Without attention to padding."""
        return self.head(self.body(self.embed(tokens), src_key_padding_mask=tokens == PAD))


class EncoderDecoder(Encoder):
    """Scores of the next target token, after a source and the target tokens so far."""

    def __init__(self):
        super().__init__(nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True))

    def forward(self, source, target):
        """Without attention to padding of the source, or to later target tokens."""
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        padding = {"src_key_padding_mask": source == PAD, "memory_key_padding_mask": source == PAD}
        return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=causal, **padding))


def token_loss(**options):
    """The cross-entropy of the scores of each token."""
    return lambda model, tokens, labels: cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), **options)


def teacher_forcing(model, source, target):
    """The cross-entropy of each target token, after those before it."""
    scores = model(source, target[:, :-1])
    return cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1)


def batches(rows=10):
    """Texts of different lengths: with masked tokens; with a class for each token; with a target sequence."""
    lengths, position = torch.linspace(LENGTH, 3, rows).long()[:, None], torch.arange(LENGTH)
    tokens = torch.randint(FIRST, VOCABULARY, (rows, LENGTH)).masked_fill(position >= lengths, PAD)
    chosen = (torch.rand(rows, LENGTH) < 0.3) & (tokens != PAD)
    chosen[4] = False  # a text without a masked token
    classes = (tokens % 4 == 0).long() + (tokens % 8 == 0)
    masked_lm = tokens.masked_fill(chosen, MASK), tokens.masked_fill(~chosen, -100)
    return masked_lm, (tokens, classes.masked_fill(tokens == PAD, -100)), (tokens, tokens[:, ::2])


def by_hand(model, loss_fn, microbatches):
    """The loss and the gradient after `(loss / n).backward()` for each of n micro-batches."""
    model.zero_grad()
    total = 0.0
    for microbatch in microbatches:
        loss = loss_fn(model, *microbatch) / len(microbatches)
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def main():
    """Prints losses, and how far each gradient is from that of the whole batch."""
    torch.manual_seed(0)
    masked_lm, tagged, translated = batches()
    count = lambda tokens, labels: (labels != -100).sum()
    weigh = lambda tokens, labels: CLASS_WEIGHTS[labels[labels != -100]].sum()
    count_targets = lambda source, target: (target[:, 1:] != PAD).sum()
    smoothed, weighted = {"label_smoothing": 0.1}, {"weight": CLASS_WEIGHTS}
    for name, n, model, loss_fn, weight, batch in (
        ("masked LM", 4, Encoder(), token_loss(), count, masked_lm),
        ("masked LM", 10, Encoder(), token_loss(), count, masked_lm),
        ("label smoothing", 4, Encoder(), token_loss(**smoothed), count, masked_lm),
        ("class weights", 4, Encoder(classes=3), token_loss(**weighted), weigh, tagged),
        ("class weights and label smoothing", 4, Encoder(classes=3), token_loss(**weighted, **smoothed), weigh, tagged),
        ("seq2seq", 4, EncoderDecoder(), teacher_forcing, count_targets, translated),
    ):
        model.double()
        step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss_fn), n, weight=weight)
        loss, grads = step(*batch)
        grads = torch.cat([grad.flatten() for grad in grads.values()])
        _, whole = by_hand(model, loss_fn, [batch])
        usual_loss, usual = by_hand(model, loss_fn, [*zip(*(leaf.tensor_split(n) for leaf in batch), strict=True)])
        off, usual_off = [((each - whole).abs().max() / whole.abs().max()).item() for each in (grads, usual)]
        print(f"{name}, {n} micro-batches: loss {loss:.3f}, off by {off:.0e}")
        print(f"    the usual loop, (loss / n).backward(): loss {usual_loss:.3f}, off by {usual_off:.0%}")


if __name__ == "__main__":
    main()
