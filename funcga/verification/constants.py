"""Constants: whether a loss is divided by the number of micro-batches already.

Such a loss is as wrong for one micro-batch as for n, so no comparison of the two shows it. Its code is looked at: the
numbers that it reads under a name that speaks of accumulation, or that are the n which is asked for. With one of them
doubled the whole output must be halved, or doubled; only then is it accused.
"""

import copy
import functools
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

# A count of micro-batches whatever its value; and what is one only if its value is the n that is asked for.
_SURE = re.compile(r"accum|micro_?b|num_micro|n_micro|grad_?steps", re.IGNORECASE)
_LIKELY = re.compile(
    r"^(n|k|steps?|n_?steps|num_?steps|ga|gas)$|chunk|split|(n|num|number)_?(of_?)?(mini)?_?batches", re.IGNORECASE
)
_DEPTH = 8


class Variant(NamedTuple):
    """A function in which one number, which it calls by this name, is doubled."""

    name: str
    value: float
    function: Callable[..., Any]


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
        for name, value, owner in _of_object("self", function.__self__, function.__func__.__code__, n):
            yield Variant(name, value, types.MethodType(function.__func__, owner))
    elif isinstance(function, types.FunctionType):
        yield from _of_function(function, n, depth)
    elif hasattr(function, "loss_fn"):  # a GradientFunction, or a pure_loss
        for variant in _variants(function.loss_fn, n, depth + 1):
            yield variant._replace(function=replace(function, loss_fn=variant.function))
    elif callable(getattr(function, "__wrapped__", None)):  # jitted
        yield from _variants(function.__wrapped__, n, depth + 1)


def _of_partial(function: Any, n: int | None, depth: int) -> Iterator[Variant]:
    for variant in _variants(function.func, n, depth + 1):
        yield variant._replace(function=functools.partial(variant.function, *function.args, **function.keywords))
    for key, value in function.keywords.items():
        for name, number, doubled in _doubled(key, value, None, n):
            yield Variant(
                name, number, functools.partial(function.func, *function.args, **function.keywords | {key: doubled})
            )
    names = getattr(getattr(function.func, "__code__", None), "co_varnames", ())
    for i, (name, value) in enumerate(zip(names, function.args, strict=False)):
        for spelled, number, doubled in _doubled(name, value, None, n):
            args = (*function.args[:i], doubled, *function.args[i + 1 :])
            yield Variant(spelled, number, functools.partial(function.func, *args, **function.keywords))


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
        for spelled, number, changed in _changed(name, value, code, n, depth, own):
            cells = [*(function.__closure__ or ())]
            cells[i] = types.CellType(changed)
            yield Variant(spelled, number, _rebuilt(function, closure=tuple(cells)))
    if not own:
        return
    for name in sorted(_names(code) & function.__globals__.keys()):
        value = function.__globals__[name]
        foreign = (getattr(value, "__module__", None) or "").startswith(("torch", "jax", "numpy", "funcga"))
        if foreign or isinstance(value, types.ModuleType | type):
            continue
        for spelled, number, changed in _changed(name, value, code, n, depth, own):
            yield Variant(spelled, number, _rebuilt(function, names={**function.__globals__, name: changed}))
    yield from _of_defaults(function, n)
    yield from _of_literals(function, n)


def _changed(
    name: str, value: Any, code: types.CodeType, n: int | None, depth: int, own: bool
) -> Iterator[tuple[str, float, Any]]:
    """(name, number, the value with that number doubled) for a variable of a function."""
    if own:
        yield from _doubled(name, value, code, n)
    if callable(value) and not isinstance(value, type):
        for variant in _variants(value, n, depth + 1):
            yield variant.name, variant.value, variant.function


def _doubled(name: str, value: Any, code: types.CodeType | None, n: int | None) -> Iterator[tuple[str, float, Any]]:
    if _is_suspect(name, value, n):
        yield name, value, 2 * value
    elif code is not None and not callable(value):
        yield from _of_object(name, value, code, n)


def _of_object(name: str, value: Any, code: types.CodeType, n: int | None) -> Iterator[tuple[str, float, Any]]:
    """The same for the entries of a dict, and the attributes of an object, which the code names."""
    if isinstance(value, dict):
        for key in [key for key in value if isinstance(key, str) and key in _texts(code)]:
            if _is_suspect(key, value[key], n):
                yield f'{name}["{key}"]', value[key], {**value, key: 2 * value[key]}
    elif hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type):
        for key in [key for key in vars(value) if key in _names(code)]:
            number = vars(value)[key]
            if _is_suspect(key, number, n):
                made = copy.copy(value)
                object.__setattr__(made, key, 2 * number)
                yield f"{name}.{key}", number, made


def _is_suspect(name: str, value: Any, n: int | None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or value in (0, 1):
        return False
    count = value if value > 1 else 1 / value if value > 0 else 0
    if abs(count - round(count)) > 1e-6 or count < 2:
        return False
    return bool(_SURE.search(name)) or (n is not None and round(count) == n and bool(_LIKELY.search(name)))


def _of_defaults(function: types.FunctionType, n: int | None) -> Iterator[Variant]:
    defaults = function.__defaults__ or ()
    first = function.__code__.co_argcount - len(defaults)
    for i, value in enumerate(defaults):
        for name, number, doubled in _doubled(function.__code__.co_varnames[first + i], value, None, n):
            yield Variant(name, number, _rebuilt(function, defaults=(*defaults[:i], doubled, *defaults[i + 1 :])))
    for key, value in (function.__kwdefaults__ or {}).items():
        for name, number, doubled in _doubled(key, value, None, n):
            made = _rebuilt(function)
            made.__kwdefaults__ = {**(function.__kwdefaults__ or {}), key: doubled}
            yield Variant(name, number, made)


def _of_literals(function: types.FunctionType, n: int | None) -> Iterator[Variant]:
    """Where n is 3 or more: `/ 2` and `0.5 *` are in too many losses."""
    code = function.__code__
    for i, value in enumerate(code.co_consts):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and n is not None and n >= 3 and (value == n or (value and abs(1 / value - n) < 1e-6)):
            consts = (*code.co_consts[:i], 2 * value, *code.co_consts[i + 1 :])
            yield Variant(repr(value), value, _rebuilt(function, code=code.replace(co_consts=consts)))


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*inner)


def _texts(code: types.CodeType) -> set[str]:
    inner = [_texts(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return {const for const in code.co_consts if isinstance(const, str)}.union(*inner)


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
