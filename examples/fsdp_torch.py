"""One update of a module sharded by FSDP1, and by FSDP2: gradients are reduced once, and stay sharded.

    torchrun --nproc-per-node 2 examples/fsdp_torch.py

Two replicas with two micro-batches of 4 give the weights [0.2117, 0.3172], as 16 rows on one device do; each replica
holds one of the two. By hand FSDP1 wants `no_sync()` around all micro-batches but the last, and FSDP2 a call of
`set_requires_gradient_sync` before each; both average over the replicas, so that the tokens of all of them have to be
counted first. Here the two differ in how the module is wrapped, and in how its gradient is clipped, and in nothing
else: torch.nn.utils.clip_grad_norm_ knows of shards only if they are DTensors, as FSDP2 has them. On a module of FSDP1
it takes the norm of what this rank holds, so that each rank cuts by another one.
"""

import gc

import torch
import torch.distributed as dist
from sentences import count_tokens, summed_loss, window
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import funcga
import torch_backend


def fsdp1(module):
    """The module wrapped, and a function that gives its weights."""
    wrapped = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)

    def weights():
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return module.weight.flatten().tolist()

    return wrapped, weights


def fsdp2(module):
    """The module sharded, and a function that gives its weights."""
    wrapped = fully_shard(module, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return wrapped, lambda: wrapped.weight.full_tensor().flatten().tolist()


def clipped(module, max_norm):
    """The norm of the gradient of the whole batch, whose shards are cut to max_norm together."""
    if isinstance(module, FullyShardedDataParallel):
        return module.clip_grad_norm_(max_norm).item()
    return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm).full_tensor().item()


def updated(wrap, max_norm=10.0):
    """The loss, the norm before it is clipped, and the weights after one update."""
    torch.manual_seed(0)
    module, weights = wrap(torch.nn.Linear(1, 2, bias=False))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.08)

    # sync="every" would reduce each micro-batch: more traffic, and no gradient is ever held unsharded
    gradient = torch_backend.module_value_and_grad(module, summed_loss, sync="last")
    step = funcga.stream(gradient, fold=funcga.per_weight(), weight=count_tokens)

    loss, grads = step(window(dist.get_rank(), dist.get_world_size(), n=2, size=4))
    torch_backend.assign_grads(module, grads)  # sharded, as the parameters are
    norm = clipped(module, max_norm)
    optimizer.step()
    return loss.item(), norm, weights()


def main():
    """One update of each."""
    for wrap in (fsdp1, fsdp2):
        loss, norm, weights = updated(wrap)
        weights = [round(w, 4) for w in weights]
        print(f"{wrap.__name__}, rank {dist.get_rank()}: loss {loss:.4f}, norm {norm:.4f}, weights {weights}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # FSDP holds the group in a cycle, and gloo may abort a process that exits with it
    dist.destroy_process_group()
