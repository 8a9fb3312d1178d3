"""The one error type of funcga, and what its texts share."""

import functools
import inspect
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class FuncgaError(ValueError):
    """What was asked, what was found and where, why it cannot work, and the line to write instead.

    Every refusal of bad input is one of these, raised before any work is done wherever that is
    possible; a call that fails has changed nothing. Errors that your own functions raise pass
    through untouched.

    Example:
        >>> funcga.accumulate(lambda x: x.mean(), 0)
        Traceback (most recent call last):
        funcga.errors.FuncgaError: n is 0: it must be at least 1. Write n=1 for one micro-batch.
    """


class TooFewRowsError(FuncgaError):
    """A FuncgaError about a loss that cannot take a micro-batch of so few rows; with more of
    them it can.
    """


def no_derivative(name: str) -> FuncgaError:
    """The error for a step with this fold inside of a loss that is differentiated."""
    return FuncgaError(
        f"a step with the fold {name} is differentiated, and its sums of integers have no "
        "derivative: it would be 0. Use the plain fold inside of a loss."
    )


def uninitialised(path: str) -> FuncgaError:
    """The error for a parameter that has no shape yet."""
    return FuncgaError(
        f"`{path}` has no shape yet: it belongs to a lazy module, which makes its parameters when "
        "it first runs. Run it once before: with torch.no_grad(): module(x)."
    )


def no_device(name: object, framework: str, devices: list[str]) -> FuncgaError:
    """The error for a device that a framework does not have here."""
    return FuncgaError(
        f"device={str(name)!r} is none that {framework} has here; it has "
        f"{', '.join(map(repr, devices))}."
    )


def similar(name: object, names: Iterable[str]) -> str:
    """A hint at the one of `names` that is most like this name, " (`name`?)", to stand behind
    it; "" if none is.
    """
    # Slow to import, and rarely needed.
    import difflib

    close = difflib.get_close_matches(str(name), [*names], 1)
    return f" (`{close[0]}`?)" if close else ""


def listed(names: Sequence[str], most: int = 4) -> str:
    """Some names in a row, "a, b and 3 more"; "nothing" if there are none."""
    return (
        ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")
        or "nothing"
    )


def streamable(values: Iterable[object]) -> str:
    """The line to write where one of these may be a loader, which yields micro-batches; "" where
    none is.
    """
    for value in values:
        is_data = isinstance(value, str | bytes | Mapping | Sequence) or hasattr(value, "shape")
        if isinstance(value, Iterable) and not is_data:
            return (
                f"If the {type(value).__name__} yields micro-batches, stream them: for window in "
                "funcga.windows(loader, 8): funcga.stream(grad_fn)(params, window), without params "
                "for module_value_and_grad."
            )
    return ""


@contextmanager
def needs_numpy(name: str) -> Iterator[None]:
    """A context for what imports NumPy, which torch does not need: FuncgaError, which says what
    `name` needs, if it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise FuncgaError(
            f"numpy is not installed, and {name} needs it. Install it: pip install numpy"
        ) from error


def check_callable(function: object, name: str, like: str) -> None:
    """Raises FuncgaError if it cannot be called."""
    if not callable(function):
        shown = repr(function)
        shown = shown if len(shown) < 80 else f"of type {type(function).__name__}"
        raise FuncgaError(f"{name} is {shown}, which is no function. Pass one, such as {like}")


def check_count(value: Any, name: str, instead: str = "") -> int:
    """A number of micro-batches or rows as an int >= 1. Raises FuncgaError, which names what may
    stand instead.
    """
    try:
        # In Python True is an int, but it is not a count.
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise FuncgaError(
            f"{name} is {value!r}: it must be an int, at least 1. Write {name}=8{instead}."
        ) from None
    if count < 1:
        raise FuncgaError(
            f"{name} is {count}: it must be at least 1. Write {name}=1 for one micro-batch."
        )
    return count


def refuses_arguments(
    function: Callable[..., object], count: int, keywords: Iterable[str], error: TypeError
) -> bool:
    """Whether `error` says that a function does not take so many positional arguments, or one of
    these keywords.

    False for an error from inside of the function, and for a function that does not say what it
    takes.
    """
    try:
        inspect.signature(function).bind(*range(count), **dict.fromkeys(keywords))
    except TypeError:
        # A decorator may show another signature than it has. Then the function that it calls was
        # entered.
        code = getattr(inspect.unwrap(function), "__code__", None)
        return all(frame.f_code is not code for frame, _ in traceback.walk_tb(error.__traceback__))
    except ValueError:  # a builtin without a signature
        return False
    return False


# What other libraries call it.
_ELSEWHERE = {
    "every_k_schedule": "n",
    "k": "n",
    "accumulation_steps": "n",
    "gradient_accumulation_steps": "n",
    "grad_accum_steps": "n",
    "accum_steps": "n",
    "num_accum_steps": "n",
    "accum_iter": "n",
    "accumulate_grad_batches": "n",
    "num_microbatches": "n",
    "num_micro_batches": "n",
    "n_microbatches": "n",
    "num_chunks": "n",
    "chunks": "n",
    "steps": "n",
    "num_steps": "n",
    "update_freq": "n",
    "batch_size": "microbatch_size",
    "micro_batch_size": "microbatch_size",
    "chunk_size": "microbatch_size",
    "use_grad_mean": "fold",
    "reduction": "fold",
    "reduce": "fold",
    "accumulator": "fold",
    "mean": "fold",
    "accumulator_dtype": "fold",
    "should_skip_update_fn": "drop",
    "opt": "tx",
    "optimizer": "tx",
    "inner": "tx",
    "fun": "grad_fn",
    "loss_fn": "grad_fn",
    "weights": "weight",
    "batch_argnums": "in_axes",
    "argnums": "in_axes",
    "num_real_microbatches": "weight",
    "group": "across",
    "process_group": "across",
    "axis_name": "across",
}
_WRITTEN = {
    "n": "n=8",
    "microbatch_size": "microbatch_size=4",
    "in_axes": "in_axes=(None, 0)",
    "weight": 'weight=lambda batch: batch["is_real"].sum()',
}


def _written(meant: str, kwargs: Mapping[str, object]) -> str:
    """How a parameter is written, with the value of what other libraries call so."""
    if meant == "drop":
        test = kwargs.get("should_skip_update_fn")
        large = ", drop_if=lambda grads: optax.global_norm(grads) > 100"
        is_finite = getattr(test, "__name__", "") == "skip_not_finite"
        return 'drop="microbatch"' + ("" if is_finite else large)
    if meant != "fold":
        return _WRITTEN.get(meant, f"{meant}=...")
    # A sum or a mean, and the dtype of the accumulator, may come as two arguments.
    values = {name: value for name, value in kwargs.items() if _ELSEWHERE.get(name) == "fold"}
    dtype = values.pop("accumulator_dtype", None)
    dtype = getattr(dtype, "__name__", str(dtype).removeprefix("torch.")) if dtype else ""
    option = f"dtype={dtype!r}".replace("'", '"') if dtype else ""
    return f"fold={_fold_of(next(iter(values.values()), True), option)}"


def _fold_of(value: object, option: str) -> str:
    """The fold that another library names so: "sum", False for use_grad_mean, and so on."""
    if isinstance(value, tuple | list):
        return f"({', '.join(_fold_of(part, option) for part in value)})"
    says = str(value).lower()
    if value is False or "sum" in says:
        return f"funcga.sum({option})"
    return "funcga.concat()" if "concat" in says or says == "none" else f"funcga.mean({option})"


def explains_arguments(function: F) -> F:
    """The function, which raises FuncgaError for arguments that it does not have, and names the
    one that is meant.
    """
    names = [*inspect.signature(function).parameters]

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if not refuses_arguments(function, len(args), kwargs, error):
                raise
            unknown = next((name for name in kwargs if name not in names), "")
            meant = _ELSEWHERE.get(unknown, unknown)
            if meant in names[:1]:
                line = f"{function.__name__}({meant}, ...)"
                advice = f"Here that is `{meant}`, the first argument: {line}."
            elif meant in names:
                line = f"{function.__name__}({names[0]}, {_written(meant, kwargs)})"
                advice = f"Here that is `{meant}`: {line}."
            elif meant in ("n", "microbatch_size") and "n" not in names:
                advice = (
                    "It folds all that it is given: funcga.windows(microbatches, n=8) gives it 8 "
                    "at a time."
                )
            else:
                advice = f"Its parameters are {', '.join(names)}."
            raise FuncgaError(f"{error}. {advice}") from None

    return cast(F, explained)
