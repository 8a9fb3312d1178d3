"""A whole update with AdamW: gradients of a window, the optimizer, the parameters after it."""

BASELINE = "loop"
OPTIONS = {"lr": 1e-3, "eps": 1e-6}  # with eps=1e-8 gradients that are 0 but for rounding would make steps of size lr
