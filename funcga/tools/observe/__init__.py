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

from funcga._backend import Backend
from funcga._backend.prefixes import mapped, paths_and_leaves
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold import accumulator_dtype
from funcga._fold.accumulator import Accumulation, StateFolding
from funcga._fold.outputs import Outputs
from funcga._tools import load
from funcga._types import Array, GradFn, Kwargs, Scalar, Structure, Tree, TreeFn
from funcga.errors import FuncgaError, listed
from funcga.folds import Fold
from funcga.observers import Observed, Observer


def observed(program: Program, observe: Tree) -> Program:
    """The program that returns (result, observation)."""
    program.memory.options["observe="] = _in_words(observe)
    return ObservedProgram(**vars(program), observe=observe, given=program.grad_fn)


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedProgram(Program):
    """A program whose micro-batches have the value (measures, output). `given`: the function whose
    gradients are observed, of which the loop may have made another grad_fn.
    """

    observe: Tree
    given: GradFn
    # The last Readings of each structure, and the dtypes that they are for; set by `readings`.
    known: dict[Structure, Any] = field(default_factory=dict)

    def ignores_weights(self, backend: Backend) -> bool:
        """Whether the weights make no difference: each gradient is measured in units of them."""
        return False

    def bind(self, value: Tree, arguments: Arguments) -> tuple[Outputs, list[Array]]:
        """The Outputs for a first micro-batch with this (measures, output), and its leaves."""
        folds = self.readings(value[1], arguments).folds
        outputs, leaves = Program.bind(replace(self, fold=(folds, self.fold)), value, arguments)
        return replace(outputs, before=len(folds)), leaves

    def readings(self, value: Tree, arguments: Arguments) -> Any:
        """The Readings of outputs like this value, which grad_fn has returned for the arguments."""
        leaves, structure = arguments.backend.trees.flatten(value)
        dtypes = [getattr(leaf, "dtype", None) for leaf in leaves]
        known, readings = self.known.get(structure, (None, None))
        if known != dtypes:
            # Bound without measures, so that errors name the leaves of the output.
            outputs, _ = super().bind(value, arguments)
            # A gradient function of funcga says which part the gradient is.
            gradient_in = getattr(self.given, "gradient_in", partial(_locate, outputs, arguments))
            readings = Readings(self.observe, outputs, gradient_in)
            self.known[structure] = dtypes, readings
        return readings

    def completed(self, backend: Backend, result: Tree, kwargs: Kwargs) -> Tree:
        """(value, observation), from the result of a finished window."""
        folded, value = result
        _, readings = self.known[backend.trees.flatten(value)[1]]
        scale = kwargs["loss_scale"] if getattr(self.given, "scaled", False) else 1.0
        return value, readings.observation(folded, value, scale)


def _in_words(tree: Tree) -> str:
    """Describes the folds of observers: replicas have to observe alike."""
    if isinstance(tree, Observer):
        return f"an Observer of {tree.fold!r}"
    if not (tree and isinstance(tree, dict | list | tuple)):
        raise FuncgaError(
            f"{tree!r} in observe= is no observer. Pass one, such as funcga.gradient_noise(), "
            "which is called, or a dict, tuple or list of them."
        )
    return ", ".join(map(_in_words, tree.values() if isinstance(tree, dict) else tree))


class Readings:
    """How outputs of grad_fn like a value are measured.

    The measures of a micro-batch are one number, which is folded as a gradient of ones is, and
    [groups] for each observer, by these `folds`. The gradient is at `indices` among the leaves of
    (measures, output). `groups` has the places there of each group's leaves, and `dtype` is that
    of measures.
    """

    def __init__(self, observe: Tree, outputs: Outputs, gradient_in: Callable[[Tree], Tree]):
        """`outputs`: how the value alone is folded. `gradient_in` returns the part of a value that
        is the gradient.
        """
        backend, folds = outputs.backend, list[Any](outputs.folds)
        self.trees, self.arrays = backend.trees, backend.arrays
        self.xp = xp = backend.arrays.xp
        self.tool = load(f"observe.in_{backend.name}", "observe=")
        self.observers, self.structure = backend.trees.flatten(
            observe, lambda node: isinstance(node, Observer)
        )
        gradient = gradient_in(outputs.structure_of(range(len(folds))))
        paths = {
            index: path
            for path, index in paths_and_leaves(gradient, self.trees.children)
            if index is not None and folds[index] is not None
        }
        of_ones = _fold_of_ones([folds[index].fold for index in paths])
        self.folds = of_ones, *[observer.fold for observer in self.observers]
        self.indices = [len(self.folds) + index for index in paths]
        self.groups = [_groups(observer, paths.values()) for observer in self.observers]
        is_double = any(outputs.dtypes[i] in (xp.float64, xp.complex128) for i in paths)
        self.dtype = xp.float64 if is_double else xp.float32
        # The measures of a leaf, each computed once for all observers.
        self.measures = [*dict.fromkeys(observer.measure for observer in self.observers)]

    def placeholders(self, like: Array) -> Tree:
        """Ones in place of measures, on the device of `like`."""
        one = self.xp.ones_like(like, dtype=self.dtype).reshape(-1)[:1]
        return one, *[self.xp.broadcast_to(one, (len(groups),)) for groups in self.groups]

    # --- a micro-batch

    def row(self, leaf: Array) -> Array:
        """The measures of an array, [measures]; a number, if there is one measure."""
        as_array = self.arrays.as_array
        wide = as_array(leaf, accumulator_dtype(leaf.dtype, self.arrays))
        row = [as_array(measure(self.xp, wide), self.dtype) for measure in self.measures]
        return self.xp.stack(row) if len(row) > 1 else row[0]

    def measured(self, value: Tree, weight: Scalar) -> Tree:
        """(measures, value) of a micro-batch of which grad_fn returned this value."""
        leaves = [*self.folds, *self.trees.flatten(value)[0]]
        return tuple(self.leaves_for(leaves, weight, {})), value

    def leaves_for(
        self,
        leaves: Any,
        weight: Scalar,
        known: Mapping[int, Array],
        seed: Scalar = 1.0,
        one: Array | None = None,
    ) -> list[Array]:
        """The measures of a micro-batch, from the leaves of (anything, output); `known` are the
        rows of leaves that are measured already, `seed` is the factor of the gradient, and `one`
        an array of it, [1], if there is one.
        """
        xp, vectors = self.xp, [*self._vectors(leaves, known)]
        # A micro-batch of weight 0 counts as zeros, as there may be no backward pass for it.
        if self.arrays.is_array(weight):
            weight = self.arrays.as_array(weight, self.dtype, vectors[0])
            vectors = [xp.where(weight != 0, vector, 0) for vector in vectors]
            divisor = xp.where(weight != 0, weight, 1)
        else:
            vectors = vectors if weight else [*map(xp.zeros_like, vectors)]
            divisor = weight or 1.0
        # A gradient of ones in the mean, which is the sum over a micro-batch divided by its weight.
        one, scale = xp.ones_like(vectors[0][:1]) if one is None else one, seed
        if not self.folds[0].reducer.linear:
            one, scale = one * weight, seed * divisor
        if self.arrays.is_array(scale) or scale != 1:
            pairs = zip(vectors, self.observers, strict=True)
            vectors = [vector / scale**observer.degree for vector, observer in pairs]
        return [one, *vectors]

    def _vectors(self, leaves: Any, known: Mapping[int, Array]) -> Iterator[Array]:
        """Yields the measures of each observer's groups, [groups], of such leaves."""
        others, rows = [index for index in self.indices if index not in known], {**known}
        new = self.tool.rows(self, [leaves[index] for index in others])
        rows.update(zip(others, new, strict=True))
        stacked = self.xp.stack([rows[index] for index in self.indices])
        measures = stacked.reshape(len(self.indices), -1)
        for observer, groups in zip(self.observers, self.groups, strict=True):
            column = measures[:, self.measures.index(observer.measure)]
            if observer.groups is None:
                yield column.sum()[None]
            else:
                numbers = [*column]
                of_groups = [[numbers[place] for place in group] for group in groups.values()]
                yield self.xp.stack([self.xp.stack(group).sum() for group in of_groups])

    # --- the end of a window

    def observation(self, folded: Sequence[Array], value: Tree, loss_scale: Scalar = 1.0) -> Tree:
        """The observation of a finished window: `folded` are the results of the measures."""
        (factor,), trees, xp = folded[0], self.trees, self.xp
        results = self._vectors([*folded, *trees.flatten(value)[0]], {})
        divisor = xp.where(factor == 0, 1, factor)  # of a window that weighs nothing
        in_units = divisor
        if self.arrays.is_array(loss_scale) or loss_scale != 1:
            in_units = divisor / self.arrays.as_array(loss_scale, self.dtype)
        observations = []
        each = zip(self.observers, self.groups, folded[1:], results, strict=True)
        for observer, groups, of_microbatches, result in each:
            result = self.arrays.as_array(result, self.dtype, factor) / divisor**observer.degree
            # Arrays with the groups on their last axis: the observation of each.
            seen = observer.finish(xp, Observed(of_microbatches, result, in_units))
            of_groups = {
                name: mapped(lambda leaf, k=k: leaf[..., k], trees, seen)
                for k, name in enumerate(groups)
            }
            observations.append(of_groups[""] if observer.groups is None else of_groups)
        return trees.unflatten(self.structure, observations)


def _groups(observer: Observer, paths: Iterable[str]) -> dict[str, list[int]]:
    """The places of the leaves of each group."""
    groups = dict[str, list[int]]()
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
        Fold(replace(fold.plain.reducer, dtype=None), replace(fold.plain.normalizer, dtype=None))
        for fold in folds
    }
    if others or not (fold.reducer.additive and fold.normalizer.only_divides):
        names = listed(sorted({f"({fold.name})" for fold in folds}))
        raise FuncgaError(
            f"observe= was given, and the leaves of the gradient are folded by {names}: what is "
            "observed is how one mean of gradients comes about. Fold all of them alike, with "
            "funcga.mean(), per_weight() or sum()."
        )
    return fold


def _locate(outputs: Outputs, arguments: Arguments, numbered: Tree) -> Tree:
    """The part of a value that looks like the first argument, a gradient. Raises FuncgaError if
    there is none, or more than one.
    """
    flatten = outputs.backend.trees.flatten
    wanted, structure = flatten(arguments.parts[0].value)
    shapes = [getattr(leaf, "shape", None) for leaf in wanted]

    def found(part: Tree) -> Iterator[Tree]:
        indices, its_structure = flatten(part)
        if its_structure == structure and [outputs.shapes[i] for i in indices] == shapes:
            yield part
        for child in part if isinstance(part, tuple | list) else ():
            yield from found(child)

    gradients = [*found(numbered)]
    if len(gradients) != 1:
        raise FuncgaError(
            "observe= was given, and no part, or more than one part, of what grad_fn returns looks "
            "like its first argument, as a gradient does. Write grad_fn as "
            "funcga.value_and_grad(loss_fn), which says where the gradient is."
        )
    return gradients[0]


# --- multi_steps


class ObservedFolding(StateFolding):
    """The fold of (measures, gradients) in the state of a `multi_steps`."""

    readings: Readings  # set by `bind`, of gradients like those of the last call

    def __init__(self, of_gradients: StateFolding, observe: Tree, scales: bool):
        """`scales`: whether gradients come with the scale of a loss_scaled."""
        super().__init__(of_gradients.fold, of_gradients.name)
        self.of_gradients = of_gradients
        self.observe, self.scales, self.options = observe, scales, {"observe=": _in_words(observe)}

    def __reduce__(self) -> Any:
        """Pickled without what was cached."""
        return type(self), (self.of_gradients, self.observe, self.scales)

    def bind(
        self, value: Tree, backend: Backend, shaped: bool = True
    ) -> tuple[Outputs, list[Array]]:
        """The Outputs for values like this one, and its leaves, with zeros for the measures."""
        _, grads = value
        outputs, leaves = self.of_gradients.bind(grads, backend, shaped)
        self.readings = readings = Readings(self.observe, outputs, lambda value: value)
        self.before, self.fold = len(readings.folds), (readings.folds, self.of_gradients.fold)
        like = next(filter(backend.arrays.is_array, leaves))
        return super().bind((readings.placeholders(like), grads), backend, shaped)

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

    def updating(self, run: TreeFn, states: Tree, params: Tree, given: Tree) -> tuple[Tree, Tree]:
        """The result of an update, and (the inner state, the observation of its window)."""
        (inner, _), ((measures, grads), extra) = states, given
        scaled = inner
        while self.scales and type(scaled) is tuple:  # a chain, whose first is a loss_scaled
            scaled = scaled[0]
        scale = scaled.scale if self.scales else 1.0
        observation = self.readings.observation(measures, grads, scale)
        result, inner = run(inner, params, (grads, extra))
        return result, (inner, observation)
