"""Transforms of optax on tensors of torch, computed by JAX in the same memory.

It stands on the trees of two frameworks (`funcga.tools.trees`).
"""
