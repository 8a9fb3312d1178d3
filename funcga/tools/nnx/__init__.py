"""Checks of objects of flax.nnx, which are trees with state, and are copied in each trace.

So a variable that is in two places would become two, and what grad_fn writes to an object would be
lost. The core of JAX loads this where flax.nnx is imported.
"""
