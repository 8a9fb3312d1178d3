"""`to_torch`, `to_jax`, `to_numpy`: whole trees from one framework to another, in new memory or in the same."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from funcga._backend.dispatch import load, load_imported
from funcga._backend.prefixes import leaf_paths, paths_apart
from funcga._backend.protocols import Backend, Handed, UnfitError
from funcga.errors import FuncgaError


def to_torch(tree: Any, *, copy: bool | None = True, device: Any = None) -> Any:
    """The tree with every array, of torch, JAX or NumPy, as a torch tensor of the same shape and dtype, detached.

    copy: True makes one copy of each array, in memory of its own. None shares the memory where that is possible and
    copies elsewhere; False shares it, or raises. What shares memory sees what is written to it:

    | from | shared, unless | and then |
    |---|---|---|
    | JAX | it is sharded | do not write to the tensor: JAX relies on its arrays never changing |
    | NumPy | it is read-only, or has negative strides or bytes in another order | write where you like |
    | torch | | write where you like; it is what `x.detach()` is |

    device: a torch.device or its name. By default arrays stay where they lie, which is the CPU where torch has no such
    device. Another device is a copy.

    The tree is walked by the framework that its containers belong to, and keeps them. Leaves that are no arrays stay as
    they are. A tensor that is in the tree twice comes back as two copies, or where memory is shared, as two in one.

    Raises FuncgaError, which names the leaf, for what torch cannot have: dtypes such as int4, typed keys of JAX (hand
    over `jax.random.key_data(key)`), what jit traces, what has been donated; and for a device that is not there.

    >>> params = funcga.to_torch(params)  # as they come from optax, flax or equinox
    >>> batch = funcga.to_torch(batch, copy=None, device="cuda")
    """
    return _moved(tree, load("torch"), copy, device)


def to_jax(tree: Any, *, copy: bool | None = True, device: Any = None) -> Any:
    """The tree with every array, of torch, JAX or NumPy, as a JAX array of the same shape and dtype.

    copy: True makes one copy of each array, in memory of its own, finished when this returns. None shares the memory
    where that is possible and copies elsewhere; False shares it, or raises:

    | from | shared, unless | and then |
    |---|---|---|
    | torch | it is not contiguous, or a slice that begins at no multiple of 64 bytes | do not write to the tensor |
    | NumPy | the same; NumPy's own memory mostly begins elsewhere | do not write to NumPy's array |
    | JAX | | it is the same array |

    JAX relies on its arrays never changing, and may read them later than it is called. One that shares memory can be
    donated: JAX gives it up and writes elsewhere.

    device: a jax.Device, a Sharding, or a name such as "cpu" or "gpu:1". By default JAX arrays and CUDA tensors stay
    where they lie, if JAX has that device, and all else goes to JAX's default device, uncommitted. Another device is
    a copy. Inside of jit, what is traced stays as it is.

    The tree is walked by the framework that its containers belong to, and keeps them. Leaves that are no arrays stay as
    they are.

    Raises FuncgaError, which names the leaf, for 64-bit values while JAX has them switched off, which it would narrow
    silently; for what JAX cannot have: DTensors, sparse tensors, dtypes such as torch.int4, tensors of a running
    torch.func transform; and for a device that is not there.

    >>> params = funcga.to_jax(module.state_dict())
    >>> logits = model.apply(params, funcga.to_jax(batch, copy=None))
    """
    return _moved(tree, load("jax"), copy, device)


def _moved(tree: Any, target: Backend, copy: bool | None, device: Any) -> Any:
    place = None if device is None else target.handover.device(device)
    walked = _walked(tree, target)
    reach = target.handover.platforms()

    def lent(leaf: Any, owner: Backend | None) -> Handed:
        handed = Handed(leaf) if owner in (None, target) else owner.handover.lent(leaf, reach)
        if owner is None:
            _check_unmasked(leaf)
        target.handover.check(handed.array)
        return handed

    taken = target.handover.taken(walked.each(lent), place, _checked(copy) is True)
    return walked.rebuilt(taken, copy)


def _check_unmasked(leaf: Any) -> None:
    if any(base.__name__ == "MaskedArray" for base in type(leaf).__mro__):
        raise UnfitError(
            f"a masked array {leaf.dtype}{list(leaf.shape)}, whose mask would be lost; x.filled(0) has none"
        )


def _checked(copy: Any) -> bool | None:
    if not (copy is None or isinstance(copy, bool)):
        raise FuncgaError(f"copy={copy!r} is neither True (copy all), None (where it must be) nor False (nothing).")
    return copy


def to_numpy(tree: Any, *, copy: bool | None = True) -> Any:
    """The tree with every array, of torch, JAX or NumPy, as a NumPy array of the same shape and dtype.

    bfloat16 and float8 are those of ml_dtypes. copy: True makes one copy of each array, in memory of its own. None
    shares the memory where that is possible and copies elsewhere; False shares it, or raises:

    | from | shared, unless | and then |
    |---|---|---|
    | JAX | it is not on the CPU, or on several devices | the array is read-only |
    | torch | it is not on the CPU, or lazily conjugated | write where you like |
    | NumPy | | it is the same array |

    The tree is walked by the framework that its containers belong to, and keeps them. Leaves that are no arrays stay as
    they are, and so do NumPy's scalars. Raises FuncgaError, which names the leaf, for what has no numbers that NumPy
    could have, as `to_torch` and `to_jax` do.

    >>> numpy.savez("params.npz", **funcga.to_numpy(params, copy=None))
    """
    walked = _walked(tree, None)

    def lent(leaf: Any, owner: Backend | None) -> Handed:
        handed = Handed(leaf) if owner is None else owner.handover.lent(leaf, set())
        own = handed.why is not None and handed.array.flags.writeable
        return handed if own or _checked(copy) is not True else Handed(handed.array.copy(), "a copy was asked for")

    return walked.rebuilt(walked.each(lent), copy)


def shares_memory(left: Any, right: Any) -> dict[str, bool]:
    """Whether the arrays of two trees share memory: by path, True where writing to one may be seen in the other.

    left, right: trees of torch, JAX or NumPy, each of its own framework, whose arrays have the same paths; these are
    written as in `to_state_dict`, and what is no array is left out. Compared are the addresses from an array's first
    byte to its last, so that rows that alternate in one memory count as shared. An array without numbers, traced, fake
    or empty, shares nothing. Raises FuncgaError, which names the paths, if one tree has arrays that the other has not.

    >>> funcga.shares_memory(params, funcga.to_jax(params, copy=None))
    {"['w']": True, "['b']": True}
    """
    mine, others = _extents(left), _extents(right)
    missing, new = paths_apart([*mine], [*others])
    if missing or new:
        raise FuncgaError(
            f"left and right have arrays at other paths: only left has {_some(missing)}, only right has {_some(new)}. "
            f"Compare trees of the same structure, such as a tree and funcga.to_jax(tree, copy=None)."
        )
    return {path: any(a < d and c < b for a, b in pieces for c, d in others[path]) for path, pieces in mine.items()}


def _some(paths: list[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths[:4]) + (f" and {len(paths) - 4} more" if paths[4:] else "") or "none"


def _extents(tree: Any) -> dict[str, list[tuple[int, int]]]:
    walked = _walked(tree, None)
    paths = leaf_paths(tree, walked.walker.trees)
    return {
        paths[place]: _numpy_extents(walked.leaves[place])
        if owner is None
        else owner.handover.extents(walked.leaves[place])
        for place, owner in walked.owners.items()
    }


def _numpy_extents(array: Any) -> list[tuple[int, int]]:
    if not _is_numpy(array, "ndarray") or not array.size:
        return []
    start = array.__array_interface__["data"][0]
    spans = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    backward, forward = sum(span for span in spans if span < 0), sum(span for span in spans if span > 0)
    return [(start + backward, start + forward + array.itemsize)]


def _is_numpy(leaf: Any, *names: str) -> bool:
    return any(base.__module__ == "numpy" and base.__name__ in names for base in type(leaf).__mro__)


class _Walked(NamedTuple):
    """A tree as one framework walks it, and whose the arrays are that it finds: None for NumPy's."""

    tree: Any
    walker: Backend
    leaves: list[Any]
    structure: Any
    owners: dict[int, Backend | None]

    def is_whole(self) -> bool:
        """Whether no leaf can be a container of another framework."""
        others = [leaf for place, leaf in enumerate(self.leaves) if place not in self.owners]
        return all(leaf is None or isinstance(leaf, int | float | complex | str) for leaf in others)

    def each(self, lent: Callable[[Any, Backend | None], Handed]) -> list[Handed]:
        """What a function returns for every array and its owner; FuncgaError, with the path, for an UnfitError."""
        handed = []
        for place, owner in self.owners.items():
            try:
                handed.append(lent(self.leaves[place], owner))
            except UnfitError as unfit:
                raise FuncgaError(f"`{self._path(place)}` is {unfit}.") from unfit
        return handed

    def _path(self, place: int) -> str:
        return leaf_paths(self.tree, self.walker.trees, "tree")[place]

    def rebuilt(self, handed: list[Handed], copy: bool | None) -> Any:
        """The tree with these arrays; FuncgaError where one is not shared and must be."""
        leaves = [*self.leaves]
        for place, (array, why) in zip(self.owners, handed, strict=True):
            if copy is False and why is not None:
                raise FuncgaError(
                    f"copy=False asks for no copy, and `{self._path(place)}` cannot be shared: {why}. copy=None copies "
                    f"what cannot be shared, and nothing else."
                )
            leaves[place] = array
        return self.walker.trees.unflatten(self.structure, leaves)


def _walked(tree: Any, target: Backend | None) -> _Walked:
    """The tree as a framework has it that knows all its containers; if none does, as the one that finds most arrays."""
    loaded = load_imported() or [installed()]
    found = []
    for backend in loaded:
        walked = _walked_by(backend, tree, loaded)
        if walked.is_whole():
            return walked
        found.append(walked)

    def fitness(walked: _Walked) -> tuple[int, bool, bool]:
        return len(walked.owners), walked.walker in walked.owners.values(), walked.walker is target

    return max(found, key=fitness)


def installed() -> Backend:
    """Any framework that there is, to walk a tree of NumPy's arrays."""
    return load("torch" if find_spec("torch") else "jax")


def _walked_by(walker: Backend, tree: Any, loaded: list[Backend]) -> _Walked:
    leaves, structure = walker.trees.flatten(tree)
    owners: dict[int, Backend | None] = {}
    for place, leaf in enumerate(leaves):
        owner = next((backend for backend in loaded if backend.arrays.owns(leaf)), None)
        if owner is not None or _is_numpy(leaf, "ndarray", "generic"):
            owners[place] = owner
    return _Walked(tree, walker, leaves, structure, owners)
