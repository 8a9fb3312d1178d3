"""Modules as pure functions."""
