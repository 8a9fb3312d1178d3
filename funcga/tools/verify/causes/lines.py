"""Lines that are printed so that they can be pasted: a tree of folds for what grad_fn returns, the
names of the user's own loss, in_axes for the arguments of the call.
"""

from collections.abc import Collection

from funcga import folds
from funcga._call.arguments import argument_names
from funcga.folds import Fold
from funcga.tools.verify.counted import as_parameters
from funcga.tools.verify.probe import Probe


class _Code(str):
    """An expression, which stands in the `repr` of a tree as it is."""

    __repr__ = str.__str__


def fold_line(probe: Probe, better: str, leaves: Collection[int]) -> str:
    """The option `fold=` with another fold, such as "funcga.mean()", for these leaves."""
    trees = probe.backend.trees
    written = [
        _Code(better if index in leaves else _written(fold))
        for index, fold in enumerate(probe.folds)
    ]
    # The shortest prefix: one fold for all leaves of a node that are alike.
    is_alike = lambda node: len({*trees.flatten(node)[0]}) == 1
    nodes, structure = trees.flatten(probe.like_output(written), is_alike)
    text = repr(trees.unflatten(structure, [trees.flatten(node)[0][0] for node in nodes]))
    own = trees.flatten(probe.program.fold, lambda node: isinstance(node, Fold))[0]
    # All of them are exact, if one is, as with one fold around all.
    if len({*written}) == 1 and all(fold.plain is not fold for fold in own):
        text = f"funcga.reproducible({text})"
    return f"fold={text}"


_STOCK = "mean per_weight sum max min moments logsumexp ratio pooled carry"
_CALLS = {vars(folds)[stock]().name: f"funcga.{stock}()" for stock in _STOCK.split()}


def _written(fold: Fold) -> str:
    """A stock fold as it is written; the names of its parts for any other one."""
    axis = fold.reducer.monoid.axis
    if axis is not None:
        return f"funcga.concat({axis or ''})"
    return _CALLS.get(fold.name, f"funcga.Fold({fold.name})")


def loss_names(probe: Probe) -> list[str]:
    """The parameters of the user's own loss; of one of a module, the module is the first."""
    of_module = probe.framework.module_loss(probe.grad_fn)
    return as_parameters(argument_names(of_module or probe.grad_fn, len(probe.args)))


def signature(probe: Probe) -> str:
    """What the user's own loss is defined with where it takes totals: "(params, x, *, totals)"."""
    return f"({', '.join([*loss_names(probe), '*', *probe.kwargs, 'totals'])})"
