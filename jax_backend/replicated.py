"""A step on every device of a mesh axis, each with its own rows, for code without shard_map.

Only JAX has this file: in torch every replica is a process of its own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from funcga._backend.dispatch import load
from funcga._backend.prefixes import broadcast
from funcga._call import Program
from funcga._types import Args, Kwargs, Tree
from funcga.errors import FuncgaError
from jax_backend import arrays, trees
from jax_backend._private import is_traced, is_tracing
from jax_backend.arrays import axis_names
from jax_backend.replicas import listed, requiring_across, spelled

Axes: TypeAlias = str | tuple[str, ...]


def replicated(
    step: Callable[..., Tree],
    mesh: Mesh,
    *,
    axis: str | tuple[str, ...] | None = None,
    in_specs: Tree = None,
    out_specs: Tree = None,
    check_vma: bool = True,
) -> Callable[..., Tree]:
    """A function with step's own signature: step on every device along an axis of the mesh, each
    with its own rows.

    It is `jax.shard_map` with that axis manual and every other left to the compiler, so parameters
    that are sharded over another axis stay so. Call it inside jit or outside, where it is jitted
    once. In step, `across=axis` merges.

    Args:
        step: Tree function of arrays, such as one of `accumulate` or a whole training step.
        mesh: The devices, with names.
        axis: The name of an axis, or a tuple of names. Default: the mesh's only axis.
        in_specs: A PartitionSpec, or a tuple with one, or a tree prefix of them, for each
            positional argument. Default: as the step's in_axes say, cut where it splits; for a step
            that is not of funcga's, the first argument whole on every device, every other cut on
            its axis 0. Keyword arguments are passed whole, and anything but an array is part of the
            program.
        out_specs: Of the result, a tree prefix. Default: P(), the same on all devices; for what
            `scatter` leaves cut, P("data"), as in out_specs=(P(), P("data")).
        check_vma: As in `jax.shard_map`: whether the types of arrays say over which axes they
            differ, which proves that the result is the same on all devices. Without it a model may
            start a scan from `jnp.zeros`, and nothing shows that a result was not merged.

    Returns:
        A function of whole arrays, whose rows it cuts among the devices.

    Raises:
        FuncgaError: if the mesh has several axes and none is named, and for a result that no step
            has merged.
        ValueError: if rows do not divide among the devices.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> grad_fn = jax.value_and_grad(lambda w, x: (w * x).mean())
        >>> step = jax_backend.replicated(funcga.accumulate(grad_fn, 2, across="data"), mesh)
        >>> loss, grads = step(jnp.ones(()), jnp.arange(8.0))
        >>> float(loss), float(grads)
        (3.5, 3.5)
    """
    names = _names(mesh, axis)
    # For gradients outside of jit, which begin on one device: the types of results must not have
    # more.
    untyped = Mesh(mesh.devices, mesh.axis_names)

    def on_each(
        function: Callable[..., Tree],
        args: Args,
        kwargs: Kwargs,
        out_specs: Tree = out_specs,
    ) -> Tree:
        """`function(args, kwargs)` on every device, with its own part of the arguments."""
        specs = _specs(args, in_specs, names, step)
        # Only arrays are arguments of shard_map; all else is closed over.
        static, whole_arrays = trees.partition((args, kwargs))
        is_eager = is_tracing() and not is_traced(jnp.zeros(()))
        has_types = any(not jax.typeof(leaf).sharding.mesh.empty for leaf in whole_arrays)
        devices = mesh if not is_eager or has_types else untyped
        pairs = zip(trees.flatten(args)[0], specs, strict=True)
        array_specs = [spec for leaf, spec in pairs if arrays.is_array(leaf)]
        array_specs += [PartitionSpec()] * (len(whole_arrays) - len(array_specs))

        def on_each_device(local_arrays: list[Tree]) -> Tree:
            args, kwargs = static.tree(local_arrays)
            with requiring_across(names):
                return function(args, kwargs)

        mapped = jax.shard_map(
            on_each_device,
            mesh=devices,
            in_specs=(array_specs,),
            out_specs=PartitionSpec() if out_specs is None else out_specs,
            axis_names=set(names),
            check_vma=check_vma,
        )
        placed = [
            _placed(*pair, devices, names) for pair in zip(whole_arrays, array_specs, strict=True)
        ]
        return _explained(mapped, placed, names)

    run = trees.Compiled(partial(on_each, lambda args, kwargs: step(*args, **kwargs)))

    def everywhere(*args: Tree, **kwargs: Tree) -> Tree:
        """The result of step on every device along the axis, each with its own rows."""
        return run((), args, kwargs)

    # For `plan`, which runs the step with other numbers of micro-batches.
    everywhere.step, everywhere.on_each = step, on_each  # type: ignore[attr-defined]
    return everywhere


def _names(mesh: Mesh, axis: Axes | None) -> tuple[str, ...]:
    if axis is not None:
        return axis_names(axis)
    if len(mesh.axis_names) != 1:
        raise FuncgaError(
            f"the mesh has the axes {listed(mesh.axis_names)}, and axis= does not say which of "
            "them has the replicas. "
            f'Write replicated(step, mesh, axis="{mesh.axis_names[0]}").'
        )
    return tuple(mesh.axis_names)


def _specs(
    args: Args, in_specs: Tree, names: tuple[str, ...], step: Callable[..., Tree]
) -> list[PartitionSpec]:
    """The PartitionSpec of every leaf of the positional arguments."""
    cut = names[0] if len(names) == 1 else names
    program = getattr(step, "program", None)
    # A step of funcga has in_axes.
    if in_specs is None and isinstance(program, Program):
        return _as_split(program, args, cut)
    whole, rows = PartitionSpec(), PartitionSpec(cut)
    if in_specs is None:
        in_specs = (whole, *[rows] * (len(args) - 1))[: len(args)]
    is_spec = lambda spec: isinstance(spec, PartitionSpec)
    what = "in_specs is no prefix of the positional arguments"
    leaf_specs = broadcast(in_specs, args, is_spec, trees, "args", what)
    return [spec for spec, _ in leaf_specs]


def _as_split(program: Program, args: Args, cut: Axes) -> list[PartitionSpec]:
    """The PartitionSpec of every leaf, cut on the axis that the program splits."""
    specs: list[PartitionSpec] = []
    for part in program.read(args, load("jax")).parts:
        if not part.axes:  # an argument that is passed whole has no leaves listed
            specs += [PartitionSpec()] * len(trees.flatten(part.value)[0])
        for leaf, axis in zip(part.leaves, part.axes, strict=True):
            splits = isinstance(axis, int) and arrays.is_array(leaf) and leaf.ndim > 0
            specs.append(
                PartitionSpec(*[None] * (axis % leaf.ndim), cut) if splits else PartitionSpec()
            )
    return specs


def _placed(leaf: Tree, spec: PartitionSpec, mesh: Mesh, names: tuple[str, ...]) -> Tree:
    """The array, resharded over Explicit axes, where types have to agree."""
    # Over Auto axes shard_map itself reshards.
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Explicit
    ]
    names = tuple(name for name in names if name in explicit)
    if not names:
        return leaf
    # Along the axes of the step as the spec says, along all others unchanged.
    sharding = jax.typeof(leaf).sharding
    before = tuple(sharding.spec) if sharding.mesh.axis_names == mesh.axis_names else ()
    entries = []
    for axis in range(len(leaf.shape)):
        kept = [name for name in _entry(before, axis) if name not in names]
        entries.append(
            (*[name for name in _entry(tuple(spec), axis) if name in names], *kept) or None
        )
    return jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec(*entries)))


def _entry(spec: Sequence[Axes | None], axis: int) -> tuple[str, ...]:
    """The mesh axes that an axis of an array lies over; a PartitionSpec may have fewer entries
    than the array axes.
    """
    return axis_names(spec[axis]) if axis < len(spec) else ()


def _explained(mapped: Callable[..., Tree], placed: list[Tree], names: tuple[str, ...]) -> Tree:
    """The result of the mapped step; errors of JAX about varying results say what to write."""
    try:
        return mapped(placed)
    # Recognised by their text, as JAX has no types for these errors.
    except ValueError as error:
        if "require replication" not in str(error):
            raise
        raise FuncgaError(
            f"a result of the step is not the same on all devices along {' and '.join(names)}, as "
            "nothing has merged it over all of it. Merge where it is folded, "
            f"funcga.accumulate(grad_fn, n, across={spelled(names)}); or leave it cut, as what "
            f"scatter= scatters: out_specs with P({spelled(names)}) in its place."
        ) from error
    except TypeError as error:
        if "manual axis types" in str(error):
            error.add_note(
                "funcga: jax_backend.replicated(step, mesh, check_vma=False) runs such a loop as "
                "it is; JAX then no longer proves that the result is the same on all devices."
            )
        raise
