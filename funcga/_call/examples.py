"""Lists of examples among the arguments: there axis 0 of an array is not the rows, but channels,
say, or tokens.

A collate function for images of several sizes makes {"images": [float32[3, 480, 640], ...]}, and a
DataLoader makes lists of its own, [inputs, labels], whose arrays do have rows. The two differ in
where the list stands, and in whether another array has as many rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from funcga._backend import Backend, Trees
from funcga._types import Tree


class Examples(NamedTuple):
    """A list of arrays alike, or of trees of such."""

    path: str
    entries: list[Any]
    named: bool  # whether it stands below a key, where no DataLoader puts the parts of a batch


def find_examples(
    args: Mapping[str, Tree], rows: int, even: bool, backend: Backend
) -> Examples | None:
    """The first list whose arrays look like examples.

    args: the arguments that are split, by name. rows: how many all arrays have along axis 0; if
    they are not `even`, then the first of them, and the lists are why.
    """
    if not any(_has_list(arg, backend.trees) for arg in args.values()):
        return None
    lists = [
        candidate for name, arg in args.items() for candidate in _lists(arg, backend, name, False)
    ]
    # Where the numbers of rows differ, lists are why. But of two arrays, inputs and labels, one may
    # just be short.
    if not even:
        return next(
            (candidate for candidate in lists if candidate.named or len(candidate.entries) > 2),
            None,
        )
    # Another array has as many rows, so axis 0 is the rows in the lists too.
    if _has_others(args, lists, backend):
        return None
    return next(
        (candidate for candidate in lists if candidate.named or _is_long(candidate, rows, backend)),
        None,
    )


def _has_list(tree: Tree, trees: Trees) -> bool:
    """Whether there is a list in it. Quick for arrays and the usual containers: it is asked of
    every micro-batch.
    """
    if tree is None or hasattr(tree, "shape"):
        return False
    if isinstance(tree, dict):
        return any(_has_list(child, trees) for child in tree.values())
    if type(tree) is tuple:
        return any(_has_list(child, trees) for child in tree)
    return type(tree) is list or any(
        _has_list(child, trees) for _, child in trees.children(tree) or ()
    )


def _lists(tree: Tree, backend: Backend, path: str, named: bool) -> Iterator[Examples]:
    if type(tree) is list and _are_alike(tree, backend):
        yield Examples(path, tree, named)
        return
    for key, child in backend.trees.children(tree) or ():
        yield from _lists(child, backend, path + key, named or type(tree) not in (list, tuple))


def _are_alike(entries: list[Any], backend: Backend) -> bool:
    """Whether these are several trees of one structure, and of arrays of the same dtypes and
    numbers of axes.
    """
    if len(entries) < 2:
        return False
    kinds = []
    for entry in entries:
        leaves, structure = backend.trees.flatten(entry)
        if not leaves or not all(map(backend.arrays.is_array, leaves)):
            return False
        kinds.append((structure, [(leaf.dtype, len(leaf.shape)) for leaf in leaves]))
    return all(kind == kinds[0] for kind in kinds)


def _has_others(args: Mapping[str, Tree], lists: list[Examples], backend: Backend) -> bool:
    """Whether there is an array outside of the lists."""
    inside = {
        id(leaf) for candidate in lists for leaf in backend.trees.flatten(candidate.entries)[0]
    }
    leaves = [leaf for arg in args.values() for leaf in backend.trees.flatten(arg)[0]]
    return any(leaf is not None and id(leaf) not in inside for leaf in leaves)


def _is_long(examples: Examples, rows: int, backend: Backend) -> bool:
    """Whether it has more entries than rows, and these are images or more."""
    first = backend.trees.flatten(examples.entries[0])[0][0]
    return 1 < rows < len(examples.entries) and len(first.shape) > 2
