"""Train a convolutional network with BatchNorm on digits, with an optimizer of torch as a function.

    python examples/train_digits_torch.py
    python examples/train_digits_torch.py --plot loss.png --checkpoint digits.pt --stop-after 50

The last micro-batch of an epoch has fewer rows and its last window fewer micro-batches, yet all rows of a window count
the same. Loops that divide by n get both wrong, and who stops them in the middle of a window loses its gradients. Here
these are in the optimizer's state: with `--resume` in place of `--stop-after 50` the training ends as it would have,
bit for bit. What BatchNorm sees is pooled, and the running statistics are updated once a window, as by one batch: who
wants them to decay as with n updates makes their momentum m 1 - (1 - m)**n.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training import digits, load, options, order, progress, report, saving

import funcga
import torch_backend


def network():
    """Images of 8 x 8 pixels in, logits of the ten digits out."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def mean_loss(module, x, y):
    """The mean over the rows."""
    return cross_entropy(module(x), y)


def main(arguments=None):
    """Trains, and says how the loss went and how many of the test images are told right."""
    args, (train, test) = options(__file__, arguments, updates=48), digits()
    (x, y), (test_x, test_y) = [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in (train, test)]
    torch.manual_seed(0)
    module = network()
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, mean_loss, statistics=True), has_aux=True)
    adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=lambda update: 1e-2 * (1 - update / args.updates))
    tx = funcga.multi_steps(torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw), 4)
    total = funcga.Accumulator((funcga.mean(), funcga.pooled()))  # of the loss, and of what BatchNorm sees

    params = torch_backend.trainable(module)
    state, seen, curve, start = tx.init(params), None, [], 0
    if args.resume:
        params, buffers, state, seen, curve, start = load(args, torch.load)
        module.load_state_dict(buffers, strict=False)
    steps = order(len(x), rows=32, n=4, updates=args.updates)[: args.stop_after]
    for done, (indices, is_last) in enumerate(progress(steps, start), start + 1):
        value, grads = gradient(params, x[indices], y[indices])
        state = tx.accumulate(grads, state, weight=len(indices))
        seen = total.update(seen or total.init(value), value, weight=len(indices))
        if is_last:
            updates, state = tx.flush(state, params)
            params = torch_backend.apply_updates(params, updates)
            (loss, statistics), seen = total.finalize(seen), None
            module.load_state_dict(torch_backend.running_buffers(module, statistics), strict=False)
            curve.append(loss.item())
        if args.checkpoint and (done % 25 == 0 or done == len(steps)):
            with saving(args) as file:
                torch.save((params, dict(module.named_buffers()), state, seen, curve, done), file)
    report(curve, args.plot)
    module.load_state_dict(params, strict=False)
    accuracy = (module.eval()(test_x).argmax(1) == test_y).float().mean()
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
