"""`coupled`: the gradient of a loss that needs the whole batch at once, in two passes over its
micro-batches.

The first pass folds a summary of each micro-batch, and keeps no graph. The loss is a function of
the folded summaries, and its gradient with respect to them is a cotangent. The second pass pulls
the cotangent back through each micro-batch; the fold determines the cotangent of one summary.

Design note: docs/concepts/inside_coupled.md.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol, cast

from funcga import reducers
from funcga._backend import Backend
from funcga._call import Memory, Program, read_program, read_sizes
from funcga._call.arguments import Arguments
from funcga._fold import LeafFold, Tally, parts_of
from funcga._fold.outputs import Outputs, broadcast_folds
from funcga._grad import GradientFunction, value_and_grad
from funcga._replicas import step_of
from funcga._types import Across, Array, LossFn, Reduced, Scalar, TotalsFn, Tree, WeightFn
from funcga.errors import (
    FuncgaError,
    check_callable,
    refuses_arguments,
)
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
    if hasattr(summary_fn, "named_parameters") and [*summary_fn.named_parameters()]:
        raise FuncgaError(
            f"summary_fn is a module of type {type(summary_fn).__name__}, which has parameters of "
            "its own and takes none. Write a function of it: "
            "torch_backend.module_value_and_grad(module, lambda module, x: module(x))."
        )
    for name, function in {"summary_fn": summary_fn, "loss_fn": loss_fn}.items():
        if isinstance(function, GradientFunction):
            raise FuncgaError(
                f"{name} is a gradient function, and the gradient is taken by `coupled` itself. "
                "Pass the function that computes the summaries, and the loss of them: "
                "funcga.coupled(summary_fn, loss_fn, n=8)."
            )
    gradient = value_and_grad(loss_fn, argnums, has_aux)
    assert isinstance(gradient, GradientFunction)
    with _in_its_words():
        count, rows = read_sizes(n, microbatch_size)
        program = read_program(
            summary_fn,
            fold,
            weight,
            in_axes,
            across,
            totals,
            n=count,
            microbatch_size=rows,
        )
    job = Coupled(program, gradient, Memory(None if across is None else step_of(loss_fn)))

    @functools.wraps(summary_fn, assigned=("__doc__", "__name__", "__qualname__"), updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        """The loss and its gradient."""
        with _in_its_words(), job.program.telling(job.after):
            backend = job.program.backend(args, kwargs)
            if program.totals is not None:
                program.totals.check_call(kwargs)
            job.check_folds(backend)
            return job.passes(backend)(args, kwargs)

    # For tools that inspect the step.
    step.coupled = job  # type: ignore[attr-defined]
    return step


@contextmanager
def _in_its_words() -> Iterator[None]:
    """A context that rewrites errors of code shared with `accumulate`: summary_fn in place of
    grad_fn.
    """
    try:
        yield
    except FuncgaError as error:
        words = {
            "accumulate(grad_fn, ": "coupled(summary_fn, loss_fn, ",
            # It takes no window of a loader.
            "cut all of them alike.": "cut all of them alike; a list of micro-batches is joined "
            "first: map(torch.cat, zip(*window)).",
            "A DataLoader is folded by stream.": "Join what a DataLoader yields: step(params, "
            "*map(torch.cat, zip(*window))).",
            "grad_fn": "summary_fn",
            "Add it: def loss_fn(": "Add it: def summary_fn(",
            "output": "summary",
            "for each example.": "for each example. The loss comes second: coupled(summary_fn, "
            "loss_fn).",
        }
        (text,) = error.args
        for word, instead in words.items():
            text = text.replace(word, instead)
        error.args = (text,)
        raise


# What to return from summary_fn and to take in loss_fn, by the reducer of a fold.
_COLLECTED = "value[None], with fold=funcga.concat(), and take {} in loss_fn"
_INSTEAD = {
    reducers.max: _COLLECTED.format("{xp}.amax(s, 0)"),
    reducers.min: _COLLECTED.format("{xp}.amin(s, 0)"),
    reducers.logsumexp: _COLLECTED.format("{nn}.logsumexp(s, 0)"),
    reducers.pairs: "value, with fold=funcga.sum(), and take s[0] / s[1] in loss_fn",
    reducers.moments: "{{'mean': value, 'square': value**2}}, with fold=funcga.mean(), and take "
    "the variance in loss_fn, s['square'] - s['mean'] ** 2",
}


class Passes(Protocol):
    """What `coupled` needs of a framework: the file of the tool for it."""

    def coupled(self, job: "Coupled", backend: Backend) -> Callable[..., Any]:
        """f(args, kwargs): the loss and its gradient, of summaries of the micro-batches cut from
        args.
        """
        ...


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
        return replace(self.program, totals=None, memory=self.memory)

    def passes(self, backend: Backend) -> Callable[..., Any]:
        """The two passes, by the tool."""
        side = cast("Passes", import_module(f"funcga.tools.coupled.in_{backend.name}"))
        return side.coupled(self, backend)

    def first(self, **changes: Any) -> Program:
        """The program of the first pass, which folds the summaries."""
        return replace(self.program, totals=None, **changes)

    def check_folds(self, backend: Backend) -> None:
        """Raises FuncgaError for a fold that neither adds, nor collects, nor threads."""
        for fold in backend.trees.flatten(self.program.fold, _is_fold)[0]:
            if not isinstance(fold, Fold):
                continue  # which is refused where folds are read
            monoid = fold.reducer.monoid
            if monoid.collective == "sum" or monoid.axis is not None or fold.reducer.carries:
                continue
            instead = _INSTEAD.get(fold.reducer, _COLLECTED.format("the result of the rows s"))
            names = {"jax": ("jnp", "jax.nn")}.get(backend.name, ("torch", "torch"))
            raise FuncgaError(
                f"a summary is folded by `{fold.name}`, and `coupled` has the gradient of "
                "summaries that are added or collected: by mean(), per_weight(), sum() or "
                "concat(). "
                f"Return {instead.format(xp=names[0], nn=names[1])}."
            )

    def second(self, grad_fn: Callable[..., Tree], fold: FoldTree, in_axes: Tree) -> Program:
        """The program of the second pass: the fold of `grad_fn` over the micro-batches."""
        return replace(
            self.program,
            grad_fn=grad_fn,
            fold=fold,
            weight=lambda *_: 1,
            in_axes=in_axes,
            totals=None,
            memory=self.memory,
        )

    def loss_of(
        self, params: Sequence[Tree], summaries: Tree, backend: Backend
    ) -> tuple[Array, Tree]:
        """(loss, aux). Raises FuncgaError if loss_fn does not take these arguments, or returns
        anything else.
        """
        loss_fn = self.gradient.loss_fn
        try:
            return self.gradient.split(loss_fn(*params, summaries), backend)
        except TypeError as error:
            if not refuses_arguments(loss_fn, len(params) + 1, (), error):
                raise
            raise FuncgaError(
                "loss_fn is called with what is differentiated and then the summaries, "
                f"{len(params) + 1} in all: {error}. Write it with one parameter for each: def "
                "loss_fn(params, s)."
            ) from error

    def check_depends(self, depends: bool) -> None:
        """Raises FuncgaError for a loss that does not depend on the summaries."""
        if not depends:
            raise FuncgaError(
                "loss_fn does not use the summaries: its value depends on no float array of them, "
                "so that no gradient comes to summary_fn. Compute the loss from its last argument, "
                "loss_fn(params, s)."
            )

    def check_reached(self, is_reached: bool) -> None:
        """Raises FuncgaError for summaries that depend on no parameter."""
        if not is_reached:
            raise FuncgaError(
                "the summaries that the loss uses depend on no parameter: summary_fn detaches what "
                "it computes, or it uses a module, or arrays, that it closes over. Compute them "
                "from its first argument, and leave out detach(), no_grad() and stop_gradient()."
            )

    def arg_indices(self, args: Sequence[Tree]) -> tuple[int, ...]:
        """The indices of the differentiated arguments. Raises FuncgaError if one is out of
        range.
        """
        return self.gradient.arg_indices(len(args))

    def check_whole(self, arguments: Arguments, arg_indices: Sequence[int]) -> None:
        """Raises FuncgaError if one of the differentiated arguments is split."""
        for arg_index in arg_indices:
            if arguments.parts[arg_index].axes:
                raise FuncgaError(
                    f"argnums is {self.gradient.argnums!r}, and in_axes splits argument "
                    f"{arg_index}: parameters are passed whole. Name the arguments to "
                    "differentiate by in argnums, and write None for them in in_axes."
                )


def _is_fold(node: object) -> bool:
    return isinstance(node, Fold)


@dataclass(frozen=True, eq=False)
class Summaries:
    """The folded summaries of all micro-batches and replicas, before they are normalised.

    `outputs` are those of the first pass. `reduced` has the accumulator of each reduced leaf,
    `collected` the rows of each collected one, and `state` what is threaded. `tally_of` gives
    the tally for a fold.
    """

    job: Coupled
    outputs: Outputs
    reduced: list[Reduced]
    collected: list[Array]
    state: list[Any]
    tally_of: Callable[[LeafFold], Tally]

    def variables(self) -> list[Array]:
        """The arrays that the loss is differentiated by: the reduced floats, then the collected
        ones.
        """
        leaves, _, indices = self._flat
        if not indices:
            raise FuncgaError(
                "summary_fn returns no float array, so the loss of its summaries has no gradient. "
                "Return what the loss is computed from, such as embeddings."
            )
        return [leaves[index] for index in indices]

    def tree(self, variables: Sequence[Array]) -> Tree:
        """The summaries for loss_fn, with these variables."""
        leaves, structure, indices = self._flat
        leaves = [*leaves]
        for index, variable in zip(indices, variables, strict=True):
            leaves[index] = variable
        outputs, backend = self.outputs, self.outputs.backend
        reduced, collected = backend.trees.unflatten(structure, leaves)
        triples = zip(outputs.reduced_folds, reduced, strict=True)
        return outputs.join(
            [fold.normalize(leaf, self.tally_of(fold)) for fold, leaf in triples],
            [
                backend.arrays.cast(leaf, fold.result_dtype)
                for fold, leaf in zip(outputs.collected_folds, collected, strict=True)
            ],
            self.state,
        )

    def cotangents(self, of_variables: Sequence[Array | None]) -> "Cotangents":
        """The cotangents of the leaves, from those of the variables; None if the loss does not
        depend on one.
        """
        leaves, structure, indices = self._flat
        backend = self.outputs.backend
        by_index = dict(zip(indices, of_variables, strict=True))
        # A leaf of several arrays has a cotangent for each of them, or None.
        reached = backend.trees.unflatten(
            structure, [by_index.get(index) is not None for index in range(len(leaves))]
        )
        filled = [
            backend.arrays.xp.zeros_like(leaf) if by_index.get(index) is None else by_index[index]
            for index, leaf in enumerate(leaves)
        ]
        of_reduced, of_collected = [
            [
                cotangent if any(parts_of(is_reached)) else None
                for cotangent, is_reached in zip(*pair, strict=True)
            ]
            for pair in zip(backend.trees.unflatten(structure, filled), reached, strict=True)
        ]
        of_leaves = zip(
            (*self.outputs.reduced, *self.outputs.collected),
            (*of_reduced, *of_collected),
            strict=True,
        )
        reached = [leaf_index for leaf_index, cotangent in of_leaves if cotangent is not None]
        return Cotangents(self.outputs, of_reduced, of_collected, self._are_weighed(reached))

    def _are_weighed(self, leaf_indices: Sequence[int]) -> bool:
        """Whether a micro-batch of weight 0 contributes nothing to these leaves."""
        outputs = self.outputs
        # With arrays as leaves, as a dataclass without any is not a container.
        summary = outputs.structure_of([outputs.backend.arrays.integer(0)] * len(outputs.folds))
        count = len(outputs.backend.trees.flatten(summary)[0])
        folds = broadcast_folds(self.job.program.fold, summary, count, outputs.backend, "summary")
        return all(folds[leaf_index][0].reducer.linear for leaf_index in leaf_indices)

    @property
    def weigh_nothing(self) -> bool:
        """Whether the host sees a total weight of 0, so that a mean of the summaries is 0."""
        totals = [self.tally_of(fold).total for fold in self.outputs.reduced_folds]
        return any(isinstance(total, int | float) and not total for total in totals)

    @functools.cached_property
    def _flat(self) -> tuple[list[Array], Any, list[int]]:
        """The arrays, their structure, and which of them are variables."""
        leaves, structure = self.outputs.backend.trees.flatten((self.reduced, self.collected))
        kinds = [self.outputs.backend.arrays.kind(leaf.dtype) for leaf in leaves]
        if "complex" in kinds:
            raise FuncgaError(
                "summary_fn returns a complex array, and the gradient is that of real ones. Return "
                "its real and its imaginary part."
            )
        return leaves, structure, [index for index, kind in enumerate(kinds) if kind == "float"]


@dataclass(frozen=True, eq=False)
class Cotangents:
    """The cotangents of folded summaries; None for a leaf that has none.

    `are_weighed`: whether a micro-batch of weight 0 contributes to none of those that have one.
    """

    outputs: Outputs
    reduced: list[Reduced | None]
    collected: list[Array | None]
    are_weighed: bool

    def parts(self, output: Tree, weight: Scalar, share: Scalar = None) -> list[Reduced]:
        """The contribution of one micro-batch, with this output of the first pass, to each leaf
        that has a cotangent.

        `share` is the weight in the unit of means, if there is one.
        """
        leaves = self.outputs.in_order(output)
        triples = zip(self.outputs.reduced, self.outputs.reduced_folds, self.reduced, strict=True)
        lifted = [
            fold.lift(leaves[leaf_index], share if fold.is_mean and share is not None else weight)
            for leaf_index, fold, cotangent in triples
            if cotangent is not None
        ]
        pairs = zip(self.outputs.collected, self.collected, strict=True)
        return [
            *lifted,
            *[leaves[leaf_index] for leaf_index, cotangent in pairs if cotangent is not None],
        ]

    def of(
        self, parts: Sequence[Reduced], rows: Callable[[int, Array, int, int], Array]
    ) -> list[Reduced]:
        """The cotangents of these parts: of a sum the same for each of its terms, of collected
        rows their own rows.

        `rows(position, cotangent, axis, size)` are those of this micro-batch, in the cotangent of
        the collected leaf at this position.
        """
        sums = [cotangent for cotangent in self.reduced if cotangent is not None]
        collected = [
            (position, cotangent, fold.axis or 0)
            for position, (fold, cotangent) in enumerate(
                zip(self.outputs.collected_folds, self.collected, strict=True)
            )
            if cotangent is not None
        ]
        pairs = zip(collected, parts[len(sums) :], strict=True)
        return [*sums, *[rows(*of_leaf, part.shape[of_leaf[2]]) for of_leaf, part in pairs]]

    def threaded(self, output: Tree) -> Tree:
        """The summary with None for all but threaded state."""
        leaves, threads = self.outputs.in_order(output), self.outputs.threads
        return self.outputs.structure_of(
            [leaf if index in threads else None for index, leaf in enumerate(leaves)]
        )
