"""Rules that carry a learning rate over to another batch size."""

import numpy as np
import pytest

import funcga


def test_the_rules_are_those_of_the_papers():
    assert funcga.transforms.linear_scaling(0.1, 256, 8192) == pytest.approx(3.2, rel=1e-15)  # Goyal et al. (2017)
    assert funcga.transforms.sqrt_scaling(1e-3, 256, 1024) == 2e-3
    for rule in (funcga.transforms.linear_scaling, funcga.transforms.sqrt_scaling):
        assert rule(0.1, 256, 256) == 0.1
        assert rule(rule(0.1, 256, 512), 512, 1024) == pytest.approx(rule(0.1, 256, 1024), rel=1e-15)


def test_sizes_may_be_what_was_folded(kit):
    rows = kit.arrays(np.array(1024.0, "float32"))
    assert float(funcga.transforms.linear_scaling(0.5, 256, rows)) == 2
    assert float(funcga.transforms.sqrt_scaling(0.5, 256, rows)) == 1


BAD = {
    "lr is 0: it must be a finite number above 0, such as lr=0.1.": (0, 256, 512),
    "base_batch_size is -1: it must be a finite number above 0, such as base_batch_size=256.": (0.1, -1, 512),
    "batch_size is nan: it must be a finite number above 0, such as batch_size=1024.": (0.1, 256, float("nan")),
    "batch_size is '512': it must be a finite number above 0, such as batch_size=1024.": (0.1, 256, "512"),
    "batch_size is True: it must be a finite number above 0, such as batch_size=1024.": (0.1, 256, True),
}


@pytest.mark.parametrize("text", BAD)
def test_numbers_that_are_none(text):
    for rule in (funcga.transforms.linear_scaling, funcga.transforms.sqrt_scaling):
        with pytest.raises(funcga.FuncgaError) as error:
            rule(*BAD[text])
        assert str(error.value) == text
