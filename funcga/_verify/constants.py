"""Constants: whether a loss is divided by the number of micro-batches already.

Such a loss is as wrong for one micro-batch as for n, so no comparison of the two shows it. Its code is looked at: the
numbers that it reads under a name that speaks of accumulation, or that are the n which is asked for. With one of them
doubled the whole output must be halved, or doubled. Only then is it accused, and only if its name says what it stands
for: that a temperature or a number of channels equals n is no mistake.
"""

import dis
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

from funcga._verify.suspects import doubled, doubt_of, names_in, number_of, of_object

_DEPTH = 8


class Variant(NamedTuple):
    """A function in which one number, which it calls by this name, is doubled.

    doubt: 0 if the name says that it is the number of micro-batches; 1 if the name, or the place, is usual for it; 2 if
    it merely equals n.
    """

    name: str
    value: float
    function: Callable[..., Any]
    doubt: int


def variants(function: Any, n: int | None) -> Iterator[Variant]:
    """The function with each number doubled that may be the number of micro-batches; nothing of it is changed."""
    yield from _variants(function, n, 0)


def _variants(function: Any, n: int | None, depth: int) -> Iterator[Variant]:
    if depth > _DEPTH:
        return
    if isinstance(function, functools.partial):
        yield from _of_partial(function, n, depth)
    elif isinstance(function, types.MethodType):
        for variant in _variants(function.__func__, n, depth + 1):
            yield variant._replace(function=types.MethodType(variant.function, function.__self__))
        for name, value, owner in of_object("self", function.__self__, function.__func__.__code__, n):
            yield _variant(name, value, types.MethodType(function.__func__, owner), n)
    elif isinstance(function, types.FunctionType):
        yield from _of_function(function, n, depth)
    elif is_dataclass(function) and hasattr(function, "loss_fn"):  # a GradientFunction, or a pure_loss
        made: Any = function
        for variant in _variants(made.loss_fn, n, depth + 1):
            yield variant._replace(function=replace(made, loss_fn=variant.function))
    elif callable(getattr(function, "__wrapped__", None)):  # jitted
        yield from _variants(function.__wrapped__, n, depth + 1)
    elif isinstance(getattr(type(function), "__call__", None), types.FunctionType):  # noqa: B004 - its code is read
        yield from _variants(types.MethodType(type(function).__call__, function), n, depth + 1)


def _of_partial(function: Any, n: int | None, depth: int) -> Iterator[Variant]:
    for variant in _variants(function.func, n, depth + 1):
        yield variant._replace(function=functools.partial(variant.function, *function.args, **function.keywords))
    code = getattr(function.func, "__code__", None)
    for key, value in function.keywords.items():
        for name, number, twice in doubled(key, value, code, n):
            made = functools.partial(function.func, *function.args, **function.keywords | {key: twice})
            yield _variant(name, number, made, n)
    for i, (name, value) in enumerate(zip(getattr(code, "co_varnames", ()), function.args, strict=False)):
        for spelled, number, twice in doubled(name, value, code, n):
            args = (*function.args[:i], twice, *function.args[i + 1 :])
            yield _variant(spelled, number, functools.partial(function.func, *args, **function.keywords), n)


def _of_function(function: types.FunctionType, n: int | None, depth: int) -> Iterator[Variant]:
    code = function.__code__
    own = not str(function.__globals__.get("__name__")).startswith(
        ("torch.", "jax.", "numpy.", "funcga.", "torch_backend.")
    )
    for i, (name, cell) in enumerate(zip(code.co_freevars, function.__closure__ or (), strict=True)):
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        for found in _changed(name, value, code, n, depth, own):
            cells = [*(function.__closure__ or ())]
            cells[i] = types.CellType(found.function)
            yield found._replace(function=_rebuilt(function, closure=tuple(cells)))
    if not own:
        return
    for name in sorted(names_in(code) & function.__globals__.keys()):
        value = function.__globals__[name]
        foreign = (getattr(value, "__module__", None) or "").startswith(("torch", "jax", "numpy", "funcga"))
        if (foreign and number_of(value) is None) or isinstance(value, types.ModuleType | type):
            continue
        for found in _changed(name, value, code, n, depth, own):
            made = _rebuilt(function, names={**function.__globals__, name: found.function})
            yield found._replace(function=made)
    yield from _of_defaults(function, n)
    yield from _of_literals(function, n)


def _changed(name: str, value: Any, code: types.CodeType, n: int | None, depth: int, own: bool) -> Iterator[Variant]:
    """Variants of which `function` is the value of a variable of a function, with a number of it doubled."""
    if own:
        for spelled, number, twice in doubled(name, value, code, n):
            yield _variant(spelled, number, twice, n)
    if callable(value) and not isinstance(value, type):
        for variant in _variants(value, n, depth + 1):
            is_literal = variant.name == repr(variant.value)  # whose function may return a part of the loss
            yield variant._replace(doubt=2) if own and is_literal else variant


def _variant(name: str, value: float, function: Any, n: int | None) -> Variant:
    return Variant(name, value, function, doubt_of(name, value, n))


def _of_defaults(function: types.FunctionType, n: int | None) -> Iterator[Variant]:
    defaults = function.__defaults__ or ()
    first = function.__code__.co_argcount - len(defaults)
    for i, value in enumerate(defaults):
        for name, number, twice in doubled(function.__code__.co_varnames[first + i], value, None, n):
            made = _rebuilt(function, defaults=(*defaults[:i], twice, *defaults[i + 1 :]))
            yield _variant(name, number, made, n)
    for key, value in (function.__kwdefaults__ or {}).items():
        for name, number, twice in doubled(key, value, None, n):
            made = _rebuilt(function)
            made.__kwdefaults__ = {**(function.__kwdefaults__ or {}), key: twice}
            yield _variant(name, number, made, n)


def _of_literals(function: types.FunctionType, n: int | None) -> Iterator[Variant]:
    """Where n is 3 or more: `/ 2` and `0.5 *` are in too many losses."""
    code = function.__code__
    for i, value in enumerate(code.co_consts):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and n is not None and n >= 3 and (value == n or (value and abs(1 / value - n) < 1e-6)):
            consts = (*code.co_consts[:i], 2 * value, *code.co_consts[i + 1 :])
            made = _rebuilt(function, code=code.replace(co_consts=consts))
            yield Variant(repr(value), value, made, 1 if _divides_all(code, value) else 2)


def _divides_all(code: types.CodeType, value: float) -> bool:
    """Whether what is returned is something divided by this literal, at once."""
    found = [*dis.get_instructions(code)]
    triples = zip(found, found[1:], found[2:], strict=False)
    return any(
        a.argval == value and b.argrepr == "/" and c.opname == "RETURN_VALUE"
        for a, b, c in triples
        if a.opname.startswith("LOAD_")
    )


def _rebuilt(
    function: types.FunctionType,
    code: types.CodeType | None = None,
    names: dict[str, Any] | None = None,
    defaults: tuple[Any, ...] | None = None,
    closure: tuple[Any, ...] | None = None,
) -> types.FunctionType:
    made = types.FunctionType(
        code or function.__code__,
        function.__globals__ if names is None else names,
        function.__name__,
        function.__defaults__ if defaults is None else defaults,
        function.__closure__ if closure is None else closure,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
