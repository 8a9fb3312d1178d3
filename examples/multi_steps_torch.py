"""Train with an optimizer of torch as a pure transform that sees one gradient for every four micro-batches.

    python examples/multi_steps_torch.py

The gradient of a micro-batch is that of a mean over its tokens and comes with their number, so that every token of a
window counts the same; the gradients are clipped after that, and the learning rate follows one of torch's schedulers,
which counts updates. In mid-window everything is saved, and goes on bit for bit from the file, while by hand
what had been added up is lost: `.grad` is in no state_dict. The same training with optimizer.step() ends at the same
weights.
"""

import functools
import io

import torch
from sentences import PADDING, count_tokens, microbatch, summed_loss

import funcga
import torch_backend

schedule = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=8)


def halves(tokens, labels):
    """The tokens of a micro-batch, scaled, and as labels whether each of them is above 20."""
    return tokens / 20 - 1, torch.where(labels == PADDING, labels, (tokens > 20).float())


# 26 micro-batches of 2 rows: six windows of 4, and one of 2
loader = [halves(*microbatch(2 * i, 2)) for i in range(26)]


def mean_loss(module, tokens, labels):
    """The mean over the tokens."""
    return summed_loss(module, tokens, labels) / count_tokens(tokens, labels)


def functional(module):
    """The weights after one epoch, without an object that changes."""
    tx = funcga.multi_steps(
        torch_backend.chain(
            torch_backend.clip_grad_norm(1.0),
            torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1, scheduler=schedule),
        ),
        4,
    )
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, mean_loss))
    params = torch_backend.trainable(module)
    state = tx.init(params)
    for i, batch in enumerate(loader):
        if i == 13:
            params, state = saved_and_loaded((params, state))
        loss, grads = gradient(params, *batch)
        params, state = funcga.transforms.apply(tx, grads, state, params, weight=count_tokens(*batch))
        if tx.has_updated(state):
            print(f"update {int(state.updates)}: loss {loss:.3f}")
    if state.offered > 0:
        updates, state = tx.flush(state, params)
        params = torch_backend.apply_updates(params, updates)
        print(f"update {int(state.updates)}: loss {loss:.3f}, of the last two micro-batches")
    return params


def saved_and_loaded(tree):
    """The tree through a file."""
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stepped(module):
    """The same with optimizer.step(): funcga folds each window, everything else stays as it is."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scheduler = schedule(optimizer)
    step = funcga.stream(funcga.value_and_grad(torch_backend.pure_loss(module, mean_loss)), weight=count_tokens)
    for window in funcga.windows(loader, 4):
        _loss, grads = step(torch_backend.trainable(module), window)
        torch_backend.assign_grads(module, grads)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return torch_backend.trainable(module)


def main():
    """Trains in both ways, and compares."""
    torch.manual_seed(0)
    module = torch.nn.Linear(1, 2)
    params = functional(module)
    others = stepped(module)
    apart = max((params[name] - others[name]).abs().max().item() for name in params)
    print(f"the same weights as with optimizer.step(), to 1e-5: {apart < 1e-5}")


if __name__ == "__main__":
    main()
