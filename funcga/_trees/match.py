"""`match`: the arrays of one tree in the form of another, matched by path."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from funcga._backend.dispatch import backend_of, load_imported
from funcga._backend.prefixes import paths_apart
from funcga._backend.protocols import Backend
from funcga._trees.interop import installed, to_jax, to_torch
from funcga._trees.paths import as_numpy, by_path, paths_and_leaves
from funcga.errors import FuncgaError
from funcga.rules import AXES, Pair, Rule, as_rules, pairs, permuted


def match(tree: Any, like: Any, *, rules: Iterable[Rule] = ()) -> Any:
    """The arrays of `tree`, copied, in the containers and the framework of `like`, matched by dotted path.

    like: a tree of arrays of torch, JAX or NumPy; or of what stands for arrays, jax.ShapeDtypeStruct, as jax.eval_shape
    makes it, and tensors on torch's meta device, for which real arrays come back; what else it holds is
    kept. rules: what the leaves of `tree` are called in `like`, and how their axes lie there (see `funcga.rules`).
    Dtypes are those of `tree`, shapes those of `like`. Raises FuncgaError, which names the paths, if one is missing or
    new, or has another shape.

    >>> params = funcga.match(module.state_dict(), model.init(key, x), rules=funcga.rules.torch_to_flax)
    """
    is_of_numpy = _is_of_numpy(like)
    backend = (load_imported() or [installed()])[-1] if is_of_numpy else backend_of([like], lambda: ["like"])
    is_array = _is_numpy if is_of_numpy else backend.arrays.is_array
    expected = {path: leaf for path, leaf in by_path(like, "like").items() if is_array(leaf)}
    given = {path: leaf for path, leaf in by_path(tree, "tree").items() if hasattr(leaf, "shape")}
    matched = {pair.right: pair for pair in pairs(given, expected, as_rules(rules))}
    missing, new = paths_apart([*expected], [*matched])
    if missing or new:
        raise _unmatched(missing, [matched[path].left for path in new])
    found = {path: _permuted(given[pair.left], pair, expected[path], backend) for path, pair in matched.items()}
    leaves = [found.get(path, leaf) for path, leaf in paths_and_leaves(like, backend.trees.children)]
    return backend.trees.unflatten(backend.trees.flatten(like)[1], leaves)


def _is_of_numpy(like: Any) -> bool:
    arrays = [leaf for leaf in by_path(like, "like").values() if hasattr(leaf, "shape")]
    return bool(arrays) and all(map(_is_numpy, arrays))


def _is_numpy(leaf: Any) -> bool:
    return type(leaf).__module__ == "numpy" and hasattr(leaf, "shape")


def _unmatched(missing: list[str], new: list[str]) -> FuncgaError:
    return FuncgaError(
        f"the trees have different leaves: `like` has {_some(missing, new)}, which tree lacks, and tree has "
        f"{_some(new, missing)}, which `like` lacks. Say what is called what: "
        rf"rules=[funcga.Rule(r'fc1\.(.*)', r'Dense_0.\1'), *funcga.rules.torch_to_flax]."
    )


def _some(paths: list[str], others: list[str], most: int = 8) -> str:
    """Some of the paths, each with what comes close to it on the other side."""
    shown = []
    for path in paths[:most]:
        close = get_close_matches(path, others, n=1)
        shown.append(f"`{path}`" + (f" (is it `{close[0]}`?)" if close else ""))
    return ", ".join(shown) + (f" and {len(paths) - most} more" if len(paths) > most else "") if paths else "nothing"


def _permuted(leaf: Any, pair: Pair, like: Any, backend: Backend) -> Any:
    array = permuted(as_numpy(leaf, pair.left), pair)
    shape, wanted = tuple(array.shape), tuple(like.shape)
    if shape != wanted:
        raise FuncgaError(
            f"`{pair.left}` is {array.dtype}{list(shape)} and `{pair.right}` of `like` is "
            f"{backend.arrays.describe(like)}: the shapes differ. {_advice(pair, shape, wanted)}"
        )
    if _is_numpy(like):
        return array.copy()
    made = {"torch": to_torch, "jax": to_jax}[backend.name](array)
    return made if getattr(like, "is_meta", False) else backend.arrays.placed(made, like)


def _advice(pair: Pair, shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    for axes, permute in AXES.items():
        if len(shape) > 1 and tuple(shape[k] for k in permute(len(shape))) == wanted:
            rule = f"funcga.Rule(r'{re.escape(pair.left)}', r'{pair.right}', axes='{axes}')"
            return f"It fits with its axes permuted: put {rule} before the other rules."
    return "Nothing is reshaped: make `like` of a model of the same sizes, or give a Rule whose axes= is a function."
