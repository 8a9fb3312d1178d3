"""`coupled`: the gradient of a loss that needs the whole batch at once, in two passes over its
micro-batches.

The first pass folds a summary of each micro-batch, and keeps no graph. The loss is a function of
the folded summaries, and its gradient with respect to them is a cotangent. The second pass pulls
the cotangent back through each micro-batch; the fold determines the cotangent of one summary.

Design note: docs/concepts/inside_coupled.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, NamedTuple, TypedDict, Unpack, overload

from funcga import normalizers
from funcga._accumulate import TotalsFn
from funcga._backend import Backend
from funcga._call import Memory, Program, backend_of_call, read_program, read_split, telling
from funcga._call.arguments import Arguments
from funcga._fold import Tally, accumulator_dtype, kind
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction, value_and_grad
from funcga._replicas import StepId, step_of
from funcga._tools import load
from funcga._types import A, Across, Array, LossFn, P, R, Scalar, Tree, TreeFn, WeightFn
from funcga.errors import FuncgaError, check_callable
from funcga.folds import Fold, FoldTree, concat
from funcga.reducers import weighted


class _Options(TypedDict, total=False):
    microbatch_size: int | None
    fold: FoldTree
    weight: WeightFn | None
    in_axes: Tree
    across: Across
    totals: TotalsFn | None
    has_aux: bool


# The first is for a module's own parameters, whose gradients its gradient function returns.
@overload
def coupled(
    summary_fn: Callable[P, tuple[object, dict[str, A]]],
    loss_fn: Callable[..., R],
    n: int | None = None,
    **options: Unpack[_Options],
) -> Callable[P, tuple[R, dict[str, A]]]: ...
@overload
def coupled(  # type: ignore[overload-overlap]
    summary_fn: Callable[Concatenate[A, P], object],
    loss_fn: Callable[..., R],
    n: int | None = None,
    *,
    argnums: Literal[0] = 0,
    **options: Unpack[_Options],
) -> Callable[Concatenate[A, P], tuple[R, A]]: ...
@overload
def coupled(
    summary_fn: Callable[P, object],
    loss_fn: Callable[..., R],
    n: int | None = None,
    *,
    argnums: int | tuple[int, ...],
    **options: Unpack[_Options],
) -> Callable[P, tuple[R, Any]]: ...
def coupled(
    summary_fn: Callable[..., Tree],
    loss_fn: LossFn,
    n: int | None = None,
    *,
    microbatch_size: int | None = None,
    fold: FoldTree = concat(),  # noqa: B008 - a frozen value
    weight: WeightFn | None = None,
    in_axes: Tree = None,
    across: Across = None,
    totals: TotalsFn | None = None,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """The loss and gradient of a loss that needs the whole batch, in n micro-batches: exact.

    A contrastive loss compares each row with all others; load balancing, VICReg and Barlow Twins
    take statistics of the batch. The mean of such losses over micro-batches is another loss. Here
    the batch enters the loss by summaries of its micro-batches::

        s = the fold of summary_fn(params, *microbatch) over micro-batches and replicas
        loss = loss_fn(params, s)
        grads = the gradient of loss_fn(params, s(params)) by params

    The first pass computes the summaries. The second runs each micro-batch again, and pulls the
    gradient of the loss with respect to its summary back to the parameters. That is 2n forward
    passes, with the activations of one micro-batch in memory; n = 1 takes one pass. The second
    pass draws the random numbers of the first, as for dropout. The step takes a batch, not a window
    of a loader, whose micro-batches are joined: `step(params, *map(torch.cat, zip(*window)))`.
    With `concat()` this is the gradient cache of Gao, Zhang, Han and Callan (2021), arXiv
    2101.06983 (docs/howto/whole_batch.md).

    Args:
        summary_fn: `summary_fn(params, *microbatch)` returns a tree of arrays: embeddings [rows,
            features] for `concat()`, a mean over the rows for `mean()`, a sum for `sum()`.
            Integers, such as labels, get no gradient. With
            `torch_backend.module_value_and_grad(module, summary_fn)` the parameters are the
            module's own, which DDP or FSDP may wrap: then the step is `f(*batch)`.
        loss_fn: `loss_fn(params, s)` returns a real scalar, or (scalar, aux) with has_aux. `s` has
            the structure that summary_fn returns. For a module's own parameters it gets the module.
            Parameters that it uses itself, such as a temperature, count once.
        n: How many micro-batches; as in `accumulate`.
        microbatch_size: How many rows a micro-batch has, in place of `n`.
        fold: A Fold, or a tree prefix of Folds over summary_fn's output. Each adds, collects or
            threads: a maximum is taken in loss_fn, of rows under `concat()`.
        weight: As in `accumulate`, for the folds that weigh.
        in_axes: As in `accumulate`, for summary_fn's arguments. Threaded state gets no gradient.
        across: As in `accumulate`: every replica passes its own rows, and gets the same result.
        totals: As in `accumulate`, for summary_fn's keyword argument `totals`.
        argnums: The argument of summary_fn to differentiate by, or a tuple of several. They are
            passed whole.
        has_aux: Whether loss_fn returns (scalar, aux).

    Returns:
        A function that is called as summary_fn is, on a whole batch. It returns `(loss, grads)`, or
        `((loss, aux), grads)` with has_aux, as `value_and_grad` does.

    Raises:
        FuncgaError: If an argument is invalid, or the loss does not depend on the summaries.

    Example:
        >>> def summary_fn(params, x, y):
        ...     return {"x": F.normalize(x @ params["w"]), "y": F.normalize(y @ params["w"])}
        >>> def loss_fn(params, s):
        ...     logits = s["x"] @ s["y"].T * params["scale"].exp()
        ...     return F.cross_entropy(logits, torch.arange(len(logits)))
        >>> step = funcga.coupled(summary_fn, loss_fn, n=4)
        >>> params = {"w": torch.eye(3), "scale": torch.tensor(1.0)}
        >>> loss, grads = step(params, torch.eye(10, 3), torch.eye(10, 3))
        >>> grads["w"].shape
        torch.Size([3, 3])
    """
    check_callable(summary_fn, "summary_fn", "lambda params, x: model(params, x)")
    gradient = value_and_grad(loss_fn, argnums, has_aux)
    assert isinstance(gradient, GradientFunction)
    split = read_split(n, microbatch_size)
    program = read_program(summary_fn, fold, weight, in_axes, across, split)
    counting = None if totals is None else load("totals", "totals=").counting(program, totals)
    job = Coupled(program, gradient, None if across is None else step_of(loss_fn), counting)

    @wraps(summary_fn, assigned=("__doc__", "__name__", "__qualname__"), updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        """The loss and its gradient."""
        with telling(counting, program, job.second):
            backend = backend_of_call(summary_fn, args, kwargs)
            _check_folds(program.fold, backend)
            return job.passes(backend)(args, kwargs)

    # For tools that inspect the step.
    step.coupled = job  # type: ignore[attr-defined]
    return step


def _check_folds(folds: FoldTree, backend: Backend) -> None:
    """Raises FuncgaError for a fold that neither adds, nor collects, nor threads."""
    for fold in backend.trees.flatten(folds, lambda node: isinstance(node, Fold))[0]:
        if not isinstance(fold, Fold):
            continue  # which is refused where folds are read
        reducer, is_sum = fold.reducer, fold.normalizer.only_divides
        is_sum = is_sum and reducer.monoid.collective == "sum" and not reducer.of_bits
        if not (is_sum or reducer.monoid.axis is not None or reducer.carries):
            raise FuncgaError(
                f"a summary is folded by `{fold.name}`, and `coupled` has the gradient of "
                "summaries that are added or collected: by mean(), per_weight(), sum() or "
                "concat(). Return value[None] from summary_fn, with fold=funcga.concat(), and "
                "combine the rows of s in loss_fn, such as s.max() for a maximum."
            )


@dataclass(frozen=True, eq=False)
class Coupled:
    """What a step of `coupled` computes: a fold of summaries, and the gradient of a loss of them.

    `program` folds the summaries. `step` identifies the second pass across replicas. `counting`:
    the program that counts a batch first, if there is one.
    """

    program: Program
    gradient: GradientFunction
    step: StepId | None = None
    counting: Any = None

    @cached_property
    def second(self) -> Program:
        """The program of the second pass, which is counted apart. Its grad_fn, fold and weight are
        known once the first has run.
        """
        return replace(self.program, memory=Memory(self.step))

    def passes(self, backend: Backend) -> TreeFn:
        """The step in a framework, called with (args, kwargs)."""
        step: TreeFn = load(f"coupled.in_{backend.name}", "coupled").coupled(self, backend)
        return step if self.counting is None else self.counting.before(step, backend)

    def loss(
        self, params: Sequence[Tree], summaries: "Summaries", variables: Mapping[int, Array]
    ) -> tuple[Array, Tree]:
        """(loss, aux) of the summaries, with these variables among their leaves."""
        outputs, leaves = summaries.outputs, enumerate(summaries.leaves)
        tree = outputs.structure_of([variables.get(index, leaf) for index, leaf in leaves])
        return self.gradient.split(self.gradient.loss_fn(*params, tree), outputs.backend)

    def arg_indices(self, arguments: Arguments) -> tuple[int, ...]:
        """The indices of the differentiated arguments. Raises FuncgaError if one is out of range,
        or split.
        """
        arg_indices = self.gradient.arg_indices(len(arguments.parts))
        for arg_index in arg_indices:
            if arguments.parts[arg_index].axes:
                raise FuncgaError(
                    f"argnums is {self.gradient.argnums!r}, and in_axes splits argument "
                    f"{arg_index}: parameters are passed whole. Name the arguments to "
                    "differentiate by in argnums, and write None for them in in_axes."
                )
        return arg_indices


# The sum of gradients of weight 1. One of weight 0 adds nothing, not even a NaN.
SUM = Fold(weighted, normalizers.identity)


def unused() -> FuncgaError:
    """The error for a loss that does not depend on the summaries."""
    return FuncgaError(
        "loss_fn does not use the summaries: its value depends on no float array of them, so that "
        "no gradient comes to summary_fn. Compute the loss from its last argument, "
        "loss_fn(params, s), and return float arrays from summary_fn, such as embeddings."
    )


class Summaries(NamedTuple):
    """The folded summaries of all micro-batches and replicas: the leaves of the result of a first
    pass with these outputs. `tallies` has one for each reduced leaf, by its index.
    """

    outputs: Outputs
    leaves: list[Any]
    tallies: Mapping[int, Tally]

    @property
    def variables(self) -> dict[int, Array]:
        """The arrays that the loss is differentiated by, by their leaf indices: floats that are
        added or collected.
        """
        outputs, variables = self.outputs, dict[int, Array]()
        for index in (*outputs.reduced, *outputs.collected):
            leaf = self.leaves[index]
            if kind(leaf.dtype) == "complex":
                raise FuncgaError(
                    "summary_fn returns a complex array, and the gradient is that of real ones. "
                    "Return its real and its imaginary part."
                )
            if kind(leaf.dtype) == "float":
                variables[index] = leaf
        return variables

    def cotangents(self, of_variables: Mapping[int, Array]) -> dict[int, Array]:
        """The cotangents of what is added and collected, from those of the variables."""
        folds: Any = self.outputs.folds
        cotangents = dict(of_variables)
        for index in cotangents.keys() & self.tallies.keys():
            # A normalizer that divides is its own derivative.
            dtype = folds[index].accumulator_dtype
            wide = replace(folds[index], result_dtype=dtype)
            cotangent = wide.arrays.as_array(cotangents[index], dtype)
            cotangents[index] = wide.normalize(cotangent, self.tallies[index])
        return cotangents

    def are_weighed(self, leaf_indices: Iterable[int]) -> bool:
        """Whether a micro-batch of weight 0 contributes to none of these leaves."""
        folds: Any = self.outputs.folds
        return all(folds[index].fold.reducer.linear for index in leaf_indices)

    def inner_product(
        self,
        cotangents: Mapping[int, Array],
        output: Tree,
        weights: Mapping[int, Scalar],
        rows_of: Callable[[int, Array, int], Array],
        loss: Array,
    ) -> tuple[Array, Tree]:
        """(the inner product of the cotangents with what a micro-batch contributes, whose summary
        is this output; the summary with None for all but threaded state).

        Its gradient is the share of the micro-batch in that of the loss. `weights`: one for each
        reduced leaf. `rows_of(index, part, axis)`: the cotangent of these rows of a collected leaf.
        """
        folds: Any = self.outputs.folds
        arrays, leaves = self.outputs.backend.arrays, self.outputs.in_order(output)
        # Summed in at least 32 bits, where the loss is.
        total = arrays.xp.zeros_like(loss, dtype=accumulator_dtype(loss.dtype, arrays))
        for index, cotangent in cotangents.items():
            part = leaves[index]
            if index in weights:  # each term of a sum has the cotangent of the sum
                part = folds[index].lift(part, weights[index])
            else:
                cotangent = rows_of(index, part, folds[index].axis)
            product = part * arrays.as_array(cotangent, part.dtype)
            term = product.sum(dtype=accumulator_dtype(part.dtype, arrays))
            total = total + arrays.as_array(term, total.dtype, total)
        threads = self.outputs.threads
        threaded = [leaf if index in threads else None for index, leaf in enumerate(leaves)]
        return total, self.outputs.structure_of(threaded)
