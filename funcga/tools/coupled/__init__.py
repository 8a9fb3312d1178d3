"""`coupled`: the gradient of a loss that needs the whole batch at once, in two passes over its
micro-batches.

The first pass folds a summary of each micro-batch, and keeps no graph. The loss is a function of
the folded summaries, and its gradient with respect to them is a cotangent. The second pass pulls
the cotangent back through each micro-batch; the fold determines the cotangent of one summary.

Design note: docs/concepts/inside_coupled.md.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from funcga import normalizers
from funcga._accumulate import TotalsFn
from funcga._backend import Backend
from funcga._call import Memory, Program, read_program, read_sizes
from funcga._call.arguments import Arguments
from funcga._fold import Tally
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction, value_and_grad
from funcga._replicas import step_of
from funcga._tools import load
from funcga._types import Across, Array, LossFn, Scalar, Tree, WeightFn
from funcga.errors import FuncgaError, check_callable
from funcga.folds import Fold, FoldTree, concat


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
    check_callable(loss_fn, "loss_fn", "lambda params, summaries: loss")
    gradient = value_and_grad(loss_fn, argnums, has_aux)
    assert isinstance(gradient, GradientFunction)
    count, rows = read_sizes(n, microbatch_size)
    program = read_program(summary_fn, fold, weight, in_axes, across, n=count, microbatch_size=rows)
    if totals is not None:
        program = load("totals", "totals=").counted(program, totals)
    job = Coupled(program, gradient, Memory(None if across is None else step_of(loss_fn)))

    @functools.wraps(summary_fn, assigned=("__doc__", "__name__", "__qualname__"), updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        """The loss and its gradient."""
        with program.telling(job.after):
            backend = program.backend(args, kwargs)
            job.check_folds(backend)
            return job.passes(backend)(args, kwargs)

    # For tools that inspect the step.
    step.coupled = job  # type: ignore[attr-defined]
    return step


@dataclass(frozen=True, eq=False)
class Coupled:
    """What a step of `coupled` computes: a fold of summaries, and the gradient of a loss of them.

    `memory` is the cache of the second pass; that of the first is the program's.
    """

    program: Program
    gradient: GradientFunction
    memory: Memory

    @property
    def after(self) -> Program:
        """A program that stands for the second pass, which is counted apart."""
        return self.first(memory=self.memory)

    def passes(self, backend: Backend) -> Callable[..., Any]:
        """f(args, kwargs): the loss and its gradient, of summaries of the micro-batches cut from
        args.
        """
        tool = load(f"coupled.in_{backend.name}", "coupled")
        return tool.coupled(self, backend)  # type: ignore[no-any-return]

    def first(self, **changes: Any) -> Program:
        """The program of the first pass, which folds the summaries."""
        return replace(self.program, prologue=None, epilogues=(), **changes)

    def second(self, grad_fn: Callable[..., Tree], fold: FoldTree, in_axes: Tree) -> Program:
        """The program of the second pass: the fold of `grad_fn` over the micro-batches."""
        changes = {"grad_fn": grad_fn, "fold": fold, "in_axes": in_axes}
        return replace(self.after, weight=lambda *_: 1, **changes)

    def check_folds(self, backend: Backend) -> None:
        """Raises FuncgaError for a fold that neither adds, nor collects, nor threads."""
        for fold in backend.trees.flatten(self.program.fold, lambda node: isinstance(node, Fold))[
            0
        ]:
            if not isinstance(fold, Fold):
                continue  # which is refused where folds are read
            reducer, normalizer = fold.reducer, fold.normalizer
            only_divides = normalizer.divides_by or normalizer.apply is normalizers.identity.apply
            is_sum = reducer.monoid.collective == "sum" and only_divides and not reducer.of_bits
            if not (is_sum or reducer.monoid.axis is not None or reducer.carries):
                raise FuncgaError(
                    f"a summary is folded by `{fold.name}`, and `coupled` has the gradient of "
                    "summaries that are added or collected: by mean(), per_weight(), sum() or "
                    "concat(). Return value[None] from summary_fn, with fold=funcga.concat(), and "
                    "combine the rows of s in loss_fn, such as s.max() for a maximum."
                )

    def loss_of(
        self, params: Sequence[Tree], summaries: Tree, backend: Backend
    ) -> tuple[Array, Tree]:
        """(loss, aux)."""
        return self.gradient.split(self.gradient.loss_fn(*params, summaries), backend)

    def check_depends(self, depends: bool) -> None:
        """Raises FuncgaError for a loss that does not depend on the summaries."""
        if not depends:
            raise FuncgaError(
                "loss_fn does not use the summaries: its value depends on no float array of them, "
                "so that no gradient comes to summary_fn. Compute the loss from its last argument, "
                "loss_fn(params, s), and return float arrays from summary_fn, such as embeddings."
            )

    def check_reached(self, is_reached: bool) -> None:
        """Raises FuncgaError for summaries that depend on no parameter."""
        if not is_reached:
            raise FuncgaError(
                "the summaries that the loss uses depend on no parameter: summary_fn detaches what "
                "it computes, or it uses a module, or arrays, that it closes over. Compute them "
                "from its first argument, and leave out detach(), no_grad() and stop_gradient()."
            )

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


class Summaries(NamedTuple):
    """The folded summaries of all micro-batches and replicas: the leaves of the result of a first
    pass with these outputs. Of tallies there is one for each reduced leaf.
    """

    outputs: Outputs
    leaves: list[Any]
    tallies: Sequence[Tally]

    @property
    def variables(self) -> dict[int, Array]:
        """The arrays that the loss is differentiated by, by their leaf indices: floats that are
        added or collected.
        """
        kind = self.outputs.backend.arrays.kind
        folded = {i: self.leaves[i] for i in (*self.outputs.reduced, *self.outputs.collected)}
        kinds = {index: kind(leaf.dtype) for index, leaf in folded.items()}
        if "complex" in kinds.values():
            raise FuncgaError(
                "summary_fn returns a complex array, and the gradient is that of real ones. Return "
                "its real and its imaginary part."
            )
        return {index: leaf for index, leaf in folded.items() if kinds[index] == "float"}

    def tree(self, variables: Mapping[int, Array]) -> Tree:
        """The summaries for loss_fn, with these variables."""
        leaves = enumerate(self.leaves)
        return self.outputs.structure_of([variables.get(index, leaf) for index, leaf in leaves])

    def cotangents(self, of_variables: Mapping[int, Array | None]) -> "Cotangents":
        """The cotangents of what is added and collected, from those of the variables; None if the
        loss does not depend on one.
        """
        outputs, cast = self.outputs, self.outputs.backend.arrays.cast
        found = {index: c for index, c in of_variables.items() if c is not None}
        # A normalizer that divides is its own derivative.
        for (index, fold), tally in zip(outputs.reduced.items(), self.tallies, strict=True):
            if index in found:
                wide = replace(fold, result_dtype=fold.accumulator_dtype)
                found[index] = wide.normalize(cast(found[index], fold.accumulator_dtype), tally)
        return Cotangents(outputs, found)


class Cotangents(NamedTuple):
    """The cotangents of what is added or collected, by leaf index."""

    outputs: Outputs
    of: dict[int, Array]

    @property
    def are_weighed(self) -> bool:
        """Whether a micro-batch of weight 0 contributes to none of these leaves."""
        folds = [self.outputs.folds[index] for index in self.of]
        return all(fold is not None and fold.fold.reducer.linear for fold in folds)

    def parts(self, output: Tree, weights: Sequence[Scalar]) -> dict[int, Array]:
        """The contribution of one micro-batch, with this output of the first pass, to each leaf
        that has a cotangent; `weights`: one for each reduced leaf.
        """
        outputs, leaves = self.outputs, self.outputs.in_order(output)
        parts = {index: leaves[index] for index in self.of}
        for (index, fold), weight in zip(outputs.reduced.items(), weights, strict=True):
            if index in parts:
                parts[index] = fold.lift(parts[index], weight)
        return parts

    def of_parts(
        self, parts: Mapping[int, Array], rows: Callable[[int, Array, int, int], Array]
    ) -> dict[int, Array]:
        """The cotangents of these parts: of a sum the same for each of its terms, of collected
        rows their own rows.

        `rows(position, cotangent, axis, size)` are those of this micro-batch, in the cotangent of
        the collected leaf at this position.
        """
        cotangents = dict(self.of)
        collected = self.outputs.collected.items()
        for position, (index, fold) in enumerate(collected):
            if index in parts:
                axis = fold.axis or 0
                size = parts[index].shape[axis]
                cotangents[index] = rows(position, self.of[index], axis, size)
        return cotangents

    def threaded(self, output: Tree) -> Tree:
        """The summary with None for all but threaded state."""
        leaves, threads = self.outputs.in_order(output), self.outputs.threads
        return self.outputs.structure_of(
            [leaf if index in threads else None for index, leaf in enumerate(leaves)]
        )
