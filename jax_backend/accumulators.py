"""Accumulators: zeros of a gradient's own type, and where they lie on a mesh.

Only JAX has this file: in torch a gradient is added where autograd has put it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from funcga._fold.outputs import Outputs
from jax_backend.collectives import as_varying, varying_axes

_spec: Any = PartitionSpec  # which JAX has not typed


def zeros(aval: Any) -> jax.Array:
    """Zeros of a type: sharded over Explicit axes, and varying over manual ones, as it says."""
    return as_varying(lax.full(aval.shape, 0, aval.dtype, sharding=aval.sharding), tuple(varying_axes(aval)))


def typed(array: jax.Array, aval: Any) -> jax.Array:
    """The array sharded and varying as a type says, for a loop that makes it so."""
    now: Any = jax.typeof(array)
    if now.sharding != aval.sharding and not aval.sharding.mesh.empty:
        array = jax.sharding.reshard(array, aval.sharding)  # type: ignore[no-untyped-call]
    return as_varying(array, tuple(varying_axes(aval)))


def alike(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """The parts of one array sharded as that of them which is sharded over the fewest Explicit axes."""
    types: list[Any] = [jax.typeof(part) for part in parts]
    least = min(types, key=lambda aval: sum(entry is not None for entry in aval.sharding.spec))
    return [typed(part, least) for part in parts]


@dataclass(frozen=True)
class Places:
    """Where the arguments of a call lie, by path and shape, over the axes of a mesh that are left to the compiler.

    Their accumulators are made before the compiler has seen a gradient. So each lies like the argument whose gradient
    it seems to be, which has its shape and its path; where there is none the compiler chooses. A single number is on
    every device.
    """

    known: tuple[tuple[Any, NamedSharding], ...]

    def pinned(self, outputs: Outputs, carry: Any) -> Any:
        """The carry of a loop with its accumulators in their places, whichever micro-batch is the last one in it."""
        known = dict(self.known)
        everywhere: Any = NamedSharding(self.known[0][1].mesh, _spec())
        tree = outputs.structure_of(range(len(outputs.folds)))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]

        def pin(part: jax.Array, shape: Any = None, place: NamedSharding | None = None) -> jax.Array:
            own = everywhere if part.ndim == 0 else place if part.shape == shape else None
            return part if own is None else lax.with_sharding_constraint(part, own)  # type: ignore[no-untyped-call]

        reduced, total, state = carry
        kept = []
        for leaf_index, lifted in zip(outputs.reduced, reduced, strict=True):
            path, shape = paths[leaf_index], outputs.shapes[leaf_index]
            kept.append(jax.tree.map(partial(pin, shape=shape, place=_place(known, path, shape)), lifted))
        return kept, jax.tree.map(pin, total), state


def places(args: Any) -> Places | None:
    """Where the arguments of a call lie; None if not on a mesh, or if their types say it."""
    known: dict[Any, NamedSharding] = {}
    for arg in args:
        if any(_left_to_the_compiler(leaf) for leaf in jax.tree.leaves(arg)):
            for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
                if place := _left_to_the_compiler(leaf):
                    known.setdefault((path, leaf.shape), place)
    return Places(tuple(known.items())) if known else None


def _left_to_the_compiler(leaf: Any) -> Any:
    """How an array is sharded over the axes that no type names; None if there are none."""
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or sharding.mesh.size == 1:
        return None
    mesh = sharding.mesh
    free = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Auto}
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    kept = [tuple(name for name in entry if name in free) or None for entry in entries]
    return NamedSharding(mesh, _spec(*kept)) if free else None


def _place(known: dict[Any, NamedSharding], path: Any, shape: Any) -> NamedSharding | None:
    """Of the argument whose path is the end of this one: of `w` in (loss, {"w": ...}), that of `w` in {"w": ...}."""
    ends = ((path[i:], shape) for i in range(len(path) + 1))
    return next((known[end] for end in ends if end in known), None)
