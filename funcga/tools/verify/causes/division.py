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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from funcga._fold import has_no_axes
from funcga.tools.verify.causes import Answer, cause, note
from funcga.tools.verify.exact import Case, largest, relative


def divided_by_n(case: Case) -> Iterator[Answer]:
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
    found = variants(partial(probe.grad_fn, **probe.kwargs), n) if leaves else ()
    for variant in sorted(found, key=lambda variant: variant.doubt):
        try:
            step = probe.with_attributes(grad_fn=variant.function).raw_step()
            changed = probe.numbers(step(*probe.take_rows(probe.all_rows)))
        # The number was the length of something, and the function fails with another.
        except Exception:
            continue
        factor = 0.5 if variant.value > 1 else 2.0
        size = largest([probe.whole[i] for i in leaves])
        apart = [relative(changed[i], factor * probe.whole[i], size) for i in leaves]
        if max(apart) <= case.limit.relative:
            yield _answer(case, leaves, variant)
            return


def _answer(case: Case, leaves: list[int], variant: "Variant") -> Answer:
    """The cause, or a note if the number may stand for something else, such as the size of an axis
    of the batch.
    """
    probe, name, value = case.probe, variant.name, variant.value
    split = [leaf for leaf, axis in probe.arguments if isinstance(axis, int) and leaf is not None]
    operation = f"{'/' if value > 1 else '*'} {name}"
    is_a_size = value in {size for leaf in split for size in leaf.shape}
    if variant.doubt == 2 or (variant.doubt == 1 and is_a_size):
        return note("factor", operation=operation)
    is_summed = any(probe.folds[i].normalizer.divides_by is None for i in leaves)
    return cause(
        "divided by n: summed" if is_summed else "divided by n",
        operation=operation,
        doubt=", if it stands for the number of micro-batches" if name == repr(value) else "",
        name=name,
        value=value,
        twice=2 * value,
        size="half" if value > 1 else "twice",
    )


# --- the numbers that a function reads, each doubled in a copy


class Variant(NamedTuple):
    """A copy of a function in which the number of this name is doubled.

    doubt: 0 if the name says that it is the number of micro-batches; 1 if the name, or where it
    stands, is usual for it; 2 if it merely equals n.
    """

    name: str
    value: float
    function: Any
    doubt: int


# A count of micro-batches whatever its value; what is one if its value is the n that is asked for,
# unless the batch has this size as well; and what may be one then.
_SURE = re.compile(
    r"accum|micro_?b|num_micro|n_micro|grad_?steps|grad_?acc|(^|_)acc_?steps|(^|_)ga_?steps|update_?freq|every_?k|"
    r"iter_?size|virtual_?batch",
    re.IGNORECASE,
)
_USUAL = re.compile(r"^(n|acc|ACC|gas?|GAS?)$")
_LIKELY = re.compile(r"^(n|k|steps?|n_?steps|num_?steps)$|chunk|split|batches", re.IGNORECASE)

_LIBRARIES = {"torch", "jax", "jaxlib", "numpy", "funcga", "torch_backend", "jax_backend"}
_DEPTH = 8
"""How deep functions that call functions, and settings in settings, are followed."""


def variants(
    value: Any, n: int | None, name: str = "", code: types.CodeType | None = None, depth: int = 0
) -> Iterator[Variant]:
    """Copies of a value, a function or something that it reads, each with one number doubled that
    may be the number of micro-batches.

    name: the name of the value. code: that of the function which reads the value; its names select
    the entries and attributes of settings.
    """
    number = _number(value)
    if number is not None:
        doubt = _doubt(name, number, n)
        if doubt is not None:
            yield Variant(name, number, 2 * value, doubt)
        return
    if depth > _DEPTH or isinstance(value, types.ModuleType | type):
        return
    is_own = isinstance(value, types.FunctionType) and not _is_library(value.__module__)
    for part, label, reader, put in _parts(value, name, code):
        for variant in variants(part, n, label, reader, depth + 1):
            # A function that is called may return a part of the loss: there a literal tells
            # nothing.
            doubt = 2 if is_own and variant.name == repr(variant.value) else variant.doubt
            yield variant._replace(function=put(variant.function), doubt=doubt)
    if is_own:
        yield from _literals(value, n)


def _is_library(module: object) -> bool:
    return str(module).split(".")[0] in _LIBRARIES


def _number(value: Any) -> float | None:
    """The value of a number, or of an array without axes."""
    if isinstance(value, bool) or not (isinstance(value, Real) or has_no_axes(value)):
        return None
    # A random key and a complex number have no such value, and one that is being compiled has none
    # yet.
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _doubt(name: str, number: float, n: int | None) -> int | None:
    """The doubt of a Variant; None if this is not a number of micro-batches, or its inverse."""
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
    if _USUAL.search(word):
        return 1 if number == n else 2
    return 2 if _LIKELY.search(word) else None


# What a function reads, or settings hold; what that is called; the code that names its entries and
# attributes; and `put(other)`: the whole with another part in its place.
_Part = tuple[object, str, types.CodeType | None, Callable[[Any], object]]


def _parts(value: Any, name: str, code: types.CodeType | None) -> Iterator[_Part]:
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, partial):
        yield value.func, "", None, lambda other: partial(other, *value.args, **value.keywords)
        code = value.func.__code__ if isinstance(value.func, types.FunctionType) else None
        yield from _of_keywords(value, value.keywords, code)
    elif isinstance(value, types.MethodType):
        method, owner = value.__func__, value.__self__
        yield method, "", None, lambda other: types.MethodType(other, owner)
        for part, label, reader, put in _of_settings(owner, "self", method.__code__):
            of_method = lambda other, put=put: types.MethodType(method, put(other))
            yield part, label, reader, of_method
    # A gradient function of funcga's, or a pure_loss.
    elif is_dataclass(type(value)) and any(field.name == "loss_fn" for field in fields(value)):
        yield value.loss_fn, "", None, lambda other: replace(value, loss_fn=other)
    # What is jitted: the function as it was.
    elif callable(getattr(value, "__wrapped__", None)):
        yield value.__wrapped__, "", None, lambda other: other
    # An object with a __call__ of its own.
    elif isinstance(inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
        yield types.MethodType(type(value).__call__, value), "", None, lambda other: other
    elif not callable(value):
        yield from _of_settings(value, name, code)


def _of_keywords(
    function: Callable[..., object],
    values: Mapping[str, object],
    code: types.CodeType | None = None,
) -> Iterator[_Part]:
    """The parts that a keyword argument replaces: bound keyword arguments, and defaults."""
    for name, value in values.items():
        put = lambda other, name=name: partial(function, **{name: other})
        yield value, name, code, put


def _of_function(function: types.FunctionType) -> Iterator[_Part]:
    """The variables that a function closes over, its globals and its defaults; in a library only
    functions, such as the loss in the closure of torch.func.grad(loss).
    """
    code, variables = function.__code__, function.__globals__
    is_library = _is_library(function.__module__)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    for name, cell in cells.items():
        value = None if cell == types.CellType() else cell.cell_contents
        if callable(value) or not is_library:
            put = lambda other, name=name: _rebuilt(
                function, closure=tuple((cells | {name: types.CellType(other)}).values())
            )
            yield value, name, code, put
    if is_library:
        return
    for name in sorted(_names(code) & variables.keys()):
        value = variables[name]
        if _number(value) is not None or not _is_library(type(value).__module__):
            put = lambda other, name=name: _rebuilt(function, globals={**variables, name: other})
            yield value, name, code, put
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    yield from _of_keywords(function, defaults)


def _rebuilt(function: types.FunctionType, **changes: Any) -> types.FunctionType:
    """A copy of the function with other code, globals or closure."""
    parts: dict[str, Any] = {
        "code": function.__code__,
        "globals": function.__globals__,
        "closure": function.__closure__,
    }
    rebuilt = types.FunctionType(
        name=function.__name__, argdefs=function.__defaults__, **(parts | changes)
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return rebuilt


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


def _of_settings(value: Any, name: str, code: types.CodeType | None) -> Iterator[_Part]:
    """The entries of a dict, or the attributes of an object, that the code names, without
    functions.
    """
    is_dict = isinstance(value, dict)
    if not is_dict and inspect.getattr_static(value, "__dict__", None) is None:
        return
    for key in sorted(_names(code)) if code else ():
        # A property is not evaluated: it might do anything.
        part = value.get(key) if is_dict else inspect.getattr_static(value, key, None)
        if part is not None and not callable(part):
            label = f'{name}["{key}"]' if is_dict else f"{name}.{key}"
            yield part, label, code, partial(_with_part, value, key)


def _with_part(value: Any, key: str, part: object) -> Any:
    """A copy with another value for an entry or an attribute, also for one of its class."""
    if isinstance(value, dict):
        return {**value, key: part}
    changed = copy.copy(value)
    object.__setattr__(changed, key, part)
    return changed


def _literals(function: types.FunctionType, n: int | None) -> Iterator[Variant]:
    """The literals that equal n, or 1 / n, for n >= 3: `/ 2` and `0.5 *` are in too many losses."""
    code = function.__code__
    for index, value in enumerate(code.co_consts if n and n >= 3 else ()):
        if type(value) in (int, float) and value and n in (value, round(1 / value, 6)):
            consts = (*code.co_consts[:index], 2 * value, *code.co_consts[index + 1 :])
            changed = _rebuilt(function, code=code.replace(co_consts=consts))
            yield Variant(repr(value), value, changed, 1 if _divides_all(code, value) else 2)


def _divides_all(code: types.CodeType, value: float) -> bool:
    """Whether the function returns an expression divided by this literal."""
    steps = [*dis.get_instructions(code)]
    return any(
        load.opname.startswith("LOAD_")
        and load.argval == value
        and (divide.argrepr, end.opname) == ("/", "RETURN_VALUE")
        for load, divide, end in zip(steps, steps[1:], steps[2:], strict=False)
    )
