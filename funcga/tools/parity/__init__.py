"""The tool that compares the same loss in torch and in JAX: `python -m funcga parity`.

    problem = funcga.checks.Problem(params, batch, torch_loss=torch_loss, jax_loss=jax_loss)

A `Problem` is in this file, the built-in ones in `problems.py`. Their losses, and what else differs
between the frameworks, are in `in_torch.py` and `in_jax.py`. A side is a problem in one framework
and one dtype (`sides.py`). `run.py` computes and compares all sides; `report.py` has the table, the
verdict and the JSON, `page.py` the page and the pictures.

It stands on verify, on compare and on the optimizers; the command line alone stands on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from funcga._types import LossFn, Tree
from funcga.folds import Fold, mean
from funcga.tools.trees.rules import Rule


@dataclass(frozen=True)
class Problem:
    """The same loss, parameters and batch in two frameworks, for `python -m funcga parity`.

    Args:
        params: A tree of float arrays: NumPy's, torch's or JAX's. Floats are cast to every dtype of
            the run.
        batch: The arguments after params, a tuple of trees of arrays, split into micro-batches as
            `in_axes` says. Integers are int64 in torch and, where they fit, int32 in JAX.
        torch_loss: `loss(params, *batch)` -> a real scalar in the dtype of params. If one loss is
            None, the other one is only compared with itself.
        jax_loss: The same in JAX; it is jitted.
        fold: As of `accumulate`: mean(), per_weight() or sum().
        weight: As of `accumulate`, one function for both frameworks.
        in_axes: As of `accumulate`. Default: each argument of the batch on axis 0.
        jax_params: The parameters as jax_loss takes them, if their tree is another one, such as
            flax's. Only its structure counts: the values are those of params, matched by path.
        rules: How paths and layouts of params become those of jax_params, see `funcga.trees`.
        reduction: The number of terms in the sums of a gradient, for the tolerances. Default: the
            rows of the batch, or the size of its largest array of integers, such as tokens, plus
            the longest axis of a parameter.
        optimizers: The optimizers of the training: any of sgd, momentum, adam and adamw.
        name: The name of the problem in the report.
        about: A line of description.

    Raises:
        FuncgaError: When parity runs it, if the parts do not fit: a loss that is not a scalar,
            another fold, trees that do not match.

    Example:
        >>> params = {"w": np.ones((3, 2), "float32")}
        >>> batch = (np.ones((8, 3), "float32"), np.zeros((8, 2), "float32"))
        >>> torch_loss = lambda params, x, y: F.mse_loss(x @ params["w"], y)
        >>> jax_loss = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)
        >>> problem = funcga.checks.Problem(params, batch, torch_loss=torch_loss, jax_loss=jax_loss)
    """

    params: Tree
    batch: tuple[Tree, ...]
    torch_loss: Callable[..., Tree] | None = None
    jax_loss: Callable[..., Tree] | None = None
    fold: Fold = field(default_factory=mean)
    weight: Callable[..., Tree] | None = None
    in_axes: Tree = None
    jax_params: Tree = None
    rules: Sequence[Rule] = ()
    reduction: int | None = None
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    name: str = ""
    about: str = ""

    @property
    def losses(self) -> dict[str, LossFn]:
        """The losses, by framework: 'torch', 'jax' or both."""
        losses = {"torch": self.torch_loss, "jax": self.jax_loss}
        return {framework: loss for framework, loss in losses.items() if loss is not None}
