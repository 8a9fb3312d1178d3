"""Trees matched by path: `match` and its renaming rules, state dicts, and `shares_memory`.

`match` takes dotted paths, so that trees of different frameworks and containers have one spelling.
A `Rule` says what a leaf is called in the other tree, and how its axes lie there. `torch_to_flax`
and `flax_to_torch` are such rules for the layers of torch.nn and flax: linear, convolutional,
normalisation and embedding layers.

Example:
    >>> torch_params = {"fc.weight": np.ones((2, 3))}
    >>> flax_params = {"fc": {"kernel": np.zeros((3, 2))}}
    >>> rules = funcga.trees.torch_to_flax
    >>> funcga.trees.match(torch_params, flax_params, rules=rules)["fc"]["kernel"].shape
    (3, 2)
"""

import re
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence

from funcga._backend import Backend
from funcga._backend.dispatch import backend_of, is_numpy, load_imported
from funcga._backend.prefixes import (
    Children,
    PathError,
    check_paths,
    leaf_paths,
    paths_and_leaves,
    paths_apart,
)
from funcga._types import Array, Tree
from funcga.errors import FuncgaError, listed
from funcga.tools.trees import ExportError, converted, owner_of, shares_memory, side, walkers
from funcga.tools.trees.rules import (
    Pair,
    Rule,
    flax_to_torch,
    pairs,
    permuted,
    torch_to_flax,
)

__all__ = [
    "Rule",
    "flax_to_torch",
    "from_state_dict",
    "match",
    "shares_memory",
    "to_state_dict",
    "torch_to_flax",
]


def match(tree: Tree, like: Tree, *, rules: Iterable[Rule] = ()) -> Tree:
    """Copies the arrays of a tree into the structure and framework of another, matched by path.

    Args:
        tree: The tree with the arrays. Their dtypes are kept.
        like: The tree to copy the structure of; it is not changed. Its leaves are arrays of torch,
            JAX or NumPy, or shapes: a jax.ShapeDtypeStruct, as of jax.eval_shape, or a meta tensor.
            Its shapes have to match; leaves that are not arrays are kept.
        rules: How leaves of `tree` are renamed and transposed for `like`, see `funcga.trees`.

    Returns:
        A tree like `like`.

    Raises:
        FuncgaError: If a path is missing or unexpected, or an array has another shape; the error
            names the paths.

    Example:
        >>> tree = {"layer.weight": torch.ones(2, 3)}
        >>> like = {"layer": {"kernel": jax.ShapeDtypeStruct((3, 2), "float32")}}
        >>> rules = funcga.trees.torch_to_flax
        >>> funcga.trees.match(tree, like, rules=rules)["layer"]["kernel"].shape
        (3, 2)
    """
    # Which paths there must be, which there are, and which goes to which.
    likes = by_path(like, "like")
    target = _framework_of(like, likes)
    is_array = target.arrays.is_array if target else is_numpy
    expected = {path: leaf for path, leaf in likes.items() if is_array(leaf)}
    arrays = {
        path: leaf
        for path, leaf in by_path(tree, "tree").items()
        if is_numpy(leaf) or owner_of(leaf)
    }
    matches = _matches(arrays, expected, tuple(rules))
    filled = {
        pair.right: _filled(arrays[pair.left], pair, expected[pair.right], target)
        for pair in matches
    }
    # Not by `likes`, which leaves out everything that is not an array.
    trees = (target or walkers()[-1]).trees
    leaves = [filled.get(path, leaf) for path, leaf in paths_and_leaves(like, trees.children)]
    return trees.unflatten(trees.flatten(like)[1], leaves)


def _framework_of(like: Tree, leaves: Mapping[str, Array]) -> Backend | None:
    """The framework whose arrays a tree holds; None for a tree of NumPy's."""
    if any(map(is_numpy, leaves.values())) and not any(map(owner_of, leaves.values())):
        return None
    return backend_of([like], lambda: ["like"])


def _matches(arrays: Iterable[str], expected: Iterable[str], rules: Sequence[Rule]) -> list[Pair]:
    """The Pair of each path. Raises FuncgaError if some are missing or new."""
    matches = {pair.right: pair for pair in pairs(arrays, expected, rules)}
    missing, new = paths_apart([*expected], [*matches])
    new = [matches[path].left for path in new]
    if missing or new:
        raise FuncgaError(
            f"the trees have different leaves: `like` has {_listed(missing)}, which tree lacks, "
            f"and tree has {_listed(new)}, which `like` lacks. Say what is called what: "
            r"rules=[funcga.trees.Rule(r'fc1\.(.*)', r'Dense_0.\1'), "
            "*funcga.trees.torch_to_flax]."
        )
    return [*matches.values()]


def _listed(paths: list[str]) -> str:
    return listed([f"`{path}`" for path in paths], 8)


def _filled(leaf: Array, pair: Pair, like: Array, target: Backend | None) -> Array:
    """A copy of the array for the other tree."""
    array = permuted(as_numpy(leaf, pair.left), pair)
    shape, wanted = tuple(array.shape), tuple(like.shape)
    if shape != wanted:
        described = target.arrays.describe(like) if target else f"{like.dtype}{list(wanted)}"
        raise FuncgaError(
            f"`{pair.left}` is {array.dtype}{list(shape)} and `{pair.right}` of `like` is "
            f"{described}: the shapes differ, and nothing is reshaped. If the axes are permuted, "
            f"put funcga.trees.Rule(r'{re.escape(pair.left)}', r'{pair.right}', axes='oi->io') "
            "before the other rules; else make `like` of a model of the same sizes."
        )
    if target is None:
        return array.copy()
    return side(target).moved_like(converted(array, target, copy=True), like)


# -- dotted paths


def by_path(tree: Tree, name: str) -> dict[str, Array]:
    """The leaves of a tree by their dotted paths, such as `hidden.weight`; that of a single array
    is empty.

    A flat dict {"hidden.weight": array} has the same paths as a nested one; dicts keep their order.
    None and functions are ignored; a flax variable is its `.value`. Raises FuncgaError, in which
    `name` is the tree, for a torch module, an iterator or a dict view, and for two leaves with the
    same path.
    """
    leaves: dict[str, Array] = {}
    for path, leaf in paths_and_leaves(tree, _children_in(tree)):
        if path in leaves:
            raise FuncgaError(
                f"two leaves of {name} have the path `{path}`, as a key with a dot in it and as "
                "nested keys, so that it does not say which is meant. Rename one of the two."
            )
        _check_leaf(leaf, f"`{path}` of {name}" if path else name)
        if leaf is not None and not callable(leaf):
            leaves[path] = leaf
    return leaves


def _children_in(tree: Tree) -> Children:
    """A function that returns the children of a node: dicts, lists and tuples in their own order,
    other containers as the framework of the tree has them.

    Unlike in a fold, a tree may hold arrays of several frameworks, or only of NumPy.
    """
    # The framework that owns an array knows the containers best; without arrays any one is asked.
    loaded = load_imported()
    owners = [b for b in loaded if any(map(b.arrays.owns, b.trees.flatten(tree, _is_pathless)[0]))]
    backend = [*loaded, *owners][-1] if loaded else None

    def children(node: Tree) -> list[tuple[str, Tree]] | None:
        # JAX would sort the keys of a dict, and NumPy's trees need no framework.
        if isinstance(node, Mapping):
            return [(f"[{key!r}]", child) for key, child in node.items()]
        if isinstance(node, tuple | list):
            fields = getattr(node, "_fields", None)
            keys = (
                [f".{field}" for field in fields]
                if fields
                else [f"[{index}]" for index in range(len(node))]
            )
            return list(zip(keys, node, strict=True))
        return backend.trees.children(node) if backend and not _is_pathless(node) else None

    return children


def _is_pathless(node: object) -> bool:
    """Whether a node has items without names: an iterator, or a view of a dict."""
    return isinstance(node, Iterator | MappingView)


def _check_leaf(leaf: object, where: str) -> None:
    """Raises FuncgaError for leaves that only look like trees of arrays."""
    if hasattr(leaf, "named_parameters"):
        raise FuncgaError(
            f"{where} is the module {type(leaf).__name__}, which is no tree of arrays. Pass its "
            "parameters, dict(module.named_parameters()), or its buffers too: module.state_dict()."
        )
    if _is_pathless(leaf):
        raise FuncgaError(
            f"{where} is a {type(leaf).__name__}, whose items have no paths. Pass a dict: "
            "dict(module.named_parameters()) instead of module.parameters(), tree instead of "
            "tree.values(); or a list of the items."
        )


def as_numpy(leaf: Array, path: str) -> Array:
    """An array of any framework as a NumPy array, without a copy if possible; other leaves as they
    are.

    Raises FuncgaError, with the path, if NumPy does not support the array.
    """
    owner = owner_of(leaf)
    if owner is None:
        return leaf
    try:
        return side(owner).export_array(leaf, set())
    except ExportError as error:
        raise FuncgaError(f"{f'`{path}`' if path else 'the array'} is {error}.") from error


# -- state dicts


def to_state_dict(tree: Tree) -> dict[str, Array]:
    """Returns the arrays of a tree as a flat dict, for any file format, without copying them.

    Args:
        tree: Nested containers of arrays of torch or JAX, such as the state of a transform.

    Returns:
        The arrays by their paths, such as `.window.accumulated['w']`, which are the same in both
        frameworks. None and empty containers are left out. Typed keys of JAX are stored as
        jax.random.key_data(key), and from_state_dict restores them.

    Raises:
        FuncgaError: If the tree has no arrays, or arrays of two frameworks.

    Example:
        >>> state = optax.adam(1e-3).init({"w": jnp.ones(2)})
        >>> np.savez("state.npz", **funcga.to_numpy(funcga.trees.to_state_dict(state)))
    """
    backend = backend_of([tree], lambda: ["tree"])
    leaves = zip(leaf_paths(tree, backend.trees), backend.trees.flatten(tree)[0], strict=True)
    return {path: side(backend).stored(leaf) for path, leaf in leaves if leaf is not None}


def from_state_dict(like: Tree, state_dict: Mapping[str, Array]) -> Tree:
    """Returns a tree like another one, with the arrays of a state dict, matched by path.

    Args:
        like: A tree of the same structure, such as tx.init(params); it is not changed.
        state_dict: A dict like that of to_state_dict, with arrays of any framework or NumPy.

    Returns:
        The tree. Its arrays are copies, in the framework and on the devices of those of `like`.

    Raises:
        FuncgaError: If a path is missing or unexpected, or an array has another shape or dtype; the
            error names the paths.

    Example:
        >>> tx = optax.adam(1e-3)
        >>> saved = funcga.trees.to_state_dict(tx.init({"w": jnp.ones(2)}))
        >>> state = funcga.trees.from_state_dict(tx.init({"w": jnp.zeros(2)}), saved)
    """
    # None has a path, too, but is in no state dict.
    backend = backend_of([like], lambda: ["like"])
    likes, structure = backend.trees.flatten(like)
    paths = leaf_paths(like, backend.trees)
    try:
        check_paths(
            [path for path, leaf in zip(paths, likes, strict=True) if leaf is not None],
            [*state_dict],
        )
    except PathError as error:
        raise FuncgaError(
            f"the state dict is not of a tree like this one: {error}. Make `like` as the state was "
            "made that was saved: the same params, transform and options."
        ) from None
    # Python's numbers are not converted: NumPy's files make them arrays of 64 bits.
    arrays = {
        path: state_dict[path]
        for path, leaf in zip(paths, likes, strict=True)
        if backend.arrays.is_array(leaf)
    }
    saved = {**state_dict, **converted(arrays, backend, copy=True)}
    leaves = [
        leaf if leaf is None else _restored(path, saved[path], leaf, backend)
        for path, leaf in zip(paths, likes, strict=True)
    ]
    return backend.trees.unflatten(structure, leaves)


def _restored(path: str, array: Array, like: Array, backend: Backend) -> Array:
    arrays = backend.arrays
    if not arrays.is_array(like):
        return type(like)(array) if isinstance(like, int | float | complex | str) else array
    ours = side(backend)
    if arrays.describe(ours.stored(array)) != arrays.describe(ours.stored(arrays.as_array(like))):
        raise FuncgaError(
            f"{path} is {arrays.describe(array)} in the state dict and {arrays.describe(like)} in "
            "the tree to fill. Nothing is cast: make `like` of params in the shapes and dtypes "
            "that were saved."
        )
    return ours.moved_like(ours.restored(array, like), like)
