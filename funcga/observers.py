"""What `observe=` takes, and what it returns: noise, norms and dropped micro-batches of a window.

`gradient_noise` says how much the gradients of micro-batches differ, and so how large a batch is
worth its cost; `gradient_norms` and `dropped` look at each micro-batch. The classes are those of
what they return, and `Observer` is for observers of your own.

Example:
    >>> grad_fn = funcga.grad(lambda w, x: (w * x).mean())
    >>> observe = {"norms": funcga.gradient_norms(), "dropped": funcga.dropped()}
    >>> step = funcga.accumulate(grad_fn, 2, observe=observe)
    >>> grads, observed = step(torch.tensor(1.0), torch.tensor([2.0, -4.0]))
    >>> type(observed["norms"]) is funcga.observers.GradientNorms
    True
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from funcga import monoids, normalizers
from funcga._backend.dispatch import backend_of
from funcga._types import Array, Namespace, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import Fold, concat
from funcga.reducers import Reducer

__all__ = [
    "GradientNoise",
    "GradientNorms",
    "NoiseAverage",
    "Observed",
    "Observer",
    "averaged",
    "dropped",
    "gradient_noise",
    "gradient_norms",
]

_Groups: TypeAlias = Callable[[str], str | None] | None


def squared_norm(xp: Namespace, leaf: Array) -> Array:
    """The sum of the squared absolute values of all elements. Each backend has a faster version."""
    return abs(leaf * leaf).sum()


class Observed(NamedTuple):
    """What `Observer.finish` gets. Groups of leaves are on the last axis of each array.

    Attributes:
        folded: The fold of the measures of all micro-batches.
        result: The measure of the weighted mean of the micro-batches' gradients, [groups].
        factor: What that mean is to be multiplied by to be the gradient without a loss scale: 1 for
            mean() and per_weight(), the total weight for sum().

    Example:
        >>> finish = lambda xp, observed: observed.factor * xp.sqrt(observed.result)
        >>> # the norm of the gradient that the step returns
        >>> norm = funcga.observers.Observer(funcga.mean(), finish)
        >>> step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).mean()), 2, observe=norm)
        >>> step(torch.tensor(1.0), torch.tensor([2.0, 4.0]))
        (tensor(3.), tensor(3.))
    """

    folded: Reduced
    result: Array
    factor: Scalar


@dataclass(frozen=True)
class Observer:
    """What `observe=` takes: a fold over the measures of the micro-batches' gradients, and what is
    made of it.

    A micro-batch's gradient is in the units of a mean: what grad_fn returns under `mean()`, and
    under `per_weight()` and `sum()` that divided by the micro-batch's weight.

    Args:
        fold: What is folded: for each micro-batch the measures of its gradient, [groups], with its
            weight.
        finish: `finish(xp, observed)` of an `Observed` returns the observation: an array, or a tree
            of arrays, with the groups on the last axis of each. It is an array function, and in JAX
            it is traced.
        measure: `measure(xp, leaf)` of an array, a number: a sum over its elements, so that the
            measure of a group is the sum of those of its leaves. By default the squared norm.
        degree: The degree of the measure: that of `c * leaf` is `c**degree` times that of the leaf,
            for c > 0.
        groups: `groups(path)` of a leaf's dotted path in the gradient, such as "layers.0.weight",
            returns the name of its group, a string, or None to leave it out. Then the observation
            is a dict, with an entry for each group. By default all leaves together are one group,
            and its observation comes as it is.

    Example:
        >>> norm = lambda xp, observed: xp.sqrt(observed.folded)
        >>> largest = funcga.observers.Observer(funcga.max(), norm)
        >>> step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).mean()), 2, observe=largest)
        >>> # the largest norm of a micro-batch's gradient
        >>> step(torch.tensor(1.0), torch.tensor([2.0, 4.0]))
        (tensor(3.), tensor(4.))
    """

    fold: Fold
    finish: Callable[[Namespace, Observed], Tree]
    measure: Callable[[Namespace, Array], Array] = squared_norm
    degree: int = 2
    groups: _Groups = None


ObserverTree: TypeAlias = Observer | Mapping[str, Any] | Sequence[Any]
"""An Observer, or a dict, tuple or list of such trees."""


class GradientNoise(NamedTuple):
    """What `gradient_noise` says: numbers, 0-d arrays, each with its standard error.

    All are NaN after a window of fewer than two micro-batches: of one, nothing can be said. The
    errors are infinite where the fourth powers of the gradients' norms are beyond the range of
    floats.

    Attributes:
        trace: tr(Sigma), the sum of the variances of the elements of one row's gradient.
        norm_squared: `|G|^2`, the squared norm of the true gradient. An estimate may be below 0,
            where all is noise.
        scale: `tr(Sigma) / |G|^2`, the simple noise scale: a number of rows.
        trace_error: The standard error of the trace.
        norm_squared_error: That of the squared norm.
        scale_error: That of the scale, to first order: it means something where it is small.

    Example:
        >>> grad_fn = funcga.grad(lambda w, x: ((w - x) ** 2).mean())
        >>> step = funcga.accumulate(grad_fn, 4, observe=funcga.gradient_noise())
        >>> grads, noise = step(torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> noise.trace  # of the gradients -2, -4, -6 and -8
        tensor(6.6667)
    """

    trace: Array
    norm_squared: Array
    scale: Array
    trace_error: Array
    norm_squared_error: Array
    scale_error: Array


def gradient_noise(groups: _Groups = None) -> Observer:
    """An observer for `observe=`: the noise of the gradients, and the simple noise scale.

    It compares the micro-batches' gradients, of b_i rows each, with their mean. Rows are what
    `weight=` counts: with a weight of tokens it is the noise of a token's gradient. For `sum()`,
    gradients are those of a sum over the whole batch, as the step returns them, and so are their
    noise and norm; the scale is the same. A loss scale is divided out.

    The estimates are unbiased if rows are drawn independently, whatever the b_i. The standard
    errors come from the spread of `b_i |g_i|^2` in the window: they are about right where a
    micro-batch is smaller than the noise scale, and too large, by about sqrt(1 + 2 b / scale),
    where it is larger. With few micro-batches they are uncertain themselves.

    Args:
        groups: `groups(path)` of a leaf's dotted path, such as "layers.0.weight", returns the name
            of a group, or None to leave the leaf out. Then the observation is a dict of a
            `GradientNoise` for each group. By default the whole gradient is one.

    Returns:
        The Observer, whose observation is a `GradientNoise`.

    References:
        McCandlish et al. (2018), "An Empirical Model of Large-Batch Training", arXiv 1812.06162,
        appendix A.1.

    Example:
        >>> loss_fn = lambda params, x, y: ((x @ params["w"] - y) ** 2).mean()
        >>> gradient = funcga.value_and_grad(loss_fn)
        >>> step = funcga.accumulate(gradient, 8, observe=funcga.gradient_noise())
        >>> x = torch.linspace(-1, 1, 32).reshape(16, 2)
        >>> (loss, grads), noise = step({"w": torch.zeros(2)}, x, x[:, 0])
        >>> bool(noise.trace > 0)
        True
    """
    return Observer(_FOLD, _noise, groups=groups)


def _powers(xp: Namespace, squares: Array, weight: Scalar) -> Array:
    """What is summed of a micro-batch: y, y^2, b y, b, b^2 and 1, with y = b |g|^2; nothing for
    a weight of 0.
    """
    is_known = isinstance(weight, int | float)
    if is_known and not weight:
        return xp.zeros_like(xp.broadcast_to(squares, (6, *squares.shape)))
    # Few operations, as each is a kernel.
    ones = xp.ones_like(squares)
    once = xp.stack([squares, ones]) * weight
    (y, b), (yy, bb) = once, once * once
    powers = xp.stack([y, yy, y * weight, b, bb, ones])
    return powers if is_known else xp.where(b > 0, powers, 0)


_FOLD = Fold(Reducer(_powers, monoids.sum, over_steps=True), normalizers.identity)


# For micro-batches of b_i rows, B in all and n of them, let g_i be their mean gradients and g the
# weighted mean of them. If each row's gradient has the mean G and the covariance Sigma, then y_i =
# b_i |g_i|^2 has the expectation tr(Sigma) + b_i |G|^2, and |g|^2 that of |G|^2 + tr(Sigma) / B. So
# two numbers can be solved for:
#
#     tr(Sigma) = (sum of y_i - B |g|^2) / (n - 1)        |G|^2 = |g|^2 - tr(Sigma) / B
#
# For equal b_i this is appendix A.1 of McCandlish et al. (2018), and it is unbiased for any.
def _noise(xp: Namespace, observed: Observed) -> GradientNoise:
    (y, yy, by, b, bb, n), mean_squared, factor = observed
    # One micro-batch says nothing: NaN, of which everything else follows.
    freedom = xp.where(n > 1, n - 1, xp.nan)
    trace = (y - b * mean_squared) / freedom
    norm_squared = mean_squared - trace / b
    # The residuals y_i - trace - b_i norm_squared, whose sum is 0, have the variance 4 b G' Sigma G
    # + 2 tr(Sigma^2). That of the trace is 2 tr(Sigma^2) / (n - 1), for Gaussian noise.
    of_residuals = 2 * by - trace * b - norm_squared * bb
    squares = yy - trace * y - norm_squared * of_residuals
    # Beyond the range of floats, where the sums are infinite and their difference is not known.
    squares = xp.nan_to_num(squares, nan=xp.inf, posinf=xp.inf, neginf=xp.inf)
    variance = xp.clip(squares / freedom, 0)
    # The first term alone makes |g|^2 vary, and is at most the whole. It is also at most 4 b |G|^2
    # times the largest eigenvalue of Sigma, which is not above the root of tr(Sigma^2).
    largest = 4 * b / n * xp.clip(norm_squared, 0) * xp.sqrt(variance / 2)
    of_signal = xp.fmin(largest, variance)
    error = xp.sqrt(variance / freedom)
    norm_error = xp.sqrt(n * (of_signal + error**2)) / b
    return _in_units(xp, factor**2, trace, norm_squared, error, norm_error)


def _in_units(
    xp: Namespace,
    unit: Array,
    trace: Array,
    norm_squared: Array,
    error: Array,
    norm_error: Array,
) -> GradientNoise:
    """The noise of these estimates times the unit."""
    scale = trace / norm_squared
    # To first order, of two errors that have nothing to do with each other.
    scale_error = xp.sqrt(error**2 + (scale * norm_error) ** 2) / abs(norm_squared)
    estimates = unit * xp.stack([trace, norm_squared, error, norm_error])
    trace, norm_squared, error, norm_error = estimates
    return GradientNoise(trace, norm_squared, scale, error, norm_error, scale_error)


class NoiseAverage(NamedTuple):
    """The state of `averaged`: sums of estimates, and of their variances, and the weight of all of
    them.

    Inside of jax.jit or a scan, where a state has one structure from the first window on, begin
    with zeros.

    Example:
        >>> from funcga.observers import GradientNoise, NoiseAverage, averaged
        >>> state = NoiseAverage(*[jnp.zeros(())] * 5)
        >>> noise = GradientNoise(*map(jnp.asarray, (8.0, 2.0, 4.0, 1.0, 1.0, 2.0)))
        >>> average, state = jax.jit(averaged, static_argnums=2)(noise, state, 0.9)
        >>> round(float(average.scale), 3)
        4.0
    """

    trace: Array
    norm_squared: Array
    trace_variance: Array
    norm_squared_variance: Array
    weight: Array


def averaged(noise: Tree, state: Tree, decay: float) -> tuple[Tree, Tree]:
    """The exponential average of a noise over windows: of the trace and of the squared norm, which
    then are divided.

    The average of a ratio would be biased, and ruled by the windows whose squared norm is close to
    0. The average is that of the windows so far, with weights 1, decay, decay**2 and so on, the
    last window first. A window that says nothing, as one of a single micro-batch, is left out, and
    so is one whose numbers are not finite. The errors are those of a mean of independent estimates.

    Args:
        noise: What `gradient_noise` has said of a window: a `GradientNoise`, or a dict of them.
        state: The state that the last call returned; None in the first.
        decay: The weight of the windows so far, against that of the next one: at least 0 and below
            1.

    Returns:
        (the averaged noise, in the structure of `noise`; the state), to be saved with the training
        state.

    Raises:
        FuncgaError: The decay is out of its range.

    Example:
        >>> from funcga.observers import GradientNoise, averaged
        >>> noise = GradientNoise(*map(torch.tensor, (8.0, 2.0, 4.0, 1.0, 1.0, 2.0)))
        >>> state = None
        >>> for window in range(4):
        ...     average, state = funcga.observers.averaged(noise, state, decay=0.9)
        >>> average.scale
        tensor(4.)
    """
    if not 0 <= decay < 1:
        raise FuncgaError(
            f"decay is {decay!r}: it must be a number from 0 to below 1, such as decay=0.99."
        )
    if isinstance(noise, dict):
        averages, states = dict[str, Tree](), dict[str, Tree]()
        for name, of_group in noise.items():
            averages[name], states[name] = averaged(of_group, state and state[name], decay)
        return averages, states
    xp: Any = backend_of([noise], lambda: ["noise"]).arrays.xp
    values = [
        noise.trace,
        noise.norm_squared,
        noise.trace_error**2,
        noise.norm_squared_error**2,
        xp.ones_like(noise.trace),
    ]
    # NaN and infinite numbers would stay in the average for ever.
    says, before = xp.isfinite(xp.stack(values)).all(0), state or map(xp.zeros_like, values)
    after = [
        xp.where(says, decay**power * old + (1 - decay) ** power * new, old)
        for old, new, power in zip(before, values, (1, 1, 2, 2, 1), strict=True)
    ]
    trace, norm_squared, variance, norm_variance, weight = after
    error, norm_error = xp.sqrt(variance), xp.sqrt(norm_variance)
    average = _in_units(xp, 1 / weight, trace, norm_squared, error, norm_error)
    return average, NoiseAverage(*after)


class GradientNorms(NamedTuple):
    """What `gradient_norms` says.

    Attributes:
        microbatches: The norm of each micro-batch's gradient, [n], in order; over replicas one
            replica after the other. 0 for a micro-batch of weight 0, whatever its gradient, and NaN
            for one that is dropped.
        mean: The norm of the gradient that the step returns, before anything clips it.

    Example:
        >>> grad_fn = funcga.grad(lambda w, x: (w * x).mean())
        >>> step = funcga.accumulate(grad_fn, 2, observe=funcga.gradient_norms())
        >>> step(torch.tensor(1.0), torch.tensor([2.0, -4.0]))
        (tensor(-1.), GradientNorms(microbatches=tensor([2., 4.]), mean=tensor(1.)))
    """

    microbatches: Array
    mean: Array


def gradient_norms(groups: _Groups = None) -> Observer:
    """An observer for `observe=`: the norm of each micro-batch's gradient, and that of their mean,
    before clipping.

    All norms are in the units of what the step returns: that of one micro-batch is the norm of what
    the step would return if all of the batch were like it. So the norm of the mean is never above
    the largest. A loss scale is divided out.

    Args:
        groups: As in `gradient_noise`: then the observation is a dict of a `GradientNorms` for each
            group.

    Returns:
        The Observer, whose observation is a `GradientNorms`.

    Example:
        >>> loss_fn = lambda params, x: (params["a"] * x + params["b"]).mean()
        >>> norms = funcga.gradient_norms(groups=lambda path: path)
        >>> step = funcga.accumulate(funcga.grad(loss_fn), 2, observe=norms)
        >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
        >>> grads, norms = step(params, torch.tensor([3.0, -3.0]))
        >>> norms["a"]
        GradientNorms(microbatches=tensor([3., 3.]), mean=tensor(0.))
    """
    return Observer(concat(), _norms, groups=groups)


def _norms(xp: Namespace, observed: Observed) -> GradientNorms:
    squares, result, factor = observed
    # One micro-batch after the other, each with all of its groups.
    squares = squares.reshape(-1, result.shape[0])
    return GradientNorms(factor * xp.sqrt(squares), factor * xp.sqrt(result))


def dropped() -> Observer:
    """An observer for `observe=`: how many micro-batches of the window `drop=` has left out, on all
    replicas.

    With drop="window", that is none, or all of them. It is a 0-d integer array, on the device of
    the gradients: nothing waits for it.

    Returns:
        The Observer, whose observation is the number.

    Example:
        >>> grad_fn = funcga.grad(lambda w, x: (w * x).mean())
        >>> step = funcga.accumulate(grad_fn, 3, drop="microbatch", observe=funcga.dropped())
        >>> step(torch.tensor(1.0), torch.tensor([2.0, float("nan"), 4.0]))
        (tensor(3.), tensor(1))
    """
    return Observer(concat(), _count, measure=_nothing, degree=0)


def _nothing(xp: Namespace, leaf: Array) -> Array:
    return abs(leaf.reshape(-1)[:0]).sum()  # real where the leaf is complex


def _count(xp: Namespace, observed: Observed) -> Array:
    # What is collected of a micro-batch that is dropped is NaN.
    return xp.isnan(observed.folded).sum()[None]
