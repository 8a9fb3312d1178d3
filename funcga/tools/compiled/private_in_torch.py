"""What the tool uses of torch that is private: how a compiled function was made, and what sees its
operations.
"""

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from funcga._types import TreeFn


class Compiled(NamedTuple):
    """What torch.compile has made of a `function`: `compile(other)` compiles another one with the
    same options.

    `compile_whole` compiles one as a whole, that is, it refuses what it cannot trace. `replays`:
    whether calls are captured as CUDA graphs.
    """

    function: TreeFn
    compile: Callable[[TreeFn], TreeFn]
    compile_whole: Callable[[TreeFn], TreeFn]
    replays: bool


def compiled_of(function: object) -> Compiled | None:
    """The Compiled of a function that torch.compile has made; None for any other.

    The function that it returns holds its options, in a variable of its own. Without that no
    function is known to be compiled: then autograd adds the gradients of a compiled loss.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")  # without it nothing is compiled
    if frames is None or not isinstance(function, types.FunctionType):
        return None
    marks = vars(function)
    # A function that wraps a compiled one by functools.wraps has the marks of that one.
    if "_torchdynamo_orig_callable" not in marks or marks.get("_torchdynamo_wrapper_id") != id(
        function
    ):
        return None
    try:
        context: Any = inspect.getclosurevars(function).nonlocals["self"]
        if not isinstance(context, frames.OptimizeContext):
            return None
        backend, dynamic = frames.innermost_backend(context.callback), context._dynamic
        guards = getattr(context._hooks, "guard_filter_fn", None)
        options = function.get_compiler_config() or {}  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError):
        return None

    def without_checkpoints(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> TreeFn:
        # A compiler that is given the backward pass too would keep what a checkpoint is to compute
        # again.
        modules = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        if any(
            "activation_checkpoint" in str(node.target)
            for module in modules
            for node in module.graph.nodes
        ):
            raise NotImplementedError("a checkpoint in a graph with its backward pass")
        return backend(graph, inputs)  # type: ignore[no-any-return]

    whole = torch._dynamo.optimize(
        backend=without_checkpoints, nopython=True, dynamic=dynamic, guard_filter_fn=guards
    )
    return Compiled(
        marks["_torchdynamo_orig_callable"], context, whole, bool(options.get("triton.cudagraphs"))
    )


def refusals_to_compile() -> tuple[type[Exception], ...]:
    """What torch.compile raises for a function that it cannot compile, before any of it has run."""
    errors = torch._dynamo.exc
    return errors.TorchDynamoException, errors.FailOnRecompileLimitHit


# How many modes there are that see every operation.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def saves_by_hooks() -> bool:
    """Whether hooks of `torch.autograd.graph.saved_tensors_hooks` are in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
