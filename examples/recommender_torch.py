"""A recommender with sparse embeddings: BPR with sampled negatives, SparseAdam for the tables and Adam for the rest.

    python examples/recommender_torch.py

Bayesian personalized ranking (BPR) compares the item that a user has bought with sampled ones, and takes the mean over
these pairs. A sampled item that the user likes as well is not a negative, and its pair does not count. So a micro-batch
is weighted by its pairs: `weight=count_pairs`. `(loss / n).backward()` is right if all micro-batches have equally many
pairs, as without that mask. Negatives are drawn before the batch is split, so that they do not depend on n.

With `nn.Embedding(sparse=True)`, the gradient of a table has the rows that occur in the batch. It stays sparse over
micro-batches: rows are collected, and added up once, at the end. SparseAdam takes it, and moves these rows alone. Its
moments are as large as the tables, and are made in its first step. After that, nothing of that size is made.

Source: Rendle, Freudenthaler, Gantner and Schmidt-Thieme (2009), "BPR: Bayesian Personalized Ranking from Implicit
Feedback".
"""

import torch
from torch import nn
from torch.nn.functional import logsigmoid
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import funcga
import torch_backend

NEGATIVES = 8


class Recommender(nn.Module):
    """The score of an item is its product with what a layer makes of the user."""

    def __init__(self, users, items, sparse=True, width=16):
        super().__init__()
        self.users, self.items = (nn.Embedding(rows, width, sparse=sparse) for rows in (users, items))
        self.layer = nn.Linear(width, width)

    def forward(self, users, items):
        """The scores of some items for each user, [rows, items]."""
        return (self.layer(self.users(users))[:, None] * self.items(items)).mean(-1)


def bpr(model, users, bought, negatives, mask):
    """The mean over the pairs of a bought item and a negative."""
    better_by = model(users, bought[:, None]) - model(users, negatives)
    return -(logsigmoid(better_by) * mask).sum() / mask.sum().clamp(min=1)


def count_pairs(users, bought, negatives, mask):
    """The weight of a micro-batch."""
    return mask.sum()


def kind(ids):
    """A user likes the items of one kind, of four. Half of the items are of the first."""
    return (ids % 6 - 2).clamp(min=0)


def purchases(users, items, rows):
    """Users; an item that each has bought; sampled items; and which of these are negatives."""
    users = users[torch.randint(len(users), (rows,))]
    shuffled = torch.rand(rows, items).argsort(1)
    liked = kind(shuffled) == kind(users)[:, None]
    bought = shuffled.gather(1, liked.long().argmax(1, keepdim=True))[:, 0]
    return users, bought, shuffled[:, -NEGATIVES:], ~liked[:, -NEGATIVES:]


def usual_loop(model, batch, size):
    """The gradient of `(loss / n).backward()`."""
    microbatches = [*zip(*(leaf.split(size) for leaf in batch), strict=True)]
    for microbatch in microbatches:
        (bpr(model, *microbatch) / len(microbatches)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def exact():
    """Compares gradients with those of dense tables, of the whole batch, by plain autograd in float64."""
    model, dense = (Recommender(300, 100, sparse).double() for sparse in (True, False))
    dense.load_state_dict(model.state_dict())
    batch = purchases(torch.arange(300), 100, rows=28)
    names = [name for name, _ in dense.named_parameters()]
    whole = dict(zip(names, torch.autograd.grad(bpr(dense, *batch), [*dense.parameters()]), strict=True))
    largest = max(abs(grad).max() for grad in whole.values())
    off = lambda grads: (max(abs(grads[name].to_dense() - whole[name]).max() for name in names) / largest).item()
    gradient = torch_backend.module_value_and_grad(model, bpr)
    _, grads = funcga.accumulate(gradient, microbatch_size=7, weight=count_pairs)(*batch)
    usual = off(usual_loop(model, batch, size=7))
    print(f"BPR, 4 micro-batches of 7: off by {off(grads):.0e}; the usual loop: {usual:.0%}")


class Largest(TorchDispatchMode):
    """`with Largest(there) as largest`: `largest.bytes` is the size of the largest tensor made, besides those there."""

    def __init__(self, there):
        super().__init__()
        self.bytes, self.known = 0, {tensor.data_ptr() for tensor in there}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        """Looks at what the operation returns; the indices and values of a sparse tensor are results, too."""
        out = op(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.data_ptr() not in self.known:
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


def main(users=10**6, items=100, updates=40):
    """The gradient, and training with a table of a million users, of which a hundred buy."""
    torch.manual_seed(0)
    exact()
    model = Recommender(users, items)
    tables = [model.users.weight, model.items.weight]
    optimizers = [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(model.layer.parameters(), lr=0.01)]
    step = funcga.accumulate(torch_backend.module_value_and_grad(model, bpr), n=4, weight=count_pairs)
    active = torch.randint(users, (100,))
    for update in range(updates):
        states = tree_leaves([optimizer.state_dict() for optimizer in optimizers])
        with Largest([*model.parameters(), *filter(torch.is_tensor, states)]) as largest:
            loss, grads = step(*purchases(active, items, rows=64))
            torch_backend.assign_grads(model, grads)
            for optimizer in optimizers:
                optimizer.step()
        if update in (0, updates - 1):
            print(f"update {update + 1}: loss {loss:.2f}, the largest new tensor has {largest.bytes:,} bytes")
    grad = grads["users.weight"]
    print(f"the gradient of the users, {grad.layout}, has {len(grad.values())} of {len(grad):,} rows")


if __name__ == "__main__":
    main()
