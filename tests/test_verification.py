"""`verify` names every planted mistake, and accuses no right loss."""

import numpy as np
import pytest

import funcga
from tests import mistakes
from tests.kits import JAX, TORCH

CASES = [(kit, name) for name, (kits, *_) in mistakes.MISTAKES.items() for kit in kits]


@pytest.mark.parametrize(("kit", "name"), CASES, ids=[f"{kit.name}-{name}" for kit, name in CASES])
def test_a_mistake_is_named(kit, name):
    _, made, names, fix = mistakes.MISTAKES[name]
    grad_fn, args, options = made(kit)
    verdict = funcga.verify(grad_fn, *args, **options)
    assert [cause.name for cause in verdict.causes] == names, str(verdict)
    assert fix in verdict.causes[0].fix
    assert not verdict.ok
