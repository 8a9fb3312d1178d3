"""Which leaves of an output are the gradient, and what observers are told of them: the same for
outputs of one kind.
"""

from collections.abc import Sequence

from funcga import normalizers
from funcga._backend import Backend
from funcga._backend.prefixes import paths_and_leaves
from funcga._exact import Finish, Lift
from funcga._fold.outputs import broadcast_folds
from funcga._observe import Observed, Observer, Observers, squared_norm
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError, listed
from funcga.folds import Fold, FoldTree


class Readings:
    """What is measured of outputs like this `value` of grad_fn, whose part `gradient(value)` is the
    gradient.

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
        # Numbers of double precision come with gradients of it.
        bits = [
            leaves[i].dtype.itemsize * (4 if self._is_complex(leaves[i]) else 8)
            for i in self.in_value
        ]
        self.dtype = backend.arrays.as_dtype("float64" if 64 in bits else "float32")
        self.groups = [_groups(observer, located) for observer in observers.all]
        # Whether no observer asks for a part of the gradient.
        self.is_one_group = all(
            [*map(len, groups.values())] == [len(self.in_value)] for groups in self.groups
        )
        self.count = 1 + len(observers.all)  # how many leaves stand before those of the value

    def _is_complex(self, leaf: Array) -> bool:
        return self.arrays.kind(leaf.dtype) == "complex"

    def order_groups_like(self, other: "Readings") -> None:
        """Puts the groups in the order of other Readings, if they have the same: a dict may come
        in another order.
        """
        for index, (groups, names) in enumerate(zip(self.groups, other.groups, strict=True)):
            if groups.keys() == names.keys():
                self.groups[index] = {name: groups[name] for name in names}

    @property
    def leaf_indices(self) -> list[int]:
        """The leaves of the gradient in the whole output."""
        return [self.count + leaf_index for leaf_index in self.in_value]

    def placeholders(self, like: Array) -> Tree:
        """What stands before the value until it is measured, on the device of `like`."""
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
        if self.are_norms:
            return arrays.squared_norms(leaves, self.dtype)[:, None]

        def measured(leaf: Array) -> Array:
            wide = arrays.cast(leaf, arrays.accumulator_dtype(leaf.dtype))
            return xp.stack(
                [
                    arrays.cast(measure(xp, wide), self.dtype)
                    for measure, _ in self.observers.measures
                ]
            )

        return xp.stack(arrays.measured(measured, leaves))

    def leaves_for(self, measures: Array, weight: Scalar, seed: Scalar = 1.0) -> list[Array]:
        """What observers fold of a micro-batch, from the measures of its gradient.

        These are in the order of `in_value`. If all is one group, several leaves may be measured as
        one. `seed` is what the gradient was multiplied by.
        """
        xp = self.arrays.xp
        # What weighs nothing is nothing to observers, as no backward pass may be run for it.
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

    def measured(self, value: Tree, weight: Scalar) -> Tree:
        """The whole output of a micro-batch, of which grad_fn has returned this value."""
        return tuple(self.told(self.trees.flatten(value)[0], weight)), value

    def told(self, leaves: Sequence[Array], weight: Scalar) -> list[Array]:
        """What the observers fold of a micro-batch whose value has these leaves."""
        return self.leaves_for(self.measures_of([leaves[i] for i in self.in_value]), weight)

    def _vectors(self, measures: Array) -> list[Array]:
        """For each observer the measures of its groups."""
        xp, vectors, position_of = (
            self.arrays.xp,
            [],
            {i: position for position, i in enumerate(self.in_value)},
        )
        for observer, groups in zip(self.observers.all, self.groups, strict=True):
            column = measures[:, self.observers.measures.index((observer.measure, observer.degree))]
            if [*map(len, groups.values())] == [len(self.in_value)]:
                vectors.append(column.sum()[None])
                continue
            numbers = [*column]
            sums = [
                xp.stack([numbers[position_of[i]] for i in group]).sum()
                for group in groups.values()
            ]
            vectors.append(xp.stack(sums))
        return vectors

    # --- the end of a window

    def observation(self, folded: Sequence[Tree], value: Tree, loss_scale: Scalar = 1.0) -> Tree:
        """What the observers say, from what was folded of the leaves before the value, and the
        value.
        """
        leaves = self.trees.flatten(value)[0]
        return self.finish(folded, self.measures_of([leaves[i] for i in self.in_value]), loss_scale)

    def finish(self, folded: Sequence[Tree], of_result: Array, loss_scale: Scalar) -> Tree:
        """The same from the measures of the gradient in the value."""
        total, steps = folded[0][0], folded[0][1]
        of_result = self.arrays.cast(of_result, self.dtype, total)
        if self.arrays.is_array(loss_scale):
            loss_scale = self.arrays.cast(loss_scale, self.dtype)
        factor = {"weight": 1.0, "steps": total / steps}.get(str(self.divides_by), total)
        observations = []
        triples = zip(
            self.observers.all, folded[1:], self._vectors(of_result), self.groups, strict=True
        )
        for observer, of_microbatches, result, groups in triples:
            observed = Observed(
                of_microbatches, result / factor**observer.degree, factor / loss_scale
            )
            observations.append(
                self._taken_apart(observer, observer.finish(self.arrays.xp, observed), [*groups])
            )
        return self.observers.in_order(observations)

    def _taken_apart(self, observer: Observer, observation: Tree, names: list[str]) -> Tree:
        """The observation of each group, from arrays with the groups on their last axis."""
        leaves, structure = self.trees.flatten(observation)
        each = [
            self.trees.unflatten(structure, [leaf[..., index] for leaf in leaves])
            for index in range(len(names))
        ]
        return each[0] if observer.groups is None else dict(zip(names, each, strict=True))


def _has_numbers(leaf: Array, backend: Backend) -> bool:
    return leaf is not None and backend.arrays.kind(leaf.dtype) in ("float", "complex")


def _groups(observer: Observer, located: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    """The leaf indices in the value of each group. Raises FuncgaError for names that are none,
    and without a leaf.
    """
    groups: dict[str, list[int]] = {}
    for path, leaf_index in located:
        name = "" if observer.groups is None else observer.groups(path)
        if name is not None and not isinstance(name, str):
            raise FuncgaError(
                f"groups returned {name!r} for the leaf `{path}`: the name of a group is a string. "
                "Return one, or None "
                'to leave the leaf out: groups=lambda path: path.split(".")[0].'
            )
        if name is not None:
            groups.setdefault(name, []).append(leaf_index)
    if not groups:
        raise FuncgaError(
            "there is no leaf to observe: the gradient has the leaves "
            f"{listed([f'`{path}`' for path, _ in located])}, and groups returned None for all of "
            "them. Return the name of a group for some."
        )
    return groups


def _kind(folds: Sequence[Fold]) -> tuple[bool, str | None]:
    """(whether the sum of the gradients is weighted, what divides it). Raises FuncgaError if
    they are no such sums.
    """
    kinds = set[tuple[bool, str | None]]()
    for fold in folds:
        reducer, normalizer = fold.reducer, fold.normalizer
        if isinstance(reducer.lift, Lift) and isinstance(normalizer.apply, Finish):
            # Exact sums of the same.
            kinds.add((reducer.lift.is_weighted, normalizer.apply.divides_by))
            continue
        is_plain = (
            normalizer.divides_by is not None or normalizer.apply is normalizers.identity.apply
        )
        if not reducer.additive or not is_plain:
            raise FuncgaError(
                f"observe= was given, and the gradient is folded by {fold.name}: what is observed "
                "is how the mean of gradients comes about. Fold the gradient with funcga.mean(), "
                "per_weight() or sum()."
            )
        kinds.add((reducer.linear, normalizer.divides_by))
    if len(kinds) != 1:
        raise FuncgaError(
            "observe= was given, and the leaves of the gradient are folded in different ways, of "
            "which no one mean comes. Give all of them one fold, such as funcga.mean()."
        )
    return kinds.pop()


def locate(value: Tree, params: Tree, backend: Backend) -> Tree:
    """The leaf indices of the part of a value that looks like the params: the gradient in what any
    grad_fn returns.

    Raises FuncgaError if there is none, or more than one.
    """
    trees = backend.trees
    leaves, structure = trees.flatten(value)
    numbered = trees.unflatten(structure, [*range(len(leaves))])
    wanted = _looks(params, trees.flatten(params)[0], backend)
    parts = [numbered]
    if isinstance(numbered, tuple | list):
        parts += [
            part
            for child in numbered
            for part in (child, *(child if isinstance(child, tuple | list) else ()))
        ]
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
