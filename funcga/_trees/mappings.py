"""Mappings that a framework's trees do not know: `BatchEncoding`, `UserDict`, `MappingProxyType` and their like."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from funcga._types import Tree


class Kind(NamedTuple):
    """What a mapping is, apart from its values."""

    type: Callable[[dict[Hashable, Tree]], Mapping[Hashable, Tree]]
    keys: tuple[Hashable, ...]


class Mapped:
    """A mapping in a tree: the frameworks know this class as a node, whose structure is a Kind."""

    def __init__(self, mapping: Mapping[Hashable, Tree], walk: Callable[[Tree], Tree]):
        self.kind = Kind(type(mapping), tuple(mapping))
        self.values = [walk(mapping[key]) for key in self.kind.keys]


def is_mapping(kind: type) -> bool:
    """Whether things of this type are mappings."""
    return issubclass(kind, Mapping)


def rebuilt(kind: Kind, values: Iterable[Tree]) -> Tree:
    """A mapping of this kind with other values; a dict of them if its type does not make one of a dict.

    What it knows beside its values, as a `BatchEncoding` does the words that its tokens come from, is of all rows: it
    is left out.
    """
    # The type is tried out: one whose constructor takes something else would make another mapping, silently.
    plain = dict(zip(kind.keys, values, strict=True))
    try:
        mapping = kind.type(plain)
        is_alike = [*mapping] == [*plain] and all(mapping[key] is plain[key] for key in plain)
    except Exception:  # of somebody else's type, which may want anything
        return plain
    return mapping if is_alike and type(mapping) is kind.type else plain
