"""Remedies: the line of `coupled` that stands for a loss which needs the whole batch, with the
user's own names.
"""

from funcga._call.arguments import argument_names
from funcga._grad import GradientFunction
from funcga._verify.probe import Probe


def coupled_line(probe: Probe, summary: str, fold: str = "") -> str:
    """The call of `coupled` for this loss; `summary` says in a word what is folded, `fold` by what
    if not concat().

    How a loss is taken apart cannot be told from outside: the user writes its two parts in the
    place of two words.
    """
    grad_fn = probe.program.grad_fn
    gradient = grad_fn if isinstance(grad_fn, GradientFunction) else None
    of_module = probe.framework.module_loss(grad_fn)
    names = _named(argument_names(of_module or grad_fn, len(probe.args)))
    summary_fn = f"lambda {', '.join([*names, *probe.kwargs])}: {summary}"
    if of_module is not None:
        names[0], summary_fn = "params", f"torch_backend.pure_loss(module, {summary_fn})"
    # The second function gets what is differentiated, by default the first argument.
    arg_indices = (0,) if gradient is None else gradient.arg_indices(len(names))
    differentiated = ", ".join([names[arg_index] for arg_index in arg_indices])
    has_aux = gradient is not None and gradient.has_aux
    loss_fn = f"lambda {differentiated}, s: {'(loss, aux)' if has_aux else 'loss'}"
    return f"funcga.coupled({summary_fn}, {loss_fn}, {_options(probe, gradient, fold)})"


def _options(probe: Probe, gradient: GradientFunction | None, fold: str) -> str:
    program = probe.program
    options = {"n": str(program.n or 8), "fold": fold}
    if program.weight is not None and fold == "funcga.mean()":
        options["weight"] = "weight"
    if program.in_axes is not None:
        options["in_axes"] = repr(program.in_axes)
    if gradient is not None and gradient.argnums != 0:
        options["argnums"] = repr(gradient.argnums)
    if gradient is not None and gradient.has_aux:
        options["has_aux"] = "True"
    return ", ".join([f"{name}={value}" for name, value in options.items() if value])


def _named(names: list[str]) -> list[str]:
    """The names of arguments, with invented ones for those of *args, which have none."""
    invented = iter(
        [
            name
            for name in ("batch", "y", "z", *(f"x{i}" for i in range(len(names))))
            if name not in names
        ]
    )
    return [
        name if name.isidentifier() else "params" if arg_index == 0 else next(invented)
        for arg_index, name in enumerate(names)
    ]
