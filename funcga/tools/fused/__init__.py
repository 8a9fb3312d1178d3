"""Gradients of large weights, added to the sums inside of the backward pass.

Only torch needs this tool: XLA fuses the sum into the product by itself.
"""
