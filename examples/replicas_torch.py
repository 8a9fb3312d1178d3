"""One update on several replicas, with pure parameters: exact, though every micro-batch has another number of tokens.

    torchrun --nproc-per-node 2 examples/replicas_torch.py

Two replicas with two micro-batches of 4 give the weights [0.2117, 0.3172], as 16 rows on one device do. The average of
the replicas' means, which is what an all-reduce by hand gives, counts the tokens of a replica with few of them more.
"""

import torch
import torch.distributed as dist
from sentences import count_tokens, summed_loss, window

import funcga
import torch_backend


def main(replicas):
    """One update."""
    torch.manual_seed(0)
    module = torch.nn.Linear(1, 2, bias=False)
    params = torch_backend.trainable(module)
    funcga.check_replicas(params, replicas)  # do they start from the same?

    step = funcga.stream(
        funcga.value_and_grad(torch_backend.pure_loss(module, summed_loss)),
        fold=funcga.per_weight(),  # a sum over tokens, divided by the tokens of all replicas
        weight=count_tokens,
        across=replicas,
    )
    loss, grads = step(params, window(dist.get_rank(), dist.get_world_size(), n=2, size=4))
    params = torch_backend.apply_updates(params, {name: -0.08 * grad for name, grad in grads.items()})

    weights = [round(w, 4) for w in params["weight"].flatten().tolist()]
    print(f"rank {dist.get_rank()}: loss {loss:.4f}, weights {weights}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.group.WORLD)
    dist.destroy_process_group()  # when nothing holds the group any more: gloo may abort a process that exits with it
