"""One update of a model cut into two pipeline stages, over micro-batches with different numbers of tokens.

    torchrun --nproc-per-node 2 examples/pipeline_torch.py

With the scale of torch's schedules, which divide by the number of micro-batches, each micro-batch counts alike, however
many of its tokens do. Here every token counts alike, as in one batch on one device, and both processes have the loss.
"""

import gc

import torch
import torch.distributed as dist
from sentences import PADDING, count_tokens, microbatch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import funcga
import torch_backend


def mean_loss(output, labels):
    """The mean over the tokens that are no padding."""
    return cross_entropy(output.flatten(0, 1), labels.flatten().long(), ignore_index=PADDING)


def by_hand(stage, tokens, labels):
    """The gradients of a schedule as torch has it: the average of the means of 4 micro-batches."""
    schedule = ScheduleGPipe(stage, 4, loss_fn=mean_loss)
    schedule.step(*([tokens] if stage.is_first else []), target=labels if stage.is_last else None)
    return {f"{stage.stage_index}.{name}": p.grad for name, p in stage.submod.named_parameters()}


def main():
    """The gradient of this process's stage, compared with that of the model on one device."""
    torch.manual_seed(0)
    rank, device = dist.get_rank(), torch.device("cpu")
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh()), torch.nn.Linear(8, 2)
    ).double()
    tokens, labels = microbatch(0, 16)  # sentences of 1 to 16 tokens
    tokens = tokens.double()
    of_model = torch_backend.pure_loss(model, lambda model, tokens, labels: mean_loss(model(tokens), labels))
    value, expected = funcga.value_and_grad(of_model)(torch_backend.trainable(model), tokens, labels)
    expected = {name: grad for name, grad in expected.items() if name.startswith(f"{rank}.")}

    stage = PipelineStage(model[rank], rank, 2, device)
    gradient = torch_backend.pipeline_value_and_grad(ScheduleGPipe, stage, mean_loss)
    step = funcga.accumulate(gradient, n=4, weight=count_tokens)
    loss, grads = step(tokens, labels)
    torch_backend.assign_grads(gradient.module, grads)

    exact = max((grads[name] - expected[name]).abs().max().item() for name in expected) < 1e-12
    print(f"stage {rank}: loss {loss.item():.6f}, on one device {value.item():.6f}, gradients to 1e-12: {exact}")

    gradient.module.zero_grad()
    scaled = by_hand(PipelineStage(model[rank], rank, 2, device), tokens, labels)
    off = max((scaled[name] - expected[name]).norm() / expected[name].norm() for name in expected)
    print(f"stage {rank}: scale_grads=True is off by more than 10 %: {off.item() > 0.1}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
