"""The tool that converts trees of arrays between frameworks, with or without copies.

    jax_params = funcga.to_jax(module.state_dict(), copy=None)
    flax_params = funcga.trees.match(module.state_dict(), like, rules=funcga.trees.torch_to_flax)

`to_torch`, `to_jax`, `to_numpy` and `shares_memory` are in this file, `match` and state dicts in
`funcga/trees.py`, renaming rules in `rules.py`. How arrays leave a framework and enter it, by
DLPack or NumPy, is in `in_torch.py`, `in_jax.py` and `in_numpy.py`, which are loaded by name. It
stands on the core's trees and arrays (`funcga._backend`); compare, verify, parity and `from_optax`
stand on it.
"""

from collections.abc import Collection, Iterator, MappingView, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from funcga._backend import Trees
from funcga._backend.dispatch import is_numpy, load, load_imported
from funcga._backend.prefixes import leaf_paths
from funcga._types import Array, Structure, Tree
from funcga.errors import FuncgaError


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
            array. If there is no such device, torch says so.

    Example:
        >>> funcga.to_torch({"w": jnp.ones(2)})
        {'w': tensor([1., 1.])}
    """
    return converted(tree, load("torch").name, copy, device)


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
            JAX, which would narrow it silently; if JAX does not support it: a DTensor,
            a dtype such as torch.int4, a tensor of a running torch.func transform. If
            there is no such device, JAX says so.

    Example:
        >>> funcga.to_jax({"w": torch.ones(2)})
        {'w': Array([1., 1.], dtype=float32)}
    """
    return converted(tree, load("jax").name, copy, device)


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
    return converted(tree, "numpy", copy)


def side(framework: str) -> Any:
    """The module of a framework, or of NumPy: how it exports arrays to the others, and imports
    theirs. All have the same functions.
    """
    return import_module(f"funcga.tools.trees.in_{framework}")


def framework_of(leaf: object) -> str | None:
    """The imported framework that an array belongs to, or "numpy"; None for anything else."""
    if is_numpy(leaf):
        return "numpy"
    own = [backend.name for backend in load_imported() if backend.arrays.is_array(leaf)]
    return own[0] if own else None


def described(array: Array) -> str:
    """`float32[8, 3]`, of an array of any framework."""
    return f"{str(array.dtype).removeprefix('torch.')}{[*array.shape]}"


def converted(
    tree: Tree,
    framework: str,
    copy: bool | None,
    device: object = None,
    platforms: Collection[str] = (),
    name: str = "tree",
) -> Tree:
    """The tree converted to a framework, as by `to_torch` and `to_jax`.

    Arrays on these platforms stay there, like those on the framework's own. `name` is the name of
    the tree in errors.
    """
    target = side(framework)
    platforms = {*platforms, *target.platforms()}
    walk = walked(tree)
    arrays = target.placed(_imported(walk, framework, platforms, name), device)
    if copy is None:
        return walk.rebuilt(arrays)
    shared = []
    for position, (index, (leaf, source)) in enumerate(walk.arrays.items()):
        extents = side(source).extents(leaf)
        array = arrays[position]
        is_shared = _overlap(extents, target.extents(array))
        # What is read-only may be memory that JAX keeps.
        if copy and (is_shared or (is_numpy(array) and not array.flags.writeable)):
            shared.append(position)
        elif not copy and not is_shared and extents:
            raise FuncgaError(
                f"copy=False asks for no copy, and `{walk.path(index, name)}` cannot be shared: it "
                "lies elsewhere, or in a layout or dtype that the other side does not have. "
                "copy=None copies what cannot be shared, and nothing else."
            )
    copies = target.copies([arrays[position] for position in shared])
    for position, copied in zip(shared, copies, strict=True):
        arrays[position] = copied
    return walk.rebuilt(arrays)


def _imported(walk: "Walk", framework: str, platforms: Collection[str], name: str) -> list[Array]:
    """The arrays of a tree as the framework has them where they lie."""
    arrays = []
    for index, (leaf, source) in walk.arrays.items():
        try:
            exported = leaf
            if source != framework:
                exported = side(source).export_array(leaf, platforms)
            arrays.append(side(framework).import_array(exported))
        # The framework that cannot have the array says why.
        except Exception as error:
            why = str(error).strip().partition("\n")[0].rstrip(".")
            raise FuncgaError(
                f"`{walk.path(index, name)}` is {described(leaf)}, which cannot be converted: "
                f"{why}."
            ) from error
    return arrays


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
        KeyError: If one tree has an array at a path where the other has none.

    Example:
        >>> params = {"w": torch.ones(2), "b": torch.ones(1)}
        >>> funcga.trees.shares_memory(params, {"w": params["w"], "b": torch.ones(1)})
        {"['w']": True, "['b']": False}
    """
    # Trees of two frameworks have their leaves in different orders, so these are matched by path.
    lefts, rights = _extents(left), _extents(right)
    return {path: _overlap(lefts[path], rights[path]) for path in lefts | rights}


Extent = tuple[int, int]
"""The addresses of the first byte of a piece of memory, and of the one after its last."""


def _extents(tree: Tree) -> dict[str, list[Extent]]:
    walk = walked(tree)
    return {
        walk.path(index): side(source).extents(leaf)
        for index, (leaf, source) in walk.arrays.items()
    }


def _overlap(lefts: list[Extent], rights: list[Extent]) -> bool:
    return any(start < last and first < end for start, end in lefts for first, last in rights)


class Walk(NamedTuple):
    """A tree as one framework flattens it, and its arrays with their frameworks, by leaf index."""

    tree: Tree
    trees: Trees
    leaves: list[object]
    structure: Structure
    arrays: dict[int, tuple[Array, str]]

    def path(self, leaf_index: int, name: str = "") -> str:
        """The path of a leaf, as it is written in code."""
        return leaf_paths(self.tree, self.trees, name)[leaf_index]

    def rebuilt(self, arrays: Sequence[Array]) -> Tree:
        """The tree with other arrays in their places."""
        leaves = [*self.leaves]
        for index, array in zip(self.arrays, arrays, strict=True):
            leaves[index] = array
        return self.trees.unflatten(self.structure, leaves)


def walked(tree: Tree) -> Walk:
    """The Walk of a tree by a framework that knows all its containers, its own before others, or
    else by the one that finds the most arrays.
    """
    walks = dict[tuple[int, bool], Walk]()
    # Each framework has its own containers: torch does not look into a flax module, nor JAX into a
    # torch one. If none is imported, an installed one walks trees of NumPy arrays.
    for backend in load_imported() or [load("torch" if find_spec("torch") else "jax")]:
        leaves, structure = backend.trees.flatten(tree, is_pathless)
        arrays = {
            index: (leaf, framework)
            for index, leaf in enumerate(leaves)
            if (framework := framework_of(leaf))
        }
        walk = Walk(tree, backend.trees, leaves, structure, arrays)
        # A leaf that is no plain value may be a container that only another framework knows.
        are_plain = all(
            index in arrays or leaf is None or isinstance(leaf, int | float | complex | str)
            for index, leaf in enumerate(leaves)
        )
        owners = {framework for _, framework in arrays.values()} - {"numpy"}
        is_own = backend.name in owners
        if are_plain and (is_own or not owners):
            return walk
        walks.setdefault((len(arrays), is_own), walk)
    return walks[max(walks)]


def is_pathless(node: object) -> bool:
    """Whether a node has items without names: an iterator, or a view of a dict."""
    return isinstance(node, Iterator | MappingView)
