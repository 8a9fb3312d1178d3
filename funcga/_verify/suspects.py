"""Suspects: numbers which, by their name, may be the number of micro-batches, and the settings that hold them."""

import copy
import inspect
import re
import types
from collections.abc import Iterator
from numbers import Real
from typing import Any

# A count of micro-batches whatever its value; what is one if its value is the n that is asked for, unless the batch has
# this size as well; and what may be one then.
_SURE = re.compile(
    r"accum|micro_?b|num_micro|n_micro|grad_?steps|grad_?acc|(^|_)acc_?steps|(^|_)ga_?steps|update_?freq|every_?k|"
    r"iter_?size|virtual_?batch",
    re.IGNORECASE,
)
_USUAL = re.compile(r"^(n|acc|ACC|gas?|GAS?)$")
_LIKELY = re.compile(r"^(n|k|steps?|n_?steps|num_?steps)$|chunk|split|batches", re.IGNORECASE)
_NESTED = 3


def doubled(name: str, value: Any, code: types.CodeType | None, n: int | None) -> Iterator[tuple[str, float, Any]]:
    """(name, number, the value with that number doubled)."""
    if _is_suspect(name, value, n):
        yield name, float(value), 2 * value
    elif code is not None and not callable(value):
        yield from of_object(name, value, code, n)


def of_object(
    name: str, value: Any, code: types.CodeType, n: int | None, depth: int = 0
) -> Iterator[tuple[str, float, Any]]:
    """The same for the entries of a dict, and the attributes of an object, which the code names."""
    for key, part in _parts(value, code):
        spelled = f'{name}["{key}"]' if isinstance(value, dict) else f"{name}.{key}"
        if _is_suspect(key, part, n):
            yield spelled, float(part), _with(value, key, 2 * part)
        elif depth < _NESTED and not callable(part):
            for deeper, number, made in of_object(spelled, part, code, n, depth + 1):
                yield deeper, number, _with(value, key, made)


def _parts(value: Any, code: types.CodeType) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((key, value[key]) for key in value if isinstance(key, str) and key in _texts(code))
    elif hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type):
        found = ((key, inspect.getattr_static(value, key, None)) for key in sorted(names_in(code)))
        yield from ((key, part) for key, part in found if part is not None)


def _with(value: Any, key: str, part: Any) -> Any:
    """A copy with another entry or attribute; an attribute of the class becomes one of the copy."""
    if isinstance(value, dict):
        return {**value, key: part}
    made = copy.copy(value)
    object.__setattr__(made, key, part)
    return made


def number_of(value: Any) -> float | None:
    """The value of a number or of an array without axes."""
    if isinstance(value, bool) or not (isinstance(value, Real) or getattr(value, "shape", None) == ()):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # a key, a complex number, one that is not known yet
        return None


def _is_suspect(name: str, value: Any, n: int | None) -> bool:
    number = number_of(value)
    if number is None or not 0 < number < float("inf"):
        return False
    count = number if number > 1 else 1 / number
    if abs(count - round(count)) > 1e-6 or count < 2:
        return False
    return bool(_SURE.search(name)) or (round(count) == n and bool(_USUAL.search(name) or _LIKELY.search(name)))


def doubt_of(name: str, value: float, n: int | None) -> int:
    """0 if the name says that this is the number of micro-batches, 1 if it is a usual one for it, else 2."""
    last = re.findall(r"\w+", name)[-1]
    return 0 if _SURE.search(last) else 1 if _USUAL.search(last) and value == n else 2


def names_in(code: types.CodeType) -> set[str]:
    """The globals and attributes that the code, and functions inside of it, name."""
    inner = [names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*inner)


def _texts(code: types.CodeType) -> set[str]:
    inner = [_texts(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return {const for const in code.co_consts if isinstance(const, str)}.union(*inner)
