"""A loss that compares all rows of the batch, one process, eager. The loop by hand computes another one."""

import importlib.util
from pathlib import Path

import torch

BASELINE, EXPECTED = "loop", "full_batch"

EXTRA = "rivals"


def _declare_operators_of_torchvision() -> torch.library.Library | None:
    """Two operators that `import torchvision` asks for, if its own cannot be loaded.

    torchvision on PyPI is built for CUDA. Beside a torch that is built for the CPU, importing it fails, and so does
    everything that imports it, open_clip and transformers among them. None of its operators is called here.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for library in Path(found.origin).parent.glob("_C.*"):
            torch.ops.load_library(str(library))
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return declared
    return None


_DECLARED = _declare_operators_of_torchvision()  # for as long as this lives
