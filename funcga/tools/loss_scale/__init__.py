"""`loss_scaled`: a dynamic loss scale around an optimizer, for gradients in float16."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from funcga._backend import Arrays
from funcga._backend.dispatch import backend_of
from funcga._fold import LEAST32, check_quantity
from funcga._transform import DonatingTransform, Traits, Transform, wrapped_transform
from funcga._transform.apply import Step, UpdateFunction, traits_of
from funcga._types import Array, Kwargs, Tree
from funcga.errors import check_count
from funcga.tools.finite import finite, summed


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`: a tree of arrays that passes through jit, scan, torch.save and
    checkpoints.

    The counts are 0-d int32 arrays; in torch all but `inner` are on the CPU.

    Attributes:
        inner: The state of the wrapped transform.
        scale: What the next window's losses are to be multiplied by, a 0-d float32 array.
        growth: How many updates there have been since the scale last changed.
        skipped: How many windows were no update.

    Example:
        >>> sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=0.1)
        >>> tx = funcga.transforms.loss_scaled(sgd, init_scale=1024.0)
        >>> state = tx.init({"w": torch.ones(2)})
        >>> state.scale
        tensor(1024.)
    """

    inner: Tree
    scale: Array
    growth: Array
    skipped: Array


def loss_scaled(
    tx: Any,
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    across: Any = None,
) -> DonatingTransform:
    """A transform that divides gradients by the loss scale that they come with, and lets tx make an
    update of them.

    If a gradient is not finite, the updates are zeros, the state of tx stays what it is, and the
    scale is multiplied by backoff_factor; after growth_interval updates in a row, by growth_factor.
    That is torch.amp.GradScaler, step for step, with `unscale_`, `step` and `update` in one;
    transforms inside of tx, as clipping, see unscaled gradients.

    Inside of `multi_steps`, or after `accumulate`, a window has one scale, is looked at once, and
    is used or skipped as a whole: leave its `drop` alone, which would hide from the scale what is
    not finite. (A window that is skipped is an update of zeros to `multi_steps`.) The gradients of
    a window must all come with the scale of the state. On a CUDA device the host waits once an
    update, as GradScaler does. A schedule inside of tx does not count a window that is skipped,
    whereas `scheduler.step()` after `scaler.step(optimizer)` does.

    Source: Micikevicius et al. (2018), "Mixed precision training".

    Args:
        tx: Any pair of functions (init, update). What it sees, gradients and params, has floats of
            less than 32 bits as float32, and so have its state and the updates.
        init_scale: A finite number above 0; with a power of 2, and powers of 2 as factors, scaling
            loses nothing.
        growth_factor: A number above 1.
        backoff_factor: A number between 0 and 1.
        growth_interval: An int of at least 1.
        across: Replicas that hold different parts of the gradients, as those of FSDP1, or of a
            reduce-scatter in JAX, so that they skip a window together; as in `accumulate`. Merged
            gradients, and DTensors, need none.

    Returns:
        A transform (init, update), whose state is a LossScaledState.

    Raises:
        FuncgaError: A number is out of its range.

    Example:
        >>> params = {"w": jnp.ones(2, "float16")}
        >>> scaled = funcga.transforms.loss_scaled(optax.sgd(0.1), init_scale=1024.0)
        >>> tx = funcga.multi_steps(scaled, 8)
        >>> loss_fn = lambda params, x: (x * params["w"]).mean()
        >>> gradient = funcga.value_and_grad(loss_fn, scaled=True)
        >>> state = tx.init(params)
        >>> loss, grads = gradient(params, jnp.ones(2, "float16"), loss_scale=state.inner.scale)
        >>> updates, state = tx.update(grads, state, params)
    """
    above_1, share = "a finite number above 1", "a number between 0 and 1"
    check_quantity("init_scale", init_scale, "65536.0", least=LEAST32, most=_MOST)
    check_quantity("growth_factor", growth_factor, "2.0", above_1, least=1, most=_MOST)
    check_quantity("backoff_factor", backoff_factor, "0.5", share, most=1 - 2.0**-53)
    interval = check_count(growth_interval, "growth_interval")
    numbers = float(init_scale), float(growth_factor), float(backoff_factor)
    update = _ScaledUpdate(wrapped_transform(tx), *numbers, interval, across)
    return DonatingTransform(update.init, update)


_MOST = 2.0**127  # the largest power of two in float32


@dataclass(frozen=True, eq=False)
class _ScaledUpdate(UpdateFunction[Any]):
    """The `update` of one `loss_scaled`, with its choices."""

    tx: Transform
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    across: object

    @property
    def traits(self) -> Traits:
        """What it says of itself."""
        return traits_of(self.tx)._replace(scales=True)

    def init(self, params: Tree) -> LossScaledState:
        """The state before the first update."""
        backend = backend_of([params], lambda: ["params"])
        arrays = backend.arrays
        scale = arrays.as_array(self.init_scale, arrays.as_dtype("float32"))
        growth, skipped = (arrays.as_array(0, arrays.xp.int32) for _ in range(2))
        inner = self.tx.init(backend.transforms.widened(params)[0])
        return LossScaledState(inner, scale, growth, skipped)

    def stepped(
        self,
        owned: bool,
        into: bool | None,
        grads: Tree,
        state: Any,
        params: Tree,
        extra: Kwargs,
    ) -> tuple[Tree, LossScaledState]:
        """(result, state). If a gradient is not finite: zeros, or unchanged params, and a
        smaller scale.
        """
        backend = backend_of([state.scale, grads], lambda: ["state", "grads"])
        leaves, structure = backend.trees.flatten(grads)
        # Tested while scaled, and divided only if finite.
        is_finite = finite(leaves, backend)
        if self.across is not None:
            # All replicas skip the window if any has a gradient that is not finite.
            infinite = backend.arrays.as_array(~is_finite, backend.arrays.as_dtype("float32"))
            is_finite = summed(infinite, self.across, backend) == 0
        step, scaled = Step(self.tx, backend, owned, into), backend.states.scaled

        def run(inner: Tree, params: Tree, given: tuple[Any, ...]) -> tuple[Tree, Tree]:
            leaves, scale, extra = given
            scale = backend.arrays.scalar(scale)
            # In at least 32 bits.
            wide, _ = backend.transforms.widened(leaves)
            unscaled = scaled(wide, 1.0 / scale, owned)
            try:
                grads = backend.trees.unflatten(structure, unscaled)
                return step.run(inner, params, (grads, extra))
            except Exception:
                # Restore gradients that were divided in place.
                if owned:
                    scaled(unscaled, scale, donate=True)
                raise

        given = leaves, state.scale, extra
        is_finite = backend.arrays.scalar(is_finite)
        result, inner, used = step.when(is_finite, run, state.inner, params, given, grads)
        return result, self._adjusted(state, inner, backend.arrays.as_array(used), backend.arrays)

    def _adjusted(
        self, state: LossScaledState, inner: Tree, used: Array, arrays: Arrays
    ) -> LossScaledState:
        """The state after a window that was used or skipped: its scale grows, backs off or
        stays.
        """
        # Selected by `where`, as the host may not see whether the window was used.
        xp, growth = arrays.xp, state.growth + 1
        grown = state.scale * self.growth_factor
        # It stays if it would become infinite, or 0.
        grows = (growth == self.growth_interval) & xp.isfinite(grown)
        smaller = xp.clip(state.scale * self.backoff_factor, LEAST32)
        scale = xp.where(used, xp.where(grows, grown, state.scale), smaller)
        growth = xp.where(used & (growth < self.growth_interval), growth, 0)
        skipped = state.skipped + arrays.as_array(~used, xp.int32)
        return LossScaledState(inner, scale, growth, skipped)
