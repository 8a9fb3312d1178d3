"""Divisors: the number that a loss divides by: a count in the batch, or the number of micro-batches
in its own code.

Counts are expressions of the batch that people write for a weight, each tried on groups of rows
elsewhere. A loss that is divided by the number of micro-batches is as wrong for one micro-batch as
for n, so no comparison of the two shows it. Its code is looked at instead: the numbers that it
reads under a name that speaks of accumulation, or that are the n which is asked for. Each is
doubled in a copy of the function, and nothing of the user's is changed.
"""

import copy
import dis
import inspect
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._fold import has_no_axes
from funcga._types import Array
from funcga._verify.probe import Probe, Rows, as_numbers


class Count(NamedTuple):
    """What some rows count, and the body of a lambda with these parameters that says so."""

    parameters: str
    expression: str
    of: Callable[[Rows], float]

    @property
    def line(self) -> str:
        """The argument of `accumulate` for a loss that divides by it."""
        return f"weight=lambda {self.parameters}: {self.expression}"


ROWS = Count("", "", len)


def counts(probe: Probe) -> Iterator[Count]:
    """The counts that people write, of every leaf that is split: simplest first, and those of
    labels before all.

    Labels say what a loss is over. A mask of what is attended to may well count the same in this
    batch, and not in the next one.
    """
    for leaf in sorted(
        _split_leaves(probe),
        key=lambda leaf: not re.search("label|target", leaf.name, re.IGNORECASE),
    ):
        for expression, counted in _expressions(leaf):
            yield Count(leaf.parameters, expression, partial(_total, counted))


def rows_of(probe: Probe) -> Count:
    """The number of rows, counted in the first leaf that is split."""
    leaf = next(_split_leaves(probe))
    return Count(
        leaf.parameters,
        f"{leaf.name}.shape[{leaf.axis}]" if leaf.axis else f"len({leaf.name})",
        len,
    )


def _total(counted: Array, rows: Rows) -> float:
    return float(counted[[*rows]].sum())


def form(probe: Probe) -> Count:
    """The form of a count where none fits: that of labels, if anything in the batch looks like
    labels.
    """
    leaves = [*_split_leaves(probe)]
    whole = [leaf for leaf in leaves if np.equal(leaf.values, np.round(leaf.values)).all()]
    for leaf in (whole or leaves[-1:])[:1]:
        return Count(leaf.parameters, f"({leaf.name} != -100).sum()", len)
    return Count("batch", '(batch["labels"] != -100).sum()', len)


class _Leaf(NamedTuple):
    """A leaf that is split: its numbers, rows first, and how the body of a lambda with these
    parameters calls it.
    """

    values: Array
    name: str
    axis: int
    parameters: str


def _split_leaves(probe: Probe) -> Iterator[_Leaf]:
    # weight= is called with every argument that is split, so these are the parameters of the
    # lambda.
    arguments = zip(
        argument_names(probe.program.grad_fn, len(probe.args)), probe.arguments.parts, strict=True
    )
    split = [
        (name, part) for name, part in arguments if any(isinstance(axis, int) for axis in part.axes)
    ]
    # An argument of *args has no name of its own, so the lambda invents one.
    invented = iter(["batch", "y", "z", *(f"x{i}" for i in range(len(split)))])
    names = [name if name.isidentifier() else next(invented) for name, _ in split]
    for name, (_, part) in zip(names, split, strict=True):
        paths = leaf_paths(part.value, probe.backend.trees, name)
        for path, leaf, axis in zip(paths, part.leaves, part.axes, strict=True):
            values = as_numbers(leaf, probe.backend)
            if isinstance(axis, int) and values is not None and not np.iscomplexobj(values):
                yield _Leaf(
                    np.moveaxis(values, axis, 0), path, axis % values.ndim, ", ".join(names)
                )


def _expressions(leaf: _Leaf) -> Iterator[tuple[str, Array]]:
    """(expression, what each element counts)."""
    values, name = leaf.values, leaf.name
    # Numbers that are not whole are weights themselves, or masks of some kind.
    if values.size == 0 or not np.equal(values, np.round(values)).all():
        if (values >= 0).all():
            yield f"{name}.sum()", values
            yield f"({name} != 0).sum()", values != 0
        yield f"({name} ** 2).sum()", values**2
        return
    shifted = [(name, values)]
    # A language model counts from the second token on, or up to the last but one.
    if leaf.axis == 0 and values.ndim > 1 and values.shape[1] > 1:
        shifted += [(f"{name}[:, 1:]", values[:, 1:]), (f"{name}[:, :-1]", values[:, :-1])]
    for spelled, part in shifted:
        unique, frequency = np.unique(part, return_counts=True)
        if (part >= 0).all():
            yield f"{spelled}.sum()", part
        # The sum of a mask is what it counts already.
        if {*unique} <= {0, 1}:
            continue
        # The usual values of what is ignored, then the most frequent one and the largest, which
        # padding may be.
        for ignored in dict.fromkeys(
            (-100, 0, -1, int(unique[frequency.argmax()]), int(unique[-1]))
        ):
            if ignored in unique:
                yield f"({spelled} != {ignored}).sum()", part != ignored
        if (part < 0).any():
            yield f"({spelled} >= 0).sum()", part >= 0
        yield f"({spelled} > 0).sum()", part > 0


class Variant(NamedTuple):
    """A function in which one number, which it calls by this name, is doubled.

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
    """The value, a function or what one reads, with each number doubled that may be the number of
    micro-batches.

    name: what the value is called. code: that of the function which reads it, by the names in which
    settings are read.
    """
    number = _number(value)
    if number is not None:
        doubt = _doubt(name, number, n)
        if doubt is not None:
            yield Variant(name, number, 2 * value, doubt)
        return
    if depth > _DEPTH or isinstance(value, types.ModuleType | type):
        return
    is_function = isinstance(value, types.FunctionType)
    # In a library only functions are followed, such as the loss in the closure of
    # torch.func.grad(loss).
    is_library = is_function and _is_library(value.__globals__.get("__name__"))
    for part in _parts(value, name, code):
        if is_library and not callable(part.value):
            continue
        for variant in variants(part.value, n, part.name, part.code, depth + 1):
            # A function that is called may return a part of the loss: there a literal tells
            # nothing.
            is_in_call = is_function and not is_library and variant.name == repr(variant.value)
            doubt = 2 if is_in_call else variant.doubt
            yield variant._replace(function=part.put(variant.function), doubt=doubt)
    if is_function and not is_library:
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
    """The doubt of a Variant; None if this is no number of micro-batches, nor one divided by it."""
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


class _Part(NamedTuple):
    """What a function reads, or settings hold: its name, its value, and `put`: the whole with
    another value there.

    code: what names the entries and attributes of the value that are read.
    """

    name: str
    value: Any
    put: Callable[[Any], Any]
    code: types.CodeType | None = None


def _parts(value: Any, name: str, code: types.CodeType | None) -> Iterator[_Part]:
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, partial):
        yield from _of_partial(value)
    elif isinstance(value, types.MethodType):
        method, owner = value.__func__, value.__self__
        yield _Part("", method, lambda changed: types.MethodType(changed, owner))
        for part in _of_settings(owner, "self", _code(method)):
            yield part._replace(put=partial(_with_owner, method, part.put))
    # A gradient function of funcga's, or a pure_loss.
    elif is_dataclass(type(value)) and any(field.name == "loss_fn" for field in fields(value)):
        yield _Part("", value.loss_fn, lambda changed: replace(value, loss_fn=changed))
    # What is jitted: the function as it was.
    elif callable(getattr(value, "__wrapped__", None)):
        yield _Part("", value.__wrapped__, lambda changed: changed)
    # An object with a __call__ of its own.
    elif isinstance(inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
        yield _Part("", types.MethodType(type(value).__call__, value), lambda changed: changed)
    elif not callable(value):
        yield from _of_settings(value, name, code)


def _with_owner(method: Any, put: Callable[[Any], Any], changed: object) -> types.MethodType:
    return types.MethodType(method, put(changed))


def _code(function: object) -> types.CodeType | None:
    return function.__code__ if isinstance(function, types.FunctionType) else None


def _of_partial(function: partial[Any]) -> Iterator[_Part]:
    target, args, keywords = function.func, function.args, function.keywords
    yield _Part("", target, lambda changed: partial(changed, *args, **keywords))
    # The arguments of a partial have the names of the parameters that they fill.
    code = _code(target)
    for index, (name, value) in enumerate(
        zip(code.co_varnames if code else (), args, strict=False)
    ):
        put = lambda changed, index=index: partial(
            target, *args[:index], changed, *args[index + 1 :], **keywords
        )
        yield _Part(name, value, put, code)
    for name, value in keywords.items():
        yield _Part(name, value, partial(_with_keyword, function, name), code)


def _with_keyword(function: Any, name: str, value: object) -> Any:
    return partial(function, **{name: value})


def _of_function(function: types.FunctionType) -> Iterator[_Part]:
    """What a function closes over; unless it is a library's, its globals and defaults as well."""
    code, variables, cells = function.__code__, function.__globals__, function.__closure__ or ()
    for index, (name, cell) in enumerate(zip(code.co_freevars, cells, strict=True)):
        put = lambda changed, index=index: _rebuilt(
            function, closure=(*cells[:index], types.CellType(changed), *cells[index + 1 :])
        )
        try:
            yield _Part(name, cell.cell_contents, put, code)
        # The variable is not set yet.
        except ValueError:
            continue
    if _is_library(variables.get("__name__")):
        return
    for name in sorted(_names(code) & variables.keys()):
        value = variables[name]
        if _number(value) is not None or not _is_library(type(value).__module__):
            put = lambda changed, name=name: _rebuilt(
                function, globals={**variables, name: changed}
            )
            yield _Part(name, value, put, code)
    # A default is overridden as a keyword argument.
    last = code.co_varnames[: code.co_argcount][-len(function.__defaults__ or ()) :]
    defaults = dict(zip(last, function.__defaults__ or (), strict=False)) | (
        function.__kwdefaults__ or {}
    )
    for name, value in defaults.items():
        yield _Part(name, value, partial(_with_keyword, function, name))


def _rebuilt(function: types.FunctionType, **changes: Any) -> types.FunctionType:
    """A copy of the function in which some of the parts that it is made of are others."""
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
    """The globals, attributes and texts, such as keys, that the code and functions inside of it
    have.
    """
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names, *(const for const in code.co_consts if isinstance(const, str))}.union(
        *inner
    )


def _of_settings(value: Any, name: str, code: types.CodeType | None) -> Iterator[_Part]:
    """The entries of a dict, and the attributes of an object, which the code names; no
    functions.
    """
    names = sorted(_names(code)) if code else []
    if isinstance(value, dict):
        for key in names:
            if key in value and not callable(value[key]):
                put = lambda changed, key=key: {**value, key: changed}
                yield _Part(f'{name}["{key}"]', value[key], put, code)
    elif inspect.getattr_static(value, "__dict__", None) is not None:
        for attribute in names:
            # A property is not evaluated: it might do anything.
            part = inspect.getattr_static(value, attribute, None)
            if part is not None and not callable(part):
                yield _Part(
                    f"{name}.{attribute}", part, partial(_with_attribute, value, attribute), code
                )


def _with_attribute(value: Any, name: str, part: object) -> Any:
    """A copy with another attribute; one of the class becomes one of the copy."""
    changed = copy.copy(value)
    object.__setattr__(changed, name, part)
    return changed


def _literals(function: types.FunctionType, n: int | None) -> Iterator[Variant]:
    """Where n is 3 or more: `/ 2` and `0.5 *` are in too many losses."""
    code = function.__code__
    for index, value in enumerate(code.co_consts):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            is_number
            and n is not None
            and n >= 3
            and (value == n or (value and abs(1 / value - n) < 1e-6))
        ):
            consts = (*code.co_consts[:index], 2 * value, *code.co_consts[index + 1 :])
            changed = _rebuilt(function, code=code.replace(co_consts=consts))
            yield Variant(repr(value), value, changed, 1 if _divides_all(code, value) else 2)


def _divides_all(code: types.CodeType, value: float) -> bool:
    """Whether what is returned is something divided by this literal, at once."""
    steps = [*dis.get_instructions(code)]
    return any(
        load.opname.startswith("LOAD_")
        and load.argval == value
        and (divide.argrepr, end.opname) == ("/", "RETURN_VALUE")
        for load, divide, end in zip(steps, steps[1:], steps[2:], strict=False)
    )
