"""CLIP and SigLIP in micro-batches, exactly: each picture is compared with the captions of the whole batch.

    python examples/image_text_torch.py

Both losses need the embeddings of all rows at once, and nothing else of the model. `funcga.coupled` collects them in
one pass over the micro-batches, computes the loss with its learned temperature (SigLIP: scale and bias), and pulls the
gradient back in a second pass. Memory is that of one micro-batch and of the embeddings.

Plain accumulation takes the mean of the losses of the micro-batches. There a picture is compared with the few captions
of its own micro-batch: that is another loss. Two noisy views of the same numbers stand for pictures and captions.

Sources: Radford et al. (2021), "Learning transferable visual models from natural language supervision"; Zhai, Mustafa,
Kolesnikov and Beyer (2023), "Sigmoid loss for language image pre-training".
"""

import math

import torch
from by_hand import apart
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize

import funcga
import torch_backend


class TwoTowers(nn.Module):
    """Embeddings of pictures and of captions, and how similarities become logits."""

    def __init__(self, scale, bias=0.0):
        super().__init__()
        tower = lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.picture, self.caption = tower(), tower()
        self.scale, self.bias = nn.Parameter(torch.tensor(math.log(scale))), nn.Parameter(torch.tensor(bias))

    def logits(self, pictures, captions):
        """Of each picture with each caption, from their embeddings."""
        return self.scale.exp() * pictures @ captions.T + self.bias


def embed(model, pictures, captions):
    """The summary of a micro-batch: its embeddings, each of length 1."""
    return {"pictures": normalize(model.picture(pictures)), "captions": normalize(model.caption(captions))}


def clip_loss(model, s):
    """How well the caption of each picture is found among all of them, and the picture of each caption."""
    logits = model.logits(s["pictures"], s["captions"])
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def siglip_loss(model, s):
    """How well pairs that belong together are told from all others: a sum over all pairs, divided by the rows."""
    logits = model.logits(s["pictures"], s["captions"])
    sign = 2 * torch.eye(len(logits)) - 1
    return -logsigmoid(sign * logits).sum() / len(logits)


LOSSES = {"CLIP": (clip_loss, {"scale": 1 / 0.07}), "SigLIP": (siglip_loss, {"scale": 10.0, "bias": -10.0})}


def in_two_passes(model, loss_fn, n):
    """(loss, gradients) of a batch as a function of it, exact for every n."""
    return funcga.coupled(torch_backend.module_value_and_grad(model, embed), loss_fn, n)


def plainly(model, loss_fn, n):
    """The same loss, accumulated as usual: the mean of the losses of n micro-batches."""
    of_rows = lambda model, *rows: loss_fn(model, embed(model, *rows))
    return funcga.accumulate(torch_backend.module_value_and_grad(model, of_rows), n)


def compare(model, loss_fn, batch):
    """Prints how far the gradients of 8 micro-batches are from that of the whole batch."""
    _, whole = plainly(model, loss_fn, n=1)(*batch)
    _, exact = in_two_passes(model, loss_fn, n=8)(*batch)
    _, plain = plainly(model, loss_fn, n=8)(*batch)
    print(f"    8 micro-batches: {apart(exact, whole):.0e} off in two passes, {apart(plain, whole):.0%} off plainly")


def pairs(rows):
    """Pictures [rows, 32] and the captions [rows, 32] that belong to them."""
    contents, of_picture, of_caption = torch.randn(rows, 8), torch.randn(8, 32), torch.randn(8, 32)
    noisy = lambda view: contents @ view + torch.randn(rows, 32)
    return noisy(of_picture), noisy(of_caption)


def main():
    """A training with each of the losses, and how far plain accumulation is off before and after it."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    pictures, captions = pairs(1000)
    batch, test = (pictures[:350], captions[:350]), (pictures[800:], captions[800:])
    for name, (loss_fn, start) in LOSSES.items():
        model = TwoTowers(**start)
        print(f"{name}, before the training")
        compare(model, loss_fn, batch)

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = in_two_passes(model, loss_fn, n=8)
        for _ in range(30):
            rows = torch.randperm(800)[:350]
            loss, grads = step(pictures[rows], captions[rows])
            torch_backend.assign_grads(model, grads)
            optimizer.step()

        with torch.no_grad():
            found = model.logits(*embed(model, *test).values()).argmax(1)
        hits = (found == torch.arange(len(found))).double().mean()
        print(f"{name}, after 30 updates: loss {loss:.3f}, scale {model.scale.exp():.2f}, {hits:.0%} of captions found")
        compare(model, loss_fn, batch)


if __name__ == "__main__":
    main()
