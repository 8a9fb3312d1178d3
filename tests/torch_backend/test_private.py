"""Private names of torch that a build, or a backend of torch.distributed, may lack."""

import pytest
import torch

import funcga
from tests.processes import processes
from torch_backend import _private


def loss(params, x, y):
    return (torch.tanh(x @ params["w"]) @ params["v"] - y).square().mean()


def arguments():
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 4, generator=generator), "v": torch.randn(4, generator=generator)}
    return params, torch.randn(7, 3, generator=generator), torch.randn(7, generator=generator)


def merged_without(group, names):
    """A window over replicas, with and without these names of torch.distributed, which sends early the second time."""
    import torch.distributed as dist

    params, x, y = arguments()
    weight = lambda x, y: float(len(x))

    def window():
        again = dist.new_group([0, 1])
        step = funcga.accumulate(funcga.value_and_grad(loss), 2, weight=weight, across=again)
        return [step(params, x[: 3 + group.rank()], y[: 3 + group.rank()]) for _ in range(2)]

    want = window()
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delattr(dist, name)
        another = dist.new_group([0, 1])
        own = _private.group_of_our_own(another)
        got = window()
    funcga.compare(want, got, rtol=0, atol=0).assert_close()
    return own is another


def test_replicas_without_a_group_of_our_own():
    assert processes().run(merged_without, [], size=2) == [False] * 2
    assert processes().run(merged_without, ["ProcessGroupGloo"], size=2) == [True] * 2
