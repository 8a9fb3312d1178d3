"""The gradient function of a pipeline's stages.

Only torch has this file: in JAX stages are axes of a mesh in one program.
"""

import inspect
from dataclasses import dataclass

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.supported import PIPELINE
from funcga._types import Across, GradFn
from funcga.errors import FuncgaError
from torch_backend.modules.checks import check_wrapped_before
from torch_backend.pipeline.schedule import Pipeline
from torch_backend.pipeline.window import PipelineWindow
from torch_backend.wrapped.ddp import Wrapper
from torch_backend.wrapped.gradient import ModuleGradient


@dataclass(frozen=True, eq=False)
class PipelineGradient(ModuleGradient):
    """The gradient function of the stages that this process has. Made by `pipeline_value_and_grad`.

    `module` has the stages by their indices, and `wrapper` is what wraps them; None if nothing
    does.
    """

    pipeline: Pipeline
    n_microbatches: int | None
    wrapper: Wrapper | None

    @property
    def kind(self) -> str:
        """Its row of the table of what is supported."""
        return PIPELINE

    @property
    def __signature__(self) -> inspect.Signature | None:
        return None  # the arguments are the first stage's, and a target

    def window(self, program: Program, backend: Backend, alone: bool = False) -> PipelineWindow:
        """One window of a program with this gradient function; one that is `alone` has a single
        micro-batch.
        """
        self.check_not_traced()
        if self.wrapper is None:
            check_wrapped_before(self.module)
        return PipelineWindow(
            program, self, backend, self.pipeline, self.n_microbatches, self.wrapper
        )

    def merged_over(self, across: Across) -> Across:
        """The wrapper's own replicas, or those of across=."""
        return across if self.wrapper is None else self.wrapper.replicas(across)

    def check_counted(self, grad_fn: GradFn) -> None:
        """Raises FuncgaError for a function around it, which is called for each micro-batch
        alone.
        """
        if grad_fn is not self:
            raise FuncgaError(
                "totals= was given, and grad_fn is a function around pipeline_value_and_grad, "
                "which runs a schedule for each micro-batch alone. Write accumulate(gradient, n, "
                "totals=totals), with the gradient function itself."
            )
