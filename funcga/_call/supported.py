"""Which features of a step go with which kind of gradient function, and with each other.

One table, which is checked when a step is made, and printed in the documentation. Each entry is
True, or why it cannot be, and what to write instead.
"""

from collections.abc import Sequence
from typing import Literal

from funcga.errors import FuncgaError

ANY = "any pure function"
MODULE = "a module's own parameters"
WRAPPED = "a module in DDP, replicate or fully_shard"
FSDP1 = "a module in FullyShardedDataParallel"
PIPELINE = "a pipeline"

_REDUCE = (
    "let funcga reduce: accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, "
    "loss_fn)), n, across=group), with the module that was wrapped."
)
_REDUCED = (
    "what can be looked at is the gradient of all replicas together, once a window. Write "
    'drop="window", to drop '
    f"what is not finite; or {_REDUCE}"
)
_FLAT = (
    "FSDP1 computes one flat gradient for all parameters of a part: those of its parameters cannot "
    f"be told apart. Use fully_shard; or {_REDUCE}"
)
_TOGETHER = (
    "a schedule runs the micro-batches of a window together: none can be looked at alone. Leave it "
    "out, and measure the gradient that the step returns."
)
_REPLAYED = (
    "a window is replayed when memory runs out, and the other replicas or stages would hang. Say "
    "how many: accumulate(gradient, n=8), or the n of a plan of one rank."
)

_WRAPPED: dict[str, Literal[True] | str] = {
    'drop="microbatch"': _REDUCED,
    'drop="window"': True,
    "drop_if=": _REDUCED,
    "observe=": True,
    'n="auto"': _REPLAYED,
}
SUPPORTED: dict[str, dict[str, Literal[True] | str]] = {
    ANY: dict.fromkeys(_WRAPPED, True),
    MODULE: dict.fromkeys(_WRAPPED, True),
    WRAPPED: _WRAPPED,
    FSDP1: {**_WRAPPED, "observe=": _FLAT},
    PIPELINE: {**dict.fromkeys(_WRAPPED, _TOGETHER), 'n="auto"': _REPLAYED},
}

# What does not go together, whatever the gradient function is.
EXCLUSIVE: dict[tuple[str, str], str] = {
    ('n="auto"', "across="): (
        "a replica that runs out of memory would begin anew while the others wait for it. Plan n "
        "first, on the replica with the most rows, and give the number: n=8 of funcga.plan(step, "
        "params, batch)."
    ),
    ('drop="microbatch"', "totals="): (
        "which are counted before the first micro-batch is evaluated: they would have what is "
        "dropped in them, and "
        'every loss was divided by them. Drop the whole window, drop="window"; or divide by a '
        "weight: "
        "fold=funcga.per_weight(), weight=..."
    ),
    ("observe=", "scatter="): (
        "of across=, which leaves the gradient in parts on the replicas: what is observed is "
        "compared with the whole of it. Leave scatter out of a step that observes."
    ),
    ("drop=", "scaled=True"): (
        "and the loss_scaled that divides by the scale has to see what is not finite, or the scale "
        "would never back off. Leave drop out: loss_scaled skips such updates itself."
    ),
}


def check_supported(features: Sequence[str], kind: str) -> None:
    """Raises FuncgaError if a gradient function of this kind cannot do one of these, or they do
    not go together.
    """
    for feature in features:
        why = SUPPORTED[kind].get(feature, True)
        if why is not True:
            raise FuncgaError(f"{feature} was given, and the gradient is that of {kind}: {why}")
    for (one, other), why in EXCLUSIVE.items():
        if one in features and other in features:
            raise FuncgaError(f"{one} was given together with {other}, {why}")
