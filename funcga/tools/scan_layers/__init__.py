"""Gradients that a scan over layers would stack, folded layer by layer instead.

Only JAX needs this tool: autograd of torch adds the gradient of each layer by itself.
"""
