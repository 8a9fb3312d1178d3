"""The gradient of a window is clipped, not those of its micro-batches: with optimizer.step(), and as transforms.

    python examples/clipping_torch.py

What a transform does it does to what it is given, so the order is seen: clipping is inside of `multi_steps`, or after
the fold. By hand it is easily done after each backward pass, where it clips what has been added up so far, again and
again, and in DDP before the gradients are averaged.
"""

import torch
from sentences import count_tokens, microbatch, summed_loss

import funcga
import torch_backend

MAX_NORM, LR = 1.0, 0.08
loader = [microbatch(2 * i, 2) for i in range(8)]


def mean_loss(module, tokens, labels):
    """The mean over the tokens of a micro-batch."""
    return summed_loss(module, tokens, labels) / count_tokens(tokens, labels)


def started():
    """The module before it has learned anything."""
    torch.manual_seed(0)
    return torch.nn.Linear(1, 2, bias=False)


def stepped(module, loader, n):
    """The norms before clipping; the module has had an update for every n micro-batches."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    step = funcga.stream(funcga.grad(torch_backend.pure_loss(module, mean_loss)), weight=count_tokens)
    norms = []
    for window in funcga.windows(loader, n):
        torch_backend.assign_grads(module, step(dict(module.named_parameters()), window))
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms


def transformed(module, loader, n):
    """The parameters after the same updates, without an object that changes; the loader divides by n."""
    sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=LR)
    tx = funcga.multi_steps(torch_backend.chain(torch_backend.clip_grad_norm(MAX_NORM), sgd), n)
    gradient = funcga.grad(torch_backend.pure_loss(module, mean_loss))
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    state = tx.init(params)
    for batch in loader:
        updates, state = tx.update(gradient(params, *batch), state, params, weight=count_tokens(*batch))
        if tx.has_updated(state):
            params = torch_backend.apply_updates(params, updates)
    return params


def main():
    """Both, and one batch for each window."""
    module, whole = started(), started()
    norms = stepped(module, loader, 4)
    print("norms of the windows:", ", ".join(f"{norm:.3f}" for norm in norms))

    stepped(whole, [microbatch(0, 8), microbatch(8, 8)], 1)
    funcga.compare(module.state_dict(), whole.state_dict()).assert_close()
    funcga.compare(transformed(started(), loader, 4), whole.state_dict()).assert_close()
    print("clipped at 1, the weights are those of two batches: with optimizer.step(), and as transforms")


if __name__ == "__main__":
    main()
