"""Optimizers of torch as pure functions."""
