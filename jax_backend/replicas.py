"""Replicas: what across= names, and whether they hold the same."""

from typing import Any


def replicas_of(across: Any) -> Any:
    """The replicas that `across=` names, as the loop takes them; FuncgaError for what names none."""
    raise NotImplementedError


def check_replicas(params: Any, across: Any) -> None:
    """Raises FuncgaError, which names the leaf, if an array is not the same on every replica."""
    raise NotImplementedError
