"""What the examples in torch compare with: the gradient of a loop by hand, and how far two gradients are apart."""


def gradient_by_hand(model, loss_fn, microbatches):
    """The gradient that `(loss / n).backward()` leaves after n micro-batches; of one, that of the whole batch."""
    model.zero_grad()
    for microbatch in microbatches:
        (loss_fn(model, *microbatch) / len(microbatches)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def apart(left, right):
    """The largest difference of two gradients, relative to the largest element of the second."""
    return max(abs(left[k] - right[k]).max() for k in right) / max(abs(g).max() for g in right.values())
