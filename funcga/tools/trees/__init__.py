"""The tool that converts trees of arrays between frameworks, with or without copies.

    jax_params = funcga.to_jax(module.state_dict(), copy=None)
    flax_params = funcga.trees.match(module.state_dict(), like, rules=funcga.trees.torch_to_flax)

`to_torch`, `to_jax`, `to_numpy` and `shares_memory` are in this file, `match` and state dicts in
`funcga/trees.py`, renaming rules in `rules.py`. How arrays leave a framework and enter it, by
DLPack or NumPy, is in `in_torch.py` and `in_jax.py`, which are loaded by name. It stands on the
core's trees and arrays (`funcga._backend`); compare, verify, parity and `from_optax` stand on it.
"""

from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from funcga._backend import Backend
from funcga._backend.dispatch import is_numpy, is_of_numpy, load, load_imported
from funcga._backend.prefixes import leaf_paths, paths_apart
from funcga._types import Array, Structure, Tree
from funcga.errors import FuncgaError, listed


def to_torch(tree: Tree, *, copy: bool | None = True, device: object = None) -> Tree:
    """Converts every array of a tree to a torch tensor of the same shape and dtype, detached.

    The tree keeps its containers. Leaves that are not arrays of torch, JAX or NumPy stay as they
    are. A tensor that is in the tree twice becomes two copies; without a copy, two tensors that
    share memory.

    Args:
        tree: Nested containers of arrays.
        copy: True copies each array once. None shares memory where possible and copies elsewhere.
            False shares memory, or raises. If memory is shared, writes are visible in both:

            - A JAX array is shared unless it is sharded. Do not write to the tensor: JAX relies on
              its arrays never changing.
            - A NumPy array is shared unless it is read-only, or has negative strides or bytes in
              another order. Write where you like.
            - A tensor is always shared, as by `x.detach()`. Write where you like.
        device: A torch.device or its name. By default arrays stay on their device, or move to the
            CPU if torch does not have it. Moving to another device copies.

    Returns:
        A tree of the same structure, with tensors.

    Raises:
        FuncgaError: If torch does not support an array, which the error names: a dtype such as
            int4, a typed key of JAX (convert `jax.random.key_data(key)`), a traced or a donated
            array. Or if there is no such device.

    Example:
        >>> funcga.to_torch({"w": jnp.ones(2)})
        {'w': tensor([1., 1.])}
    """
    return converted(tree, load("torch"), copy, device)


def to_jax(tree: Tree, *, copy: bool | None = True, device: object = None) -> Tree:
    """Converts every array of a tree to a JAX array of the same shape and dtype.

    The tree keeps its containers. Leaves that are not arrays of torch, JAX or NumPy stay as they
    are, and so do traced arrays inside of jit.

    Args:
        tree: Nested containers of arrays.
        copy: True copies each array once, and waits until that is done. None shares memory where
            possible and copies elsewhere. False shares memory, or raises:

            - A tensor is shared unless it is not contiguous, or a slice that begins at no multiple
              of 64 bytes. Do not write to it afterwards.
            - A NumPy array is shared under the same conditions; NumPy's own memory usually begins
              elsewhere. Do not write to it afterwards.
            - A JAX array stays the same array.

            JAX relies on its arrays never changing, and may read them after a call has returned. An
            array that shares memory can be donated: JAX gives it up and writes elsewhere.
        device: A jax.Device, a Sharding, or a name such as "cpu" or "gpu:1". By default JAX arrays
            and CUDA tensors stay on their device, if JAX has it; everything else goes to JAX's
            default device, uncommitted. Moving to another device copies.

    Returns:
        A tree of the same structure, with JAX arrays.

    Raises:
        FuncgaError: If an array, which the error names, has 64 bits while these are disabled in
            JAX, which would narrow it silently; if JAX does not support it: a DTensor, a sparse
            tensor, a dtype such as torch.int4, a tensor of a running torch.func transform; or if
            there is no such device.

    Example:
        >>> funcga.to_jax({"w": torch.ones(2)})
        {'w': Array([1., 1.], dtype=float32)}
    """
    return converted(tree, load("jax"), copy, device)


def to_numpy(tree: Tree, *, copy: bool | None = True) -> Tree:
    """Converts every array of a tree to a NumPy array of the same shape and dtype.

    The tree keeps its containers. Leaves that are not arrays of torch, JAX or NumPy stay as they
    are, and so do NumPy scalars. bfloat16 and float8 become the dtypes of ml_dtypes.

    Args:
        tree: Nested containers of arrays.
        copy: True copies each array once. None shares memory where possible and copies elsewhere.
            False shares memory, or raises:

            - A JAX array is shared unless it is not on the CPU, or on several devices. NumPy's
              array is read-only.
            - A tensor is shared unless it is not on the CPU, or lazily conjugated. Write where you
              like.
            - A NumPy array stays the same array.

    Returns:
        A tree of the same structure, with NumPy arrays.

    Raises:
        FuncgaError: If NumPy does not support an array, which the error names; see `to_torch` and
            `to_jax`.

    Example:
        >>> funcga.to_numpy({"w": torch.ones(2)}, copy=None)
        {'w': array([1., 1.], dtype=float32)}
    """
    _check_copy(copy)
    walk = _walk(tree, None)

    def export(leaf: Array, owner: Backend | None) -> Array:
        return leaf if owner is None else side(owner).export_array(leaf, set())

    arrays = walk.mapped(export)
    if copy:
        # What is read-only may be JAX's own.
        arrays = [array if array.flags.writeable else array.copy() for array in arrays]
    return walk.rebuilt(arrays, copy, lambda shared: [array.copy() for array in shared])


def map_arrays(function: Callable[[Array], Array], tree: Tree) -> Tree:
    """The tree with a function applied to each of its arrays, as NumPy's."""
    walk = _walk(to_numpy(tree, copy=None), None)
    return walk.rebuilt(walk.mapped(lambda leaf, _: function(leaf)), None, list)


class ExportError(Exception):
    """Says why another framework does not support an array; the caller adds its path."""


def side(backend: Backend) -> Any:
    """The module of a framework: how it exports arrays to other frameworks and NumPy, and imports
    theirs. Both have the same functions.
    """
    return import_module(f"funcga.tools.trees.in_{backend.name}")


def converted(
    tree: Tree,
    target: Backend,
    copy: bool | None,
    device: object = None,
    platforms: Collection[str] = (),
    name: str = "tree",
) -> Tree:
    """The tree converted to a framework, as by `to_torch` and `to_jax`.

    Arrays on these platforms stay there, like those on the framework's own. `name` is the name of
    the tree in errors.
    """
    _check_copy(copy)
    target_device = None if device is None else side(target).device(device)
    platforms = {*platforms, *side(target).platforms()}
    walk = _walk(tree, target, name)

    # First every array is exported, so that an error comes before anything is copied.
    def export(leaf: Array, owner: Backend | None) -> Array:
        # NumPy's arrays belong to no framework, and every one takes them.
        if owner is None:
            exported = _export_numpy(leaf)
        else:
            exported = leaf if owner is target else side(owner).export_array(leaf, platforms)
        side(target).check_importable(exported)
        return exported

    arrays = side(target).import_arrays(walk.mapped(export), target_device)
    return walk.rebuilt(arrays, copy, side(target).copies)


def _check_copy(copy: object) -> None:
    if not (copy is None or isinstance(copy, bool)):
        raise FuncgaError(
            f"copy={copy!r} is neither True (copy all), None (where it must be) nor False "
            "(nothing)."
        )


def _export_numpy(leaf: Array) -> Array:
    """An array or scalar of NumPy as a plain array, whose bytes are in this machine's order."""
    if is_of_numpy(leaf, "MaskedArray"):
        raise ExportError(
            f"a masked array {leaf.dtype}{list(leaf.shape)}, whose mask would be lost; x.filled(0) "
            "has none"
        )
    array = leaf.__array__()
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def shares_memory(left: Tree, right: Tree) -> dict[str, bool]:
    """Returns, by path, whether the arrays of two trees share memory.

    The address ranges are compared, so two arrays of alternating rows count as shared. Traced, fake
    and empty arrays share nothing.

    Args:
        left: A tree of arrays of torch, JAX or NumPy.
        right: Another one, of any framework, whose arrays have the same paths.

    Returns:
        Whether memory is shared, by path as in `to_state_dict`. Leaves that are not arrays are left
        out.

    Raises:
        FuncgaError: If one tree has arrays that the other does not have; the error names them.

    Example:
        >>> params = {"w": torch.ones(2), "b": torch.ones(1)}
        >>> funcga.trees.shares_memory(params, {"w": params["w"], "b": torch.ones(1)})
        {"['w']": True, "['b']": False}
    """
    # Trees of two frameworks have their leaves in different orders, so these are matched by path.
    lefts, rights = _extents(left), _extents(right)
    missing, new = paths_apart([*lefts], [*rights])
    if missing or new:
        raise FuncgaError(
            f"left and right have arrays at other paths: only left has {listed(missing)}, only "
            f"right has {listed(new)}. Compare trees of the same structure, such as a tree and "
            "funcga.to_jax(tree, copy=None)."
        )
    return {path: _overlap(extents, rights[path]) for path, extents in lefts.items()}


def _overlap(lefts: list["Extent"], rights: list["Extent"]) -> bool:
    return any(start < last and first < end for start, end in lefts for first, last in rights)


Extent = tuple[int, int]
"""The addresses of the first byte of a piece of memory, and of the one after its last."""


def extent(start: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Extent:
    """The Extent of a strided array with its first element at `start`; strides are in bytes."""
    # Along each axis the last element lies this far from the first; with a negative stride, before
    # it.
    spans = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return start + sum(min(span, 0) for span in spans), start + sum(
        max(span, 0) for span in spans
    ) + itemsize


def _extents(tree: Tree) -> dict[str, list[Extent]]:
    walk = _walk(tree, None)
    paths = leaf_paths(tree, walk.walker.trees)
    return {
        paths[index]: _extents_of(walk.leaves[index], owner) for index, owner in walk.owners.items()
    }


def _extents_of(array: Array, owner: Backend | None) -> list[Extent]:
    if owner is not None:
        extents: list[Extent] = side(owner).extents(array)
        return extents
    start = array.__array_interface__["data"][0] if array.size else 0
    return [extent(start, array.shape, array.strides, array.itemsize)] if array.size else []


class _Walk(NamedTuple):
    """A tree as a framework flattens it, and the owners of its arrays by leaf index, None for
    NumPy.
    """

    tree: Tree
    walker: Backend
    leaves: list[object]
    structure: Structure
    owners: dict[int, Backend | None]
    name: str

    def path(self, leaf_index: int) -> str:
        """The path of a leaf, as it is written in code."""
        return leaf_paths(self.tree, self.walker.trees, self.name)[leaf_index]

    def mapped(self, function: Callable[[Array, Backend | None], Array]) -> list[Array]:
        """Calls a function with every array and its owner. An ExportError becomes a FuncgaError
        with the path.
        """
        arrays = []
        for index, owner in self.owners.items():
            try:
                arrays.append(function(self.leaves[index], owner))
            except ExportError as error:
                raise FuncgaError(f"`{self.path(index)}` is {error}.") from error
        return arrays

    def rebuilt(
        self, arrays: list[Array], copy: bool | None, copies: Callable[[list[Array]], list[Array]]
    ) -> Tree:
        """The tree with these arrays; if `copy`, with copies of those in the memory of the tree.
        Raises FuncgaError if copy=False and one is in other memory.
        """
        leaves, shared = [*self.leaves], list[int]()
        for (index, owner), array in zip(self.owners.items(), arrays, strict=True):
            leaves[index] = array
            if copy is None or (array is self.leaves[index] and not copy):
                continue
            extents = _extents_of(self.leaves[index], owner)
            if _overlap(extents, _extents_of(array, owner_of(array))):
                shared.append(index)
            elif extents and not copy:
                raise FuncgaError(
                    f"copy=False asks for no copy, and `{self.path(index)}` cannot be shared: it "
                    "lies elsewhere, or in a layout or dtype that the other side does not have. "
                    "copy=None copies what cannot be shared, and nothing else."
                )
        if copy:
            copied = copies([leaves[index] for index in shared])
            leaves = [*map(dict(zip(shared, copied, strict=True)).get, range(len(leaves)), leaves)]
        return self.walker.trees.unflatten(self.structure, leaves)


def _walk(tree: Tree, target: Backend | None, name: str = "tree") -> _Walk:
    """The tree flattened by a framework that knows all its containers, or else by the one that
    finds the most arrays.
    """
    # Each framework has its own containers: torch does not look into a flax module, nor JAX into a
    # torch one.
    walks = []
    for walker in walkers():
        leaves, structure = walker.trees.flatten(tree)
        owners = {
            index: owner_of(leaf)
            for index, leaf in enumerate(leaves)
            if is_numpy(leaf) or owner_of(leaf)
        }
        walk = _Walk(tree, walker, leaves, structure, owners, name)
        # A leaf that is no plain value may be a container that only another framework knows.
        others = [leaf for index, leaf in enumerate(leaves) if index not in owners]
        if all(leaf is None or isinstance(leaf, int | float | complex | str) for leaf in others):
            return walk
        walks.append(walk)

    # Most arrays count first; then that they are the walker's own, and that it is the one to
    # convert to.
    def fitness(walk: _Walk) -> tuple[int, bool, bool]:
        return len(walk.owners), walk.walker in walk.owners.values(), walk.walker is target

    return max(walks, key=fitness)


def walkers() -> list[Backend]:
    """The imported frameworks; if there is none, an installed one, for trees of NumPy arrays."""
    return load_imported() or [load("torch" if find_spec("torch") else "jax")]


def owner_of(leaf: object) -> Backend | None:
    """The imported framework that an array belongs to; None for NumPy and anything else."""
    return next((backend for backend in load_imported() if backend.arrays.owns(leaf)), None)
