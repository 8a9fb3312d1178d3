"""`across=` that names replicas for each leaf, which torch refuses with the line to write; `examples/experts_torch.py` and
docs/howto/experts.md write it, and compare it with the model of all experts on one process.
"""

import torch

import funcga
import torch_backend
from tests.processes import answer, processes


def given(group, across, step):
    return step(across(group))


def accumulated(across):
    gradient = funcga.value_and_grad(lambda w, x: (w * x).mean())
    return funcga.accumulate(gradient, 2, across=across)(torch.ones(3), torch.ones(4, 3))


def coupled(across):
    return funcga.coupled(lambda w, x: x * w, lambda w, s: (s * w).sum(), 2, across=across)(
        torch.ones(3), torch.ones(4, 3)
    )


def transformed(across):
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD, lr=0.1), 2, across=across)
    return tx.update(torch.ones(3), tx.init(torch.ones(3)), torch.ones(3))


def checked(across):
    return funcga.check_replicas({"dense": torch.ones(3)}, across)


STEPS = {"accumulate": accumulated, "coupled": coupled, "multi_steps": transformed, "check_replicas": checked}
TREES = {
    "a pair": lambda group: (group, {"dense": group, "experts": group}),
    "a dict": lambda group: {"dense": group},
    "a function": lambda group: lambda path: group,
}
ONE_GROUP = (
    "in torch all leaves of a step are merged over one group. To reduce each leaf over a group of its own, fold sums"
)
NO_GROUPS = {"empty": (lambda group: (), "across= is ()"), "list": (lambda group: [], "across= is []")}


def refusals(group):
    found = {(name, how): answer(given, group, TREES[how], STEPS[name]) for name in STEPS for how in TREES}
    return found | {name: answer(given, group, across, accumulated) for name, (across, _) in NO_GROUPS.items()}


def test_replicas_of_each_leaf_are_refused_on_all_processes():
    for found in processes().run(refusals, size=2):
        for name, (kind, text) in found.items():
            assert (kind, NO_GROUPS.get(name, (None, ONE_GROUP))[1] in text) == ("FuncgaError", True), (name, text)
