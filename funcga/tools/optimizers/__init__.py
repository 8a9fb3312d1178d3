"""Optimizers of torch as pure functions, chains of them, and clipping.

    adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)
    tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)

Only torch needs this tool: in JAX optax has all of it. Nothing here accumulates: a transform takes
gradients, wherever they come from. `in_torch.py` runs torch's own optimizer on aliases or copies of
the parameters, with a state that is a tree; `options.py` says which options it runs with, and
`chain.py` has chains and clipping.
"""

import torch

from funcga.tools.optimizers.chain import ClipNormState
from funcga.tools.optimizers.state import Number, OptimizerState

# For torch.load with weights_only=True.
torch.serialization.add_safe_globals([ClipNormState, Number, OptimizerState])
