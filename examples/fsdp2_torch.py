"""One update of a module sharded by FSDP2: gradients are reduced once, and stay sharded.

    torchrun --nproc-per-node 2 examples/fsdp2_torch.py

Two replicas with two micro-batches of 4 give the weights [0.2117, 0.3172], as 16 rows on one device do; each replica
holds one of the two.
"""

import torch
import torch.distributed as dist
from sentences import count_tokens, summed_loss, window
from torch.distributed.fsdp import fully_shard

import funcga
import torch_backend


def main():
    """One update."""
    torch.manual_seed(0)
    module = torch.nn.Linear(1, 2, bias=False)
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.08)

    # sync="every" would reduce each micro-batch: more traffic, and no gradient is ever held unsharded
    gradient = torch_backend.module_value_and_grad(module, summed_loss, sync="last")
    step = funcga.stream(gradient, fold=funcga.per_weight(), weight=count_tokens)

    loss, grads = step(window(dist.get_rank(), dist.get_world_size(), n=2, size=4))
    torch_backend.assign_grads(module, grads)  # DTensors, as the parameters are
    optimizer.step()

    weights = [round(w, 4) for w in module.weight.full_tensor().flatten().tolist()]
    print(f"rank {dist.get_rank()}: loss {loss:.4f}, weights {weights}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
