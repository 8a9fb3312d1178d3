"""Every example runs as its first lines say, and prints what they say."""

import os
import random
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest
import torch

from tests.processes import launched
from tests.programs import EXAMPLES, ROOT, as_a_program

RUN = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "python": [sys.executable]}
PRINTS = {  # what the output has to hold, and how often
    "replicas_torch": (r"weights \[0\.2117, 0\.3172\]", 2),
    "elastic_torch": (r"^exact sums: .*: the same bits: True$|^plain sums: .*: the same bits: False$", 2),
    "ddp_torch": (r"weights \[0\.2117, 0\.3172\], effective batch size 16|what is left, effective batch size 7", 4),
    "fsdp_torch": (r"fsdp[12], rank \d: loss [\d.]+, norm 3\.8750, weights \[0\.2117, 0\.3172\]", 4),
    "experts_torch": (r"^rank \d: after 5 updates the parameters are those of one process: True$", 4),
    "pipeline_torch": (r"^stage [01]: .* (?:gradients to 1e-12|by more than 10 %): True$", 4),
    "replicas_jax": (r"each update: one all-reduce of [\d,]+ bytes, in 0 loops", 1),
    "batchnorm_torch": (r"^merged: .*to 1e-6: True$|^(?:threaded|frozen): .*: False$", 3),
    "batchnorm_jax": (r"^merged: .*to 1e-6: True$|^(?:threaded|frozen): .*: False$", 3),
    "basic_torch": (r": the weight is 2\.04000$", 3),
    "basic_jax": (r": the weight is 2\.04000$|: 0\.079, 0\.678, 1\.713$", 4),
    "remainder_torch": (r"^the last window has the gradient of its three rows$|: 5 updates$", 2),
    "variable_length_torch": (
        r": \[0\.0953, 0\.4337\]$|^wrong.*: \[0\.0775, 0\.4514\]$|^two .*: \[0\.1536, 0\.3754\]$",
        5,
    ),
    "variable_length_jax": (r": \[0\.0953, 0\.4337\]$|^wrong.*: \[0\.0775, 0\.4514\]$", 3),
    "grpo_torch": (r"that of the whole batch: True; by hand it is off by \d|^in the end: reward 0\.[4-9]", 3),
    "auxiliary_jax": (r"^that of the whole batch: True$|is off by \d+%$|^update 60: loss 0\.[34]", 3),
    "text_torch": (
        r"micro-batches: loss [13]\.\d+, off by \de-1[3-9]$|loop, .*: loss (?:nan|[13]\.\d+), off by (?:71|8[59]|28|31|54)%$",
        12,
    ),
    "speech_torch": (
        r"of 6: off by \de-1[3-9]; .*: \de-1[3-9]$|of 7: off by \de-1[3-9]; .*: (?:11|22|10|14)%$",
        5,
    ),
    "vae_torch": (
        r"rows, .*: off by \de-1[3-9]; .*: \de-1[3-9]$|: off by \de-1[3-9]; .*: (?:5|43|2)%$|^update 60: beta 1\.00, loss 10\.",
        5,
    ),
    "diffusion_torch": (
        r"of 7: off by \de-1[3-9]; .*: \de-1[3-9]$|of 8: off by \de-1[3-9]; .*: 12%$"
        r"|weights off by \de-1[3-9], EMA off by \de-1[3-9]$|micro-batches: off by 50%$",
        4,
    ),
    "noise_scale_torch": (r"^ +\d+ +[\d.]+ \+- *[\d.]+ +[\d.]+ +.*o|three standard errors: (?:7[89]|80) of 80$", 9),
    "clipping_torch": (r"^norms of the windows: 1\.901, 13\.245$|the weights are those of two batches", 2),
    "clip_and_schedule_jax": (r"^updates 9: the parameters are those of whole batches$", 1),
    "schedules_torch": (r": 12 updates, .* the same as a transform$", 4),
    "adaptive_torch": (r": (4 .* 16|13 .* 5), same gradients$|^updates of \[72, 72, 16\] rows$", 3),
    "adaptive_jax": (r"in micro-batches of 16$|: 2 updates$", 2),
    "microbatched_forward_torch": (r"19 outputs, as from the whole batch$", 1),
    "checkpointing_torch": (r"^eight micro-batches, .*(?: 5|t .* 2)\d\d,\d+ bytes, the same gradients$", 3),
    "checkpointing_jax": (r"^eight micro-batches.*, the same gradients$", 2),
    "contrastive_tiles_torch": (r"^1024 x .* 1\d,\d+,\d+ bytes$|^16 tiles .* 2,\d+,\d+ bytes, the same gradients$", 2),
    "contrastive_tiles_jax": (r"^1024 x .* 1\d,\d+,\d+ temp.*$|^16 tiles .* 1,\d+,\d+ temp.*, the same gradients$", 2),
    "image_text_torch": (
        r": \de-1[4-9] off in two passes, \d\d+% off plainly$|updates: .* (?:8|9)\d% of captions found$",
        6,
    ),
    "image_text_jax": (
        r": \de-1[4-9] off in two passes, \d\d+% off plainly$|updates: .* (?:8|9)\d% of captions found$",
        6,
    ),
    "bi_encoder_torch": (r"^update 6: loss 3\.\d+$|: \de-1[4-9] off in two passes, \d\d% off plainly$", 2),
    "mixture_of_experts_torch": (r": \de-1[4-9] off in two passes, [\d.]+% off plainly$|^update 24: loss [23]\.", 3),
    "mixture_of_experts_jax": (r": \de-1[4-9] off in two passes, [\d.]+% off plainly$|^update 24: loss [23]\.", 3),
    "vicreg_torch": (r"whole batch: [1-9]e-1[4-6] in two passes$|the usual way, .*: (?:64|340)% off$", 4),
    "vicreg_jax": (r"whole batch: [1-9]e-1[4-6] in two passes$|the usual way, .*: (?:55|769)% off$", 4),
    "detection_torch": (r": off by \de-1[3-9]$|backward\(\): 46%$|^update 30: loss 2\.", 3),
    "yolo_torch": (r": off by \de-1[3-9]$|backward\(\): (?:11|7)%$|^update 20: loss 0\.[3-6]", 5),
    "segmentation_torch": (r": off by \de-1[3-9]$|backward\(\): (?:57|10)%$|^update 30: loss 0\.[67]", 7),
    "molecules_torch": (r": off by \de-1[3-9]$|backward\(\): 36%$|^epoch 10: loss 1\.", 3),
    "splatting_torch": (
        r": off by \de-1[3-9]$|: \de-1[3-9]$|gradients: 66%$|equal: True$|^16 of 40 .* be 0$|^update 30: loss 0\.0[34]",
        7,
    ),
    "recommender_torch": (
        r": off by \de-1[3-9]; .*: 8%$|^update 1: .* 64,000,000 bytes$|^update 40: loss 0\.0\d, .* 51,200 bytes$"
        r"|sparse_coo, has 48 of 1,000,000 rows$",
        4,
    ),
    "ppo_torch": (r": off by \de-1[3-9]; .*: 2%$|micro-batch: off by 1%$|^in the end: mean return 0\.7\d$", 3),
    "multi_task_torch": (
        r": off by \de-1[3-9]$|window: 86%, of the task: 47%$|^update (?:1|27): .* heads\.score\.weight, heads\.score\.bias$"
        r"|^update 40: loss 1\.5\d, unused: nothing$",
        5,
    ),
    "once_per_update_torch": (
        r"^40 updates: (?:\w+ off by \de-1[3-9], ){3}learning rates off by 0e\+00$|EMA off by 11%, SWA by 1%$"
        r"|ends at 0\.0002, not 0\.0050$",
        3,
    ),
    "once_per_update_jax": (
        r"weights off by \de-1[3-9], EMA by \de-1[3-9]$|^reduce_on_plateau .* 0\.03125 .* 0\.03125$"
        r"|weights off by \de-1[3-9], loss 0\.9\d+$| 1\d,\d+ temporary bytes, through the loop 1\d\d,\d+$",
        4,
    ),
    "lbfgs_torch": (
        r": off by \de-1[3-9]; .*: 18%$|^(?:whole|accumulated): .* loss \de-0[345], u is off by \de-0[345]$"
        r"|^usual: .* loss \de\+01, u is off by \de-01$",
        4,
    ),
    "bfloat16_torch": (r" add up to 1,024$|to 1%: True$", 2),
    "metrics_torch": (r"^update [123]: .* accuracy \d+/\d+$|^epoch: .* accuracy 110/210$", 4),
    "metrics_jax": (r"accuracy 0\.7895 = 15/19, logits \(19, 4\)$", 1),
    "mixed_precision_torch": (r"of 14 14 15 14 14 14 15 15 15 16 16 16$|: True$|the last norm: 0\.7\d+$", 4),
    "mixed_precision_jax": (
        r" 17 16 16 16 17 17 17 18$|^skipped 1, .* 1 time$|^without .* [1-5]\d% of|^with .* 100% of",
        4,
    ),
    "service_torch": (r"^saved and loaded, while ann wait.*$|^3 requests failed$|: \d+ .*, to 1e-12: True$", 5),
    "dropout_torch": (r"two runs: True$| 8 masks in|^by example: 4 .* are \de-0[78] from one$", 4),
    "dropout_jax": (r"two runs: True$| 4 masks in|^by example: 4 .* are \de-0[78] from one$", 4),
    "learning_rate_torch": (
        r"^0\.1 for 8 rows is 0\.40 for 32 rows, or 0\.20|^rows 32: .*, lr 0\.(?:4|1|175|325)0*$|^rows 16: .*, lr 0\.(?:15|2)0*$",
        7,
    ),
    "comparison_torch": (r"^averaged over batches: by steps; |^BatchNorm: batch statistics; ", 2),
    "multi_steps_torch": (r"update [1-7]: loss 0\.|to 1e-5: True$", 8),
    "multi_steps_jax": (r"updates 60.*(?:loss 0\.00\d|params to 1e-4: True)$", 2),
    "train_lm_torch": (r"^loss 5\.\d+ at the first update, 2\.\d+ at update 40$", 1),
    "train_lm_optimizer_torch": (r"^loss 5\.\d+ at the first update, 2\.\d+ at update 40$", 1),
    "train_lm_jax": (r"^loss 5\.\d+ at the first update, 2\.\d+ at update 40$", 1),
    "train_digits_torch": (r"^loss 2\.\d+ .*, 0\.[12]\d+ at update 48$|^accuracy 0\.9[5-9]", 2),
    "train_digits_optimizer_torch": (r"^loss 2\.\d+ .*, 0\.[12]\d+ at update 48$|^accuracy 0\.9[5-9]", 2),
    "train_digits_jax": (r"^loss 2\.\d+ .*, 0\.[12]\d+ at update 48$|^accuracy 0\.9[5-9]", 2),
    "gpt2_torch": (r"^29 of 29 leaves of accumulated and transformers are close", 1),
    "flax_jax": (r"^8 of 8 leaves of accumulated and whole are close", 1),
    "equinox_jax": (r"^7 of 7 leaves of accumulated and whole are close", 1),
    "parity_torch_flax": (r"^rel may be 1e-12.*\n9 of 9 leaves of torch and flax are close", 1),
}
NEEDS = {
    "detection_torch": "scipy",
    "gpt2_torch": "transformers",
    "bi_encoder_torch": "transformers",
    "image_text_jax": "flax",
    "mixture_of_experts_jax": "equinox",
    "flax_jax": "flax",
    "batchnorm_jax": "flax",
    "equinox_jax": "equinox",
    "parity_torch_flax": "flax",
}

APART = {"replicas_jax"}  # it says how many devices JAX has, which it takes before it has any
# As torchrun starts them, which `replicas_torch` shows that it does. The last forks processes itself, which import nothing
# more than once.
FORKED = {"ddp_torch", "fsdp_torch", "experts_torch", "pipeline_torch", "elastic_torch"}


@pytest.mark.parametrize("name", PRINTS)
def test_the_example_prints_what_it_says(name, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    path = EXAMPLES / f"{name}.py"
    tool, *arguments = re.search(rf"^    (\w+ .*examples/{name}\.py.*)$", path.read_text(), re.M)[1].split()
    if name in FORKED:
        counts = re.findall(r"^--nproc-per-node (\d+) ", " ".join(arguments))
        printed = launched(_run, path, count=int(counts[0]) if tool == "torchrun" else 1)
    elif tool == "python" and arguments == [f"examples/{name}.py"] and name not in APART:
        _run(path)
        printed = capsys.readouterr().out
    else:
        printed = printed_apart(tool, arguments)
    pattern, times = PRINTS[name]
    assert len(re.findall(pattern, printed, re.M)) == times, printed


def _run(path):
    with as_a_program():
        runpy.run_path(str(path), run_name="__main__")


def printed_apart(tool, arguments):
    """What the program prints in processes of its own."""
    command = [*RUN[tool], *arguments]
    if tool == "torchrun":
        command[len(RUN[tool]) : len(RUN[tool])] = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_example_leaves_nothing_behind():
    before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype(), sys.path[:]
    with as_a_program():
        import sentences

        assert Path(sentences.__file__).parent == EXAMPLES
        torch.manual_seed(1)
        random.seed(1)
        torch.set_default_dtype(torch.float64)
        jax.config.update("jax_enable_x64", True)
        assert warnings.filters[0][0] == "default"  # it is warned, and goes on
        assert jax.numpy.ones(1).dtype == "float64"
    assert "sentences" not in sys.modules
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_default_dtype(), sys.path) == before[1:]
    assert jax.numpy.ones(1).dtype == "float32"


def test_every_example_is_here():
    texts = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    scripts = {name: text.splitlines()[0].strip('" ') for name, text in texts.items() if "__main__" in text}
    assert set(scripts) == set(PRINTS)
    assert (
        dict(re.findall(r"^\| \[(\w+)\]\(\./\1\.py\) \| (.*) \|$", (EXAMPLES / "README.md").read_text(), re.M))
        == scripts
    )
