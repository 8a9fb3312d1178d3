"""One device, jitted. `make(problem)` gives a pure step(params, batch) -> (loss, gradients), which is compiled once."""

BASELINE = "scan"
