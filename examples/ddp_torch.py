"""One update of a module in DDP: synchronised on the last micro-batch, and weighted by the tokens of all replicas.

    torchrun --nproc-per-node 2 examples/ddp_torch.py

Two replicas with two micro-batches of 4 give the weights [0.2117, 0.3172], as 16 rows on one device do. There is no
`no_sync`, no `world_size` and no division here, though DDP averages over the replicas and knows of no tokens.
"""

import torch
import torch.distributed as dist
from sentences import count_tokens, summed_loss, window

import funcga
import torch_backend


def main():
    """One update."""
    torch.manual_seed(0)
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 2, bias=False))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.08)

    gradient = torch_backend.module_value_and_grad(module, summed_loss)
    step = funcga.stream(gradient, fold=funcga.per_weight(), weight=count_tokens)

    loss, grads = step(window(dist.get_rank(), dist.get_world_size(), n=2, size=4))
    torch_backend.assign_grads(module, grads)
    optimizer.step()

    weights = [round(w, 4) for w in module.module.weight.flatten().tolist()]
    print(f"rank {dist.get_rank()}: loss {loss:.4f}, weights {weights}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
