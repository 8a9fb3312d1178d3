"""Compiled micro-steps: the loss, its gradients and the sums of these in one compiled graph.

Only torch needs this tool: XLA compiles the loop as a whole.
"""
