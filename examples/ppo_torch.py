"""PPO in micro-batches: advantages whitened before the split, and means over the steps of all episodes.

    python examples/ppo_torch.py

The clipped objective, the value loss and the entropy are means over the valid steps of a minibatch. Episodes have
different numbers of steps and are padded, so a micro-batch is weighted by its valid steps: `weight=count_steps`. A loop
that averages its micro-batches gives the steps of short episodes too large a weight. Where each step is a row, as in
CleanRL and Stable-Baselines3, and the micro-batches are equally large, that loop is right.

Advantages are whitened over the whole rollout, before the split. Whitened in each micro-batch they are other numbers,
and no weight corrects that. The KL divergence to the old policy is returned beside the loss. It is the mean over the
steps of the whole minibatch, too, and ends an iteration early.

The agent walks along a line of cells, and is rewarded at its right end. Source: Schulman, Wolski, Dhariwal, Radford and
Klimov (2017), "Proximal Policy Optimization Algorithms".
"""

import torch
from torch import nn

import funcga
import torch_backend

CELLS, MOST_STEPS, EPISODES, MICROBATCH = 8, 24, 64, 8
DISCOUNT, LAMBDA, CLIP, TARGET_KL = 0.99, 0.95, 0.2, 0.01


class ActorCritic(nn.Module):
    """In each cell, the log-probabilities of the actions left and right, and the value."""

    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(CELLS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, cell):
        """(log-probabilities, values)."""
        hidden = self.body(cell)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden)[..., 0]


def advantages(reward, value, mask):
    """Generalized advantage estimation. The reward and the value are 0 where an episode is over."""
    next_value, advantage, found = 0, 0, []
    for step in reversed(range(MOST_STEPS)):
        error = reward[:, step] + DISCOUNT * next_value - value[:, step]
        advantage = (error + DISCOUNT * LAMBDA * advantage) * mask[:, step]
        next_value = value[:, step]
        found.append(advantage)
    return torch.stack(found[::-1], 1)


def whitened(advantage, mask):
    """The advantages with mean 0 and variance 1 over the valid steps."""
    return (advantage - advantage[mask].mean()) / (advantage[mask].std(correction=0) + 1e-8)


@torch.no_grad()
def rollout(model):
    """Episodes of the policy, padded to MOST_STEPS, and their mean return."""
    cell, mask, steps = torch.randint(CELLS - 1, (EPISODES,)), torch.ones(EPISODES, dtype=torch.bool), []
    for _ in range(MOST_STEPS):
        log_probs, value = model(cell)
        action = torch.multinomial(log_probs.exp(), 1)
        moved = (cell + 2 * action[:, 0] - 1).clamp(min=0)
        at_goal = moved == CELLS - 1
        log_prob = log_probs.gather(1, action)[:, 0]
        steps.append((cell, action[:, 0], log_prob, value, at_goal.double() - 0.05, mask))
        cell, mask = torch.where(at_goal, 0, moved), mask & ~at_goal
    cell, action, log_prob, value, reward, mask = (torch.stack(each, 1) for each in zip(*steps, strict=True))
    reward, value = reward * mask, value * mask
    advantage = advantages(reward, value, mask)
    batch = {"cell": cell, "action": action, "log_prob": log_prob, "mask": mask, "return": advantage + value}
    return {**batch, "advantage": whitened(advantage, mask)}, reward.sum(1).mean().item()


def ppo(model, batch):
    """The loss and the KL divergence to the old policy, both means over the valid steps."""
    mean = lambda of_steps: (of_steps * batch["mask"]).sum() / batch["mask"].sum()
    log_probs, value = model(batch["cell"])
    log_ratio = log_probs.gather(-1, batch["action"][..., None])[..., 0] - batch["log_prob"]
    ratio, advantage = log_ratio.exp(), batch["advantage"]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return mean(0.5 * (value - batch["return"]).square() - gain - 0.01 * entropy), mean(ratio - 1 - log_ratio)


def whitened_late(model, batch):
    """The same with advantages that are whitened in each micro-batch."""
    return ppo(model, {**batch, "advantage": whitened(batch["advantage"], batch["mask"])})


def count_steps(batch):
    """The weight of a micro-batch."""
    return batch["mask"].sum()


def usual_loop(model, batch):
    """The gradient of `(loss / n).backward()`."""
    starts = range(0, EPISODES, MICROBATCH)
    for i in starts:
        loss, _ = ppo(model, {name: leaf[i : i + MICROBATCH] for name, leaf in batch.items()})
        (loss / len(starts)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def main(iterations=12, epochs=3):
    """The gradient of one batch, and what the policy learns."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = ActorCritic()
    accumulated = lambda loss_fn: funcga.accumulate(
        torch_backend.module_value_and_grad(model, loss_fn, has_aux=True),
        microbatch_size=MICROBATCH,
        weight=count_steps,
    )
    step = accumulated(ppo)
    batch, _ = rollout(model)
    with torch.no_grad():
        for p in model.parameters():  # as after some updates
            p += 0.05 * torch.randn_like(p)
    names = [name for name, _ in model.named_parameters()]
    whole = dict(zip(names, torch.autograd.grad(ppo(model, batch)[0], [*model.parameters()]), strict=True))
    largest = max(abs(g).max() for g in whole.values())
    off = lambda grads: (max(abs(grads[name] - whole[name]).max() for name in names) / largest).item()
    usual = off(usual_loop(model, batch))
    print(f"PPO, 8 micro-batches of 8 episodes: off by {off(step(batch)[1]):.0e}; the usual loop: {usual:.0%}")
    print(f"advantages whitened in each micro-batch: off by {off(accumulated(whitened_late)(batch)[1]):.0%}")

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for iteration in range(iterations):
        batch, mean_return = rollout(model)
        for _ in range(epochs):
            for rows in torch.randperm(EPISODES).split(EPISODES // 2):  # minibatches
                (_, kl), grads = step({name: leaf[rows] for name, leaf in batch.items()})
                torch_backend.assign_grads(model, grads)
                optimizer.step()
            if kl > TARGET_KL:
                break
        if iteration % 4 == 0:
            print(f"iteration {iteration:2}: mean return {mean_return:.2f}, KL {kl:.3f}")
    print(f"in the end: mean return {rollout(model)[1]:.2f}")


if __name__ == "__main__":
    main()
