"""Mappings that a framework's trees do not know: `BatchEncoding`, `UserDict`, `MappingProxyType` and their like."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """What a mapping is, apart from its values."""

    type: Any
    keys: tuple[Any, ...]


class Mapped:
    """A mapping in a tree: the frameworks know this class as a node, whose structure is a Kind."""

    def __init__(self, mapping: Mapping[Any, Any], walk: Callable[[Any], Any]):
        self.kind = Kind(type(mapping), tuple(mapping))
        self.values = [walk(mapping[key]) for key in self.kind.keys]


def is_mapping(kind: type) -> bool:
    """Whether things of this type are mappings."""
    return issubclass(kind, Mapping)


def rebuilt(kind: Kind, values: Any) -> Any:
    """A mapping of this kind with other values; a dict of them if its type does not make one of a dict.

    What it knows beside its values, as a `BatchEncoding` does the words that its tokens come from, is of all rows: it
    is left out.
    """
    plain = dict(zip(kind.keys, values, strict=True))
    try:
        made = kind.type(plain)
        alike = type(made) is kind.type and [*made] == [*plain] and all(made[key] is plain[key] for key in plain)
    except Exception:  # of somebody else's type, which may want anything
        return plain
    return made if alike else plain
