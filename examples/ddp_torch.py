"""One update of a module in DDP: synchronised on the last micro-batch, and weighted by the tokens of all replicas.

    torchrun --nproc-per-node 2 examples/ddp_torch.py

Two replicas with two micro-batches of 4 give the weights [0.2117, 0.3172], as 16 rows on one device do. There is no
`no_sync`, no `world_size` and no division here, though DDP averages over the replicas and knows of no tokens.

The effective batch size is a metric: the rows that were folded, added up over the micro-batches and the replicas. By
hand it is replicas x n x rows, which no longer holds at the end of an epoch; here, where one replica has run out early.
"""

import gc

import torch
import torch.distributed as dist
from sentences import count_tokens, microbatch, summed_loss, window

import funcga
import torch_backend


def loss_and_rows(module, tokens, labels):
    """The summed loss of a micro-batch, and its rows."""
    return summed_loss(module, tokens, labels), {"rows": len(tokens)}


class Trainer:
    """A module, its optimizer, and the fold: what one replica needs for an update."""

    def __init__(self, module, max_norm):
        self.module, self.max_norm = torch.nn.parallel.DistributedDataParallel(module), max_norm
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.08)
        gradient = torch_backend.module_value_and_grad(self.module, loss_and_rows, has_aux=True)
        fold = (funcga.per_weight(), {"rows": funcga.sum()}), funcga.per_weight()
        self.step = funcga.stream(gradient, fold=fold, weight=count_tokens)

    def update(self, window):
        """The loss and the rows of all replicas in this update."""
        (loss, metrics), grads = self.step(window)
        torch_backend.assign_grads(self.module, grads)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)
        self.optimizer.step()
        return loss.item(), metrics["rows"].item()


def main():
    """One update, and one more of what is left."""
    torch.manual_seed(0)
    module, rank = torch.nn.Linear(1, 2, bias=False), dist.get_rank()
    trainer = Trainer(module, max_norm=10.0)
    loss, rows = trainer.update(window(rank, dist.get_world_size(), n=2, size=4))
    weights = [round(w, 4) for w in module.weight.flatten().tolist()]
    print(f"rank {rank}: loss {loss:.4f}, weights {weights}, effective batch size {rows}")

    left = [microbatch(16, 4), microbatch(20, 1)] if rank == 0 else [microbatch(21, 2)]
    _, rows = trainer.update(left)
    print(f"rank {rank}: of what is left, effective batch size {rows}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # DDP holds the group in a cycle, and gloo may abort a process that exits with it
    dist.destroy_process_group()
