"""Segmentation in micro-batches: cross-entropy with ignore_index and class weights, Dice per image, Dice of a batch.

    python examples/segmentation_torch.py

- Cross-entropy with class weights divides by the sum of the weights of all labelled pixels: that sum is `weight=`. A
  micro-batch without a labelled pixel has the loss NaN, and weight 0: it adds nothing.
- Dice per image, as MONAI's DiceLoss has it, is a mean over images. That is the default, and a loop that averages is
  right as well, if all micro-batches have equally many images.
- Dice over the batch, as segmentation_models_pytorch and nnU-Net's batch_dice have it, is a ratio of sums over all
  pixels of a class. The mean of the Dice of micro-batches is another loss, and no weight corrects it. `coupled` folds
  the sums, and computes the loss of the whole batch from them. The cross-entropy beside it is one more sum.
"""

import torch
from by_hand import apart
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d, one_hot

import funcga
import torch_backend

IGNORED, SMOOTH = 255, 1.0
CLASS_WEIGHTS = torch.tensor([0.25, 1.0, 4.0])


class UNet(nn.Module):
    """Two levels and a skip connection."""

    def __init__(self, width=8):
        super().__init__()
        block = lambda inputs, outputs: nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 1, 1), nn.GroupNorm(2, outputs), nn.ReLU()
        )
        self.top, self.bottom, self.up = block(1, width), block(width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, len(CLASS_WEIGHTS), 1)

    def forward(self, images):
        """The class scores of each pixel."""
        top = self.top(images)
        bottom = interpolate(self.bottom(max_pool2d(top, 2)), scale_factor=2)
        return self.head(self.up(torch.cat([top, bottom], 1)))


def labelled(scores, masks):
    """Probabilities and one-hot labels, [images, classes, height, width], 0 for pixels that are ignored."""
    valid = (masks != IGNORED)[:, None]
    labels = one_hot(masks.masked_fill(masks == IGNORED, 0), scores.shape[1]).movedim(-1, 1)
    return scores.softmax(1) * valid, labels * valid


def weighted_cross_entropy(model, images, masks):
    """The mean over labelled pixels, each with the weight of its class."""
    return cross_entropy(model(images), masks, CLASS_WEIGHTS.to(images), ignore_index=IGNORED)


def weight_of_pixels(images, masks):
    """What cross_entropy divides by."""
    return CLASS_WEIGHTS[masks[masks != IGNORED]].sum()


def dice(model, images, masks, over=(2, 3)):
    """1 - Dice: the mean over images and classes; with over=(0, 2, 3) that of the batch, a mean over classes."""
    p, y = labelled(model(images), masks)
    return (1 - (2 * (p * y).sum(over) + SMOOTH) / ((p + y).sum(over) + SMOOTH)).mean()


def both_of_batch(model, images, masks):
    """Cross-entropy and batch Dice, as they are written for a whole batch."""
    return weighted_cross_entropy(model, images, masks) + dice(model, images, masks, over=(0, 2, 3))


def summary(model, images, masks):
    """The sums from which they are computed."""
    scores = model(images)
    p, y = labelled(scores, masks)
    return {
        "cross_entropy": cross_entropy(scores, masks, CLASS_WEIGHTS.to(scores), ignore_index=IGNORED, reduction="sum"),
        "weight": weight_of_pixels(images, masks),
        "common": (p * y).sum((0, 2, 3)),
        "sizes": (p + y).sum((0, 2, 3)),
    }


def both_of_sums(model, s):
    """Cross-entropy and batch Dice, of the sums over the whole batch."""
    batch_dice = (2 * s["common"] + SMOOTH) / (s["sizes"] + SMOOTH)
    return s["cross_entropy"] / s["weight"] + (1 - batch_dice).mean()


def by_hand(model, loss_fn, images, masks, sizes):
    """The gradient that `(loss / n).backward()` leaves after micro-batches of these sizes."""
    model.zero_grad()
    for microbatch in zip(images.split(sizes), masks.split(sizes), strict=True):
        loss = loss_fn(model, *microbatch) / len(sizes)
        if loss.isfinite():  # it is not where no pixel is labelled
            loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def problem(rows=18, size=16):
    """Images of discs of two kinds and their masks, with a margin that is not labelled, and images without labels."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    masks = torch.zeros(rows, size, size, dtype=torch.long)
    for row in range(rows):
        # The later an image, the smaller its disc; every third has one of the rare class.
        (top, left), radius = torch.randint(4, size - 4, (2,)), 7 - row // 3
        masks[row][(y - top) ** 2 + (x - left) ** 2 < radius**2] = 2 if row % 3 == 0 else 1
    images = 0.3 * torch.randn(rows, 1, size, size) + masks[:, None]
    masks[:, :, :2] = IGNORED
    masks[5:10] = IGNORED
    return images, masks


def main(updates=30):
    """Each loss in micro-batches of 5, 5, 4 and 4 images against the whole batch, and some training."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, (images, masks) = UNet(), problem()
    gradient = lambda loss_fn: torch_backend.module_value_and_grad(model, loss_fn)
    batch_dice = funcga.coupled(gradient(summary), both_of_sums, n=4, fold=funcga.sum())
    steps = {
        "cross-entropy": (
            funcga.accumulate(gradient(weighted_cross_entropy), n=4, weight=weight_of_pixels),
            weighted_cross_entropy,
        ),
        "Dice per image": (funcga.accumulate(gradient(dice), n=4), dice),
        "cross-entropy + batch Dice": (batch_dice, both_of_batch),
    }
    for name, (step, loss_fn) in steps.items():
        whole = by_hand(model, loss_fn, images, masks, [len(images)])
        _, grads = step(images, masks)
        usual = by_hand(model, loss_fn, images, masks, [5, 5, 4, 4])
        print(f"{name}, 4 micro-batches: off by {apart(grads, whole):.0e}")
        print(f"    the usual loop, (loss / n).backward(): {apart(usual, whole):.0%}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for update in range(updates):
        loss, grads = batch_dice(images, masks)
        torch_backend.assign_grads(model, grads)
        optimizer.step()
        if update in (0, updates - 1):
            print(f"update {update + 1:2}: loss {loss:.2f}")


if __name__ == "__main__":
    main()
