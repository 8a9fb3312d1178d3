"""A mixture of experts on 4 processes as 2 x 2, trained as on one: each has the dense layers and 2 of 4 experts.

    torchrun --nproc-per-node 4 examples/experts_torch.py

A gradient of an expert is summed over the 2 processes that have it, and divided by the tokens of all 4, however many of
them each process has.
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import funcga
import torch_backend

WIDTH, EXPERTS, UPDATES = 16, 4, 5


class Experts(nn.Module):
    """Some of the experts, for tokens of the processes of a group; without one, all of them for tokens of this one."""

    def __init__(self, w, group=None):
        super().__init__()
        self.w, self.group = nn.Parameter(w.clone()), group

    def forward(self, hidden, which):
        """What each token's expert makes of it: [tokens, WIDTH]."""
        if self.group is None:
            return torch.einsum("ti,tij->tj", hidden, self.w[which])
        count, here = self.group.size(), len(self.w)
        order = torch.argsort(which, stable=True)
        sent = torch.bincount(which // here, minlength=count)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self.group)
        sent, came = sent.tolist(), came.tolist()
        tokens = all_to_all_single_autograd(hidden[order], came, sent, self.group)
        own = torch.empty(sum(came), dtype=which.dtype)
        dist.all_to_all_single(own, which[order] % here, came, sent, group=self.group)
        made = torch.einsum("ti,tij->tj", tokens, self.w[own])
        return all_to_all_single_autograd(made, sent, came, self.group)[torch.argsort(order)]


class Model(nn.Module):
    """A dense layer, a router, and an expert for each token."""

    def __init__(self, params, experts):
        super().__init__()
        self.dense, self.router = nn.Parameter(params["dense"].clone()), nn.Parameter(params["router"].clone())
        self.experts = experts

    def forward(self, tokens):
        """What it makes of the tokens: [tokens, WIDTH]."""
        hidden = torch.tanh(tokens @ self.dense)
        weights, which = (hidden @ self.router).softmax(-1).max(-1)
        return self.experts(hidden, which) * weights[:, None]


def loss_fn(model, tokens, targets, counts):
    """The sum of the errors of the tokens that count."""
    return ((model(tokens) - targets).square().mean(-1) * counts).sum()


def trained(model, batches, groups=None):
    """The parameters after an update with each of the batches, in 4 micro-batches.

    `groups(name)` is the group that the gradient of a parameter is summed over.
    """
    step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss_fn), n=4, fold=funcga.sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for batch in batches:
        _, grads = step(*batch)
        count = batch[2].sum().double()
        if groups is not None:
            dist.all_reduce(count)
            for name, grad in grads.items():
                dist.all_reduce(grad, group=groups(name))
        torch_backend.assign_grads(model, {name: grad / count for name, grad in grads.items()})
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def main():
    """Trains on all processes and on one, and compares."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "other experts"))
    everybody, same, others = dist.group.WORLD, mesh["same experts"].get_group(), mesh["other experts"].get_group()
    torch.manual_seed(0)
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    params = {"dense": random(WIDTH, WIDTH) / 4, "router": random(WIDTH, EXPERTS)}
    w = random(EXPERTS, WIDTH, WIDTH) / 4
    batches = [(random(40, WIDTH), random(40, WIDTH), torch.rand(40) < 0.7) for _ in range(UPDATES)]

    expected = trained(Model(params, Experts(w)), batches)
    own = slice(2 * others.rank(), 2 * others.rank() + 2)
    expected["experts.w"] = expected["experts.w"][own]
    rows = torch.arange(40).split([13, 7, 11, 9])[dist.get_rank()]
    batches = [[leaf[rows] for leaf in batch] for batch in batches]

    groups = lambda name: same if "experts" in name else everybody
    found = trained(Model(params, Experts(w[own], others)), batches, groups)
    exact = max((found[name] - expected[name]).abs().max().item() for name in found) < 1e-12
    print(f"rank {dist.get_rank()}: after {UPDATES} updates the parameters are those of one process: {exact}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
