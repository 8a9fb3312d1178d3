"""Several devices, one program. `make(problem)` gives a pure step(params, batch) -> (loss, gradients).

The parameters are whole on every device of `problem.mesh`, the batch is sharded by its rows along its axis "data".
"""

BASELINE = "jit"
