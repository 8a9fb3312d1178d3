"""`grad` and `value_and_grad`: one spelling and one order of results for both frameworks."""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, overload

from funcga._backend import Arrays, Backend
from funcga._backend.dispatch import import_backends
from funcga._call import Memory, backend_of_call
from funcga._call.arguments import argument_names
from funcga._fold import (
    accumulator_dtype,
    as_number,
    check_quantity,
    describe,
    has_no_axes,
    kind,
)
from funcga._types import A, Array, GradFn, Kwargs, LossFn, P, R, Scalar, Tree
from funcga.errors import FuncgaError, check_callable


# Counts gradients per thread, which shows whether a loss has a gradient inside.
class _Evaluations(threading.local):
    count = 0


_EVALUATIONS = _Evaluations()


def evaluations() -> int:
    """How many gradients this thread has begun to compute; it grows within a loss that has a
    gradient inside.
    """
    return _EVALUATIONS.count


@dataclass(frozen=True, eq=False)
class GradientFunction:
    """A gradient function in the framework of its arguments. Made by `grad` and
    `value_and_grad`.
    """

    loss_fn: LossFn
    argnums: int | tuple[int, ...]
    has_aux: bool
    with_value: bool
    scaled: bool = False
    reached: set[bool] = field(
        default_factory=set, repr=False
    )  # not empty once a gradient has reached a leaf
    # What a backend keeps of calls outside of any step.
    memory: Memory = field(default_factory=Memory, repr=False)

    @property
    def __wrapped__(self) -> LossFn:
        return self.loss_fn

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        """The value and gradient, or the gradient, at these arguments."""
        backend = backend_of_call(self.loss_fn, args, kwargs)
        return backend.loop.alone(self, backend)(*args, **kwargs)

    def bound(self, backend: Backend, counts: bool = True) -> GradFn:
        """The framework's gradient function, which raises FuncgaError if loss_fn does not return
        a real scalar.

        `counts`: whether it may count gradients. torch.compile must not read a Python counter: it
        would compile anew for every value.
        """

        @functools.wraps(self.loss_fn, updated=())  # for the names of its parameters in messages
        def gradient(*args: Any, **kwargs: Any) -> Tree:
            arg_indices = self.arg_indices(len(args))
            if counts:
                _EVALUATIONS.count += 1
            scale = None
            if self.scaled:  # read outside of the transform, in which the host sees no numbers
                scale, kwargs = self.read_scale(kwargs, backend)

            @functools.wraps(self.loss_fn, updated=())
            def objective(*args: Any, **kwargs: Any) -> tuple[Array, tuple[Array, Tree]]:
                count_before = _EVALUATIONS.count if counts else 0
                loss, aux = self.split(self.loss_fn(*args, **kwargs), backend)
                if counts and not self.reached:
                    depends = backend.gradients.depends(loss)  # None if the framework cannot tell
                    # The gradient of a linear function is constant: of one inside of the loss it
                    # may depend on nothing.
                    is_alone = _EVALUATIONS.count == count_before
                    if depends:
                        self.reached.add(True)  # remembered for all later calls
                    elif depends is False and is_alone:
                        differentiated = [args[arg_index] for arg_index in arg_indices]
                        leaves = backend.trees.flatten(differentiated)[0]
                        if any(leaf is not None for leaf in leaves):
                            raise self.unreached(len(args))
                # Returned twice: scaled, to be differentiated, and as it is, as auxiliary data.
                return loss if scale is None else scaled_loss(loss, scale, backend.arrays), (
                    loss,
                    aux,
                )

            transform = backend.gradients.value_and_grad(objective, arg_indices)
            (_, (loss, aux)), grads = transform(*args, **kwargs)
            return self.compose(loss, aux, grads)

        return gradient

    def arg_indices(self, count: int) -> tuple[int, ...]:
        """`argnums` for `count` positional arguments, none negative. Raises FuncgaError if one
        is out of range, or is named twice.
        """
        argnums = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        # -1 and the last index name one argument.
        arg_indices = tuple([argnum % count for argnum in argnums if -count <= argnum < count])
        if len({*arg_indices}) != len(argnums):
            raise FuncgaError(
                f"argnums is {self.argnums!r}, and the call has {count} positional arguments: name "
                "each once, and pass what is to be differentiated by position."
            )
        return arg_indices

    def read_scale(self, kwargs: Kwargs, backend: Backend) -> tuple[Scalar, Kwargs]:
        """(loss scale, other keyword arguments) of a call; the scale is None unless `scaled`.
        Raises FuncgaError if it is missing or invalid.
        """
        if not self.scaled:
            return None, kwargs
        others = dict(kwargs)
        scale = others.pop("loss_scale", None)
        if has_no_axes(scale):
            scale = backend.arrays.scalar(as_number(scale))
        if not has_no_axes(scale):  # else the host does not see it
            meaning = "a finite number above 0, or a 0-d array of one"
            check_quantity("loss_scale", scale, "state.scale", meaning)
        return scale, others

    def split(self, output: Tree, backend: Backend) -> tuple[Array, Tree]:
        """(loss, aux) of loss_fn's output. Raises FuncgaError if the loss is not a real scalar,
        or with has_aux the output not a pair.
        """
        arrays = backend.arrays
        is_pair = isinstance(output, tuple | list) and len(output) == 2
        loss, aux = output if self.has_aux and is_pair else (output, None)
        is_scalar = arrays.is_array(loss) and loss.shape == ()
        if self.has_aux > is_pair or not is_scalar or kind(loss.dtype) != "float":
            aux = "has_aux=True asks for a pair: return loss, aux"
            if not self.has_aux:
                aux = "to return (loss, aux) say has_aux=True"
            raise FuncgaError(
                f"the loss is {describe(loss)}, and a gradient is that of a scalar, a "
                "real number: return loss.mean(), or loss.sum() with fold=funcga.per_weight(); "
                f"{aux}."
            )
        return loss, aux

    def compose(self, loss: Array, aux: Tree, grads: Sequence[Tree]) -> Tree:
        """The output of a gradient function; `grads` has one tree for each of argnums."""
        # Value before gradient, in both frameworks; aux goes with the value, or with the gradient
        # if there is none.
        value = (loss, aux) if self.has_aux else loss
        gradient = tuple(grads) if isinstance(self.argnums, tuple) else grads[0]
        if self.with_value:
            return value, gradient
        return (gradient, aux) if self.has_aux else gradient

    def without_aux(self, output: Tree) -> Tree:
        """The output of a gradient function without aux."""
        if not self.has_aux:
            return output
        if self.with_value:
            (loss, _), gradient = output
            return loss, gradient
        return output[0]

    def gradient_in(self, value: Tree) -> Tree:
        """The gradient in an output of `compose`."""
        if self.with_value:
            return value[1]
        return value[0] if self.has_aux else value

    def unreached(self, count: int) -> FuncgaError:
        """The error for a loss of `count` arguments that depends on no differentiated leaf."""
        names = argument_names(self.loss_fn, count)
        of = " or ".join(f"`{names[arg_index]}`" for arg_index in self.arg_indices(count))
        return FuncgaError(
            f"the loss does not depend on {of}: no gradient reaches an array of it, and nothing "
            "would be trained. loss_fn uses a module, or arrays, that it closes over, or it "
            "detaches what it computes. Compute the loss from the argument, as "
            "model.apply(params, x) does, or torch_backend.pure_loss(module, loss_fn)."
        )


def scaled_loss(loss: Array, scale: Scalar, arrays: Arrays) -> Array:
    """The loss times its scale, as at least float32."""
    # The usual scale, 65,536, overflows in float16.
    dtype = accumulator_dtype(loss.dtype, arrays)
    wide = arrays.as_array(loss, dtype)
    return wide * (arrays.as_array(scale, dtype, loss) if arrays.is_array(scale) else scale)


@overload
def grad(  # type: ignore[overload-overlap]
    loss_fn: Callable[Concatenate[A, P], object],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
) -> Callable[Concatenate[A, P], A]: ...
@overload
def grad(  # type: ignore[overload-overlap]
    loss_fn: Callable[Concatenate[A, P], tuple[object, R]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
) -> Callable[Concatenate[A, P], tuple[A, R]]: ...
@overload
def grad(
    loss_fn: Callable[P, object], argnums: int | tuple[int, ...], has_aux: bool = False
) -> Callable[P, Any]: ...
@overload
def grad(
    loss_fn: LossFn, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, *, scaled: bool
) -> Callable[..., Any]: ...
def grad(
    loss_fn: LossFn,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    scaled: bool = False,
) -> Callable[..., Any]:
    """A function that returns the gradient of loss_fn at its arguments, for torch tensors and for
    JAX arrays.

    It works on its own and in `accumulate`, where arguments after the first are split: if one of
    them is in argnums, say in_axes as well.

    Args:
        loss_fn: Returns a real scalar, or (scalar, aux) with has_aux.
        argnums: The argument to differentiate by, or a tuple of several.
        has_aux: Whether loss_fn returns (scalar, aux).
        scaled: For float16, whose smallest number is 6e-8. The function then takes one more keyword
            argument, `loss_scale`, a finite number above 0 or a 0-d array of one. The backward pass
            begins with the loss times that scale, so the gradients come multiplied by it; the value
            is the loss as it is. `loss_scaled` divides by the scale again.

    Returns:
        A function that returns `grads`, or `(grads, aux)` with has_aux. `grads` has the structure,
        shapes and dtypes of the argument `argnums`; it is a tuple of such for a tuple of argnums.

    Raises:
        FuncgaError: loss_fn is no function, or argnums are no ints. The function that is returned
            raises it for a loss that is no real scalar, or that depends on no array of what is
            differentiated.

    Example:
        >>> gradient = funcga.grad(lambda w, x: ((x * w) ** 2).mean())
        >>> gradient(torch.tensor(3.0), torch.ones(4))
        tensor(6.)
    """
    check_callable(loss_fn, "loss_fn", "loss_fn(params, *batch) -> scalar")
    import_backends()  # no import is left for the first call, which torch.compile may be tracing
    return GradientFunction(loss_fn, argnums, has_aux, False, scaled)


@overload
def value_and_grad(  # type: ignore[overload-overlap]
    loss_fn: Callable[Concatenate[A, P], R], argnums: Literal[0] = 0, has_aux: bool = False
) -> Callable[Concatenate[A, P], tuple[R, A]]: ...
@overload
def value_and_grad(
    loss_fn: Callable[P, R], argnums: int | tuple[int, ...], has_aux: bool = False
) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(
    loss_fn: LossFn, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, *, scaled: bool
) -> Callable[..., tuple[Any, Any]]: ...
def value_and_grad(
    loss_fn: LossFn,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    scaled: bool = False,
) -> Callable[..., Any]:
    """A function that returns the value of loss_fn and its gradient, `(value, grads)`, in torch and
    in JAX.

    torch.func.grad_and_value returns the gradients first. A gradient of a gradient is taken by
    calling this function, or a step of `accumulate`, inside of a loss, and differentiating that
    loss (docs/howto/second_order.md). In torch, a call by itself is one backward pass if no
    argument requires grad; otherwise its results have a graph, which takes longer
    (docs/concepts/torch_engine.md).

    Args:
        loss_fn: As in `grad`.
        argnums: As in `grad`.
        has_aux: As in `grad`.
        scaled: As in `grad`.

    Returns:
        A function that returns `(value, grads)`, or `((value, aux), grads)` with has_aux.

    Raises:
        FuncgaError: As in `grad`.

    Example:
        >>> gradient = funcga.value_and_grad(lambda w, x: ((x * w) ** 2).mean())
        >>> gradient(torch.tensor(3.0), torch.ones(4))  # the same in both frameworks
        (tensor(9.), tensor(6.))
    """
    check_callable(loss_fn, "loss_fn", "loss_fn(params, *batch) -> scalar")
    import_backends()  # no import is left for the first call, which torch.compile may be tracing
    return GradientFunction(loss_fn, argnums, has_aux, True, scaled)
