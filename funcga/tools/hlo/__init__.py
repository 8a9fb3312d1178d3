"""What XLA has made of a step: its collectives, and which gradients are folded in place.

Only JAX has this tool: there the compiler decides what is reduced where.
"""
