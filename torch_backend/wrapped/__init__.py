"""The gradients of a module's own parameters, also where the module is wrapped to reduce them: DDP,
FSDP.

Only torch has this package: models of JAX are functions of their parameters.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Concatenate, overload

import torch
from torch import nn

from funcga._call import Memory
from funcga._types import GradFn, LossFn, P, R
from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.modules.checks import wrapper_kind_of
from torch_backend.wrapped.ddp import Wrapper
from torch_backend.wrapped.gradient import ModuleGradient
from torch_backend.wrapped.window import WrappedGradient


@overload
def module_value_and_grad(
    module: nn.Module,
    loss_fn: Callable[Concatenate[Any, P], R],
    *,
    has_aux: bool = False,
    sync: str = "last",
) -> Callable[P, tuple[R, dict[str, torch.Tensor]]]: ...
@overload
def module_value_and_grad(
    module: nn.Module, loss_fn: LossFn, *, has_aux: bool = False, sync: str = "last", scaled: bool
) -> Callable[..., tuple[Any, dict[str, torch.Tensor]]]: ...
def module_value_and_grad(
    module: nn.Module,
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    sync: str = "last",
    scaled: bool = False,
) -> GradFn:
    """`f(*batch) -> (value, {name: gradient})`, or `((value, aux), {name: gradient})`, of
    `loss_fn(module, *batch)`.

    For `accumulate` and `stream`. All arguments are split, unless in_axes says otherwise. Called by
    itself, f is one micro-batch. The parameters and their `.grad`s are as before, whatever happens.
    Buffers are the module's, and its forward passes write to them as in any loop.

    A module that nothing wraps is differentiated as by `funcga.value_and_grad`, at the same cost:
    any fold, and sums in at least float32.

    A module that DDP or FSDP wraps is run as its wrapper needs it. Weights count over the
    micro-batches of all replicas, whatever each has, although the wrappers average: the result is
    that of the whole batch on one device, and the same on every replica. The wrapper's flags are as
    before, whatever happens. The gradients' fold is a sum: mean(), per_weight(), sum(), or
    Fold(reducers.weighted, normalizers.by_steps); that of value and aux is any.

    Replicas may have different numbers of micro-batches. With FSDP, whose forward passes
    communicate, and with sync="every", those with fewer run passes that add nothing. So does one
    without any row, whose batch is empty: over a row of zeros. A stream cannot, and needs a
    micro-batch on every replica. A stream holds one micro-batch more than otherwise, as it looks
    for the last. The weight is the cotangent of a micro-batch's loss, which a loss in float16 may
    not hold: return it in float32.

    Args:
        module: wrapped by DistributedDataParallel, FullyShardedDataParallel (HYBRID_SHARD too),
            fully_shard (a mesh of two dimensions too) or replicate, or by nothing: then it is a
            gradient of this process alone, and across= merges over replicas.
        loss_fn: returns a scalar, or (scalar, aux) with has_aux.
        has_aux: whether loss_fn returns (scalar, aux).
        sync: when the gradients are reduced over the replicas. "last": in the last micro-batch of a
            window alone, the least traffic. FSDP1 and FSDP2 then hold an unsharded gradient from
            the first micro-batch on: as much as all parameters take, in FSDP2's reduce_dtype.
            "every": in every micro-batch, n times the traffic; gradients stay sharded. "outer": for
            fully_shard with a mesh of two dimensions. Every micro-batch reduce-scatters over the
            inner one, and the last all-reduces the shards over the outer one.
        scaled: f takes one keyword argument more, `loss_scale`, as in `funcga.value_and_grad`; but
            the backward pass of a wrapped module begins with the weight times that, as the weight
            is the cotangent: weigh in units of a micro-batch, such as weight=lambda x, y: len(x) /
            32, so that a weight is about 1.

    Returns:
        A gradient function. The gradients are those of `dict(module.named_parameters())` that
        require grad, in the shapes that these have on this replica, DTensors for fully_shard; zeros
        where the loss does not depend on one.

    Raises:
        FuncgaError: for what a wrapper cannot do: folds that are no sums, and 16-bit sums where the
            fold promises 32.

    Example:
        >>> model = nn.Linear(3, 2)  # or one wrapped by DistributedDataParallel, fully_shard, ...
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> loss_fn = lambda model, x, y: F.cross_entropy(model(x), y)
        >>> gradient = torch_backend.module_value_and_grad(model, loss_fn)
        >>> step = funcga.accumulate(gradient, n=4)
        >>> loss, grads = step(torch.randn(10, 3), torch.randint(2, (10,)))
        >>> torch_backend.assign_grads(model, grads)
        >>> optimizer.step()
    """
    if sync not in ("last", "every", "outer"):
        raise FuncgaError(
            f'sync is {sync!r}. Write sync="last", to synchronise once a window, sync="every", to '
            'do so in every micro-batch, or sync="outer", for a mesh of two dimensions.'
        )
    wrapper = wrapper_of(module, sync)
    # These checks read most of the private attributes that a window needs. If this version of torch
    # lacks one, the error comes here, and not in the middle of a window.
    try:
        wrapper.check()
        if not wrapper.wrapped:
            return ModuleGradient(loss_fn, 0, has_aux, True, scaled, module=module)
        check_covered(module, wrapper)
    except AttributeError as error:
        raise FuncgaError(
            f"{wrapper.name} of torch {torch.__version__} has no `{error.name}`, without which its "
            f"gradients cannot be summed over a window. Use torch {_private.TRIED}; or let funcga "
            "reduce: accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), "
            "n, across=group), with the module that was wrapped."
        ) from error
    memory = Memory(options={"sync=": repr(sync)})
    return WrappedGradient(
        loss_fn, 0, has_aux, True, scaled, memory=memory, module=module, wrapper=wrapper
    )


def wrapper_of(module: nn.Module, sync: str) -> Wrapper:
    """What knows how the module is wrapped, if anything wraps it."""
    wrapped = [*_outermost(module)]
    kinds = {kind.name: kind for part in wrapped if (kind := wrapper_kind_of(part)) is not None}
    if len(kinds) > 1:
        raise FuncgaError(
            f"parts of the module are wrapped by {' and '.join(sorted(kinds))}, which reduce "
            "gradients in different ways. Wrap all of it in one of them."
        )
    for kind in kinds.values():
        # The file of a wrapper is loaded only when a module is wrapped: its imports take time.
        file, class_name = kind.wrapper.split(":")
        wrapper: Wrapper = vars(import_module(file))[class_name](wrapped, kind.name, sync)
        return wrapper
    return Wrapper(wrapped, "a module that is not wrapped", sync)


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that are wrapped and are not inside of another wrapped one."""
    if wrapper_kind_of(module) is not None:
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def check_covered(module: nn.Module, wrapper: Wrapper) -> None:
    """Raises FuncgaError if a parameter is trained that the wrapper does not reduce."""
    covered = wrapper.covered()
    for name, p in module.named_parameters():
        if p.requires_grad and id(p) not in covered:
            raise FuncgaError(
                f"`{name}` is trained and is not among what {wrapper.name} reduces, as only other "
                "parts of the module are wrapped, or it was ignored: replicas would drift apart. "
                "Wrap the whole module, or freeze it: parameter.requires_grad_(False)."
            )
