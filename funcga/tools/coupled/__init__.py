"""The two passes of `funcga.coupled`, a loss that needs the whole batch: one file for each
framework.

The first pass folds a summary of each micro-batch, and the second the gradients of inner products
of the summaries with cotangents: two windows like any other. `funcga/_coupled.py` says what the
cotangents are.
"""
