"""The optimizer's side alone: a window of n gradients, which are at hand, and Adam.

`make(problem)` takes a `jax_problem.Optimization` and gives a function without arguments that runs one window, to its
end, and returns a `jax_windows.Window`: the parameters, and the updates if they are not yet added. It keeps its own
state from window to window, and compiles with `problem.programs`.
"""

BASELINE = "optax_multi_steps"
