"""Containers that a framework's trees do not know: mappings such as `BatchEncoding`, and
dataclasses with arrays.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import NamedTuple

from funcga._types import Tree


class Kind(NamedTuple):
    """The structure of a container: its type and keys."""

    type: Callable[..., Tree]
    keys: tuple[Hashable, ...]


class Mapped:
    """A container in a tree: the frameworks know this class as a node, whose structure is a
    Kind.
    """

    def __init__(self, container: Tree, walk: Callable[[Tree], Tree]):
        entries = _entries(container)
        self.kind = Kind(type(container), tuple(entries))
        self.values = [walk(value) for value in entries.values()]


def is_container(node: object) -> bool:
    """Whether this is a mapping, or a dataclass with arrays; a dataclass without arrays is a
    leaf.
    """
    if isinstance(node, Mapping):
        return True
    is_array_or_module = hasattr(type(node), "ndim") or hasattr(type(node), "named_parameters")
    return (
        is_dataclass(node)
        and not isinstance(node, type)
        and not is_array_or_module
        and _has_arrays(node)
    )


def _has_arrays(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_arrays, value.values()))
    if isinstance(value, tuple | list):
        return any(map(_has_arrays, value))
    if isinstance(value, type):
        return False
    return hasattr(value, "ndim") or (
        is_dataclass(value) and any(map(_has_arrays, _entries(value).values()))
    )


def _entries(container: Tree) -> dict[Hashable, Tree]:
    if isinstance(container, Mapping):
        return {key: container[key] for key in container}
    return {field.name: getattr(container, field.name) for field in fields(container)}


def container_children(node: Tree) -> list[tuple[str, Tree]] | None:
    """The (key, subtree) pairs of a container, keys written as in code; None for anything else."""
    if not is_container(node):
        return None
    is_mapping = isinstance(node, Mapping)
    return [
        (f"[{key!r}]" if is_mapping else f".{key}", value) for key, value in _entries(node).items()
    ]


def rebuilt(kind: Kind, values: Iterable[Tree]) -> Tree:
    """A container of this kind with other values; a dict if the mapping cannot be made from one.

    Attributes beside the values, such as the encodings of a `BatchEncoding`, are of all rows,
    and left out.
    """
    plain = dict(zip(kind.keys, values, strict=True))
    if (
        isinstance(kind.type, type)
        and is_dataclass(kind.type)
        and not issubclass(kind.type, Mapping)
    ):
        return _rebuilt_dataclass(kind.type, plain)
    # Tried out, as a constructor with other parameters might silently make another mapping.
    try:
        mapping = kind.type(plain)
        is_alike = [*mapping] == [*plain] and all(mapping[key] is plain[key] for key in plain)
    except Exception:  # a foreign type may raise anything
        return plain
    return mapping if is_alike and type(mapping) is kind.type else plain


def _rebuilt_dataclass(kind: type, values: dict[Hashable, Tree]) -> Tree:
    """A dataclass with these fields, by its `__init__` if possible, which sets other attributes."""
    try:
        made = kind(**{field.name: values[field.name] for field in fields(kind) if field.init})
    except Exception:  # for example one that checks for arrays
        made = object.__new__(kind)
    # Set again, as `__init__` may change them.
    for name, value in values.items():
        object.__setattr__(made, str(name), value)
    return made
