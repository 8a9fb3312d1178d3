"""The gradient of the page on DP-SGD beside that of Opacus on the same draw. Opacus is no dependency: without it, this is skipped."""

import pytest
import torch

import funcga
from tests.test_frameworks import names_of

opacus = pytest.importorskip("opacus", reason="Opacus is not installed: DP-SGD is not compared with it")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # of Opacus' own hooks
@pytest.mark.parametrize("noise_multiplier", [0.0, 1.1])
@pytest.mark.parametrize("physical", [400, 16])
def test_a_private_gradient_is_that_of_opacus(noise_multiplier, physical):
    page = names_of("howto/dp_sgd.md", count=3)
    page["noise_multiplier"], params, x, y = noise_multiplier, page["params"], page["x"], page["y"]
    rows, counts = page["draw"](torch.Generator().manual_seed(1))
    ours = page["noisy"](page["step"](params, x[rows], y[rows], counts), torch.Generator().manual_seed(2))

    module = opacus.GradSampleModule(page["model"])
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.0),
        noise_multiplier=noise_multiplier,
        max_grad_norm=page["clip"],
        expected_batch_size=page["expected_rows"],
        generator=torch.Generator().manual_seed(2),
    )
    parts = rows[:-1].split(physical)  # without the row that counts for nothing
    for part in parts:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x[part]), y[part]).backward()
        optimizer.signal_skip_step(do_skip=part is not parts[-1])
        optimizer.step()
    theirs = {name.removeprefix("_module."): p.grad for name, p in module.named_parameters()}
    funcga.compare(ours, theirs).assert_close()  # to 1.4e-14 of the largest element: 4.1e-16 was measured
