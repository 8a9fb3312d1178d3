"""Which leaves of an output are the gradient, and what observers fold of them: the same for
outputs of one structure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from funcga import normalizers
from funcga._backend import Backend
from funcga._backend.prefixes import paths_and_leaves
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold.outputs import broadcast_folds
from funcga._tools import load
from funcga._types import Array, GradFn, Scalar, Tree
from funcga.errors import FuncgaError, listed
from funcga.folds import Fold, FoldTree
from funcga.tools.observe import COUNTS, Observed, Observer, squared_norm


def observed(program: Program, observe: Tree) -> Program:
    """The program that returns (result, observation)."""
    observers = Observers(observe, program.grad_fn)
    if program.is_told:
        program.memory.options["observe="] = observers.name
    return replace(program, watch=observers, epilogues=(*program.epilogues, observers.observed))


class Observers:
    """The observers of a step, in the tree that they were given in, and the function whose
    gradients they observe.
    """

    def __init__(self, tree: Tree, grad_fn: GradFn | None = None):
        self.tree, self.grad_fn, self.all = tree, grad_fn, list[Observer]()
        _mapped(self.all.append, tree)
        if not self.all:
            raise FuncgaError(
                f"observe= is {tree!r}, which has no observer in it. Pass one, or a tree of them: "
                f"observe=funcga.gradient_noise()."
            )
        # The measures of a leaf, each computed once for all observers.
        self.measures = [
            *dict.fromkeys((observer.measure, observer.degree) for observer in self.all)
        ]

    @property
    def folds(self) -> Tree:
        """The folds of the measures, beside the output of grad_fn; that of the counts comes
        first.
        """
        return COUNTS, *[observer.fold for observer in self.all]

    @property
    def name(self) -> str:
        """Their folds, in words: replicas have to observe alike."""
        return ", ".join(f"an Observer of ({observer.fold.name})" for observer in self.all)

    def readings(self, program: Program, value: Tree, arguments: Arguments) -> "Readings":
        """The Readings of outputs like this value, which grad_fn has returned for the arguments;
        the step keeps the last ones.
        """
        kept, backend = program.memory.keep(_Kept), arguments.backend
        leaves, structure = backend.trees.flatten(value)
        key = structure, [getattr(leaf, "dtype", None) for leaf in leaves]
        if kept.readings is None or kept.key != key:
            # A gradient function of funcga says which part the gradient is. In another's output
            # it is the part that looks like the params.
            numbered = backend.trees.unflatten(structure, [*range(len(leaves))])
            # Of the function that was given: the loop may have made another one of it.
            gradient_in = getattr(self.grad_fn, "gradient_in", None)
            if gradient_in is None:
                gradient = locate(value, arguments.parts[0].value, backend)
            else:
                gradient = gradient_in(numbered)
            kept.key = key
            kept.readings = Readings(self, program.fold, value, gradient, backend)
        return kept.readings

    def of_gradient(self, *args: Any) -> Any:
        """A gradient function of torch, observed."""
        return load("observe.in_torch", "observe=").observed_gradient(*args)

    def observed(
        self,
        program: Program,
        backend: Backend,
        result: Tree,
        kwargs: dict[str, Tree],
        arguments: Arguments | None = None,
    ) -> Tree:
        """(value, observation), from the result of a finished window. `arguments` are those of
        the call if no micro-batch has been bound.
        """
        folded, value = result
        readings = program.memory.keep(_Kept).readings
        if arguments is not None:
            readings = self.readings(program, value, arguments)
        assert readings is not None
        scale = kwargs["loss_scale"] if getattr(self.grad_fn, "scaled", False) else 1.0
        return value, readings.observation(folded, value, scale)

    def in_order(self, observations: list[Tree]) -> Tree:
        """The tree with observations in place of the observers."""
        each = iter(observations)
        return _mapped(lambda _: next(each), self.tree)


class _Kept:
    """Kept by a step: the last Readings, and the structure and dtypes that they are for."""

    key: object = None
    readings: "Readings | None" = None


def _mapped(function: Callable[[Observer], Tree], tree: Tree, path: str = "observe") -> Tree:
    """The tree with what the function returns in place of each observer."""
    if isinstance(tree, Observer):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _mapped(function, child, f"{path}[{key!r}]") for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        children = [_mapped(function, each, f"{path}[{k}]") for k, each in enumerate(tree)]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    raise FuncgaError(
        f"{path} is {tree!r}. Pass an observer, such as funcga.gradient_noise(), which is called, "
        "or a dict, tuple or list of them."
    )


class Readings:
    """How outputs of grad_fn like this `value` are measured.

    The leaves that observers fold stand before those of the value: the output of an observed
    micro-batch is `(leaves_for(...), value)`.
    """

    def __init__(
        self, observers: Observers, fold: FoldTree, value: Tree, gradient: Tree, backend: Backend
    ):
        """`gradient` has the leaf indices of the value, at the leaves of the gradient in it."""
        self.observers, self.arrays, self.trees = observers, backend.arrays, backend.trees
        leaves = backend.trees.flatten(value)[0]
        located = [
            (path, leaf_index)
            for path, leaf_index in paths_and_leaves(gradient, backend.trees.children)
            if leaf_index is not None and _has_numbers(leaves[leaf_index], backend)
        ]
        self.in_value = [leaf_index for _, leaf_index in located]
        folds = [value for value, _ in broadcast_folds(fold, value, len(leaves), backend)]
        self.is_weighted, self.divides_by = _kind(
            [folds[leaf_index] for leaf_index in self.in_value]
        )
        # In double precision if a gradient is.
        is_double = any(
            str(leaves[i].dtype).endswith(("float64", "complex128")) for i in self.in_value
        )
        self.dtype = backend.arrays.as_dtype("float64" if is_double else "float32")
        self.groups = [_groups(observer, located) for observer in observers.all]
        # Whether every observer has one group of all leaves.
        self.is_one_group = all(
            [*map(len, groups.values())] == [len(self.in_value)] for groups in self.groups
        )
        self.count = 1 + len(observers.all)  # how many leaves stand before those of the value

    @property
    def leaf_indices(self) -> list[int]:
        """The leaves of the gradient in the whole output."""
        return [self.count + leaf_index for leaf_index in self.in_value]

    def placeholders(self, like: Array) -> Tree:
        """Zeros in place of what observers fold, on the device of `like`."""
        sizes = [2, *[len(groups) for groups in self.groups]]
        zero = self.arrays.xp.zeros_like(like, dtype=self.dtype).reshape(-1)[:1]
        return tuple([self.arrays.xp.concatenate([zero] * size) for size in sizes])

    # --- a micro-batch

    @property
    def are_norms(self) -> bool:
        """Whether squared norms are all that is measured."""
        return [measure for measure, _ in self.observers.measures] == [squared_norm]

    def measures_of(self, leaves: Sequence[Array]) -> Array:
        """The measures of leaves of a gradient, or of parts of them, [leaves, measures]."""
        xp, arrays = self.arrays.xp, self.arrays
        in_torch = xp.__name__ == "torch"
        if self.are_norms and in_torch:  # without a copy of them
            squared_norms = load("observe.in_torch", "observe=").squared_norms
            norms: Array = squared_norms(leaves, self.dtype)
            return norms[:, None]

        def measured(leaf: Array) -> Array:
            wide = arrays.cast(leaf, arrays.accumulator_dtype(leaf.dtype))
            return xp.stack(
                [
                    arrays.cast(measure(xp, wide), self.dtype)
                    for measure, _ in self.observers.measures
                ]
            )

        # In torch over all shards; XLA knows where they are.
        of_leaves = load("finite.in_torch", "observe=").measured if in_torch else map
        return xp.stack([*of_leaves(measured, leaves)])

    def leaves_for(self, measures: Array, weight: Scalar, seed: Scalar = 1.0) -> list[Array]:
        """What observers fold of a micro-batch, from the measures of its gradient, in the order
        of `in_value`. With one group, several leaves may be measured as one. `seed`: the factor
        of the gradient.
        """
        xp = self.arrays.xp
        # A micro-batch of weight 0 counts as zeros, as there may be no backward pass for it.
        is_array = self.arrays.is_array(weight)
        if is_array:
            weight = self.arrays.cast(weight, self.dtype, measures)
            measures = xp.where(weight != 0, measures, 0)
        elif not weight:
            measures = xp.zeros_like(measures)
        vectors = self._vectors(measures)
        scales: list[Scalar] = [] if isinstance(seed, float) and seed == 1 else [seed]
        if not self.is_weighted:
            # The sum over a micro-batch becomes its mean.
            scales.append(xp.where(weight != 0, weight, 1) if is_array else float(weight) or 1.0)
        for scale in scales:
            vectors = [
                vector / scale**observer.degree
                for observer, vector in zip(self.observers.all, vectors, strict=True)
            ]
        return [xp.ones_like(measures[:1, 0].repeat(2)), *vectors]

    def leaves_in_place(
        self, leaves: list[Any], weight: Scalar, in_place: Mapping[int, Array]
    ) -> list[Any]:
        """The leaves of a program's output, with what observers fold in place of the first ones;
        `in_place` has the measures of those that are folded already, by leaf index.
        """
        # The first leaf has the counts, whose fold gets the weight unscaled.
        rows = [
            in_place[leaf_index]
            if leaf_index in in_place
            else self.measures_of([leaves[leaf_index]])[0]
            for leaf_index in self.leaf_indices
        ]
        observed = self.leaves_for(self.arrays.xp.stack(rows), weight)
        return [*observed, *leaves[len(observed) :]]

    def measured(self, value: Tree, weight: Scalar) -> Tree:
        """(what observers fold, value) of a micro-batch of which grad_fn returned this value."""
        return tuple(self.leaves_for(self._measures_in(value), weight)), value

    def _measures_in(self, value: Tree) -> Array:
        """The measures of the gradient in a value."""
        leaves = self.trees.flatten(value)[0]
        return self.measures_of([leaves[i] for i in self.in_value])

    def _vectors(self, measures: Array) -> list[Array]:
        """The measures of each observer's groups, [groups]."""
        xp, columns, vectors = self.arrays.xp, self.observers.measures, list[Array]()
        for observer, groups in zip(self.observers.all, self.groups, strict=True):
            column = measures[:, columns.index((observer.measure, observer.degree))]
            if [*map(len, groups.values())] == [len(self.in_value)]:  # all that were measured
                vectors.append(column.sum()[None])
                continue
            numbers = dict(zip(self.in_value, column, strict=True))
            sums = [xp.stack([numbers[i] for i in group]).sum() for group in groups.values()]
            vectors.append(xp.stack(sums))
        return vectors

    # --- the end of a window

    def observation(self, folded: Sequence[Tree], value: Tree, loss_scale: Scalar = 1.0) -> Tree:
        """The observation of a finished window: `folded` are the results of the leaves before the
        value.
        """
        total, steps = folded[0][0], folded[0][1]
        of_result = self.arrays.cast(self._measures_in(value), self.dtype, total)
        if self.arrays.is_array(loss_scale):
            loss_scale = self.arrays.cast(loss_scale, self.dtype)
        factor = {"weight": 1.0, "steps": total / steps}.get(str(self.divides_by), total)
        observations = []
        for observer, of_microbatches, result, groups in zip(
            self.observers.all, folded[1:], self._vectors(of_result), self.groups, strict=True
        ):
            result = result / factor**observer.degree
            observed = Observed(of_microbatches, result, factor / loss_scale)
            # Arrays with the groups on their last axis: the observation of each.
            leaves, structure = self.trees.flatten(observer.finish(self.arrays.xp, observed))
            of_groups = {
                name: self.trees.unflatten(structure, [leaf[..., k] for leaf in leaves])
                for k, name in enumerate(groups)
            }
            observations.append(of_groups[""] if observer.groups is None else of_groups)
        return self.observers.in_order(observations)


def _has_numbers(leaf: Array, backend: Backend) -> bool:
    return leaf is not None and backend.arrays.kind(leaf.dtype) in ("float", "complex")


def _groups(observer: Observer, located: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    """The leaf indices of each group. Raises FuncgaError if no leaf has one."""
    groups: dict[str, list[int]] = {}
    for path, leaf_index in located:
        name = "" if observer.groups is None else observer.groups(path)
        if name is not None:
            groups.setdefault(name, []).append(leaf_index)
    if not groups:
        raise FuncgaError(
            "there is no leaf to observe: the gradient has the leaves "
            f"{listed([f'`{path}`' for path, _ in located])}, and groups returned None for all of "
            "them. Return the name of a group for some."
        )
    # Sorted, as a dict of gradients may come in another order.
    return dict(sorted(groups.items()))


def _kind(folds: Sequence[Fold]) -> tuple[bool, str | None]:
    """(whether gradients are weighted sums, what divides them). Raises FuncgaError for other
    folds.
    """
    plain = [fold.plain for fold in folds]
    kinds = {(fold.reducer.linear, fold.normalizer.divides_by) for fold in plain}
    only_divide = all(
        fold.normalizer.divides_by or fold.normalizer.apply is normalizers.identity.apply
        for fold in plain
    )
    if not (only_divide and all(fold.reducer.additive for fold in plain)) or len(kinds) != 1:
        raise FuncgaError(
            "observe= was given, and the leaves of the gradient are folded by "
            f"{listed(sorted({f'({fold.name})' for fold in folds}))}: what is observed is how one "
            "mean of gradients comes about. Fold all of them alike, with funcga.mean(), "
            "per_weight() or sum()."
        )
    return kinds.pop()


def locate(value: Tree, params: Tree, backend: Backend) -> Tree:
    """The leaf indices of the part of a value that has the structure of the params: the
    gradient.

    Raises FuncgaError if there is none, or more than one.
    """
    trees = backend.trees
    leaves, structure = trees.flatten(value)
    numbered = trees.unflatten(structure, [*range(len(leaves))])
    parts = [numbered]
    for part in parts[:]:
        parts += part if isinstance(part, tuple | list) else ()
    for part in parts[1:]:
        parts += part if isinstance(part, tuple | list) else ()
    wanted = _looks(params, trees.flatten(params)[0], backend)
    found = [
        part
        for part in parts
        if _looks(part, [leaves[i] for i in trees.flatten(part)[0]], backend) == wanted
    ]
    if len(found) == 1 and wanted:
        return found[0]
    which = "no part" if not found else "more than one part"
    raise FuncgaError(
        f"observe= was given, and {which} of what grad_fn returns looks like its first argument, "
        "as a gradient does. Write grad_fn as funcga.value_and_grad(loss_fn), which says where the "
        "gradient is."
    )


def _looks(tree: Tree, leaves: Sequence[Array], backend: Backend) -> list[tuple[str, object]]:
    paths = [path for path, _ in paths_and_leaves(tree, backend.trees.children)]
    return sorted(
        (path, str(getattr(leaf, "shape", None))) for path, leaf in zip(paths, leaves, strict=True)
    )
