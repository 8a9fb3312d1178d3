"""Trees by path: the names of their leaves, leaves in another order, and prefixes, one value for
a whole subtree.
"""

import ast
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from funcga._backend import Trees
from funcga._types import Array, Tree
from funcga.errors import FuncgaError, listed

Children = Callable[[Tree], list[tuple[str, Tree]] | None]
"""The (key, subtree) pairs one level down, keys written as in code; None for a leaf."""


class PrefixValue(NamedTuple):
    """A prefix's value at one leaf of the tree that it covers, and the path at which the prefix
    says so.
    """

    value: Any
    root: str


def mapped(function: Callable[..., Tree], trees: Trees, tree: Tree, *others: Tree) -> Tree:
    """The tree with the function applied to each leaf, and to those of others in its place."""
    leaves, structure = trees.flatten(tree)
    columns = [trees.flatten(other)[0] for other in others]
    return trees.unflatten(structure, [*map(function, leaves, *columns)])


def outline(tree: Tree, trees: Trees) -> str:
    """A short description of a tree for errors: its type, and its first keys."""
    keys = [key for key, _ in trees.children(tree) or ()]
    name = "an array" if hasattr(tree, "dtype") else type(tree).__name__
    return f"{name}({listed(keys)})" if keys else name


def leaf_paths(tree: Tree, trees: Trees, path: str = "") -> list[str]:
    """The path of every leaf, as one would write it in code, in the order of `trees.flatten`."""
    children = trees.children(tree)
    if children is None:
        return [path]
    return [
        leaf_path for key, child in children for leaf_path in leaf_paths(child, trees, path + key)
    ]


def paths_and_leaves(tree: Tree, children: Children, path: str = "") -> list[tuple[str, Array]]:
    """(dotted path, leaf) of every leaf, in the order of `children`, which may include None."""
    below = children(tree)
    if below is None:
        return [(path, tree)]
    # A box such as flax's Param has one child, and its path is the box's own.
    if [key for key, _ in below] == [".value"]:
        return paths_and_leaves(below[0][1], children, path)
    leaves = []
    for key, child in below:
        leaves += paths_and_leaves(child, children, f"{path}.{_dotted(key)}".removeprefix("."))
    return leaves


def _dotted(key: str) -> str:
    """`['a']`, `[0]` and `.a` as `a`, `0` and `a`."""
    if key.startswith("."):
        return key[1:]
    # A quoted key is a Python literal.
    inner = key[1:-1]
    return str(ast.literal_eval(inner)) if inner[:1] in "'\"" else inner


def paths_apart(expected: Sequence[str], paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """The expected paths that are missing, and the paths that are new, each in its order."""
    expected_set, path_set = {*expected}, {*paths}
    return [path for path in expected if path not in path_set], [
        path for path in paths if path not in expected_set
    ]


class PathError(Exception):
    """A tree has leaves at other paths than expected; its text lists them, for the caller's
    error.
    """

    def __init__(self, missing: list[str], new: list[str]):
        of_both = [listed([f"`{path}`" for path in paths]) for paths in (missing, new)]
        super().__init__("missing {}, new {}".format(*of_both))


def check_paths(expected: Sequence[str], paths: Sequence[str]) -> None:
    """Raises PathError if a path is missing, or new."""
    missing, new = paths_apart(expected, paths)
    if missing or new:
        raise PathError(missing, new)


def leaves_in_order(tree: Tree, paths: Sequence[str], trees: Trees, root: str = "") -> list[Any]:
    """The leaves of a tree in the order of these paths, whatever the order of its dicts.

    The paths begin with `root`. Raises PathError if a leaf is missing, or there is one more.
    """
    by_path = dict(zip(leaf_paths(tree, trees, root), trees.flatten(tree)[0], strict=True))
    check_paths(paths, [*by_path])
    return [by_path[path] for path in paths]


def broadcast(
    prefix: Tree,
    tree: Tree,
    is_value: Callable[[Any], bool],
    trees: Trees,
    path: str,
    what: str,
) -> list[PrefixValue]:
    """The prefix's value for every leaf of the tree, in the order of `trees.flatten`.

    Children are matched by key, so the order of a dict does not matter. Raises FuncgaError, which
    says `what` is no prefix, where they don't match.
    """
    # A value of the prefix holds for all leaves below it.
    if is_value(prefix):
        return [PrefixValue(prefix, path)] * len(trees.flatten(tree)[0])
    children = trees.children(tree)
    matched = _branches(prefix, tree, children or [], trees)
    if children is None or matched is None or matched.keys() != {key for key, _ in children}:
        raise FuncgaError(
            f"{what}: at {path or 'its root'} it has {outline(prefix, trees)}, and there is "
            f"{outline(tree, trees)}. Give one value for all that stands below, or a container "
            "with the same keys."
        )
    values = []
    for key, child in children:
        values += broadcast(matched[key], child, is_value, trees, path + key, what)
    return values


def _branches(
    prefix: Tree, tree: Tree, children: list[tuple[str, Tree]], trees: Trees
) -> dict[str, Tree] | None:
    """The children of a prefix by the keys of these children of a tree; None for a leaf."""
    branches, keys = trees.children(prefix), [key for key, _ in children]
    if branches is None:
        # A dataclass without arrays is a leaf, and this one stands for its fields.
        is_alike = children and type(prefix) is type(tree)
        return {key: getattr(prefix, key[1:]) for key in keys} if is_alike else None
    # A plain tuple or list stands for any sequence, by position, also for a NamedTuple. All else is
    # matched by key.
    is_sequence = type(prefix) in (tuple, list) and isinstance(tree, tuple | list)
    if is_sequence and len(branches) == len(keys):
        return {key: branch for key, (_, branch) in zip(keys, branches, strict=True)}
    # In a dataclass torch has no child for a field that is None, where the prefix may have one.
    return {
        key: branch
        for key, branch in branches
        if key in keys or not key.startswith(".") or getattr(tree, key[1:], tree) is not None
    }


def subtrees(tree: Tree, like: Tree, trees: Trees, path: str) -> list[Tree]:
    """The subtrees of a tree at the leaves of another one, in their order.

    Children are matched by key, so the order of a dict does not matter. Raises FuncgaError, with
    the path, which begins with the tree's name, for keys that only one of the two has.
    """
    children = trees.children(like)
    if children is None:
        return [tree]
    branches = dict(trees.children(tree) or ())
    missing, new = paths_apart([key for key, _ in children], [*branches])
    if missing or new:
        raise FuncgaError(
            f"`{path}` has another structure than it should: {PathError(missing, new)}. Give it "
            "that of the parameters; of loss, grads = step(...) the gradients alone, with None "
            "where there is none."
        )
    return [
        below
        for key, child in children
        for below in subtrees(branches[key], child, trees, path + key)
    ]
