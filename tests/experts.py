"""A mixture of experts for tests: tokens travel to the process that has their expert, and back."""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

WIDTH, EXPERTS = 3, 4


def problem(rows=24, seed=0):
    """(all parameters, the batch): tokens, the expert of each, targets, and whether it counts."""
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    params = {
        "dense": {"w": normal(WIDTH, WIDTH)},
        "experts": {"w": normal(EXPERTS, WIDTH, WIDTH), "b": normal(EXPERTS, WIDTH)},
    }
    which = torch.randint(EXPERTS, (rows,), generator=random)
    counts = torch.rand(rows, generator=random) < 0.6
    return params, (normal(rows, WIDTH), which, normal(rows, WIDTH), counts)


def own_experts(params, ep):
    """The parameters of a process: all that is dense, and the experts of its rank in this group."""
    rank, count = dist.get_rank(ep), dist.get_world_size(ep)
    cut = lambda leaf: leaf.chunk(count)[rank].clone()
    return {"dense": params["dense"], "experts": {name: cut(leaf) for name, leaf in params["experts"].items()}}


def through_experts(experts, tokens, which):
    """What each token's expert makes of it."""
    return torch.einsum("ti,tij->tj", tokens, experts["w"][which]) + experts["b"][which]


def through_travel(experts, tokens, which, ep):
    """The same where each process of the group has equally many of the experts."""
    count, own = dist.get_world_size(ep), EXPERTS // dist.get_world_size(ep)
    order = torch.argsort(which, stable=True)
    sends = torch.bincount(which // own, minlength=count)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends, group=ep)
    sends, receives = sends.tolist(), receives.tolist()
    came = all_to_all_single_autograd(tokens[order], receives, sends, ep)
    experts_of = torch.empty(sum(receives), dtype=which.dtype)
    dist.all_to_all_single(experts_of, which[order] % own, receives, sends, group=ep)
    back = all_to_all_single_autograd(through_experts(experts, came, experts_of), sends, receives, ep)
    return back[torch.argsort(order)]


def loss_of(ep=None, reduction="mean"):
    """loss_fn(params, tokens, which, targets, counts) over the tokens that count; their sum, or their mean."""

    def loss_fn(params, tokens, which, targets, counts):
        hidden = torch.tanh(tokens @ params["dense"]["w"])
        out = (
            through_experts(params["experts"], hidden, which)
            if ep is None
            else through_travel(params["experts"], hidden, which, ep)
        )
        errors = (out - targets).square().sum(-1) * counts
        # A process whose tokens do not count still runs the experts of others: its own loss must not be NaN.
        return errors.sum() / counts.sum().clamp(min=1) if reduction == "mean" else errors.sum()

    return loss_fn


def count_of(tokens, which, targets, counts):
    """The weight of a micro-batch: how many of its tokens count."""
    return int(counts.sum())


def truth(params, batch):
    """(the mean loss over all tokens that count, its gradient), on one process."""
    leaves = torch.utils._pytree.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
    loss = loss_of()(leaves, *batch)
    loss.backward()
    return loss.detach(), torch.utils._pytree.tree_map(lambda leaf: leaf.grad, leaves)
