"""Optimizers of torch as pure functions, chains of them, and clipping.

    adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)
    tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)

Only torch needs this tool: in JAX optax has all of it. Nothing here accumulates: a transform takes
gradients, wherever they come from. `in_torch.py` runs what torch itself does in place, the step of
an optimizer and clipping, on aliases or copies; `chain_in_torch.py` has chains.
"""
