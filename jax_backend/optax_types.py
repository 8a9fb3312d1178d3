"""optax, the library of transforms that JAX's users have: its types, for those who have installed it.

Only JAX has this file: in torch a transform is any pair of functions.
"""

import importlib
from functools import cache
from types import ModuleType

from funcga._transform import Transform
from funcga._transform.multi_steps import MultiSteps


def _optax() -> ModuleType | None:
    """optax, if it is installed: what is made before it is imported can be put into its chains too."""
    try:
        return importlib.import_module("optax")
    except ModuleNotFoundError:
        return None


def owns(tx: Transform) -> bool:
    """Whether a transform is one of the library's, which takes this framework's arrays alone."""
    return type(tx).__module__.split(".")[0] == "optax"


def imported(tx: Transform) -> Transform:
    """A transform as the library's own combinators would call it, with extra arguments that it may ignore."""
    optax = _optax()
    if optax is None or not isinstance(tx, optax.GradientTransformation):
        return tx
    wrapped: Transform = optax.with_extra_args_support(tx)
    return wrapped


def exported(tx: MultiSteps) -> MultiSteps:
    """A transform of funcga's in the type that the library's combinators take."""
    optax = _optax()
    return tx if optax is None else _both_types(optax.GradientTransformationExtraArgs)(*tx)


@cache
def _both_types(base: type) -> type[MultiSteps]:
    """MultiSteps as a subclass of the type that optax.chain looks for."""
    # Made once for the type, and not at import: optax need not be installed.
    members = {"__doc__": MultiSteps.__doc__, "__slots__": (), "__reduce__": _reduced}
    return type("MultiSteps", (MultiSteps, base), members)


def _reduced(tx: MultiSteps) -> tuple[object, ...]:
    """How it is pickled: the type is made again where it is loaded."""
    # pickle looks a class up by its name, and this one stands in no module.
    return _exported_pair, (tx.init, tx.update)


def _exported_pair(init: object, update: object) -> MultiSteps:
    return exported(MultiSteps(init, update))  # type: ignore[arg-type]
