"""Lines that are printed so that they can be pasted: a tree of folds for what grad_fn returns, the
names of the user's own loss, in_axes for the arguments of the call.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from funcga import folds
from funcga._call.arguments import argument_names
from funcga._types import Tree
from funcga.folds import Fold
from funcga.tools.verify.counted import as_parameters
from funcga.tools.verify.probe import Probe


def fold_line(probe: Probe, better: str, leaves: Collection[int]) -> str:
    """The option `fold=` with another fold, such as "funcga.mean()", for these leaves."""
    texts = [
        better if index in leaves else _written(fold) for index, fold in enumerate(probe.folds)
    ]
    text = _tree_of(probe, probe.output, texts)
    own = probe.backend.trees.flatten(probe.program.fold, lambda node: isinstance(node, Fold))[0]
    # All of them are exact, if one is, as with one fold around all.
    if len({*texts}) == 1 and all(fold.plain is not fold for fold in own):
        text = f"funcga.reproducible({text})"
    return f"fold={text}"


_STOCK: tuple[Callable[[], Fold], ...] = (
    folds.mean,
    folds.per_weight,
    folds.sum,
    folds.max,
    folds.min,
    folds.moments,
    folds.logsumexp,
    folds.ratio,
    folds.pooled,
    folds.carry,
)
_CALLS = {stock().name: f"funcga.{stock.__name__}()" for stock in _STOCK}


def _written(fold: Fold) -> str:
    """A stock fold as it is written; the names of its parts for any other one."""
    axis = fold.reducer.monoid.axis
    if axis is not None:
        return f"funcga.concat({axis or ''})"
    return _CALLS.get(fold.name, f"funcga.Fold({fold.name})")


def _tree_of(probe: Probe, tree: Tree, texts: Sequence[str]) -> str:
    """A tree prefix with these texts for the leaves of a tree, as short as possible."""
    trees = probe.backend.trees
    children = trees.children(tree)
    if len({*texts}) <= 1 or not children:
        return texts[0] if texts else _CALLS["weighted, by_weight"]
    rest, entries = [*texts], list[tuple[str, str]]()
    for key, child in children:
        count = len(trees.flatten(child)[0])
        entries.append((key, _tree_of(probe, child, rest[:count])))
        del rest[:count]
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key[1:-1]}: {text}' for key, text in entries)}}}"
    parts = [text for _, text in entries]
    if isinstance(tree, list):
        return f"[{', '.join(parts)}]"
    if isinstance(tree, tuple):
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    fields = [f"{key.removeprefix('.')}={text}" for key, text in entries]
    return f"{type(tree).__name__}({', '.join(fields)})"


def loss_names(probe: Probe) -> list[str]:
    """The parameters of the user's own loss; of one of a module, the module is the first."""
    of_module = probe.framework.module_loss(probe.grad_fn)
    return as_parameters(argument_names(of_module or probe.grad_fn, len(probe.args)))


def signature(probe: Probe) -> str:
    """What the user's own loss is defined with where it takes totals: "(params, x, *, totals)"."""
    return f"({', '.join([*loss_names(probe), '*', *probe.kwargs, 'totals'])})"


def axes_line(probe: Probe, changed: Mapping[int, str]) -> str:
    """The option `in_axes=` as it is, but for these entries, by the index of the argument."""
    entries = [repr(part.in_axes) for part in probe.arguments.parts]
    entries = [changed.get(index, entry) for index, entry in enumerate(entries)]
    # Parameters that a module brings are no argument of the call.
    entries = entries[probe.brings_parameters :]
    return f"in_axes=({', '.join(entries)}{',' * (len(entries) == 1)})"
