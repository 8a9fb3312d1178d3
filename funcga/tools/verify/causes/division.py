"""Division by the number of micro-batches in the code of the loss itself.

Such a loss is as wrong for one micro-batch as for n, so comparing the two does not show it. So its
code is searched for numbers whose name speaks of accumulation, or that equal n. Each is doubled in
a copy of the function; the user's own objects are not changed.
"""

import copy
import dis
import inspect
import re
import types
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from funcga._fold import has_no_axes
from funcga.tools.verify.causes import Answer, Answers, cause, note
from funcga.tools.verify.exact import Case, largest, relative


def divided_by_n(case: Case) -> Answers:
    """A loss that is divided by the number of micro-batches; a note if the number may equal n by
    chance.

    If such a number is doubled, the whole output is halved or doubled. Only then is it reported,
    and only if its name says what it stands for: a temperature or a number of channels that equals
    n is no mistake.
    """
    probe = case.probe
    # Metrics beside the gradients need not have the factor. A leaf of zeros has any.
    gradients = probe.gradient_leaves()
    nonzero = [i for i in probe.additive() if np.any(probe.whole[i])]
    leaves = [i for i in nonzero if i in gradients] or nonzero
    n = case.counts[0] if len(case.counts) == 1 else None
    found = numbers(partial(probe.grad_fn, **probe.kwargs), n) if leaves else ()
    for number in sorted(found, key=lambda number: number.doubt):
        if _is_factor(case, leaves, number):
            yield _answer(case, number)
            return


def _is_factor(case: Case, leaves: list[int], number: "Number") -> bool:
    """Whether these leaves are divided by the number, or multiplied by one below 1."""
    probe = case.probe
    step = probe.with_attributes(grad_fn=number.doubled).raw_step()
    # The number was the length of something, and the function fails with another.
    try:
        changed = probe.numbers(step(*probe.take_rows(probe.all_rows)))
    except Exception:
        return False
    factor = 0.5 if number.value > 1 else 2.0
    size = largest([probe.whole[i] for i in leaves])
    apart = [relative(changed[i], factor * probe.whole[i], size) for i in leaves]
    return max(apart) <= case.limit.relative


def _answer(case: Case, number: "Number") -> Answer:
    """The cause, or a note if the number may stand for something else, such as the size of an axis
    of the batch.
    """
    probe, name, value = case.probe, number.name, number.value
    words = {"operation": f"{'/' if value > 1 else '*'} {name}", "name": name, "value": value}
    split = [leaf for leaf, axis in probe.arguments if isinstance(axis, int) and leaf is not None]
    is_a_size = any(value in leaf.shape for leaf in split)
    if number.doubt == 2 or (number.doubt == 1 and is_a_size):
        return note("factor", **words)
    return cause("divided by n", twice=2 * value, factor=0.5 if value > 1 else 2.0, **words)


# --- the numbers that a function reads, each doubled in a copy


class Number(NamedTuple):
    """A number that a function reads, and a copy of the function in which it is doubled.

    doubt: 0 if the name says that it is the number of micro-batches; 1 if the name, or where it
    stands, is usual for it; 2 if it merely equals n.
    """

    name: str
    value: float
    doubled: Any
    doubt: int


# Names of a count of micro-batches, whatever its value; and those of one if its value is the n that
# is asked for, unless the batch has this size as well.
_SURE = re.compile(
    r"accum|micro_?b|num_micro|n_micro|grad_?steps|grad_?acc|(^|_)acc_?steps|(^|_)ga_?steps|update_?freq|every_?k|"
    r"iter_?size|virtual_?batch",
    re.IGNORECASE,
)
_USUAL = re.compile(r"n|acc|ACC|gas?|GAS?")

_LIBRARIES = {"torch", "jax", "jaxlib", "numpy", "funcga", "torch_backend", "jax_backend"}


def numbers(
    value: Any, n: int | None, name: str = "", code: types.CodeType | None = None, depth: int = 8
) -> Iterator[Number]:
    """The numbers in a value, a function or something that it reads, that may be the number of
    micro-batches.

    name: the name of the value. code: that of the function which reads the value; its names select
    the entries and attributes of settings. depth: how deep functions that call functions, and
    settings in settings, are followed.
    """
    number = _number(value)
    if number is not None:
        doubt = _doubt(name, number, n)
        if doubt is not None:
            yield Number(name, number, 2 * value, doubt)
        return
    for part, label, reader, put in _parts(value, name, code) if depth else ():
        for found in numbers(part, n, label, reader, depth - 1):
            yield found._replace(doubled=put(found.doubled))
    if isinstance(value, types.FunctionType) and n and not _is_library(value.__module__):
        yield from _literals(value, n, is_called=code is not None)


def _is_library(module: object) -> bool:
    return str(module).split(".")[0] in _LIBRARIES


def _number(value: Any) -> float | None:
    """The value of a number, or of an array without axes."""
    # A random key and a complex number have no such value, and one that is being compiled has none
    # yet.
    try:
        return float(value) if isinstance(value, Real) or has_no_axes(value) else None
    except (TypeError, ValueError, RuntimeError):
        return None


def _doubt(name: str, number: float, n: int | None) -> int | None:
    """The doubt of a Number; None if this is not a number of micro-batches, or its inverse."""
    # Losses are multiplied by 1 / n as well.
    count = number if number > 1 else 1 / number if number > 0 else 0
    if not 1.5 < count < float("inf") or abs(count - round(count)) > 1e-6:
        return None
    # Of `config["train"].steps` the last word counts.
    word = "".join(re.findall(r"\w+", name)[-1:])
    if _SURE.search(word):
        return 0
    if round(count) != n:
        return None
    return 1 if number == n and _USUAL.fullmatch(word) else 2


# What a function reads, or settings hold; what that is called; the code that names its entries and
# attributes; and `put(other)`: the whole with another part in its place.
_Part = tuple[object, str, types.CodeType | None, Callable[[Any], object]]


def _parts(value: Any, name: str, code: types.CodeType | None) -> Iterator[_Part]:
    kind = type(value)
    if isinstance(value, types.FunctionType):
        yield from _of_function(value, code)
    elif isinstance(value, partial):
        yield value.func, name, code, lambda other: partial(other, *value.args, **value.keywords)
        reader = getattr(value.func, "__code__", None)
        for label, part in value.keywords.items():
            yield part, label, reader, partial(_with, value, label)
    elif isinstance(value, types.MethodType):
        function, owner = value.__func__, value.__self__
        yield function, name, code, lambda other: partial(other, owner)
        for part, label, reader, put in _settings(owner, "self", function.__code__):
            of_method = lambda other, put=put: partial(function, put(other))
            yield part, label, reader, of_method
    # A gradient function of funcga's, or a pure_loss.
    elif _is_library(kind.__module__) and hasattr(value, "loss_fn"):
        yield value.loss_fn, name, code, partial(_with, value, "loss_fn")
    # What is jitted: the function as it was.
    elif hasattr(value, "__wrapped__"):
        yield value.__wrapped__, name, code, lambda other: other
    elif isinstance(value, types.ModuleType | type) or _is_library(kind.__module__):
        return
    # An object with a __call__ of its own.
    elif callable(value):
        yield value.__call__, name, code, lambda other: other
    elif code is not None:
        yield from _settings(value, name, code)


def _of_function(function: types.FunctionType, code: types.CodeType | None) -> Iterator[_Part]:
    # In a library only functions are followed, such as the loss that torch.func.grad closes over.
    is_library = _is_library(function.__module__)
    reader = code if is_library else function.__code__
    for label, part in _variables(function).items():
        if not is_library or isinstance(part, types.FunctionType):
            yield part, label, reader, partial(_with, function, label)


def _variables(function: types.FunctionType) -> dict[str, object]:
    """What a function reads besides its arguments: globals, what it closes over, and defaults."""
    code, of_module = function.__code__, function.__globals__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    return (
        {name: of_module[name] for name in sorted(_names(code)) if name in of_module}
        | {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
        | {name: parameter.default for name, parameter in parameters.items()}
    )


def _with(value: Any, name: str, part: object) -> Any:
    """A copy of a function, a dict or an object with another value for what is read by a name."""
    if isinstance(value, dict):
        return {**value, name: part}
    code = getattr(value, "__code__", None)
    if isinstance(value, partial) or (code and name in code.co_varnames):
        return partial(value, **{name: part})
    if code is None:
        # Also for an attribute of its class.
        changed = copy.copy(value)
        object.__setattr__(changed, name, part)
        return changed
    if name in code.co_freevars:
        cells = dict(zip(code.co_freevars, value.__closure__, strict=True))
        cells[name] = types.CellType(part)
        return _copied(value, closure=tuple(cells.values()))
    return _copied(value, globals={**value.__globals__, name: part})


def _copied(function: types.FunctionType, **changed: Any) -> types.FunctionType:
    """A copy of the function with other code, globals or cells."""
    parts: dict[str, Any] = {
        "code": function.__code__,
        "globals": function.__globals__,
        "name": function.__name__,
        "argdefs": function.__defaults__,
        "closure": function.__closure__,
    }
    copied = types.FunctionType(**parts | changed)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _names(code: types.CodeType) -> set[str]:
    """The names of globals and attributes, and the strings, such as keys, in the code and in the
    functions inside of it.
    """
    names = {*code.co_names}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
        elif isinstance(const, str):
            names.add(const)
    return names


def _settings(value: Any, name: str, code: types.CodeType) -> Iterator[_Part]:
    """The entries of a dict, or the attributes of an object, that the code names, without
    functions.
    """
    for key in sorted(_names(code)):
        # A property is not evaluated: it might do anything.
        is_dict = isinstance(value, dict)
        part = value.get(key) if is_dict else inspect.getattr_static(value, key, None)
        if part is not None and not callable(part):
            label = f'{name}["{key}"]' if is_dict else f"{name}.{key}"
            yield part, label, code, partial(_with, value, key)


def _literals(function: types.FunctionType, n: int, is_called: bool) -> Iterator[Number]:
    """The literals that equal n, or 1 / n, for n >= 3: `/ 2` and `0.5 *` are in too many losses.

    A function that another one calls may return a part of the loss: there a literal tells nothing.
    """
    code = function.__code__
    for index, value in enumerate(code.co_consts if n >= 3 else ()):
        if type(value) in (int, float) and value and n in (value, round(1 / value, 6)):
            consts = (*code.co_consts[:index], 2 * value, *code.co_consts[index + 1 :])
            copied = _copied(function, code=code.replace(co_consts=consts))
            is_usual = _divides_all(code, value) and not is_called
            yield Number(repr(value), value, copied, 1 if is_usual else 2)


def _divides_all(code: types.CodeType, value: float) -> bool:
    """Whether the function returns an expression divided by this literal."""
    steps = [*dis.get_instructions(code)]
    return any(
        load.opname.startswith("LOAD_")
        and load.argval == value
        and (divide.argrepr, end.opname) == ("/", "RETURN_VALUE")
        for load, divide, end in zip(steps, steps[1:], steps[2:], strict=False)
    )
