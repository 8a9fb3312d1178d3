"""`observe=`: statistics of a window's gradients, computed while they are folded.

An observer is another fold of the same values. Every leaf of a micro-batch's gradient is
measured where it is computed, which gives one number. These numbers are folded over all
micro-batches and replicas, as any output of grad_fn: what is folded is (measures, output). At the
end the observer gets their fold, and the same measure of the gradient that the step returns. So no
gradient is stored, copied or read twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from funcga import normalizers
from funcga._backend import Backend
from funcga._backend.prefixes import paths_and_leaves
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold import accumulator_dtype
from funcga._fold.accumulator import Accumulation, StateFolding
from funcga._fold.outputs import Outputs, broadcast_folds
from funcga._tools import load
from funcga._types import Array, GradFn, Scalar, Structure, Tree
from funcga.errors import FuncgaError, listed
from funcga.folds import Fold, FoldTree
from funcga.observers import Observed, Observer, squared_norm


def observed(program: Program, observe: Tree) -> Program:
    """The program that returns (result, observation)."""
    observers = Observers(observe)
    program.memory.options["observe="] = observers.name
    return ObservedProgram(**vars(program), observers=observers, given=program.grad_fn)


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedProgram(Program):
    """A program whose micro-batches have the value (measures, output). `given`: the function whose
    gradients are observed, of which the loop may have made another grad_fn.
    """

    observers: "Observers"
    given: GradFn
    # The last Readings of each structure, and the dtypes that they are for; set by `readings`.
    known: dict[Structure, "tuple[object, Readings]"] = field(default_factory=dict)

    def ignores_weights(self, backend: Backend) -> bool:
        """Whether the weights make no difference: each gradient is measured in units of them."""
        return False

    def bind(self, value: Tree, arguments: Arguments) -> tuple[Outputs, list[Array]]:
        """The Outputs for a first micro-batch with this (measures, output), and its leaves."""
        # The output is bound alone first, so that errors name its own leaves.
        super().bind(value[1], arguments)
        folds = self.readings(value[1], arguments).folds
        with_measures = replace(self, fold=(folds, self.fold))
        outputs, leaves = Program.bind(with_measures, value, arguments)
        return replace(outputs, before=len(folds)), leaves

    def readings(self, value: Tree, arguments: Arguments) -> "Readings":
        """The Readings of outputs like this value, which grad_fn has returned for the arguments."""
        backend = arguments.backend
        leaves, structure = backend.trees.flatten(value)
        dtypes = [getattr(leaf, "dtype", None) for leaf in leaves]
        known, readings = self.known.get(structure, ((), None))
        if known != dtypes or readings is None:
            # A gradient function of funcga says which part the gradient is.
            gradient_in: Any = getattr(self.given, "gradient_in", None)
            if gradient_in is None:
                gradient_in = partial(_locate, leaves, arguments.parts[0].value, backend)
            readings = Readings(self.observers, self.fold, value, gradient_in, backend)
            self.known[structure] = dtypes, readings
        return readings

    def completed(
        self,
        backend: Backend,
        result: Tree,
        kwargs: dict[str, Tree],
        arguments: Arguments | None = None,
    ) -> Tree:
        """(value, observation), from the result of a finished window. `arguments` are those of
        the call if no micro-batch has been bound.
        """
        folded, value = result
        if arguments is None:
            _, readings = self.known[backend.trees.flatten(value)[1]]
        else:
            readings = self.readings(value, arguments)
        scale = kwargs["loss_scale"] if getattr(self.given, "scaled", False) else 1.0
        return value, readings.observation(folded, value, scale)


class Observers:
    """The observers of a step, in the tree that they were given in."""

    def __init__(self, tree: Tree):
        self.tree, self.all = tree, list[Observer]()
        _mapped(self.all.append, tree)
        # Their folds, in words: replicas have to observe alike.
        self.name = ", ".join([f"an Observer of {observer.fold!r}" for observer in self.all])


def _mapped(function: Callable[[Observer], Tree], tree: Tree) -> Tree:
    """The tree with what the function returns in place of each observer."""
    if isinstance(tree, dict) and tree:
        return {key: _mapped(function, child) for key, child in tree.items()}
    if isinstance(tree, list | tuple) and tree:
        return type(tree)([_mapped(function, child) for child in tree])
    if isinstance(tree, Observer):
        return function(tree)
    raise FuncgaError(
        f"{tree!r} in observe= is no observer. Pass one, such as funcga.gradient_noise(), which is "
        "called, or a dict, tuple or list of them."
    )


class Readings:
    """How outputs of grad_fn like a value are measured.

    The measures of a micro-batch are one number, which is folded as a gradient of ones is, and
    [groups] for each observer, by these `folds`. The gradient is at `indices` among the leaves of
    (measures, output). `groups` has the places there of each group's leaves, and `dtype` is that
    of measures.
    """

    def __init__(
        self,
        observers: Observers,
        fold: FoldTree,
        value: Tree,
        gradient_in: Callable[[Tree], Tree],
        backend: Backend,
    ):
        """`gradient_in` returns the part of a value that is the gradient."""
        self.observers, self.tree, self.backend = observers.all, observers.tree, backend
        self.tool = load(f"observe.in_{backend.name}", "observe=")
        self.arrays, xp = backend.arrays, backend.arrays.xp
        leaves, structure = backend.trees.flatten(value)
        gradient = gradient_in(backend.trees.unflatten(structure, [*range(len(leaves))]))
        located = [
            (path, index)
            for path, index in paths_and_leaves(gradient, backend.trees.children)
            if index is not None and leaves[index] is not None
        ]
        paths, indices = zip(*located, strict=True)
        folds = broadcast_folds(fold, value, len(leaves), backend)
        of_ones = _fold_of_ones([folds[index].value for index in indices])
        self.is_weighted = of_ones.reducer.linear
        self.folds = of_ones, *[observer.fold for observer in self.observers]
        self.indices = [len(self.folds) + index for index in indices]
        self.groups = [_groups(observer, paths) for observer in self.observers]
        is_double = any(leaves[i].dtype in (xp.float64, xp.complex128) for i in indices)
        self.dtype = xp.float64 if is_double else xp.float32
        # The measures of a leaf, each computed once for all observers.
        self.measures = [*dict.fromkeys(observer.measure for observer in self.observers)]
        self.are_norms = self.measures == [squared_norm]

    def placeholders(self, like: Array) -> Tree:
        """Zeros in place of measures, on the device of `like`."""
        zero = self.arrays.xp.zeros_like(like, dtype=self.dtype).reshape(-1)[:1]
        return zero, *[zero.repeat(len(groups)) for groups in self.groups]

    # --- a micro-batch

    def row(self, leaf: Array) -> Array:
        """The measures of an array, [measures]; a number, if there is one measure."""
        xp, as_array = self.arrays.xp, self.arrays.as_array
        wide = as_array(leaf, accumulator_dtype(leaf.dtype, self.arrays))
        row = [as_array(measure(xp, wide), self.dtype) for measure in self.measures]
        return xp.stack(row) if len(row) > 1 else row[0]

    def measured(self, value: Tree, weight: Scalar) -> Tree:
        """(measures, value) of a micro-batch of which grad_fn returned this value."""
        leaves = [*self.folds, *self.backend.trees.flatten(value)[0]]
        return tuple(self.leaves_for(leaves, weight)), value

    def leaves_for(
        self,
        leaves: Any,
        weight: Scalar,
        known: Mapping[int, Array] | None = None,
        seed: Scalar = 1.0,
    ) -> list[Array]:
        """The measures of a micro-batch, from the leaves of (anything, output); `known` are the
        rows of leaves that are measured already, and `seed` is the factor of the gradient.
        """
        xp, vectors = self.arrays.xp, self._vectors(leaves, known or {})
        # A micro-batch of weight 0 counts as zeros, as there may be no backward pass for it.
        if self.arrays.is_array(weight):
            weight = self.arrays.as_array(weight, self.dtype, vectors[0])
            vectors = [xp.where(weight != 0, vector, 0) for vector in vectors]
            divisor = xp.where(weight != 0, weight, 1)
        else:
            vectors = vectors if weight else [*map(xp.zeros_like, vectors)]
            divisor = float(weight) or 1.0
        # A gradient of ones in the mean, which is the sum over a micro-batch divided by its weight.
        one, scale = xp.ones_like(vectors[0][:1]), seed
        if not self.is_weighted:
            one, scale = one * weight, seed * divisor
        if not (isinstance(scale, float) and scale == 1):
            pairs = zip(vectors, self.observers, strict=True)
            vectors = [vector / scale**observer.degree for vector, observer in pairs]
        return [one, *vectors]

    def _vectors(self, leaves: Any, known: Mapping[int, Array]) -> list[Array]:
        """The measures of each observer's groups, [groups], of such leaves."""
        xp, vectors = self.arrays.xp, list[Array]()
        others = [index for index in self.indices if index not in known]
        new = self.tool.rows(self, [leaves[index] for index in others])
        rows = {**known, **dict(zip(others, new, strict=True))}
        measures = xp.stack([rows[index] for index in self.indices])
        measures = measures.reshape(len(self.indices), -1)
        for observer, groups in zip(self.observers, self.groups, strict=True):
            column = measures[:, self.measures.index(observer.measure)]
            if observer.groups is None:
                vectors.append(column.sum()[None])
            else:
                numbers = [*column]
                of_groups = [[numbers[place] for place in group] for group in groups.values()]
                vectors.append(xp.stack([xp.stack(group).sum() for group in of_groups]))
        return vectors

    # --- the end of a window

    def observation(self, folded: Sequence[Array], value: Tree, loss_scale: Scalar = 1.0) -> Tree:
        """The observation of a finished window: `folded` are the results of the measures."""
        (factor,), trees, xp = folded[0], self.backend.trees, self.arrays.xp
        results = self._vectors([*folded, *trees.flatten(value)[0]], {})
        divisor = xp.where(factor == 0, 1, factor)  # of a window that weighs nothing
        in_units = divisor / self.arrays.as_array(loss_scale, self.dtype)
        each = zip(self.groups, folded[1:], results, strict=True)

        def observation_of(observer: Observer) -> Tree:
            groups, of_microbatches, result = next(each)
            result = self.arrays.as_array(result, self.dtype, factor) / divisor**observer.degree
            # Arrays with the groups on their last axis: the observation of each.
            seen = observer.finish(xp, Observed(of_microbatches, result, in_units))
            leaves, structure = trees.flatten(seen)
            of_groups = {
                name: trees.unflatten(structure, [leaf[..., k] for leaf in leaves])
                for k, name in enumerate(groups)
            }
            return of_groups[""] if observer.groups is None else of_groups

        return _mapped(observation_of, self.tree)


def _groups(observer: Observer, paths: Sequence[str]) -> dict[str, list[int]]:
    """The places of the leaves of each group."""
    groups: dict[str, list[int]] = {}
    for place, path in enumerate(paths):
        name = "" if observer.groups is None else observer.groups(path)
        if name is not None:
            groups.setdefault(name, []).append(place)
    # Sorted, as a dict of gradients may come in another order.
    return dict(sorted(groups.items()))


def _fold_of_ones(folds: Sequence[Fold]) -> Fold:
    """The fold of all leaves of a gradient, in the dtype of measures. Raises FuncgaError unless it
    is one sum, which only the weight or the number of micro-batches divides.
    """
    fold, *others = {
        Fold(replace(plain.reducer, dtype=None), replace(plain.normalizer, dtype=None))
        for plain in [fold.plain for fold in folds]
    }
    normalizer = fold.normalizer
    only_divides = normalizer.divides_by or normalizer.apply is normalizers.identity.apply
    if others or not (fold.reducer.additive and only_divides):
        names = listed(sorted({f"({fold.name})" for fold in folds}))
        raise FuncgaError(
            f"observe= was given, and the leaves of the gradient are folded by {names}: what is "
            "observed is how one mean of gradients comes about. Fold all of them alike, with "
            "funcga.mean(), per_weight() or sum()."
        )
    return fold


def _locate(leaves: Sequence[Any], params: Tree, backend: Backend, numbered: Tree) -> Tree:
    """The part of a value that looks like the params, a gradient. Raises FuncgaError if there is
    none, or more than one.
    """

    def parts(tree: Tree) -> Iterator[Tree]:
        yield tree
        for child in tree if isinstance(tree, tuple | list) else ():
            yield from parts(child)

    def shapes(leaves: Iterable[Any]) -> list[object]:
        return [getattr(leaf, "shape", None) for leaf in leaves]

    wanted, structure = backend.trees.flatten(params)
    found = []
    for part in parts(numbered):
        indices, its_structure = backend.trees.flatten(part)
        if its_structure == structure and shapes(leaves[i] for i in indices) == shapes(wanted):
            found.append(part)
    if len(found) != 1:
        raise FuncgaError(
            "observe= was given, and no part, or more than one part, of what grad_fn returns looks "
            "like its first argument, as a gradient does. Write grad_fn as "
            "funcga.value_and_grad(loss_fn), which says where the gradient is."
        )
    return found[0]


# --- multi_steps


class ObservedFolding(StateFolding):
    """The fold of (measures, gradients) in the state of a `multi_steps`."""

    readings: Readings  # set by `bind`, of gradients like those of the last call

    def __init__(self, fold: FoldTree, observe: Tree, scales: bool):
        """`scales`: whether gradients come with the scale of a loss_scaled."""
        super().__init__(fold, "params")
        self.of_gradients, self.observers, self.scales = fold, Observers(observe), scales
        self.before = 1 + len(self.observers.all)
        self.options = {"observe=": self.observers.name}  # replicas have to observe alike

    def __reduce__(self) -> Any:
        """Pickled without what was cached."""
        return type(self), (self.of_gradients, self.observers.tree, self.scales)

    def bind(
        self, value: Tree, backend: Backend, shaped: bool = True
    ) -> tuple[Outputs, list[Array]]:
        """The Outputs for values like this one, and its leaves, with zeros for the measures."""
        _, grads = value
        readings = Readings(self.observers, self.of_gradients, grads, lambda value: value, backend)
        self.readings, self.fold = readings, (readings.folds, self.of_gradients)
        first, *_ = filter(backend.arrays.is_array, backend.trees.flatten(grads)[0])
        return super().bind((readings.placeholders(first), grads), backend, shaped)

    def empty(self, params: Tree, backend: Backend) -> tuple[Accumulation, Tree]:
        """The empty window for gradients like these params, and what a state has as `observed`
        before the first update: NaN, in the structure and dtypes of later observations.
        """
        window, _ = super().empty((None, params), backend)
        observe = lambda: self.readings.observation(*window.outputs.structure_of(window.finished()))
        return window, self.readings.tool.unknown(observe)

    def folded(self, leaves: list[Array], weight: Scalar) -> list[Array]:
        """The leaves that are folded of a micro-batch with these leaves of its gradients."""
        measures, _ = self.readings.measured(leaves, weight)
        return [*measures, *leaves]

    def updating(self, run: Callable[..., tuple[Tree, Tree]]) -> Callable[..., tuple[Tree, Tree]]:
        """The function of an update, which also observes its window."""

        def observed(states: Tree, params: Tree, given: Tree) -> tuple[Tree, Tree]:
            inner, ((measures, grads), extra) = states[0], given
            scaled, scale = inner, 1.0
            if self.scales:
                while type(scaled) is tuple:  # a chain, whose first is a loss_scaled
                    scaled = scaled[0]
                scale = scaled.scale
            observation = self.readings.observation(measures, grads, scale)
            result, inner = run(inner, params, (grads, extra))
            return result, (inner, observation)

        return observed
