"""One convolutional network in torch and in flax: the same weights, the same gradients, in float64 to 1e-12.

    python examples/parity_torch_flax.py

`funcga.trees.match` carries the weights over, by path: `conv1` is called `Conv_0` in flax, its `weight` is a `kernel`,
and its axes are not [out, in, height, width] but [height, width, in, out]. `funcga.compare` takes the same rules, for
the gradients, which torch accumulates over 3 micro-batches and flax over 5.
"""

import flax.linen
import jax
import numpy as np
import optax
import torch

import funcga
import torch_backend

RULES = [
    funcga.trees.Rule(r"conv1\.(.*)", r"Conv_0.\1"),
    funcga.trees.Rule(r"conv2\.(.*)", r"Conv_1.\1"),
    funcga.trees.Rule(r"norm\.(.*)", r"GroupNorm_0.\1"),
    funcga.trees.Rule(r"output\.(.*)", r"Dense_0.\1"),
    *funcga.trees.torch_to_flax,
]


class InTorch(torch.nn.Module):
    """Two convolutions with a normalisation between, a mean over the image, a linear layer; images [rows, 3, y, x]."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8)
        self.conv2, self.output = torch.nn.Conv2d(8, 8, 3), torch.nn.Linear(8, 5)

    def forward(self, images):
        """The logits."""
        hidden = self.conv2(self.norm(self.conv1(images)).relu()).relu()
        return self.output(hidden.mean((2, 3)))


class InFlax(flax.linen.Module):
    """The same; images [rows, y, x, 3]."""

    @flax.linen.compact
    def __call__(self, images):
        """The logits."""
        convolution = lambda x: flax.linen.Conv(8, (3, 3), padding="VALID", param_dtype=x.dtype)(x)
        norm = flax.linen.GroupNorm(2, epsilon=1e-5, param_dtype=images.dtype)
        hidden = flax.linen.relu(convolution(flax.linen.relu(norm(convolution(images)))))
        return flax.linen.Dense(5, param_dtype=images.dtype)(hidden.mean((1, 2)))


def in_torch(module, images, labels):
    """The loss and the gradients in torch, by name."""
    loss_fn = torch_backend.pure_loss(module, lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y))
    step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=3)
    loss, grads = step(torch_backend.trainable(module), *funcga.to_torch((images, labels)))
    return {"loss": loss, **grads}


def in_flax(weights, images, labels):
    """The loss and the gradients in flax, of the weights of torch."""
    model, images = InFlax(), funcga.to_jax(images.transpose(0, 2, 3, 1))
    params = funcga.trees.match(weights, jax.eval_shape(model.init, jax.random.key(0), images), rules=RULES)

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    loss, grads = funcga.accumulate(jax.value_and_grad(loss_fn), n=5)(params, images, funcga.to_jax(labels))
    return {"loss": loss, **grads}


def main():
    """Both, compared parameter by parameter."""
    jax.config.update("jax_enable_x64", True)
    random = np.random.default_rng(0)
    images, labels = random.normal(size=(10, 3, 8, 8)), random.integers(5, size=10)
    torch.manual_seed(0)
    module = InTorch().double()

    left, right = in_torch(module, images, labels), in_flax(module.state_dict(), images, labels)
    report = funcga.compare(left, right, rtol=1e-12, rules=RULES, names=("torch", "flax"))
    report.assert_close()
    print(report)


if __name__ == "__main__":
    main()
