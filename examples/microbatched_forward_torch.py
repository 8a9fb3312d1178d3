"""A batch in chunks: its loss, its gradients and the outputs of all its rows, in the order of the batch.

    python examples/microbatched_forward_torch.py

Each output has a fold of its own: the loss is a mean over rows, so that a last, shorter chunk counts by its rows, and
what has a row for each example is put together by `concat`. A function without a gradient is folded in the same way.

By hand a chunk counts by its rows, `loss * rows / total`, also where cross_entropy leaves rows out, labelled -100: then
its mean is of fewer, which `weight=` counts.
"""

import torch
from torch.nn.functional import cross_entropy

import funcga
import torch_backend


def loss_and_outputs(module, inputs, targets):
    """The mean loss of a chunk, and what the module makes of it."""
    outputs = module(inputs)
    return cross_entropy(outputs, targets), outputs


def count_labels(inputs, targets):
    """The rows that cross_entropy takes the mean of."""
    return (targets != -100).sum()


def forward_in_chunks(module, inputs, targets, size):
    """(loss, outputs), grads of the batch, at most `size` rows at a time."""
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_and_outputs), has_aux=True)
    fold = (funcga.mean(), funcga.concat()), funcga.mean()
    step = funcga.accumulate(gradient, microbatch_size=size, fold=fold, weight=count_labels)
    return step(torch_backend.trainable(module), inputs, targets)


@torch.no_grad()
def predictions(module, inputs, size):
    """The outputs alone, for inference."""
    return funcga.accumulate(module, microbatch_size=size, fold=funcga.concat(), in_axes=0)(inputs)


def made():
    """A module, inputs, and which of four classes they have."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    return module, torch.randn(19, 3), torch.randint(4, (19,))


def main():
    """Nineteen rows in chunks of eight, and at once."""
    module, inputs, targets = made()
    (loss, outputs), grads = forward_in_chunks(module, inputs, targets, 8)

    whole = cross_entropy(module(inputs), targets)
    whole.backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    funcga.compare({"loss": loss, **grads}, {"loss": whole, **expected}).assert_close()
    funcga.compare(outputs, module(inputs)).assert_close()
    funcga.compare(predictions(module, inputs, 8), module(inputs)).assert_close()
    print(f"chunks of 8, 8 and 3 rows: loss {loss:.4f}, {len(outputs)} outputs, as from the whole batch")


if __name__ == "__main__":
    main()
