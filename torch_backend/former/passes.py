"""How the two passes of one micro-batch run: the loss forwards, and backwards to the leaves.

Only torch has this file: JAX differentiates a program.

What a user's loss may do is far more than a call and a `.backward()`: run under autocast, be given
tensors by functional_call and run parts of itself again in the backward pass (checkpoints), apply
functions written in Python that run backward passes of their own, be in inference mode. All of that
is dealt with here, once, for whoever runs passes, whatever becomes of the gradients.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from funcga._call.arguments import Arguments
from funcga._grad import GradientFunction, evaluations, scaled_loss
from funcga._types import Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays
from torch_backend.arrays import recording_loss
from torch_backend.engine import graphs
from torch_backend.engine.guards import recompute
from torch_backend.engine.plan import run_of
from torch_backend.former.foreign_leaves import gradients_aside
from torch_backend.former.inputs import Inputs, Leaves, tensors_of
from torch_backend.gradients import is_constant, switched_off

_T = TypeVar("_T")
_NOTHING = nullcontext()
_GRAD, _IS_CPU = operator.attrgetter("grad"), operator.attrgetter("is_cpu")


@dataclass(eq=False)
class Pass:
    """Runs the passes of each micro-batch of a window. A context that lasts as long as the window.

    `begin` makes the leaves. Then, for each micro-batch, in the context `inputs.visit`: `forward`,
    and `backwards`, in which the backward pass runs: by `run`, or by `run_by_hand` where the graph
    has functions written in Python. In the common case LentSums.add runs the pass directly.

    `is_uninterrupted`: whether a visit to a module may last for the window, as no code of the
    user's runs between two micro-batches. `stack`: the contexts that last as long as the window.
    `autocast`: the types of devices that it is on for. `on_host`: whether all leaves are there.
    `runner`: how a backward pass is run, by autograd alone or by a tool. `seen`: what modules had
    in forward passes, where functional_call may take it out again.
    `arrivals` watches the pass for a first gradient.
    """

    inputs: Inputs
    is_uninterrupted: bool = False
    stack: ExitStack = field(default_factory=ExitStack, init=False)
    autocast: Sequence[str] = field(default=(), init=False)
    runner: Callable[..., None] = field(default_factory=lambda: graphs.run, init=False)
    seen: recompute.Seen = field(default_factory=recompute.none_seen, init=False)
    has_begun = on_host = False

    def __enter__(self) -> Self:
        if torch.is_inference_mode_enabled():
            # Tensors made in inference mode can never have a gradient, so the whole window runs
            # outside of it.
            self.stack.enter_context(torch.inference_mode(False))
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)
        # Autocast caches a cast of each leaf. The leaves end with the window, and the casts would
        # outlive them.
        if _private.is_any_autocast_enabled():
            torch.clear_autocast_cache()

    def begin(
        self, arguments: Arguments, args: tuple[Tree, ...], stays: bool, fuses: bool = False
    ) -> None:
        """Makes the leaves that last as long as the window; `stays` as in `Inputs.begin`. `fuses`:
        whether their gradients are summed, so that those of large weights may be fused.
        """
        self.has_begun = True
        self.inputs.begin(arguments, args, self.stack, stays and self.is_uninterrupted)
        leaves = self.inputs.tensors
        if _private.is_any_autocast_enabled():
            self.autocast = autocasting({leaf.device.type for leaf in leaves})
        self.on_host = all(map(_IS_CPU, leaves))
        if fuses:
            self.runner = run_of(leaves, self.inputs.hooked)

    # --- the forward pass

    def forward(
        self, loss_fn: Callable[..., Any], args: list[Tree], kwargs: dict[str, Tree]
    ) -> tuple[torch.Tensor, Tree, torch.Tensor]:
        """(the loss, its aux, the loss times its scale, which is differentiated)."""
        scale, gradient = None, self.inputs.gradient
        # Watches for a first gradient, until a leaf has got one.
        self.arrivals: Arrivals | None = None if gradient.reached else Arrivals(gradient)
        if kwargs or gradient.scaled:
            scale, kwargs = gradient.read_scale(kwargs, self.inputs.backend)
        noted = (
            _NOTHING if self.inputs.are_in_module else recompute.noted(self.seen, leaves_of(self))
        )
        enabled = _NOTHING if torch.is_grad_enabled() else torch.enable_grad()
        with recording_loss(), enabled, noted:
            loss, aux = loss_fn(*args, **kwargs), None
            # The usual output is a plain scalar. Anything else is split, and checked, by the
            # gradient function.
            is_real_scalar = (
                type(loss) is torch.Tensor and not loss.ndim and loss.dtype.is_floating_point
            )
            if gradient.has_aux or not is_real_scalar:
                loss, aux = gradient.split(loss, self.inputs.backend)
            return loss, aux, loss if scale is None else scaled_loss(loss, scale, arrays)

    # --- the backward pass

    def backwards(self, leaves: Mapping[int, Leaves], run: Callable[[], _T]) -> _T:
        """What `run()` returns, which runs the backward pass of the last loss to these leaves."""
        # A checkpoint runs parts of the loss again: it needs the parameters in the module then.
        with recording_loss():
            try:
                # Hooks are put on the leaves only now: a loss that has switched one off is found
                # out here at once.
                if self.arrivals is not None:
                    self.arrivals.watch(tensors_of(leaves))
                return run()
            except BaseException as error:
                if self.arrivals is not None:
                    self.arrivals.end()
                if isinstance(error, RuntimeError) and not all(
                    leaf.requires_grad for leaf in tensors_of(leaves)
                ):
                    raise switched_off() from error
                raise

    def run(
        self, loss: torch.Tensor, seed: float | torch.Tensor, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        """`torch.autograd.backward(loss, seed, inputs=inputs)`, outside of autocast: that is for
        the forward pass.
        """
        if isinstance(seed, torch.Tensor):
            cotangent = seed.to(loss.device, loss.dtype).expand_as(loss)
        else:
            cotangent = torch.full_like(loss, seed, requires_grad=False)
        with ExitStack() as outside:
            for device in self.autocast:
                outside.enter_context(torch.autocast(device, enabled=False))
            on_host = self.on_host and loss.is_cpu
            if self.inputs.are_in_module:
                self.runner(loss, cotangent, inputs, on_host)
            else:
                watch = recompute.Watch(self.seen, leaves_of(self), on_host)
                watch.run(self.runner, loss, cotangent, inputs, on_host, custom=not inputs)

    def run_by_hand(
        self,
        loss: torch.Tensor,
        seed: float | torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
        foreign: list[torch.Tensor],
    ) -> None:
        """`torch.autograd.backward(loss, seed)`, and no leaf but the inputs has another `.grad`
        afterwards.

        Functions written in Python may run backward passes of their own, as a reentrant checkpoint
        does. A pass that is restricted to the leaves skips such a function silently if none of its
        inputs leads to a leaf, and some functions refuse a restricted pass. So the whole pass is
        run, as a hand-written loop would run it. `foreign`: the other leaves of the loss's graph.
        """
        around = self.inputs.surroundings
        by_id = {id(leaf): leaf for leaf in (*foreign, *around.leaves)}
        for leaf in inputs:
            by_id.pop(id(leaf), None)
        in_graph = {*map(id, foreign)}
        # What the whole pass leaves in the `.grad`s of others is read before they get their own
        # back.
        with gradients_aside([*by_id.values()]):
            self.run(loss, seed, ())
            written = [
                leaf for key, leaf in by_id.items() if leaf.grad is not None and key not in in_graph
            ]
        around.check(written)


def leaves_of(passes: Pass) -> list[torch.Tensor]:
    """The leaves that last as long as the window."""
    return passes.inputs.tensors


class Arrivals:
    """Notes in the gradient function whether the next backward pass reaches a leaf. Made before
    the loss is called.
    """

    def __init__(self, gradient: GradientFunction):
        self.gradient, self.evaluations = gradient, evaluations()
        self.hooks: list[tuple[torch.Tensor, RemovableHandle]] = []

    def watch(self, leaves: Sequence[torch.Tensor]) -> None:
        """Puts hooks on the leaves."""
        for leaf in leaves:
            self.hooks.append((leaf, leaf.register_hook(self.note)))  # type: ignore[no-untyped-call]

    def note(self, _: torch.Tensor) -> None:
        """Notes a gradient."""
        self.gradient.reached.add(True)

    def end(self) -> None:
        """Takes the hooks away again. They may be on the parameters of a module."""
        for leaf, hook in self.hooks:
            _private.remove_hook(leaf, hook)

    def are_missed(self, loss: torch.Tensor, weight: Scalar, alone: bool) -> bool:
        """Whether a loss that reached no leaf is an error: it has a graph, or is a constant that
        nothing explains.

        Three things explain a constant: it is 0, as where all is masked; it has another gradient
        inside, such as that of a linear function; or other replicas have more micro-batches, so
        that this one is not `alone`.
        """
        self.end()
        if self.gradient.reached or not self.hooks or not float(weight):
            return False
        return loss.requires_grad or (
            alone and evaluations() == self.evaluations and is_constant(loss)
        )


def check_no_grads(leaves: Sequence[torch.Tensor]) -> None:
    """Raises FuncgaError if a loss, before any backward pass, has left a gradient in a leaf."""
    if {*map(type, map(_GRAD, leaves))} - {type(None)}:
        raise ran_backward()


def ran_backward() -> FuncgaError:
    """The error for a loss that runs a backward pass into its own parameters."""
    return FuncgaError(
        "loss_fn called .backward(): the gradients that it leaves in the parameters would be added "
        "to those of the loss. Return the loss and leave that to funcga; for a gradient inside of "
        "the loss use torch.autograd.grad or torch.func.grad."
    )


def autocasting(devices: Iterable[str]) -> list[str]:
    """The device types that autocast is on for, of the CPU and these."""
    return [
        type
        for type in {"cpu", *devices}
        if torch.amp.is_autocast_available(type) and torch.is_autocast_enabled(type)
    ]
