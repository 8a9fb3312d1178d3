"""The pictures of the detectors: rectangles of three classes on a noisy ground, and where they are."""

import torch

CLASSES = 3


def microbatch(counts):
    """Images of 32 x 32 pixels with so many boxes each, as a collate function joins them."""
    images, targets = 0.1 * torch.randn(len(counts), 3, 32, 32), []
    for image, boxes in zip(images, counts, strict=True):
        center, size = 0.25 + 0.5 * torch.rand(boxes, 2), 0.2 + 0.2 * torch.rand(boxes, 2)
        target = {"boxes": torch.cat([center, size], 1), "labels": torch.randint(CLASSES, (boxes,))}
        for label, corners in zip(target["labels"], torch.cat([center - size / 2, center + size / 2], 1), strict=True):
            left, top, right, bottom = (32 * corners).long()
            image[label, top:bottom, left:right] += 1
        targets.append(target)
    return images, targets
