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
from collections.abc import Iterable, Mapping

from funcga._backend import Backend
from funcga._backend.containers import container_children
from funcga._backend.dispatch import backend_of, load_imported
from funcga._backend.prefixes import (
    Children,
    PathError,
    check_paths,
    leaf_paths,
    paths_and_leaves,
)
from funcga._types import Array, Tree
from funcga.errors import FuncgaError
from funcga.tools.trees import (
    converted,
    described,
    framework_of,
    is_pathless,
    shares_memory,
    side,
    walked,
)
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
    given, expected = (
        {path: leaf for path, leaf in by_path(each, name).items() if framework_of(leaf)}
        for each, name in ((tree, "tree"), (like, "like"))
    )
    matches = pairs(given, expected, rules)
    try:
        check_paths([*expected], [*matches])
    except PathError as error:
        raise FuncgaError(
            f"the trees have different leaves: in tree, {error}. "
            r"Say what is called what: rules=[funcga.trees.Rule(r'fc1\.(.*)', r'Dense_0.\1'), "
            "*funcga.trees.torch_to_flax]."
        ) from None
    filled = {
        path: _filled(given[pair.left], pair, path, expected[path])
        for path, pair in matches.items()
    }
    # Every leaf, in the order of the framework: `by_path` leaves out None and functions.
    trees = walked(like).trees
    leaves = [filled.get(path, leaf) for path, leaf in paths_and_leaves(like, trees.children)]
    return trees.unflatten(trees.flatten(like)[1], leaves)


def _filled(leaf: Array, pair: Pair, path: str, like: Array) -> Array:
    """A copy of the array in the framework, and on the devices, of another one."""
    array = permuted(as_numpy(leaf, pair.left), pair.rules)
    if tuple(array.shape) != tuple(like.shape):
        raise FuncgaError(
            f"`{pair.left}` is {described(array)} and `{path}` of `like` is {described(like)}: the "
            "shapes differ, and nothing is reshaped. If the axes are permuted, put "
            f"funcga.trees.Rule(r'{re.escape(pair.left)}', r'{path}', axes='oi->io') before the "
            "other rules; else make `like` of a model of the same sizes."
        )
    framework = framework_of(like)
    assert framework is not None
    return side(framework).moved_like(converted(array, framework, copy=True), like)


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
        # What only looks like a tree of arrays.
        if hasattr(leaf, "named_parameters") or is_pathless(leaf):
            raise FuncgaError(
                f"{f'`{path}` of {name}' if path else name} is a {type(leaf).__name__}, whose "
                "arrays have no paths. Pass a dict: dict(module.named_parameters()) or "
                "module.state_dict() of a module, tree instead of tree.values(); or a list of the "
                "items."
            )
        if leaf is not None and not callable(leaf):
            leaves[path] = leaf
    return leaves


def _children_in(tree: Tree) -> Children:
    """A function that returns the children of a node: of dicts and lists in their own order, as JAX
    would sort the keys of a dict; of other containers as the framework of the tree has them.
    """
    # Trees of NumPy arrays need no framework.
    framework = walked(tree).trees.children if load_imported() else container_children

    def children(node: Tree) -> list[tuple[str, Tree]] | None:
        if type(node) in (tuple, list):
            return [(f"[{index}]", child) for index, child in enumerate(node)]
        if isinstance(node, Mapping):
            return container_children(node)
        return None if is_pathless(node) else framework(node)

    return children


def as_numpy(leaf: Array, path: str) -> Array:
    """An array of any framework as a NumPy array, without a copy if possible; other leaves as they
    are.

    Raises FuncgaError, with the path, if NumPy does not support the array.
    """
    if framework_of(leaf) in (None, "numpy"):
        return leaf
    return converted(leaf, "numpy", copy=None, name=path or "the array")


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
    stored = side(backend.name).stored
    return {path: stored(leaf) for path, leaf in leaves if leaf is not None}


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
    backend = backend_of([like], lambda: ["like"])
    leaves, structure = backend.trees.flatten(like)
    likes = dict(zip(leaf_paths(like, backend.trees), leaves, strict=True))
    try:
        check_paths([path for path, leaf in likes.items() if leaf is not None], [*state_dict])
    except PathError as error:
        raise FuncgaError(
            f"the state dict is not of a tree like this one: {error}. Make `like` as the state was "
            "made that was saved: the same params, transform and options."
        ) from None
    filled = [
        leaf if leaf is None else _restored(path, state_dict[path], leaf, backend)
        for path, leaf in likes.items()
    ]
    return backend.trees.unflatten(structure, filled)


def _restored(path: str, saved: Array, like: Array, backend: Backend) -> Array:
    # Numbers of Python stay such: NumPy's files make them arrays of 64 bits.
    if not backend.arrays.is_array(like):
        return type(like)(saved) if isinstance(like, int | float | complex | str) else saved
    array = converted(saved, backend.name, copy=True, name=path)
    array = side(backend.name).moved_like(array, like)
    if described(array) != described(like):
        raise FuncgaError(
            f"{path} is {described(array)} in the state dict and {described(like)} in the tree to "
            "fill. Nothing is cast: make `like` of params in the shapes and dtypes that were saved."
        )
    return array
