"""The program that `accumulate` and `stream` hand to a backend's loop: the user's functions and
options, checked.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar, TypeVar

from funcga import normalizers, reducers
from funcga._backend import Backend
from funcga._backend.dispatch import backend_of, import_backends, load_imported
from funcga._call.arguments import Arguments, Split, argument_names, read_arguments
from funcga._call.supported import MODULE
from funcga._fold import check_weight
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._replicas import StepId, step_of
from funcga._types import (
    Across,
    Args,
    Array,
    GradFn,
    Kwargs,
    Scalar,
    Tree,
    WeightFn,
)
from funcga.errors import FuncgaError, check_callable, check_count
from funcga.folds import Fold, FoldTree

Kept = TypeVar("Kept")


class OwningGradient:
    """A gradient function that brings parameters of its own: all of its arguments are split,
    unless in_axes says.
    """

    @property
    def kind(self) -> str:
        """Its row of the table of what is supported."""
        return MODULE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value and gradient of one micro-batch."""
        raise NotImplementedError

    def snapshot(self) -> Callable[[], None]:
        """Saves what a window writes besides its result; calling the result restores it."""
        return lambda: None

    @property
    def options(self) -> dict[str, str]:
        """Its options that have to be the same on all replicas, as texts."""
        return {}

    def parameters(self) -> Iterator[Array]:
        """The parameters, which also say in which framework it runs."""
        raise NotImplementedError


@dataclass(eq=False)
class Memory:
    """What a backend caches from one call of a step to the next. `step` identifies the step
    across replicas, and `options` are those that have to be the same on all of them, as texts.
    """

    step: StepId | None = None
    options: dict[str, str] = field(default_factory=dict)
    kept: dict[type, object] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        """Pickled without what was cached."""
        return Memory, (self.step, self.options)

    def keep(self, kind: type[Kept], *args: object) -> Kept:
        """The cached object of this class: `kind(*args)`, made at the first call. Each backend
        has its own classes for what it computes once, not at every call.
        """
        # The class is the key, so backends never meet in it, and a type checker knows what comes
        # back.
        kept = self.kept.get(kind)
        if not isinstance(kept, kind):
            kept = self.kept[kind] = kind(*args)
        return kept


@dataclass(frozen=True, eq=False)
class Program:
    """grad_fn and how its values are to be folded."""

    grad_fn: GradFn
    fold: FoldTree
    weight: WeightFn | None = None
    in_axes: Tree = None
    split: Split = Split()  # noqa: RUF009 - a tuple; of a stream, which comes split, it is empty
    across: Across = None
    memory: Memory = field(default_factory=Memory, repr=False)
    # Of a tool: which micro-batches are left out, by their values.
    skip: Any = None

    # In a tool whose programs fold measures of each gradient beside the value: how values like one
    # are measured, and what becomes of a result of (measures, value).
    readings: ClassVar[Any] = None
    completed: ClassVar[Any] = None

    @cached_property
    def is_exact(self) -> bool:
        """Whether a fold reads bits, as reproducible() does."""
        return _is_exact(self.fold)

    def folds(self, backend: Backend) -> list[Fold]:
        """The Folds in the tree of folds."""
        return [fold for fold in backend.trees.flatten(self.fold)[0] if isinstance(fold, Fold)]

    @cached_property
    def is_told(self) -> bool:
        """Whether other processes may take part in a call."""
        owner = owner_of(self.grad_fn)
        return self.across is not None or (owner is not None and owner.kind != MODULE)

    def read(self, args: Args, backend: Backend) -> Arguments:
        """The positional arguments, each leaf with its axis from in_axes."""
        return read_arguments(args, self.in_axes, self.grad_fn, backend)

    def weigh(self, arguments: Arguments, args: Args, rows: int | None) -> Scalar:
        """The weight of a micro-batch: a number, or a 0-d array that the host does not see yet.

        By default it is the number of rows; with `rows` None they are counted in the arguments. It
        is 1 if they cannot be counted and no fold asks for a weight.
        """
        if self.weight is not None:
            weight = self.weight(*arguments.split_args(args))
            return check_weight(weight, arguments.backend.arrays)
        if rows is not None:
            return rows
        try:
            return arguments.rows()
        except FuncgaError as error:
            if self.ignores_weights(arguments.backend):
                return 1
            raise FuncgaError(
                "the rows of a micro-batch are its weight unless weight= says it, and they cannot "
                f"be counted: {error} Write stream(grad_fn, weight=lambda batch: len(batch)), or "
                "with what else a micro-batch weighs, 1 where all weigh alike."
            ) from error

    def ignores_weights(self, backend: Backend) -> bool:
        """Whether the weights make no difference to the result, as to that of sum()."""
        return all(map(_ignores_weights, self.folds(backend)))

    def weighs_all(self, backend: Backend) -> bool:
        """Whether a micro-batch of weight 0 adds nothing to any leaf."""
        of_each = [fold.reducer for fold in self.folds(backend)]
        return all(reducer.linear or reducer.lift is reducers.moments.lift for reducer in of_each)

    def bind(self, value: Tree, arguments: Arguments) -> tuple[Outputs, list[Any]]:
        """The Outputs for a first micro-batch with this value, and its leaves."""
        # The first micro-batch shows the structure; all later ones are checked against it.
        backend, carried = arguments.backend, arguments.carried() if arguments.state else []
        return bind_outputs(self.fold, value, backend, carried=carried)


# What stock folds lift and normalize by without a look at the weight. A user's own function may
# look at it.
_WITHOUT_WEIGHT = {
    reducers.pairs.lift,
    reducers.pooled.lift,
    reducers.logsumexp.lift,
    reducers.carry.lift,
    normalizers.identity.apply,
    normalizers.ratio.apply,
    normalizers.pooled.apply,
    normalizers.logsumexp.apply,
    normalizers.carry.apply,
}


def _ignores_weights(fold: Fold) -> bool:
    """Whether the weights make no difference to the result, as to that of sum()."""
    reducer, normalizer = fold.plain.reducer, fold.plain.normalizer
    return (reducer.unweighted or reducer.lift in _WITHOUT_WEIGHT) and (
        normalizer.divides_by == "steps" or normalizer.apply in _WITHOUT_WEIGHT
    )


def telling(*programs: Program | None) -> AbstractContextManager[object]:
    """The context of a call that folds these programs one after the other, of which the first may
    be None, in which other processes that fold them are told of an error.
    """
    folded = [program for program in programs if program is not None]
    if not folded[-1].is_told:
        return nullcontext()
    told = (backend.loop.telling(folded, backend) for backend in load_imported())
    return next((context for context in told if context is not None), nullcontext())


def read_split(n: object, microbatch_size: object, instead: str = "") -> Split:
    """The Split of a step. Raises FuncgaError unless exactly one of the two is given and is a
    count; `instead` is what else n may be.
    """
    if (n is None) == (microbatch_size is None):
        count = "neither" if n is None else "both"
        raise FuncgaError(
            f"{count} of n and microbatch_size were given. Say one: accumulate(grad_fn, n=8) for 8 "
            "micro-batches, or accumulate(grad_fn, microbatch_size=4) for micro-batches of 4 rows."
        )
    if n is None:
        return Split(None, check_count(microbatch_size, "microbatch_size"))
    return Split(check_count(n, "n", instead))


def read_program(
    grad_fn: GradFn,
    fold: FoldTree,
    weight: WeightFn | None,
    in_axes: Tree,
    across: Across,
    split: Split = Split(),  # noqa: B008 - a tuple
) -> Program:
    """The Program of these options. Raises FuncgaError if grad_fn or weight cannot be called."""
    check_callable(grad_fn, "grad_fn", "funcga.value_and_grad(loss_fn)")
    if weight is not None:
        check_callable(weight, "weight", 'lambda batch: (batch["labels"] != -100).sum()')
    owner = owner_of(grad_fn)
    # By default a step splits what the step inside of it does, and all arguments of a gradient with
    # parameters of its own.
    for layer in _layers(grad_fn) if in_axes is None else ():
        inner = step_program(layer)
        if inner is not None or isinstance(layer, OwningGradient):
            in_axes = 0 if inner is None else inner.in_axes
            break
    # Imported now, as torch.compile may trace the first call.
    import_backends()
    step = None if across is None else step_of(grad_fn)
    memory = Memory(step, {} if owner is None else {**owner.options})
    return Program(grad_fn, fold, weight, in_axes, split, across, memory)


def backend_of_call(
    function: GradFn, args: Args, kwargs: Kwargs, owner: "OwningGradient | None" = None
) -> Backend:
    """The backend that owns the arrays of a call of a function. `owner`: whose parameters say it,
    too, as the arguments may have none, or be no trees.
    """
    names = lambda: [*argument_names(function, len(args)), *kwargs]  # for errors alone
    own = () if owner is None else islice(owner.parameters(), 1)
    return backend_of([*args, *kwargs.values(), *own], names)


def _is_exact(folds: Tree) -> bool:
    """Whether a fold in a tree of folds reads bits, as reproducible() does."""
    # Without a framework: keys that one of them cannot sort may be a tree of the other.
    if isinstance(folds, Fold):
        return folds.reducer.of_bits
    if isinstance(folds, Mapping):
        folds = [*folds.values()]
    return isinstance(folds, tuple | list) and any(map(_is_exact, folds))


def owner_of(grad_fn: GradFn) -> OwningGradient | None:
    """The gradient function with parameters of its own that grad_fn is or wraps; None if there
    is none.
    """
    return next((layer for layer in _layers(grad_fn) if isinstance(layer, OwningGradient)), None)


def _layers(grad_fn: GradFn) -> Iterator[GradFn]:
    """grad_fn and the functions that it wraps, as far as they can be seen."""
    layer: object = grad_fn
    while callable(layer):
        yield layer
        step = step_program(layer)
        if step is not None:
            layer = step.grad_fn
        elif isinstance(layer, partial):
            layer = None if layer.args else layer.func
        else:
            # From the instance, where functools.wraps sets it: a gradient function has a
            # property of this name.
            layer = getattr(layer, "__dict__", {}).get("__wrapped__")


def step_program(step: object) -> Program | None:
    """The program of a step made by `accumulate`; None for anything else."""
    # Also of jax.jit(step), which copies the attributes of the step.
    program = getattr(step, "program", None)
    return program if isinstance(program, Program) else None
