"""The prepared check of a GPU, in its quick form: all that it looks at is right on a simulated one."""

import pytest

from benchmarks import gpu_check
from tests import simulated

pytestmark = pytest.mark.simulated
QUICK = ["--device", "simulated", "--quick"]


@pytest.mark.filterwarnings("ignore")  # of the compiler, which the check prints
@pytest.mark.parametrize("sections", [["right"], ["waits"], ["addmm", "streams", "compile", "graph", "launches"]])
def test_all_is_right(sections, capsys):
    assert gpu_check.main([*QUICK, "--only", *sections]) == 0
    printed = capsys.readouterr().out
    assert "simulated | torch " in printed.splitlines()[0]
    assert "CUDA None" in printed.splitlines()[0]
    assert printed.rstrip().endswith("0 that raised or were wrong")
    if sections == ["right"]:
        assert printed.count("| ok |") + printed.count("| ok\n") >= 30
        assert "a GPT, tied, bfloat16, fused" in printed
    if "launches" in sections:
        assert "12 layers of 64: loop" in printed


@pytest.mark.filterwarnings("ignore")
def test_times_and_bytes_are_beside_those_of_a_loop(capsys):
    assert gpu_check.main([*QUICK, "--only", "time", "fused"]) == 0
    printed = capsys.readouterr().out
    assert "x1.00 | 0." in printed
    assert "2 x 768^2, bfloat16: on" in printed


def test_what_is_wrong_is_said(capsys, monkeypatch):
    monkeypatch.setitem(gpu_check.FEATURES, "accumulate", (gpu_check.of_params, 1e-30))
    monkeypatch.setitem(gpu_check.FEATURES, "max()", (lambda: 1 / 0, 1.0))
    assert gpu_check.main([*QUICK, "--only", "right"]) == 1
    wrong = capsys.readouterr().out.split("2 that raised or were wrong")[1]
    assert "right: accumulate: WRONG | " in wrong
    assert "right: max(): WRONG | ZeroDivisionError: division by zero" in wrong


def test_a_machine_without_a_gpu_is_told_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == (
        "gpu_check: this machine has no GPU that torch can use. Write --device simulated.\n"
    )
    assert simulated.is_installed()
