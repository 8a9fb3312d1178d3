"""Object detection in micro-batches: DETR's set loss, divided by num_boxes of the whole batch; images without boxes.

    python examples/detection_torch.py

DETR divides its box losses by `num_boxes`, and its cross-entropy by the sum of the class weights of all queries, where
"no object" has weight 0.1. Both depend on the numbers of boxes. A loop that averages the losses of micro-batches gives
a box more weight if its micro-batch has few of them. `totals=` counts the whole window first, and the loss divides each
of its sums by a total. The matching, by scipy, is done image by image, so it is the same for every split.

The targets are a list of dicts, one for each image. Such a batch cannot be cut along an axis: the micro-batches are
those of the loader, and `stream` takes them as they are.
"""

from itertools import chain

import torch
from boxes import CLASSES, microbatch
from by_hand import apart, gradient_by_hand
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss

import funcga
import torch_backend

QUERIES, WIDTH = 6, 32
NO_OBJECT = 0.1  # the weight of the class "no object"


class Detr(nn.Module):
    """Queries that attend to the features of an image."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.SiLU(), nn.Conv2d(WIDTH, WIDTH, 3, 1, 1))
        self.positions, self.queries = (nn.Parameter(torch.randn(count, WIDTH)) for count in (64, QUERIES))
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES + 1), nn.Linear(WIDTH, 4)

    def forward(self, images):
        """The class scores and the box of each query."""
        features = self.features(images).flatten(2).transpose(1, 2) + self.positions
        hidden = self.decoder(self.queries.expand(len(images), -1, -1), features)
        return self.classes(hidden), self.boxes(hidden).sigmoid()


def giou(a, b):
    """The generalized IoU of boxes, each (center x, center y, width, height)."""
    (a_low, a_high), (b_low, b_high) = ((x[..., :2] - x[..., 2:] / 2, x[..., :2] + x[..., 2:] / 2) for x in (a, b))
    area = lambda low, high: (high - low).clamp(min=0).prod(-1)
    common = area(torch.maximum(a_low, b_low), torch.minimum(a_high, b_high))
    union = area(a_low, a_high) + area(b_low, b_high) - common
    hull = area(torch.minimum(a_low, b_low), torch.maximum(a_high, b_high))
    return common / union - (hull - union) / hull


@torch.no_grad()
def matched(scores, boxes, target):
    """The Hungarian matching of one image: indices of queries, and of the boxes that they are to find."""
    distance = 5 * torch.cdist(boxes, target["boxes"], p=1) - 2 * giou(boxes[:, None], target["boxes"])
    return linear_sum_assignment((distance - scores.softmax(-1)[:, target["labels"]]).numpy())


def sums(model, images, targets, **how):
    """The cross-entropy of all queries, and the sum of the losses of all boxes."""
    scores, boxes = model(images)
    classes, of_boxes = torch.full(scores.shape[:2], CLASSES), 0.0
    for row, target in enumerate(targets):
        queries, matches = matched(scores[row], boxes[row], target)
        classes[row, queries] = target["labels"][matches]
        pairs = boxes[row, queries], target["boxes"][matches]
        of_boxes = of_boxes + 5 * l1_loss(*pairs, reduction="sum") + 2 * (1 - giou(*pairs)).sum()
    weights = torch.tensor([1.0] * CLASSES + [NO_OBJECT])
    return cross_entropy(scores.transpose(1, 2), classes, weights, **how), of_boxes


def count(images, targets):
    """What the loss divides by."""
    return {"boxes": sum(len(target["boxes"]) for target in targets), "queries": QUERIES * len(images)}


def part(model, images, targets, *, totals):
    """The part of these images in the loss of the whole batch."""
    of_classes, of_boxes = sums(model, images, targets, reduction="sum")
    weights = totals["boxes"] + NO_OBJECT * (totals["queries"] - totals["boxes"])
    return of_classes / weights + of_boxes / totals["boxes"].clamp(min=1)


def of_batch(model, images, targets):
    """The loss as DETR has it: reduction="mean" divides by the sum of the class weights."""
    of_classes, of_boxes = sums(model, images, targets)
    return of_classes + of_boxes / max(1, count(images, targets)["boxes"])


def main(updates=30):
    """One window against the whole batch, and some training."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Detr()
    window = [microbatch(counts) for counts in ([4, 1, 3], [0, 0, 0], [1, 0, 0], [2, 5, 0], [1, 1])]
    step = funcga.stream(torch_backend.module_value_and_grad(model, part), fold=funcga.sum(), totals=count)
    images, targets = zip(*window, strict=True)
    whole = gradient_by_hand(model, of_batch, [(torch.cat(images), [*chain.from_iterable(targets)])])
    _, grads = step(window)
    print(f"DETR, {len(window)} micro-batches, one without any box: off by {apart(grads, whole):.0e}")
    print(f"    the usual loop, (loss / n).backward(): {apart(gradient_by_hand(model, of_batch, window), whole):.0%}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for update in range(updates):
        loss, grads = step(window)
        torch_backend.assign_grads(model, grads)
        optimizer.step()
        if update in (0, updates - 1):
            print(f"update {update + 1:2}: loss {loss:.2f}")


if __name__ == "__main__":
    main()
