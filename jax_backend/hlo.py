"""Instruments for tests: the collectives of a compiled step, by the depth of the loops around them,
and which gradients of a scan over layers are `folded_in_place`.

They are a tool, `funcga/tools/hlo`, and the one of scans over layers; this is where users find
them.
"""

from funcga.tools.hlo.in_jax import Collective, collectives
from funcga.tools.scan_layers.in_jax import folded_in_place

__all__ = ["Collective", "collectives", "folded_in_place"]
