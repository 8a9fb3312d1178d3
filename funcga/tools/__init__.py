"""Tools: what uses the core from outside, a folder each. Any of them can be taken away."""
