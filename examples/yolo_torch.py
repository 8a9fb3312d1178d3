"""YOLO losses in micro-batches: objectness over all cells, boxes and classes over the positive cells; empty images.

    python examples/yolo_torch.py

Two normalizers are common:

- As in YOLOv5, the objectness is a mean over all cells, and the losses of boxes and classes are means over the positive
  cells. These counts are known before the forward passes: `totals=` counts the window first, and the loss divides each
  of its sums by a total.
- As in YOLOv8, all sums are divided by the sum of the target scores. It depends on the predictions, and has no
  gradient: fold it as a sum beside the loss and the gradients, and divide once, after the window.

A loop that averages the losses of micro-batches is wrong for both, as these have different numbers of boxes. The
targets are a list of dicts, one for each image. Such a batch cannot be cut along an axis: the micro-batches are those
of the loader, and `stream` takes them as they are.
"""

from itertools import chain

import torch
from boxes import CLASSES, microbatch
from by_hand import apart, gradient_by_hand
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

import funcga
import torch_backend

GRID, WIDTH = 8, 32


class Yolo(nn.Module):
    """For each cell of the grid: four numbers for its box, its objectness, and its class scores."""

    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(3, WIDTH, 4, 2, 1), nn.Conv2d(WIDTH, WIDTH, 4, 2, 1)
        self.features = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), nn.Conv2d(WIDTH, WIDTH, 3, 1, 1), nn.SiLU())
        self.head = nn.Conv2d(WIDTH, 5 + CLASSES, 1)

    def forward(self, images):
        """Of shape [images, GRID, GRID, 5 + CLASSES]."""
        return self.head(self.features(images)).permute(0, 2, 3, 1)


def iou(a, b):
    """The IoU of boxes, each (center x, center y, width, height)."""
    (a_low, a_high), (b_low, b_high) = ((x[:, :2] - x[:, 2:] / 2, x[:, :2] + x[:, 2:] / 2) for x in (a, b))
    common = (torch.minimum(a_high, b_high) - torch.maximum(a_low, b_low)).clamp(min=0).prod(1)
    return common / (a[:, 2:].prod(1) + b[:, 2:].prod(1) - common)


def losses(model, images, targets):
    """The losses of all boxes, of their classes, and of the objectness of all cells, and the target scores."""
    boxes, labels = (torch.cat([target[name] for target in targets]) for name in ("boxes", "labels"))
    rows = torch.arange(len(images)).repeat_interleave(torch.tensor([len(target["boxes"]) for target in targets]))
    corners = (boxes[:, :2] * GRID).long()
    positive = rows, corners[:, 1], corners[:, 0]  # the cells of the centers
    outputs = model(images)
    predicted = outputs[positive]
    centers = (corners + predicted[:, :2].sigmoid()) / GRID
    overlaps = iou(torch.cat([centers, predicted[:, 2:4].sigmoid()], 1), boxes)
    scores = torch.zeros(outputs.shape[:3]).index_put(positive, overlaps.detach())
    of_cells = binary_cross_entropy_with_logits(outputs[..., 4], scores, reduction="none")
    wanted = one_hot(labels, CLASSES).to(outputs)
    of_classes = binary_cross_entropy_with_logits(predicted[:, 5:], wanted, reduction="none").mean(1)
    return 1 - overlaps, of_classes, of_cells, scores


# --- divided by counts


def count(images, targets):
    """What the loss divides by."""
    return {"boxes": sum(len(target["boxes"]) for target in targets), "cells": len(images) * GRID**2}


def part(model, images, targets, *, totals):
    """The part of these images in the loss of the whole batch."""
    of_boxes, of_classes, of_cells, _ = losses(model, images, targets)
    return (of_boxes + of_classes).sum() / totals["boxes"].clamp(min=1) + of_cells.sum() / totals["cells"]


def of_batch(model, images, targets):
    """The same, as it is written for a whole batch. Without boxes their mean would be NaN."""
    of_boxes, of_classes, of_cells, _ = losses(model, images, targets)
    return of_cells.mean() + ((of_boxes + of_classes).mean() if len(of_boxes) else 0)


# --- divided by target scores


def summed(model, images, targets):
    """The sum of all losses, and what it is divided by."""
    of_boxes, of_classes, of_cells, scores = losses(model, images, targets)
    return (of_boxes + of_classes).sum() + of_cells.sum(), scores.sum()


def of_batch_by_scores(model, images, targets):
    """The same, as it is written for a whole batch."""
    total, scores = summed(model, images, targets)
    return total / scores.clamp(min=1)


def main(updates=20):
    """One window against the whole batch, for both losses, and some training."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Yolo()
    window = [microbatch(counts) for counts in ([4, 1, 3], [0, 0, 0], [1, 0, 0], [2, 5, 0], [1, 1])]
    images, targets = zip(*window, strict=True)
    batch = torch.cat(images), [*chain.from_iterable(targets)]

    by_count = funcga.stream(torch_backend.module_value_and_grad(model, part), fold=funcga.sum(), totals=count)
    _, grads = by_count(window)
    sums = funcga.stream(torch_backend.module_value_and_grad(model, summed, has_aux=True), fold=funcga.sum())
    (_, scores), sums_of_grads = sums(window)
    by_score = {name: g / scores.clamp(min=1) for name, g in sums_of_grads.items()}
    for name, loss_fn, ours in (("counts", of_batch, grads), ("target scores", of_batch_by_scores, by_score)):
        whole, usual = gradient_by_hand(model, loss_fn, [batch]), gradient_by_hand(model, loss_fn, window)
        print(f"YOLO, divided by {name}, {len(window)} micro-batches: off by {apart(ours, whole):.0e}")
        print(f"    the usual loop, (loss / n).backward(): {apart(usual, whole):.0%}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for update in range(updates):
        loss, grads = by_count(window)
        torch_backend.assign_grads(model, grads)
        optimizer.step()
        if update in (0, updates - 1):
            print(f"update {update + 1:2}: loss {loss:.2f}")


if __name__ == "__main__":
    main()
