"""The gradient of the page on DP-SGD beside that of Opacus on the same draw. Skipped without Opacus, no dependency of ours."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import funcga
from tests.test_frameworks import names_of

PAGE = "howto/dp_sgd.md"


@pytest.mark.filterwarnings("ignore")  # of Opacus: that the generator is not secure, and changes of torch
@pytest.mark.parametrize("noise_multiplier", [0.0, 1.1])
@pytest.mark.parametrize("physical", [400, 16])
def test_a_private_gradient_is_that_of_opacus(noise_multiplier, physical):
    opacus = pytest.importorskip("opacus", reason="Opacus is not installed: DP-SGD is NOT compared with it")
    page = names_of(PAGE, count=3)
    page["noise_multiplier"] = noise_multiplier
    rows, counts = page["draw"](torch.Generator().manual_seed(1))
    params, x, y = page["params"], page["x"], page["y"]
    summed = page["step"](params, x[rows], y[rows], counts)
    ours = page["noisy"](summed, torch.Generator().manual_seed(2))

    module = opacus.GradSampleModule(copy.deepcopy(page["model"]))
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
        cross_entropy(module(x[part]), y[part]).backward()
        optimizer.signal_skip_step(do_skip=part is not parts[-1])
        optimizer.step()
    theirs = {name.removeprefix("_module."): p.grad for name, p in module.named_parameters()}
    report = funcga.compare(ours, theirs)
    print(max(row.relative for row in report.rows))
    report.assert_close()
