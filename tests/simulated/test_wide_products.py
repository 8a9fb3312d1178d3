"""Products of 16-bit matrices, which a device adds in float32: not every version of torch can."""

import pytest
import torch

import funcga
from tests.torch_backend.test_fused import Model, batch, check, loss_of, of_params


@pytest.mark.simulated
def test_a_torch_that_refuses_to_add_products_of_16_bits_in_float32(monkeypatch):
    """It is asked once. Then the factors are cast, in place of the product: the sum is as exact."""
    model, args = Model(vocabulary=2**16).bfloat16().to("cuda"), [arg.to("cuda") for arg in batch()]
    step = of_params(model, loss_of, fold=(funcga.mean(), funcga.mean(out_dtype=torch.float32)))
    wanted, asked = step(*args), []

    def refusing(*args, **kwargs):
        asked.append(kwargs["out_dtype"])
        raise RuntimeError("out_dtype is not supported")

    monkeypatch.setattr(torch, "addmm", refusing)
    monkeypatch.setattr("funcga.tools.fused.in_torch._REFUSED", set())
    for _ in range(2):
        check(step(*args), wanted, limit=1e-5)
    assert asked == [torch.float32]
    asked.clear()
    monkeypatch.setattr("funcga.tools.fused.in_torch._REFUSED", set())
    monkeypatch.setattr(torch, "addmm", no_memory)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            step(*args)


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError
