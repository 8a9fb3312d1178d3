"""The loop as torch.compile sees it: one body in the graph, however many micro-batches there are.

Only torch has this file: in JAX the loop is always lax.scan.
"""

from typing import Any

import torch
from torch._higher_order_ops import scan  # torch.while_loop is public, and collects nothing

from funcga import tally
from funcga.arguments import Arguments, groups
from funcga.outputs import Outputs
from funcga.program import Program
from torch_backend import arrays


def fold_in_graph(program: Program, arguments: Arguments, state: list[Any], kwargs: dict[str, Any]) -> Any:
    """The fold of the program over the micro-batches cut from the arguments, with this state at first.

    The first micro-batch says what there is to fold; the others of its size, and those a row smaller, are a loop each.
    All of it is a pure function of its values: the compiler forgets what is written to objects around a loop.
    """
    start, total, carry, outputs = 0, tally.empty(arrays), None, None
    chunks: list[list[torch.Tensor]] = []
    for count, size in groups(arguments.rows(), program.n, program.microbatch_size):
        starts = [start + i * size for i in range(count)]
        start += count * size
        if outputs is None:
            args = arguments.cut(0, size, state)
            weight = program.weigh(arguments, args, size)
            outputs, leaves = program.bind(program.grad_fn(*args, **kwargs), arguments)
            before = [fold.identity(leaves[i]) for i, fold in zip(outputs.reduced, outputs.reduced_folds, strict=True)]
            carry = _add(outputs, before, leaves, weight), [leaves[i].clone() for i in outputs.threads]
            chunks.append([leaves[i].clone() for i in outputs.collected])
            total = tally.of(weight, arrays)
            starts = starts[1:]
        if starts:
            carry, weight, collected = _scan(program, outputs, arguments, kwargs, carry, starts, size)
            chunks.append(collected)
            total = tally.merge(total, tally.of(weight, arrays, steps=len(starts)))
    assert outputs is not None
    assert carry is not None
    results = [fold.normalize(r, total) for fold, r in zip(outputs.reduced_folds, carry[0], strict=True)]
    collected = [
        torch.cat(column, dim=fold.fold.reducer.monoid.axis or 0).to(fold.result_dtype)
        for fold, column in zip(outputs.collected_folds, zip(*chunks, strict=True), strict=True)
    ]
    return outputs.join(results, collected, carry[1])


def _add(outputs: Outputs, before: list[Any], leaves: list[Any], weight: Any) -> list[Any]:
    return [
        fold.combine(held, fold.lift(leaves[i], weight))
        for fold, held, i in zip(outputs.reduced_folds, before, outputs.reduced, strict=True)
    ]


def _scan(
    program: Program, outputs: Outputs, arguments: Arguments, kwargs: dict[str, Any], carry: Any, starts: list[int],
    size: int,
) -> tuple[Any, Any, list[torch.Tensor]]:  # fmt: skip
    """What the carry, (reduced, state), has become after these micro-batches; their weight and collected values."""
    trees = arguments.backend.trees
    split = (leaf.device for leaf, axis in arguments if arrays.is_array(leaf) and isinstance(axis, int))
    device = next(split, None)
    weighed = program.weight is not None
    # a weight of the window's own dtype, as it is summed up in the loop
    total = torch.zeros((), dtype=torch.float64, device=device)
    leaves, structure = trees.flatten((carry, total) if weighed else (carry,))

    def body(held: list[Any], start: torch.Tensor) -> tuple[list[Any], list[Any]]:
        (reduced, state), *sums = trees.unflatten(structure, held)
        args = arguments.cut(start, size, state)
        weight = program.weigh(arguments, args, size)
        values = outputs.leaves(program.grad_fn(*args, **kwargs), "a later micro-batch")
        # clones, as nothing that comes out may share memory with what went in
        after = _add(outputs, reduced, values, weight), [values[i].clone() for i in outputs.threads]
        return trees.flatten((after, *[s + weight for s in sums]))[0], [values[i].clone() for i in outputs.collected]

    held, collected = scan(body, leaves, torch.tensor(starts, device=device))
    carry, *sums = trees.unflatten(structure, held)
    columns = []
    for fold, column in zip(outputs.collected_folds, collected, strict=True):
        axis = (fold.fold.reducer.monoid.axis or 0) % (column.ndim - 1)
        columns.append(column.movedim(0, axis).flatten(axis, axis + 1))
    return carry, sums[0] if weighed else len(starts) * size, columns
