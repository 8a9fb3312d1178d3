"""The picture of a training whose loss is over the whole batch: by plain accumulation, by `coupled` and all at once.

python -m benchmarks.training writes benchmarks/results/coupled.png.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import funcga
from benchmarks.pictures import OTHERS, OURS, save
from benchmarks.results import ROOT
from benchmarks.torch_pairs import contrastive

FILE = ROOT / "benchmarks" / "results" / "coupled.png"

N, ROWS, UPDATES = 32, 256, 200  # micro-batches of 8 pairs

Params = dict[str, Tensor]


class Problem:
    """Pairs of two views of a hidden point, each of which goes through a fixed random network, and noise."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.views = [self._drawn(16, 64) / 4 for _ in range(2)]

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def batch(self, rows: int) -> Tensor:
        """Tensor [rows, 2, 64]."""
        hidden = self._drawn(rows, 16)
        return torch.stack([torch.tanh(hidden @ view) + 0.5 * self._drawn(rows, 64) for view in self.views], 1)

    def params(self) -> Params:
        """Two towers of two layers, and the logarithm of the scale, which CLIP begins with."""
        shapes = {"left_in": (64, 128), "left_out": (128, 32), "right_in": (64, 128), "right_out": (128, 32)}
        weights = {name: self._drawn(*shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
        return weights | {"logit_scale": torch.tensor(1 / 0.07).log()}


def embed(params: Params, batch: Tensor) -> Tensor:
    """Tensor [rows, 2, 32]: embeddings of norm 1."""
    tower = lambda side, rows: torch.relu(rows @ params[f"{side}_in"]) @ params[f"{side}_out"]
    both = torch.stack([tower("left", batch[:, 0]), tower("right", batch[:, 1])], 1)
    return nn.functional.normalize(both, dim=-1)


def loss_of(params: Params, both: Tensor) -> Tensor:
    """CLIP's loss of the embeddings."""
    return contrastive(*both.unbind(1), params["logit_scale"], None)


def loss_of_batch(params: Params, batch: Tensor) -> Tensor:
    """CLIP's loss of these rows alone."""
    return loss_of(params, embed(params, batch))


STEPS: dict[str, Callable[..., Any]] = {
    "the whole batch at once": funcga.value_and_grad(loss_of_batch),
    f"coupled, n={N}": funcga.coupled(embed, loss_of, n=N),
    f"accumulate, n={N}: another loss": funcga.accumulate(funcga.value_and_grad(loss_of_batch), n=N),
}


def losses(step: Callable[..., Any]) -> list[float]:
    """After each update, the loss of a batch that is not trained on. All steps begin alike and see the same batches."""
    problem = Problem()
    params, held_out = problem.params(), problem.batch(ROWS)
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    found = []
    for _ in range(UPDATES):
        found.append(float(loss_of_batch(params, held_out)))
        _, grads = step(params, problem.batch(ROWS))
        for name, parameter in params.items():
            parameter.grad = grads[name]
        optimizer.step()
    return found


def drawn(curves: dict[str, list[float]]) -> Figure:
    """The loss against the update."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    ax: Any = figure.subplots()
    styles = ({"color": "k", "linewidth": 3, "alpha": 0.35}, {"color": OURS}, {"color": OTHERS, "linestyle": "--"})
    for (name, curve), style in zip(curves.items(), styles, strict=True):
        ax.plot(curve, label=name, **style)
    ax.set_xlabel("update")
    ax.set_ylabel(f"loss of {ROWS} held-out pairs")
    ax.grid(alpha=0.3)
    ax.legend()
    return figure


def main() -> int:
    """0; the picture is in its file."""
    curves = {name: losses(step) for name, step in STEPS.items()}
    save(drawn(curves), FILE)
    for name, curve in curves.items():
        print(f"{name}: {curve[0]:.4f} -> {curve[-1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
