"""`apply`: an update that returns new parameters instead of their difference. `Step` implements
wrappers of transforms once for both, updates and new parameters.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

from funcga._backend import Backend
from funcga._backend.dispatch import backend_of
from funcga._transform import Traits, Transform, takes_weight, wrapped_transform
from funcga._types import A, Kwargs, Scalar, Tree
from funcga.errors import FuncgaError

S = TypeVar("S")


class UpdateFunction(Generic[S]):
    """The `update` of funcga's own transforms: a callable object, whose variants share one
    `stepped`. `S`: the state between two calls.
    """

    @property
    def traits(self) -> Traits:
        """The static properties of this transform."""
        return Traits()

    def stepped(
        self,
        owned: bool,
        into: bool | None,
        grads: Tree,
        state: S,
        params: Tree,
        extra: Kwargs,
    ) -> tuple[Tree, S]:
        """(updates, state), or (params, state): see `Step`, which has `owned` and `into`."""
        raise NotImplementedError

    def __call__(self, grads: A, state: S, params: Tree = None, **extra: Any) -> tuple[A, S]:
        """(updates, state)."""
        return self.stepped(False, None, grads, state, params, extra)

    def donated(self, grads: A, state: S, params: Tree = None, **extra: Any) -> tuple[A, S]:
        """The same; gradients and state may be written to."""
        return self.stepped(True, None, grads, state, params, extra)

    def __deepcopy__(self, memo: object) -> Self:
        """Itself, as a function is its own copy."""
        return self


def traits_of(tx: Transform) -> Traits:
    """The Traits of a transform; of a foreign one only `takes_weight` is known."""
    update: object = tx.update
    return (
        update.traits
        if isinstance(update, UpdateFunction)
        else Traits(takes_weight=takes_weight(tx.update))
    )


def apply(
    tx: Any, grads: Tree, state: Tree, params: Tree, *, donate: bool = False, **extra: Any
) -> tuple[Tree, Tree]:
    """Runs one step of an optimizer: `(params, state)` from gradients. It is `tx.update`, and then
    `apply_updates`, which only adds, in one.

    With torch_backend.from_optimizer, alone, in a chain or in `loss_scaled` or `multi_steps`, the
    new parameters are bitwise identical to those of `optimizer.step()`: no difference of new and
    old ones is computed and added again, which would round twice. For any other transform it is
    `tx.update`, then `apply_updates`; of optax's, JAX compiles the same program.

    The results lie in memory of their own. Where there is no update, in a call that only
    accumulates, in a window that is left out and after an overflow of the loss scale, params come
    back as they are.

    Args:
        tx: Any pair of functions (init, update).
        grads: The gradients, in the structure of params.
        state: What `tx.init` or an earlier call returned.
        params: The parameters.
        donate: In torch, give away params, grads and state: the step runs in place, as that of an
            optimizer of torch, and nothing is copied. What comes back lies in the memory of params
            and state; do not use these again. A `multi_steps(..., donate=True)` takes state and
            grads in any case, and params only with donate=True here. In JAX it does nothing: give
            them away where you compile the step, and return them in the order of the arguments:
            jax.jit(step, donate_argnums=(0, 1)) of step(params, state, batch) -> (params, state,
            loss).
        **extra: Further arguments of tx.update, such as the `weight` of a micro-batch for
            `multi_steps`.

    Returns:
        (params, state): the new parameters, detached, in the structure and dtypes of params; the
            new state.

    Raises:
        FuncgaError: params is None, or tx.update raises it.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
        >>> tx = torch_backend.from_optimizer(torch.optim.SGD, lr=0.5)
        >>> params, state = funcga.transforms.apply(tx, grads, tx.init(params), params)
        >>> params
        {'w': tensor([0.5000, 0.5000])}
    """
    if params is None:
        raise FuncgaError(
            "params are None, and apply returns what becomes of them: params, state = "
            "funcga.transforms.apply(tx, grads, state, params)."
        )
    return updated(wrapped_transform(tx), donate, donate, grads, state, params, extra)


def updated(
    tx: Transform,
    owned: bool,
    into: bool | None,
    grads: Tree,
    state: Tree,
    params: Tree,
    extra: Kwargs,
) -> tuple[Tree, Any]:
    """(updates, state), or (params, state): see `Step`, which has `owned` and `into`."""
    update: object = tx.update
    if isinstance(update, UpdateFunction):
        return update.stepped(owned, into, grads, state, params, extra)
    updates, after = tx.update(grads, state, params, **extra)
    if into is None:
        return updates, after
    backend = backend_of([params, grads], lambda: ["params", "grads"])
    return backend.transforms.added(params, updates, after, into), after


class Step(NamedTuple):
    """One step of a wrapped transform. Its result is the updates, or with `into` the new params.

    `owned`: whether gradients and state may be written to. `into`: None returns updates, False new
    params, and True the params updated in place.
    """

    tx: Transform
    backend: Backend
    owned: bool
    into: bool | None = None

    def run(self, state: Tree, params: Tree, given: tuple[Tree, Kwargs]) -> tuple[Tree, Tree]:
        """(result, state) of the transform; `given` is (gradients, further arguments)."""
        grads, extra = given
        # If gradients and state are donated and params are not, the params are copied.
        copies = self.into is False and self.owned
        wide, narrowed = self.backend.transforms.widened(params, copies, bool(self.into))
        into = None if self.into is None else self.owned  # what is not given away was copied
        after, state = updated(self.tx, self.owned, into, grads, state, wide, extra)
        return after if self.into is None else narrowed(after), state

    def when(
        self,
        predicate: Scalar,
        run: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
        state: Tree,
        params: Tree,
        given: Tree,
        like: Tree,
        views: bool = False,
    ) -> tuple[Tree, Tree, Scalar]:
        """(result, state, predicate): `run(state, params, given)` if the predicate holds, else
        zeros `like` these, or the params, and the same state. `views`: the zeros may be
        read-only views.
        """
        when = self.backend.transforms.when
        if self.into is None:
            return when(
                predicate,
                lambda state, both: run(state, *both),
                state,
                (params, given),
                like,
                views,
            )
        emit = lambda carried, given: ((), run(carried[1], carried[0], given))
        _, (after, state), ran = when(predicate, emit, (params, state), given, ())
        return after, state, ran
