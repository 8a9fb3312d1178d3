"""Train a convolutional network with BatchNorm on digits, with a module, optimizer.step() and a scheduler.

    python examples/train_digits_optimizer_torch.py
    python examples/train_digits_optimizer_torch.py --plot loss.png --checkpoint digits.pt --stop-after 50

The last micro-batch of an epoch has fewer rows and its last window fewer micro-batches, yet all rows of a window
count the same. `(loss / n).backward()` gets both wrong, and the .grads are in no state_dict(), so that who stops in
the middle of a window loses it. Here the window is a tree, saved like the rest: with `--resume` in place of
`--stop-after 50` the training ends as it would have, bit for bit. What BatchNorm sees is pooled, and the running
statistics are updated once a window, as by one batch: who wants them to decay as with n updates makes their momentum m
1 - (1 - m)**n.
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
    params = torch_backend.trainable(module)  # its own, which the optimizer updates
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.updates)
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, mean_loss, statistics=True), has_aux=True)
    total = funcga.Accumulator(((funcga.mean(), funcga.pooled()), funcga.mean()))  # of all that gradient returns

    trained, window, curve, start = (module, optimizer, scheduler), None, [], 0
    if args.resume:
        saved, window, curve, start = load(args, torch.load)
        for each, state in zip(trained, saved, strict=True):
            each.load_state_dict(state)
    steps = order(len(x), rows=32, n=4, updates=args.updates)[: args.stop_after]
    for done, (indices, is_last) in enumerate(progress(steps, start), start + 1):
        value = gradient(params, x[indices], y[indices])
        window = total.update(window or total.init(value), value, weight=len(indices))
        if is_last:
            ((loss, statistics), grads), window = total.finalize(window), None
            torch_backend.assign_grads(module, grads)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            module.load_state_dict(torch_backend.running_buffers(module, statistics), strict=False)
            curve.append(loss.item())
        if args.checkpoint and (done % 25 == 0 or done == len(steps)):
            with saving(args) as file:
                torch.save(([each.state_dict() for each in trained], window, curve, done), file)
    report(curve, args.plot)
    accuracy = (module.eval()(test_x).argmax(1) == test_y).float().mean()
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
