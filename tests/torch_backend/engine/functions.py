"""Functions written in Python, as people have them: autograd calls their backward, and knows no more of them."""

import torch


class Recompute(torch.autograd.Function):
    """What reversible nets and offloaded checkpoints are, with a name that nobody knows."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x).detach()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(x), gradient)
        return None, x.grad


class Curved(torch.autograd.Function):
    """Runs a backward pass inside of its backward that reaches no parameter."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(x.sin().sum(), x)[0] * gradient


class Doubled(torch.autograd.Function):
    """A function that only has a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
