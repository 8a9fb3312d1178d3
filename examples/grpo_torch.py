"""GRPO and DAPO on a small policy: the loss of a whole batch of completions, in micro-batches.

    python examples/grpo_torch.py

GRPO divides by the number of completions, DAPO by the number of their tokens, over all micro-batches of an update.
`totals=` counts them before the first forward pass. A loop that divides every micro-batch's loss by its own count, and
by the number of micro-batches, has another gradient: tokens of a micro-batch of short completions count for more.

The policy is to repeat its prompt, a token, and then to stop. It learns it from rewards.
"""

import torch
from by_hand import gradient_by_hand
from torch import nn

import funcga
import torch_backend

STOP, VOCABULARY, MOST = 0, 8, 12
GROUP, MICROBATCH = 8, 10


class Policy(nn.Module):
    """The scores of the next token, after a prompt and what was said since."""

    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens, state=None):
        """(scores of shape [rows, length, VOCABULARY], the state after the last token)."""
        hidden, state = self.memory(self.embed(tokens), state)
        return self.head(hidden), state


def log_probs(policy, batch):
    """The logarithm of the probability of every token of the completions."""
    scores, _ = policy(torch.cat([batch["prompt"][:, None], batch["tokens"][:, :-1]], 1))
    return scores.log_softmax(-1).gather(-1, batch["tokens"][..., None])[..., 0]


@torch.no_grad()
def rollouts(policy, prompts):
    """GROUP completions of each prompt, with the advantage of each over its group."""
    prompt = prompts.repeat_interleave(GROUP)
    said, state = [prompt[:, None]], None
    for _ in range(MOST):
        scores, state = policy(said[-1], state)
        said.append(torch.multinomial(scores[:, -1].softmax(-1), 1))
    tokens = torch.cat(said[1:], 1)
    # A completion ends with its first STOP.
    mask = (tokens == STOP).cumsum(1).sub((tokens == STOP).long()) == 0
    right = ((tokens == prompt[:, None]) & mask).sum(1)
    reward = right.clamp(max=3) / 3 - 0.1 * (mask.sum(1) - 4).abs()
    groups = reward.view(-1, GROUP)
    advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    batch = {"prompt": prompt, "tokens": tokens, "mask": mask, "advantage": advantage.view(-1, 1).double()}
    return {**batch, "old": log_probs(policy, batch)}, reward.mean().item()


def surrogate(policy, batch):
    """The clipped loss of every token, 0 where a completion is over."""
    ratio = (log_probs(policy, batch) - batch["old"]).exp()
    clipped = ratio.clamp(0.8, 1.28)
    return -torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"]) * batch["mask"]


# --- the losses with totals, and as they stand in a loop


def grpo(policy, batch, *, totals):
    """The mean over completions of the mean over the tokens of each."""
    return (surrogate(policy, batch).sum(1) / batch["mask"].sum(1).clamp(min=1)).sum() / totals["rows"]


def dapo(policy, batch, *, totals):
    """The mean over the tokens of all completions."""
    return surrogate(policy, batch).sum() / totals["tokens"].clamp(min=1)


def count(batch):
    """What the losses are divided by."""
    return {"rows": len(batch["mask"]), "tokens": batch["mask"].sum()}


def grpo_by_hand(policy, batch):
    """GRPO of one micro-batch."""
    return (surrogate(policy, batch).sum(1) / batch["mask"].sum(1).clamp(min=1)).mean()


def dapo_by_hand(policy, batch):
    """DAPO of one micro-batch."""
    return surrogate(policy, batch).sum() / batch["mask"].sum()


def distance(left, right):
    """How far two gradients are apart, relative to the second."""
    difference = sum((left[name] - right[name]).square().sum() for name in right)
    return (difference / sum(g.square().sum() for g in right.values())).sqrt().item()


def main(updates=40):
    """Prints how far each way is from the whole batch, and what the policy learns."""
    torch.manual_seed(0)
    policy = Policy().double()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    prompts = torch.arange(1, 7)

    batch, reward = rollouts(policy, prompts)
    cuts = range(0, len(batch["mask"]), MICROBATCH)
    microbatches = [{name: leaf[i : i + MICROBATCH] for name, leaf in batch.items()} for i in cuts]
    for name, loss_fn, by_hand in (("GRPO", grpo, grpo_by_hand), ("DAPO", dapo, dapo_by_hand)):
        gradient = torch_backend.module_value_and_grad(policy, loss_fn)
        step = funcga.accumulate(gradient, microbatch_size=MICROBATCH, fold=funcga.sum(), totals=count)
        _, grads = step(batch)
        whole = gradient_by_hand(policy, by_hand, [(batch,)])
        off = distance(gradient_by_hand(policy, by_hand, [(microbatch,) for microbatch in microbatches]), whole)
        print(f"{name}: that of the whole batch: {distance(grads, whole) < 1e-12}; by hand it is off by {off:.1%}")

    # `step` is that of DAPO now.
    for update in range(updates):
        _, grads = step(batch)
        torch_backend.assign_grads(policy, grads)
        optimizer.step()
        if update % 10 == 0:
            print(f"update {update:2}: reward {reward:.2f}")
        batch, reward = rollouts(policy, prompts)
    print(f"in the end: reward {reward:.2f} of at most 1")


if __name__ == "__main__":
    main()
