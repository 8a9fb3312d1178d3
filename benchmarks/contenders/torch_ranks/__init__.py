"""Several processes, joined by gloo; each has a window of its own, and gradients are averaged over them."""

BASELINE = "ddp"
