"""Mixed precision: float16 with a dynamic loss scale that a window shares, and torch's GradScaler beside it.

    python examples/mixed_precision_torch.py

The loss is multiplied before the backward pass, so that small gradients survive in float16, and the optimizer divides
again. A window has one scale: its gradients are looked at once, when all are added, and it is used or skipped as a
whole. `funcga.transforms.loss_scaled` is GradScaler step for step, as a pure transform; what it wraps, clipping here,
sees gradients in their own size. Who keeps optimizer.step() keeps GradScaler as well: `step` takes its scale.

What the usual loop gets wrong: it clips without `unscale_`, which cuts a gradient that is 65,536 times too long and
then divides it by that; and it divides the last, shorter window by the planned n. `scaler.scale(loss / n)` begins its
backward passes n times lower than the scale says: what such a run did is repeated with init_scale / n. And it goes on
in the schedule, `scaler.step(optimizer); scaler.update(); scheduler.step()`, when there was no update. A scheduler in
the transform stands still with the state; the line that does the same is `if scaler.get_scale() >= scale:`.

In bfloat16, which reaches as far as float32, none of this is needed.
"""

import functools

import torch
from torch.optim.lr_scheduler import OneCycleLR

import funcga
import torch_backend

N, INTERVAL, MAX_NORM = 4, 3, 0.1  # micro-batches in a window; updates in a row after which the scale grows; clipping

schedule = functools.partial(OneCycleLR, max_lr=1e-2, total_steps=12)


def network():
    """A small classifier."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def loss_fn(module, x, y):
    """The mean cross-entropy, with the matrices in float16."""
    with torch.autocast(x.device.type, torch.float16):
        return torch.nn.functional.cross_entropy(module(x), y)


def loader(count=46):
    """Micro-batches of 4 rows, whose last window is shorter; one is so large that its gradients overflow in float16."""
    random = torch.Generator().manual_seed(0)
    for i in range(count):
        x = torch.randn(4, 6, generator=random) * (1e4 if i == 14 else 1)
        yield x, torch.randint(0, 3, (4,), generator=random)


def functional(init_scale):
    """Pure: the scale is in the state of the transform. Yields the scale and the parameters after every window."""
    module = network()
    adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-2, scheduler=schedule)
    clipped = torch_backend.chain(torch_backend.clip_grad_norm(MAX_NORM), adamw)
    tx = funcga.transforms.loss_scaled(clipped, init_scale=init_scale, growth_interval=INTERVAL)
    step = funcga.stream(funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn), scaled=True))
    params = torch_backend.trainable(module)
    state = tx.init(params)
    for window in funcga.windows(loader(), N):
        _loss, grads = step(params, window, loss_scale=state.scale)
        updates, state = tx.update(grads, state, params)
        params = torch_backend.apply_updates(params, updates)
        yield state.scale.item(), params


def stepped(init_scale):
    """The same with optimizer.step() and torch's own GradScaler. Yields the norm that was clipped as well."""
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=INTERVAL)
    step = funcga.stream(funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn), scaled=True))
    # The scaler makes its scale where the first tensor is that it is given.
    one = torch.ones((), device=next(module.parameters()).device)
    for window in funcga.windows(loader(), N):
        params, scale = torch_backend.trainable(module), scaler.get_scale()
        _loss, grads = step(params, window, loss_scale=scaler.scale(one))
        torch_backend.assign_grads(module, grads)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # there was an update
            scheduler.step()
        yield scaler.get_scale(), {name: parameter.detach().clone() for name, parameter in params.items()}, norm.item()


def main():
    """Trains in both ways, and compares."""
    ours, theirs = list(functional(2.0**14)), list(stepped(2.0**14))
    print("scale after every window: 2 to the power of", *[int(torch.tensor(scale).log2()) for scale, _ in ours])
    print("the same as GradScaler's:", [scale for scale, _ in ours] == [scale for scale, *_ in theirs])
    apart = max((ours[-1][1][name] - parameter).abs().max().item() for name, parameter in theirs[-1][1].items())
    print(f"the same parameters, to 1e-6: {apart < 1e-6}")
    print(f"clipped to {MAX_NORM}, the last norm: {theirs[-1][2]:.3f}")


if __name__ == "__main__":
    main()
