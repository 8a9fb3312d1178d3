"""`grad` and `value_and_grad`: one spelling and one order of results for both frameworks."""

import functools
import inspect
import numbers
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from funcga._backend import Arrays, Backend
from funcga._backend.dispatch import backend_of, load_imported
from funcga._backend.prefixes import is_uninitialised, leaf_paths
from funcga._call import KnownGradient, Memory, Program
from funcga._call.arguments import argument_names
from funcga._fold import as_number, is_quantity
from funcga._types import Array, GradFn, LossFn, P, R, Scalar, Tree
from funcga.errors import FuncgaError, uninitialised


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
class GradientFunction(KnownGradient):
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

    @property
    def leaves_before(self) -> int:
        """How many leaves come before the value and the gradient in the output of `compose`: none,
        unless observers are told something.
        """
        return 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        """The value and gradient, or the gradient, at these arguments."""
        # Names are only for errors.
        names = lambda: [*argument_names(self.loss_fn, len(args)), *kwargs]
        backend = backend_of([*args, *kwargs.values()], names)
        return backend.loop.alone(self, backend)(*args, **kwargs)

    def bound(self, backend: Backend) -> GradFn:
        """The framework's gradient function, which raises FuncgaError if loss_fn does not return
        a real scalar.
        """

        @functools.wraps(self.loss_fn, updated=())  # for the names of its parameters in messages
        def gradient(*args: Any, **kwargs: Any) -> Tree:
            arg_indices = self.arg_indices(len(args))
            for arg_index in arg_indices:
                self.check_leaves(args[arg_index], arg_index, backend)
            # torch.compile must not read a Python counter: it would compile anew for every value.
            counts = not (backend.name == "torch" and backend.loop.is_traced(()))
            if counts:
                _EVALUATIONS.count += 1
            scale = None
            if self.scaled or "loss_scale" in kwargs:
                # Read outside of the transform, in which the host sees no numbers.
                scale, kwargs = self.read_scale(kwargs, backend)

            @functools.wraps(self.loss_fn, updated=())
            def objective(*args: Any, **kwargs: Any) -> tuple[Array, tuple[Array, Tree]]:
                count_before = _EVALUATIONS.count if counts else 0
                loss, aux = self.split(self.loss_fn(*args, **kwargs), backend)
                if counts and not self.reached:
                    self._check_reached(loss, args, _EVALUATIONS.count == count_before, backend)
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
        is out of range.
        """
        argnums = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        if any(not -count <= argnum < count for argnum in argnums):
            raise FuncgaError(
                f"argnums is {self.argnums!r}, and the call has {count} positional arguments, 0 to "
                f"{count - 1}. Pass what is to be differentiated by position."
            )
        # -1 and the last index name one argument.
        arg_indices = tuple([argnum % count for argnum in argnums])
        if len({*arg_indices}) != len(arg_indices):
            raise FuncgaError(
                f"argnums is {self.argnums!r}, which names an argument twice. Name each once."
            )
        return arg_indices

    def check_leaves(self, tree: Tree, arg_index: int, backend: Backend) -> None:
        """Raises FuncgaError if a leaf of this argument cannot be differentiated."""
        # The path is worked out for the error alone.
        for leaf_index, leaf in enumerate(backend.trees.flatten(tree)[0]):
            if leaf is not None and not _has_gradient(leaf, backend):
                name = argument_names(self.loss_fn, arg_index + 1)[arg_index]
                path = leaf_paths(tree, backend.trees, name)[leaf_index]
                raise _no_gradient(leaf, path, name, backend)

    def read_scale(self, kwargs: dict[str, Any], backend: Backend) -> tuple[Scalar, dict[str, Any]]:
        """(loss scale, other keyword arguments) of a call; the scale is None unless `scaled`.
        Raises FuncgaError if it is missing or invalid.
        """
        if not self.scaled:
            if "loss_scale" in kwargs and not {"loss_scale", "**"} & _keywords(self.loss_fn):
                raise FuncgaError(
                    "the call has a loss_scale, which this gradient function does not take. Make "
                    "it with scaled=True, as funcga.value_and_grad(loss_fn, scaled=True)."
                )
            return None, kwargs
        others = {name: value for name, value in kwargs.items() if name != "loss_scale"}
        return check_loss_scale(kwargs.get("loss_scale"), backend.arrays), others

    def split(self, output: Tree, backend: Backend) -> tuple[Array, Tree]:
        """(loss, aux) of loss_fn's output. Raises FuncgaError if the loss is not a real scalar,
        or with has_aux the output not a pair.
        """
        # Checked in this order: a pair, an array, a scalar, real.
        loss, aux, arrays = output, None, backend.arrays
        if self.has_aux:
            if not isinstance(output, tuple | list) or len(output) != 2:
                pair = "output.loss, output" if _has_loss(output) else "loss, aux"
                shown = _describe(output, backend)
                raise FuncgaError(
                    f"loss_fn returned {shown}, and has_aux=True asks for a pair: return {pair}."
                )
            loss, aux = output
        if not arrays.is_array(loss):
            hint = (
                " If it returns (loss, aux), say so: has_aux=True."
                if isinstance(loss, tuple | list)
                else ""
            )
            if _has_loss(loss):
                raise FuncgaError(
                    f"loss_fn returned {_describe(loss, backend)}, which holds the loss among "
                    "other outputs. Return it "
                    'alone, output.loss or output["loss"]; with has_aux=True also return '
                    "output.loss, aux."
                )
            raise FuncgaError(
                f"what loss_fn returned is {_describe(loss, backend)}, which has no gradient: "
                f"return a scalar array, not a number that was taken out of one.{hint}"
            )
        if loss.shape != ():
            raise FuncgaError(
                f"loss_fn returned {arrays.describe(loss)}, and a gradient is that of a scalar: "
                "return loss.mean(), or loss.sum() with fold=funcga.per_weight()."
            )
        if arrays.kind(loss.dtype) != "float":
            raise FuncgaError(
                f"loss_fn returned {arrays.describe(loss)}, and a gradient is that of a real "
                "number: return a float, such as abs(loss) ** 2."
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

    def _check_reached(
        self, loss: Array, args: tuple[Any, ...], alone: bool, backend: Backend
    ) -> None:
        """Raises FuncgaError if the framework sees that the loss depends on no leaf.

        alone: whether no other gradient is inside of the loss. That of a linear function is
        constant, so a loss of it may depend on nothing.
        """
        # None if the framework cannot tell. One True is remembered for all later calls.
        depends = backend.gradients.depends(loss)
        if depends:
            self.reached.add(True)
        elif depends is False and alone:
            differentiated = tuple(args[arg_index] for arg_index in self.arg_indices(len(args)))
            if any(leaf is not None for leaf in backend.trees.flatten(differentiated)[0]):
                raise self.unreached(len(args), backend)

    def unreached(self, count: int, backend: Backend) -> FuncgaError:
        """The error for a loss of `count` arguments that depends on no differentiated leaf."""
        names = argument_names(self.loss_fn, count)
        of = " or ".join(f"`{names[arg_index]}`" for arg_index in self.arg_indices(count))
        return FuncgaError(
            f"the loss does not depend on {of}: no gradient reaches an array of it, and nothing "
            "would be trained. loss_fn uses a module, or arrays, that it closes over, or it "
            "detaches what it computes. Compute the loss from the argument, as "
            f"{backend.gradients.as_function_of_params} does."
        )


def check_loss_scale(scale: Scalar | None, arrays: Arrays) -> Scalar:
    """The loss scale as a Python number where the host can see it, else as the 0-d array that it
    is.

    Raises FuncgaError if it is not a scalar number, or if the host sees that it is not finite and
    above 0.
    """
    if scale is None:
        raise FuncgaError(
            "the gradient function was made with scaled=True, and the call has no loss_scale. Pass "
            "the one of the state that divides by it: step(params, batch, loss_scale=state.scale)."
        )
    scale = as_number(scale)
    if (
        arrays.is_array(scale)
        and scale.shape == ()
        and arrays.kind(scale.dtype) in ("int", "float")
    ):
        scale = arrays.scalar(scale)
        if arrays.is_array(scale):
            return scale
    if not is_quantity(scale):
        described = repr(scale) if isinstance(scale, numbers.Number) else arrays.describe(scale)
        raise FuncgaError(
            f"loss_scale is {described}: it must be a finite number above 0, or a 0-d array of "
            "one, such as the scale of funcga.transforms.loss_scaled: loss_scale=state.scale."
        )
    return float(scale)


def scaled_loss(loss: Array, scale: Scalar, arrays: Arrays) -> Array:
    """The loss times its scale, as at least float32."""
    # The usual scale, 65,536, overflows in float16.
    dtype = arrays.accumulator_dtype(loss.dtype)
    wide = arrays.cast(loss, dtype)
    return wide * (arrays.cast(scale, dtype, loss) if arrays.is_array(scale) else scale)


def _has_gradient(leaf: Any, backend: Backend) -> bool:
    if is_uninitialised(leaf):
        return False
    try:
        return backend.arrays.kind(backend.arrays.as_array(leaf).dtype) in ("float", "complex")
    except TypeError:
        return False


def _no_gradient(leaf: Any, path: str, name: str, backend: Backend) -> FuncgaError:
    """The error for a leaf without a gradient, at this path in the argument `name`."""
    shown = backend.arrays.describe(leaf)
    if is_uninitialised(leaf):
        return uninitialised(path)
    if hasattr(leaf, "named_parameters") or type(leaf).__name__ == "generator":
        return FuncgaError(
            f"`{name}` is {shown}, and a gradient is taken with respect to its arrays. Give a "
            "module's parameters by name: torch_backend.trainable(module)."
        )
    return FuncgaError(
        f"`{path}` is {shown}, and a gradient is taken with respect to `{name}`: only float and "
        "complex arrays have one. Pass what is not trained as another argument, whole: "
        "in_axes=(None, None, 0), or close over it."
    )


def _describe(output: Tree, backend: Backend) -> str:
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {len(output)}"
    return backend.arrays.describe(output)


def _has_loss(output: Tree) -> bool:
    """Whether it is an output of a transformers model, or a dict, with a loss."""
    return "loss" in output if isinstance(output, Mapping) else hasattr(output, "loss")


def _keywords(loss_fn: LossFn) -> set[str]:
    """The parameters that a loss takes by name; "**" if it takes any."""
    # A gradient function, or another wrapper of a loss, takes what its loss takes.
    while hasattr(loss_fn, "loss_fn"):
        loss_fn = loss_fn.loss_fn
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return {"**"}
    return {"**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}


def check_scaled(loss_fn: LossFn, scaled: bool) -> None:
    """Raises FuncgaError if both the gradient function and its loss take a loss_scale."""
    if scaled and "loss_scale" in _keywords(loss_fn):
        raise FuncgaError(
            "loss_fn has a parameter loss_scale, and scaled=True takes that name for the scale of "
            "the backward pass. Give it another name; or multiply the loss yourself, without "
            "scaled=True."
        )


@overload
def grad(
    loss_fn: Callable[P, object], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
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
    return _gradient_function(loss_fn, argnums, has_aux, False, scaled)


@overload
def value_and_grad(
    loss_fn: Callable[P, R], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
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
    return _gradient_function(loss_fn, argnums, has_aux, True, scaled)


def _gradient_function(
    loss_fn: LossFn, argnums: int | tuple[int, ...], has_aux: bool, with_value: bool, scaled: bool
) -> Callable[..., Any]:
    if not callable(loss_fn):
        raise FuncgaError(
            f"loss_fn is {loss_fn!r}, which is no function. Pass loss_fn(params, *batch) -> scalar."
        )
    if hasattr(loss_fn, "named_parameters") and any(True for _ in loss_fn.named_parameters()):
        raise FuncgaError(
            f"loss_fn is a module of type {type(loss_fn).__name__}, which has parameters of its "
            "own and takes none. Write a loss function of it: "
            "torch_backend.module_value_and_grad(module, lambda module, x, y: "
            "F.mse_loss(module(x), y))."
        )
    # type(), as a bool is an int.
    entries = argnums if isinstance(argnums, tuple) else (argnums,)
    if not entries or any(type(entry) is not int for entry in entries):
        raise FuncgaError(
            f"argnums is {argnums!r}: it must be an int or a tuple of ints. Write argnums=0."
        )
    if scaled:
        check_scaled(loss_fn, scaled)
    load_imported()  # no import is left for the first call, which torch.compile may be tracing
    return GradientFunction(loss_fn, argnums, has_aux, with_value, scaled)


def bound(program: Program, backend: Backend) -> Program:
    """The program with the framework's gradient function, made once."""
    # Those of other libraries work unchanged.
    if isinstance(program.grad_fn, GradientFunction):
        return replace(program, grad_fn=program.grad_fn.bound(backend))
    return program
