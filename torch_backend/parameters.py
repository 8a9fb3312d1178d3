"""Trees that go with parameters: gradients and updates, matched by key and checked, then set or
added.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from funcga._backend.prefixes import PrefixError, leaf_paths, outline, paths_apart, subtrees
from funcga._types import Array, Tree
from funcga.errors import FuncgaError, similar, uninitialised
from torch_backend import arrays, trees
from torch_backend.arrays import with_strides_of, without_overlap
from torch_backend.dtensor import is_dtensor, local, without_partials
from torch_backend.modules.checks import nothing_to_train


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Adds what `tx.update` returned to the parameters. Unlike `funcga.transforms.apply`, it runs
    no optimizer.

    The sum is computed in the wider of the two dtypes and rounded once, so that float32 updates of
    bfloat16 parameters lose nothing before. Where the updates are not needed themselves,
    `funcga.transforms.apply` spares both: it returns the parameters after the step.

    Args:
        params: A tree of tensors, such as `torch_backend.trainable(module)`.
        updates: A tree of the same structure and shapes; None leaves a parameter as it is.

    Returns:
        The new parameters, in the structure of `params` and in memory of their own. They are
        detached, unless this is a part of a loss that is differentiated.

    Raises:
        FuncgaError: The two differ in structure or shape; the error names the paths.

    Example:
        >>> params = {"w": torch.ones(2)}
        >>> torch_backend.apply_updates(params, {"w": torch.full((2,), -0.5)})
        {'w': tensor([0.5000, 0.5000])}
    """
    leaves, structure = trees.flatten(params)
    additions = _additions(leaves, params, updates)
    # Inside of a loss that is differentiated, the sum is a part of it.
    with nullcontext() if arrays.in_transform() else torch.no_grad():
        return trees.unflatten(structure, _sums(leaves, additions))


def added(params: Tree, updates: Tree, state: Tree, donate: bool) -> Tree:
    """The params with the updates added; in place if they are donated and share no memory with
    the state.
    """
    if not donate or arrays.in_transform():
        return apply_updates(params, updates)
    leaves, structure = trees.flatten(apart(params, state))
    additions = _additions(leaves, params, updates)
    with torch.no_grad():
        return trees.unflatten(structure, [*map(_written, leaves, _sums(leaves, additions))])


def narrowed(wide: Tree, params: Tree, donate: bool) -> Tree:
    """The params that were `widened` and updated, in their own dtypes; in their memory if that
    is donated.
    """
    leaves, structure = trees.flatten(params)
    narrow = matched(wide, params, "params")
    for index, (leaf, updated) in enumerate(zip(leaves, narrow, strict=True)):
        if isinstance(leaf, torch.Tensor) and updated.dtype != leaf.dtype:
            narrow[index] = _written(leaf, updated) if donate else updated.to(leaf.dtype)
    return trees.unflatten(structure, narrow)


def _written(leaf: Array, updated: Array) -> Array:
    """The parameter, in no graph, with the numbers of another tensor."""
    return leaf.detach().copy_(updated) if isinstance(leaf, torch.Tensor) else leaf


def apart(params: Tree, other: Tree) -> Tree:
    """The params, to be written to: copies where they lie in the memory of another one, or of a
    tensor elsewhere.
    """
    leaves, structure = trees.flatten(params)
    others = {*storages(other)}
    separate = without_overlap(
        [leaf.detach() if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    )
    for index, (leaf, tensor) in enumerate(zip(leaves, separate, strict=True)):
        if tensor is None:
            separate[index] = leaf
        elif not others.isdisjoint(storages(tensor)):
            separate[index] = tensor.clone()
    return trees.unflatten(structure, separate)


def storages(tree: Tree) -> set[int]:
    """The addresses of the memory of the dense tensors in a tree."""
    addresses = set()
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        # The usual containers are walked here, which is much faster than flattening them.
        if isinstance(node, dict):
            nodes += node.values()
        elif isinstance(node, tuple | list):
            nodes += node
        elif isinstance(node, torch.Tensor):
            shard: torch.Tensor = node if type(node) is torch.Tensor else local(node)
            if shard.layout is torch.strided:
                addresses.add(shard.untyped_storage().data_ptr())
        elif node is not None and trees.children(node) is not None:
            nodes += trees.flatten(node)[0]
    return addresses


def _additions(leaves: list[Array], params: Tree, updates: Tree) -> list[Array]:
    """The updates in the order of the leaves, checked."""
    additions = matched(updates, params, "updates")
    for index, (leaf, update) in enumerate(zip(leaves, additions, strict=True)):
        if update is not None and not _is_addable(leaf, update):
            path = leaf_paths(params, trees)[index]
            raise FuncgaError(
                f"`updates{path}` is {described(update)}, and `params{path}` is {described(leaf)}. "
                "An update is a tensor of its parameter's shape, or None: updates, state = "
                "tx.update(grads, state, params), of these params."
            )
    return additions


def _is_addable(leaf: object, update: object) -> bool:
    if not (isinstance(leaf, torch.Tensor) and isinstance(update, torch.Tensor)):
        return False
    return leaf.shape == update.shape and is_dtensor(leaf) == is_dtensor(update)


def _sums(leaves: list[Array], additions: list[Array]) -> list[Array]:
    if leaves and all(map(_is_plain, leaves, additions)):
        # One launch for all, where a device has that.
        return list(torch._foreach_add(leaves, additions))
    return [_sum(leaf, update) for leaf, update in zip(leaves, additions, strict=True)]


def _is_plain(leaf: Array, update: Array) -> bool:
    """Whether the sum needs no cast, no collective and no copy."""
    return type(leaf) in PLAIN and type(update) in PLAIN and bool(leaf.dtype == update.dtype)


PLAIN = {torch.Tensor, nn.Parameter}


def _sum(leaf: Array, update: torch.Tensor | None) -> Array:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (
        leaf.clone() if update is None else (leaf + without_partials(update, leaf)).to(leaf.dtype)
    )


def assign_grads(params: Tree, grads: Tree) -> None:
    """Sets `.grad` of every parameter to its gradient, for `optimizer.step()` to find. Unlike
    `apply_updates` and `funcga.transforms.apply`, it changes no parameter.

    What was there before is replaced, not added to. The gradients are the parameters' from then on,
    and `clip_grad_norm_` writes to them. Copied are those in other strides than their parameters,
    expanded ones among them, and those in the memory of another gradient: torch.func.grad may
    return one tensor for two parameters. The others are not copied.

    Args:
        params: A module, whose gradients are `{name: gradient}`, without those of frozen
            parameters. Or a tree of parameters, such as `torch_backend.trainable(module)` or
            `list(module.parameters())`, whose gradients have its structure, with None for frozen
            ones.
        grads: The gradients, in the parameters' shapes and dtypes, where these lie; DTensors for
            DTensors.

    Raises:
        FuncgaError: The two do not match; a gradient is of a frozen parameter, which an optimizer
            would move with it; or of a tensor that no optimizer steps, as those of state_dict().
            Nothing is set then.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_fn = lambda model, x, y: F.mse_loss(model(x), y)
        >>> gradient = torch_backend.module_value_and_grad(model, loss_fn)
        >>> loss, grads = funcga.accumulate(gradient, n=4)(torch.randn(10, 3), torch.randn(10, 1))
        >>> torch_backend.assign_grads(model, grads)
        >>> optimizer.step()
    """
    # The three lists go together: the path of each parameter, the parameter, and its gradient.
    if isinstance(params, nn.Module):
        paths, parameters, gradients = _of_module(params, grads)
    else:
        params = list(params) if isinstance(params, Iterator) else params
        grads = list(grads) if isinstance(params, list) and isinstance(grads, tuple) else grads
        paths, parameters = leaf_paths(params, trees), trees.flatten(params)[0]
        gradients = matched(grads, params, "grads")
    # All is checked before the first gradient is set.
    for path, parameter, grad in zip(paths, parameters, gradients, strict=True):
        if parameter is not None or grad is not None:
            _check_settable(path, parameter, grad)
    check_gradients(gradients, parameters, lambda: paths, _dtype_advice)
    pairs = zip(gradients, parameters, strict=True)
    laid = [
        None if grad is None else with_strides_of(grad.detach(), parameter)
        for grad, parameter in pairs
    ]
    for parameter, grad in zip(parameters, without_overlap(laid), strict=True):
        if parameter is not None:
            parameter.grad = grad


def _of_module(module: nn.Module, grads: Tree) -> tuple[list[str], list[Array], list[Array]]:
    """The paths, the parameters of a module, and their gradients."""
    parameters = dict(module.named_parameters())
    if not isinstance(grads, Mapping):
        remedy = _unpacked(grads) or "Give params in the structure of grads instead of a module."
        raise FuncgaError(
            f"grads are {arrays.describe(grads)}, and those of a module are {{name: gradient}}, as "
            f"they come from step(torch_backend.trainable(module), ...). {remedy}"
        )
    # Frozen parameters need no gradient; every gradient needs a parameter.
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not trained and not grads:
        raise nothing_to_train(module)
    for name in grads:
        if name not in parameters:
            raise FuncgaError(
                f"`grads[{name!r}]` is of no parameter of the module{similar(name, parameters)}. "
                "Their names are those of dict(module.named_parameters())."
            )
    missing = [name for name in trained if name not in grads]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FuncgaError(
            f"`grads[{missing[0]!r}]` is missing{more}, and the module trains it: its .grad would "
            "be that of an earlier step. Give None where there is no gradient, or freeze it: "
            "parameter.requires_grad_(False)."
        )
    return (
        [f"[{name!r}]" for name in parameters],
        [*parameters.values()],
        [grads.get(name) for name in parameters],
    )


def _check_settable(path: str, parameter: object, grad: object) -> None:
    """Raises FuncgaError for what has no `.grad` that an optimizer would look at, or is frozen
    and has a gradient.
    """
    if not isinstance(parameter, torch.Tensor) or not parameter.is_leaf:
        graph = " with a grad_fn" if isinstance(parameter, torch.Tensor) else ""
        raise FuncgaError(
            f"`params{path}` is {described(parameter)}{graph}, which has no .grad that an "
            "optimizer would look at. Give the module, or the parameters that the optimizer was "
            "given: dict(module.named_parameters())."
        )
    if is_lazy(parameter):
        raise uninitialised(f"params{path}")
    if grad is None or parameter.requires_grad:
        return
    if isinstance(parameter, nn.Parameter):
        raise FuncgaError(
            f"`params{path}` is frozen, requires_grad=False, and `grads{path}` is a gradient, with "
            "which an optimizer would move it. Take the gradients of the parameters that are "
            "trained: assign_grads(module, grads) of step(torch_backend.trainable(module), ...). "
            "Or unfreeze it: parameter.requires_grad_(True)."
        )
    raise FuncgaError(
        f"`params{path}` is {described(parameter)} that does not require a gradient, so that no "
        "optimizer steps it: it is a gradient, or a detached copy, such as state_dict() has. The "
        "parameters come first, and are those that the optimizer was given: "
        "assign_grads(dict(module.named_parameters()), grads)."
    )


def _dtype_advice(grad: torch.Tensor, parameter: torch.Tensor) -> str | None:
    wanted = parameter.grad_dtype
    if wanted in (None, grad.dtype):
        return None
    return (
        f"Fold to the parameter's dtype: funcga.mean(out_dtype={wanted}); or, for an optimizer "
        "that computes in both, let the parameter have such a gradient: parameter.grad_dtype = "
        f"{grad.dtype}."
    )


def matched(tree: Tree, like: Tree, name: str, like_name: str = "params") -> list[Tree]:
    """What a tree has at each leaf of another one, in the order of that one's leaves.

    Children are matched by key, so the order of a dict does not matter. Raises FuncgaError, with
    the paths, for a key that only one of the two has.
    """
    # Parameters are usually a dict of tensors, which is matched much faster than a tree.
    is_flat = type(like) is dict and all(
        issubclass(kind, torch.Tensor) for kind in {*map(type, like.values())}
    )
    if is_flat and type(tree) is dict and like.keys() == tree.keys():
        return [tree[key] for key in like]
    try:
        return subtrees(tree, like, trees)
    except PrefixError as error:
        raise FuncgaError(_mismatch(error, name, like_name)) from None


def _mismatch(error: PrefixError, name: str, like_name: str) -> str:
    # A leaf in the place of a container has no keys to compare.
    branches, wanted = (
        trees.children(error.tree),
        [key for key, _ in trees.children(error.prefix) or ()],
    )
    missing, unexpected = paths_apart(wanted, [key for key, _ in branches or ()])
    problems = [f"`{name}{error.path}{key}` is missing" for key in missing]
    problems += [f"`{name}{error.path}{key}` is not expected" for key in unexpected]
    if branches is None:
        problems = [f"`{name}{error.path}` is {arrays.describe(error.tree)}"]
    none = ", with None where there is no gradient." if name == "grads" else "."
    remedy = _unpacked(error.tree) or f"Give {name} the same structure{none}"
    return (
        f"{name} and {like_name} differ in structure: "
        f"{', '.join(problems[:4])}{', ...' if len(problems) > 4 else ''}. "
        f"`{like_name}{error.path}` is {outline(error.prefix, trees)}. {remedy}"
    )


def _unpacked(tree: Tree) -> str:
    """The line to write for what may be all that a step returns, a pair; "" for anything else."""
    is_pair = isinstance(tree, tuple) and len(tree) == 2
    return (
        "Unpack what a step returns: loss, grads = step(...), and give the gradients alone."
        if is_pair
        else ""
    )


def check_gradients(
    grads: Sequence[object],
    parameters: Sequence[torch.Tensor | None],
    paths: Callable[[], list[str]],
    dtype_advice: Callable[[torch.Tensor, torch.Tensor], str | None],
) -> None:
    """Raises FuncgaError, which says what to do, for a gradient that is not its parameter's;
    None is one of any.
    """
    for index, (grad, parameter) in enumerate(zip(grads, parameters, strict=True)):
        advice = None if grad is None else _advice(grad, parameter, dtype_advice)
        if advice:
            path = paths()[index]
            raise FuncgaError(
                f"`grads{path}` is {described(grad)}, and `params{path}` is "
                f"{described(parameter)}. {advice}"
            )


def _advice(
    grad: object,
    parameter: torch.Tensor | None,
    dtype_advice: Callable[[torch.Tensor, torch.Tensor], str | None],
) -> str | None:
    """What to do about a gradient that is not its parameter's; None if it is."""
    if not isinstance(grad, torch.Tensor):
        return "Give a tensor, or None where there is no gradient."
    if parameter is None or grad.shape != parameter.shape:
        return (
            "A gradient has its parameter's shape: give the parameters that it was computed for, "
            "and the gradients alone of loss, grads = step(...)."
        )
    if grad.device != parameter.device:
        return f"Move it: grad.to({str(parameter.device)!r})."
    if is_dtensor(grad) != is_dtensor(parameter):
        return (
            _OF_DTENSOR
            if is_dtensor(parameter)
            else "The parameter lies on one device: grad.full_tensor()."
        )
    return dtype_advice(grad, parameter)


_OF_DTENSOR = (
    "The gradient of a DTensor is one: distribute_tensor(grad, parameter.device_mesh, "
    "parameter.placements), or take those of torch_backend.module_value_and_grad(module, loss_fn), "
    "which are."
)


def described(leaf: object) -> str:
    """A leaf, as errors call it: `float32[8, 3]`, whether it is a DTensor, and where it lies if
    not on the CPU.
    """
    if not isinstance(leaf, torch.Tensor):
        return arrays.describe(leaf)
    device = "" if leaf.device.type == "cpu" else f" on {leaf.device}"
    return f"{'a DTensor ' if is_dtensor(leaf) else ''}{arrays.describe(leaf)}{device}"


def check_parameters(leaves: Sequence[Array], params: Tree) -> None:
    """Raises FuncgaError for what no optimizer can change: anything but tensors of floating
    point numbers, or None.
    """
    for index, leaf in enumerate(leaves):
        if type(leaf) in PLAIN and leaf.dtype.is_floating_point:  # as most are
            continue
        if is_lazy(leaf):
            raise uninitialised(leaf_paths(params, trees, "params")[index])
        if leaf is None or (
            isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ):
            continue
        raise FuncgaError(
            f"`params{leaf_paths(params, trees)[index]}` is {arrays.describe(leaf)}: parameters "
            "are tensors of floating point or complex numbers. Leave it out, or put None there; a "
            "module's are torch_backend.trainable(module)."
        )
