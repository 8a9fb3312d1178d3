"""The gradient function of a module's own parameters.

Only torch has this file: models of JAX are functions of their parameters.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from funcga._backend import Backend
from funcga._backend.dispatch import load
from funcga._call import Memory, OwningGradient
from funcga._call.arguments import Arguments, argument_names
from funcga._grad import GradientFunction
from funcga._types import Args, Kwargs, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.engine.alone import value_of
from torch_backend.engine.called import calling
from torch_backend.engine.leaves import Own
from torch_backend.modules.checks import check_not_wrapped, signature_with
from torch_backend.modules.layers import Walk, buffers_of, put_back


@dataclass(frozen=True, eq=False, kw_only=True)
class ModuleGradient(GradientFunction, OwningGradient):
    """The gradient function of the parameters of a module that nothing wraps. Made by
    `module_value_and_grad`. The loss takes the module in the place of its parameters.
    """

    module: nn.Module

    @property
    def __signature__(self) -> inspect.Signature | None:
        return signature_with(self.loss_fn, [])

    @property
    def options(self) -> dict[str, str]:
        """When it reduces, where the module is wrapped."""
        return self.memory.options

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """The value and the gradients of one micro-batch."""
        self.check_not_traced()
        if calling.microbatch is not None:
            _check_cut(*calling.microbatch, rows_in((args, kwargs)))
        return self._alone(load("torch"), args, kwargs)

    def _alone(self, backend: Backend, args: Args, kwargs: Kwargs) -> Tree:
        """The value and the gradients of a single micro-batch."""
        return value_of(self, backend, args, kwargs, own=self.own_in(self.memory))

    def own_in(self, memory: Memory) -> Own:
        """The module, and the parameters that are trained now, for a step with this memory."""
        self.prepare()
        walk = memory.keep(Walk)
        return Own(self.module, *walk.trainable(self.module), walk)

    def prepare(self) -> None:
        """Lets the module have the parameters that get gradients. Raises FuncgaError if nobody
        would reduce these.
        """
        check_not_wrapped(self.module)

    def snapshot(self) -> Callable[[], None]:
        """The buffers as they are now, such as BatchNorm's running statistics; calling it puts
        them back.
        """
        return partial(put_back, buffers_of(self.module))

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of the module."""
        return self.module.parameters()

    def unreached(self, count: int) -> FuncgaError:
        """The error for a loss that depends on no parameter of the module."""
        return FuncgaError(
            "the loss does not depend on any parameter of the module: nothing would be trained. "
            "loss_fn uses another module, that it closes over, or it detaches what it computes. "
            "Call the module that it is given: lambda module, x, y: F.mse_loss(module(x), y)."
        )

    def check_not_traced(self) -> None:
        """Raises FuncgaError inside of torch.compile, and of a transform of torch.func."""
        is_traced = torch.compiler.is_compiling() or arrays.in_transform()
        # Without torch._dynamo nothing is compiled.
        if is_traced or ("torch._dynamo" in sys.modules and callable(_private.compiling())):
            raise FuncgaError(
                "module_value_and_grad runs .backward() on the module's own parameters, which can "
                "be neither compiled nor transformed by torch.func. Compile the module, or "
                "loss_fn; inside of a transform use "
                "funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn))."
            )


def rows_in(tree: Tree) -> list[int]:
    """How many rows the tensors of a tree have."""
    return [len(tensor) for tensor in trees.tensors_in(tree) if tensor.ndim]


def _check_cut(arguments: Arguments, args: Args, rows: list[int]) -> None:
    """Raises FuncgaError if a function around a gradient function passes on what should have been
    cut.

    `args` are those of a micro-batch, cut from all but the first of `arguments`. `rows`: of what is
    passed on.
    """
    of_batch, of_microbatch = rows_in([leaf for leaf, _ in arguments]), rows_in(args[1:])
    # A micro-batch of a stream is not cut, and neither is the only one of a batch.
    if not of_batch or of_batch[0] == of_microbatch[0]:
        return
    if of_batch[0] in rows and of_batch[0] in rows_in(args[0]):
        count = len(args)
        raise FuncgaError(
            f"grad_fn calls the gradient function of a module with {of_batch[0]} rows, those of "
            f"the whole batch, in a micro-batch of {of_microbatch[0]}. Without in_axes its first "
            f"argument, `{argument_names(arguments.grad_fn, count)[0]}`, is passed whole, and only "
            "the others are split. Split it too: accumulate(grad_fn, n, in_axes=0); or say that it "
            f"is no part of the batch: in_axes={(None,) + (0,) * (count - 1)}."
        )
