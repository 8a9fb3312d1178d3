"""The loop of open_clip's training program with `--accum-freq`."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from open_clip.loss import ClipLoss
from open_clip_train.train import train_one_epoch
from torch import nn

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "open_clip, `--accum-freq`", "funcga"
SOURCE = "https://github.com/mlfoundations/open_clip#gradient-accumulation"
TOLERANCE = math.inf  # the gradient of logit_scale comes n times


class _Clip(nn.Module):
    """The module as one of open_clip."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.logit_scale = module, module.logit_scale

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        left, right = self.module(torch.stack((images, texts), 1)).unbind(1)
        return {"image_features": left, "text_features": right, "logit_scale": self.logit_scale.exp()}


class _Window:
    """A window as a loader of one epoch."""

    def __init__(self, rows: tuple[torch.Tensor, ...]) -> None:
        self.rows = rows
        self.num_batches, self.num_samples = len(rows), sum(map(len, rows))

    def __iter__(self) -> Any:
        return ((rows[:, 0], rows[:, 1]) for rows in self.rows)


def make(problem: Problem) -> Step:
    """An epoch of one window, with an optimizer that leaves the gradients where they are."""
    model, loss_fn, seen = _Clip(problem.module), ClipLoss(), []
    loss_fn.register_forward_hook(lambda _, inputs, losses: seen.append(losses["contrastive_loss"].detach()))
    optimizer = SimpleNamespace(zero_grad=problem.module.zero_grad, step=lambda: None, param_groups=[{"lr": 0.0}])
    options = SimpleNamespace(
        device=str(problem.device), precision="fp32", distill=False, skip_scheduler=True, horovod=False,
        grad_clip_norm=None, rank=0, world_size=1, batch_size=problem.size, log_every_n_steps=1, wandb=False,
    )  # fmt: skip

    def step(batch: torch.Tensor) -> Any:
        window = _Window(problem.microbatches(batch))
        options.accum_freq = window.num_batches
        data = {"train": SimpleNamespace(set_epoch=lambda epoch: None, dataloader=window)}
        train_one_epoch(model, data, loss_fn, 0, optimizer, None, None, None, options)
        losses = seen[:]
        seen.clear()
        return losses[-1], problem.taken()

    return step
