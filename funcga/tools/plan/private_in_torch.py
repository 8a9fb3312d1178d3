"""What a plan uses of torch that is private."""

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from torch_backend._private import ParamGroup, param_groups


def fake_mode() -> Any:
    """A mode in which nothing is allocated and no kernel runs."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_for_lack_of_numbers(error: BaseException) -> bool:
    """Whether an error is that of such a mode: it was asked for a number, or runs no such
    operator.
    """
    return type(error).__module__.startswith(("torch._subclasses", "torch.fx.experimental"))


def holders_of_fsdp2(module: Any) -> list[object]:
    """All objects whose attributes change in a pass, or hold tensors."""
    state, groups = module._get_fsdp_state(), param_groups(module)
    of_groups = [each for group in groups for each in (group, group.comm_ctx, *group.fsdp_params)]
    return [state, state._state_ctx, state._comm_ctx, *of_groups]


def forget_unsharded(group: ParamGroup) -> None:
    """Drops the unsharded parameters of a group, as if there had been no pass."""
    group._reset_sharded_params = True  # else it compares addresses of the shards
    for param in group.fsdp_params:
        param.all_gather_outputs, param._unsharded_inner_tensors = [], []
        vars(param).pop("_unsharded_param", None)
