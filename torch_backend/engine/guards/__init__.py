"""Guards: what has to hold for a result to be right, whatever a loss does. One file each.

Nothing in torch is replaced for any of them. `FUNCGA_GUARDS` says when those look that only look:
"first" (the default), as the table on docs/concepts/inside_torch.md says; "every", at every call
and in every pass; "off", never. What puts something aside and gives it back does so in any case.

    grads        the `.grad`s of leaves that others own: put aside and back, or watched
    unchanged    no parameter is written to in a window, and no sum but by its backward passes
    recompute    a module that runs again in a backward pass has the parameters of the forward pass
    functions    functions written in Python run backward passes of their own
"""

import os

from funcga.errors import FuncgaError

_MODE = os.environ.get("FUNCGA_GUARDS", "first")
if _MODE not in ("first", "every", "off"):
    raise FuncgaError(f"FUNCGA_GUARDS is {_MODE!r}: write first, every or off.")
ON, EVERY = _MODE != "off", _MODE == "every"
