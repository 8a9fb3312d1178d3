"""Speech recognition: CTC, and a transducer (RNN-T) loss, which libraries divide by rows, target lengths or tokens.

    python examples/speech_torch.py

- torch's `CTCLoss` with reduction="mean" divides the loss of each row by its target length, and takes the mean over
  rows. The default fold, a mean over rows, is right. The usual loop is right as well where all micro-batches have
  equally many rows; a shorter last one counts for too much.
- NeMo's losses with "mean_batch" are means over rows of losses that are not divided by a length.
- NeMo's "mean_volume" is a sum over the batch, divided by its target tokens. `per_weight()` divides once, at the end.
  In the usual loop a token of short transcripts counts for more.

Lengths are split, like features and targets. Targets are padded: if they are joined in one dimension, they cannot be
split by rows, and `stream` takes the micro-batches of a loader. With `zero_infinity=True`, a row with more tokens than
frames has a loss of 0, and counts as a row. A row without speech has no token, and torch divides its loss by 1.

Source of the transducer: Graves (2012), "Sequence Transduction with Recurrent Neural Networks".
"""

from functools import partial

import torch
from by_hand import apart, gradient_by_hand
from torch import nn
from torch.nn.functional import ctc_loss, pad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import funcga
import torch_backend

BLANK, LABELS, BINS, WIDTH = 0, 8, 8, 32


class Encoder(nn.Module):
    """Frames and their lengths to half as many states, and their lengths."""

    def __init__(self):
        super().__init__()
        self.subsample = nn.Conv1d(BINS, WIDTH, 3, stride=2, padding=1)
        self.recurrent = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, features, lengths):
        """Padding is not read."""
        hidden = self.subsample(features.transpose(1, 2)).relu().transpose(1, 2)
        packed = pack_padded_sequence(hidden, (lengths + 1) // 2, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)


def ctc(model, features, lengths, targets, target_lengths, reduction="mean"):
    """CTC of a linear layer on the encoder."""
    hidden, lengths = model["encoder"](features, lengths)
    log_probs = model["head"](hidden).log_softmax(-1).transpose(0, 1)
    return ctc_loss(log_probs, targets, lengths, target_lengths, BLANK, reduction, zero_infinity=True)


def rnnt(model, features, lengths, targets, target_lengths, reduction="mean"):
    """-log P(targets) of a transducer, whose predictor is an embedding of the last label."""
    hidden, lengths = model["encoder"](features, lengths)
    said = model["predictor"](pad(targets, (1, 0), value=BLANK))
    log_probs = model["head"](torch.tanh(hidden[:, :, None] + said[:, None])).log_softmax(-1)
    rows, frames = log_probs.shape[:2]
    blank = log_probs[..., BLANK]  # [rows, frames, labels + 1]
    label = log_probs[:, :, :-1].gather(-1, targets[:, None, :, None].expand(-1, frames, -1, 1))[..., 0]
    # alpha[t][:, u] is log P of the first u labels by frame t; `say` is that of all of them within one frame.
    say = pad(label.cumsum(2), (1, 0))
    alpha = [say[:, 0]]
    for t in range(1, frames):
        alpha.append(say[:, t] + torch.logcumsumexp(alpha[-1] + blank[:, t - 1] - say[:, t], 1))
    losses = -(torch.stack(alpha, 1) + blank)[torch.arange(rows), lengths - 1, target_lengths]
    return losses.mean() if reduction == "mean" else losses.sum()


def count_tokens(features, lengths, targets, target_lengths):
    """The labels of all transcripts."""
    return target_lengths.sum()


def per_token(loss_fn):
    """A sum over the batch, divided by its labels."""
    return lambda model, *batch: loss_fn(model, *batch) / count_tokens(*batch)


def recordings(rows=24, most=6):
    """(features, lengths, targets, target_lengths): each label is heard for four frames, in noise."""
    target_lengths = torch.linspace(most, 1, rows).round().long()
    target_lengths[9] = 0  # no speech
    targets = torch.randint(1, LABELS, (rows, most)).masked_fill(torch.arange(most) >= target_lengths[:, None], BLANK)
    features = torch.eye(BINS)[targets.repeat_interleave(4, 1)] + 0.3 * torch.randn(rows, 4 * most, BINS)
    lengths = 4 * target_lengths.clamp(min=1)
    lengths[3] = 4  # cut off: two frames of the encoder for five labels
    return features.double(), lengths, targets, target_lengths


def main():
    """Prints how far each gradient is from that of the whole batch."""
    torch.manual_seed(0)
    batch, heads = recordings(), {"head": nn.Linear(WIDTH, LABELS)}
    for_ctc = nn.ModuleDict({"encoder": Encoder(), **heads}).double()
    transducer = nn.ModuleDict({"encoder": Encoder(), "predictor": nn.Embedding(LABELS, WIDTH), **heads}).double()
    of_tokens = {"fold": funcga.per_weight(), "weight": count_tokens}
    shown = lambda error: f"{error:.0e}" if error < 1e-9 else f"{error:.0%}"
    for name, model, loss, size, reduction, options in (
        ("CTC, mean over rows", for_ctc, ctc, 6, "mean", {}),
        ("CTC, mean over rows", for_ctc, ctc, 7, "mean", {}),
        ("CTC, mean over tokens", for_ctc, ctc, 7, "sum", of_tokens),
        ("transducer, mean over rows", transducer, rnnt, 7, "mean", {}),
        ("transducer, mean over tokens", transducer, rnnt, 7, "sum", of_tokens),
    ):
        loss_fn = partial(loss, reduction=reduction)
        step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss_fn), microbatch_size=size, **options)
        _, grads = step(*batch)
        by_hand = per_token(loss_fn) if reduction == "sum" else loss_fn
        whole = gradient_by_hand(model, by_hand, [batch])
        usual = gradient_by_hand(model, by_hand, [*zip(*(leaf.split(size) for leaf in batch), strict=True)])
        off, usual = apart(grads, whole), apart(usual, whole)
        print(f"{name}, 24 in micro-batches of {size}: off by {shown(off)}; (loss / n).backward(): {shown(usual)}")


if __name__ == "__main__":
    main()
