"""Lists of examples among the arguments: there axis 0 of an array is not the rows, but channels, say, or tokens.

A collate function for images of several sizes makes {"images": [float32[3, 480, 640], ...]}, and a DataLoader makes
lists of its own, [inputs, labels], whose arrays do have rows. The two differ in where the list stands, and in whether
another array has as many rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from funcga._backend.protocols import Backend, Trees


class Listed(NamedTuple):
    """A list of arrays alike, or of trees of such."""

    path: str
    value: list[Any]
    named: bool  # whether it stands below a key, where no DataLoader puts the parts of a batch


def suspect(args: Sequence[tuple[str, Any]], rows: int, even: bool, backend: Backend) -> Listed | None:
    """The first list whose arrays are examples, as far as can be seen.

    rows: how many all arrays have along axis 0; if that is not `even`, then the first of them, and the lists are why.
    """
    lists = [found for name, arg in args for found in _lists(arg, backend, name, False)]
    if not even:  # of two arrays, inputs and labels, one may just be too short
        return next((found for found in lists if found.named or len(found.value) > 2), None)
    inside = {id(leaf) for found in lists for leaf in backend.trees.flatten(found.value)[0]}
    leaves = [leaf for _, arg in args for leaf in backend.trees.flatten(arg)[0] if leaf is not None]
    if any(id(leaf) not in inside for leaf in leaves):
        return None  # which has as many rows: so they are rows
    return next((found for found in lists if found.named or _is_long(found, rows, backend)), None)


def _is_long(found: Listed, rows: int, backend: Backend) -> bool:
    """Whether it has more entries than rows, and these are images or more."""
    return 1 < rows < len(found.value) and len(backend.trees.flatten(found.value)[0][0].shape) > 2


def has_list(tree: Any, trees: Trees) -> bool:
    """Whether there is a list in it. Quick for arrays and the usual containers: it is asked of every micro-batch."""
    if tree is None or hasattr(tree, "shape"):
        return False
    if isinstance(tree, dict):
        return any(has_list(child, trees) for child in tree.values())
    if type(tree) is tuple:
        return any(has_list(child, trees) for child in tree)
    return type(tree) is list or any(has_list(child, trees) for _, child in trees.children(tree) or ())


def _lists(tree: Any, backend: Backend, path: str, named: bool) -> Iterator[Listed]:
    if type(tree) is list and _are_alike(tree, backend):
        yield Listed(path, tree, named)
        return
    for key, child in backend.trees.children(tree) or ():
        yield from _lists(child, backend, path + key, named or type(tree) not in (list, tuple))


def _are_alike(entries: list[Any], backend: Backend) -> bool:
    """Whether these are several trees of one structure, and of arrays of the same dtypes and numbers of axes."""
    if len(entries) < 2:
        return False
    kinds = []
    for entry in entries:
        leaves, structure = backend.trees.flatten(entry)
        if not leaves or not all(map(backend.arrays.is_array, leaves)):
            return False
        kinds.append((structure, [(leaf.dtype, len(leaf.shape)) for leaf in leaves]))
    return all(kind == kinds[0] for kind in kinds)
