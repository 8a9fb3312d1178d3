"""`plan`: what it predicts is what a real window takes, counted storage by storage; and nothing runs meanwhile."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcga
from benchmarks.torch_measure import Watch
from funcga._call import Memory, step_program
from funcga._call.arguments import Split
from funcga.tools.plan import smallest_that_fits
from funcga.tools.plan.in_torch import peak
from tests.processes import processes
from torch_backend import BACKEND, Replicas, module_value_and_grad, pure_loss, trainable

MEMORY = 400_000  # of which the transformer below needs more for n = 1


class Block(nn.Module):
    def __init__(self, width, recomputes):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))  # fmt: skip
        self.recomputes = recomputes

    def body(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.inner(x)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)


def transformer(recomputes=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), Block(16, recomputes), Block(16, recomputes), nn.Linear(16, 50))
    tokens = torch.randint(0, 50, (23, 9))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def cnn():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3, stride=2),
                          nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 50))  # fmt: skip
    return model, (torch.randn(23, 3, 12, 12), torch.randint(0, 50, (23,)))


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 50))
    return model, (torch.randn(23, 20), torch.randint(0, 50, (23,)))


def mean_loss(module, x, y):
    return F.cross_entropy(module(x).flatten(0, -2), y.flatten())


def sum_loss(module, x, y):
    return F.cross_entropy(module(x).flatten(0, -2), y.flatten(), reduction="sum")


def shared_loss(module, x, y, *, totals):
    return sum_loss(module, x, y) / totals


def autocast_loss(module, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return mean_loss(module, x, y)


def counts(x, y):
    return (y != 3).sum()


def of_module(loss_fn, **options):
    return lambda model, n: (funcga.accumulate(module_value_and_grad(model, loss_fn), n, **options), ())


def of_params(loss_fn, dtype=None, **options):
    def make(model, n):
        params = {name: p.detach().to(dtype or p.dtype) for name, p in model.named_parameters()}
        return funcga.accumulate(funcga.value_and_grad(pure_loss(model, loss_fn)), n, **options), (params,)

    return make


STEPS = {
    "module": of_module(mean_loss),
    "params": of_params(mean_loss),
    "tokens": of_params(sum_loss, fold=funcga.per_weight(), weight=counts),
    "uneven": of_module(mean_loss, weight=counts),
    "autocast": of_module(autocast_loss),
    "dropping": of_params(mean_loss, drop="microbatch"),
    "moments": of_params(mean_loss, fold=(funcga.mean(), funcga.moments())),
    "exact": of_params(mean_loss, fold=funcga.reproducible(funcga.mean())),
    "noise": of_params(mean_loss, observe=funcga.gradient_noise()),
    "narrow": of_params(mean_loss, torch.bfloat16),
    "totals": of_params(shared_loss, fold=funcga.sum(), totals=lambda x, y: len(x)),
}


def counted(step, args):
    """The peak of the storages of a real call, and those that it is given."""
    step(*args)  # the module's tables are walked at the first call
    with Watch() as seen:
        result = step(*args)
    del result
    return seen.bytes + seen.kept


def fresh(program, **options):
    """A program of which no call is known."""
    return replace(program, memory=Memory(program.memory.step), **options)


def predicted(step, args):
    job, program = getattr(step, "coupled", None), step_program(step)
    if job is None:
        loop = getattr(step, "counting", None) or BACKEND.loop
        window = lambda program: loop.accumulate(program, BACKEND)
    else:
        program = job.program
        window = lambda program: replace(job, program=program).passes(BACKEND)
    return sum(peak(fresh(program), window, args, {}, BACKEND).values())


@pytest.mark.parametrize(
    ("problem", "n"), [(mlp, 1), (cnn, 5), (transformer, 1), (lambda: transformer(recomputes=True), 5)]
)
def test_the_peak_is_that_of_the_real_window(problem, n):
    model, batch = problem()
    model.eval()  # BatchNorm of one row
    step, params = STEPS["module"](model, n)
    assert predicted(step, (*params, *batch)) == counted(step, (*params, *batch))


@pytest.mark.parametrize("name", [name for name in STEPS if name != "module"])
def test_whatever_is_folded_the_peak_is_that_of_the_real_window(name):
    model, (x, y) = mlp()
    n = 1 if name == "uneven" else 3
    step, params = STEPS[name](model, n)
    args = (*params, x.bfloat16() if name == "narrow" else x, y)
    # Numbers that weigh, or are counted, are 0-d tensors, of which there may be some more or less.
    assert abs(predicted(step, args) - counted(step, args)) <= 8 * (n + 4)


def test_nothing_is_changed():
    model, batch = cnn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors, seed = [*model.parameters(), *model.buffers()], torch.random.get_rng_state()
    funcga.plan(module_value_and_grad(model, mean_loss), *batch, memory="100 KB")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(seed, torch.random.get_rng_state())


def test_the_smallest_that_fits_and_no_larger_one():
    model, batch = transformer()
    gradient = module_value_and_grad(model, mean_loss)
    plan = funcga.plan(gradient, *batch, memory=MEMORY)
    assert plan.fits
    assert plan.microbatch_size == -(-23 // plan.n)
    at_most = lambda n: counted(funcga.accumulate(gradient, n), batch) <= MEMORY
    assert [at_most(n) for n in (plan.n - 1, plan.n)] == [False, True]
    assert plan.peak_bytes == sum(plan.parts.values()) == counted(funcga.accumulate(gradient, plan.n), batch)
    assert plan.parts["sums"] >= 4 * sum(p.numel() for p in model.parameters())
    assert plan.parts["gradients"] > 0
    assert 0 < plan.whole_batch < 23
    rows = [a[: plan.whole_batch] for a in batch]
    assert counted(funcga.accumulate(gradient, 1), rows) <= MEMORY


def test_shapes_are_enough():
    """Of more than any machine has."""
    params = {"w": torch.empty(2**20, 2**20, device="meta")}
    x = torch.empty(64, 2**20, device="meta")
    gradient = funcga.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())
    plan = funcga.plan(gradient, params, x, memory="16 TiB", state=params)
    assert plan.parts["parameters"] == plan.parts["state"] == 2**42
    assert plan.fits
    assert plan.n == 1
    refused = funcga.plan(gradient, params, x, memory="1 TiB")
    assert (refused.fits, refused.n, refused.microbatch_size, refused.whole_batch) == (False, None, 1, None)
    assert "no n fits" in str(refused)


def loss(params, x):
    return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]).mean()


def test_jax_from_shapes():
    params = {"a": jax.ShapeDtypeStruct((32, 64), "float32"), "b": jax.ShapeDtypeStruct((64, 8), "float32")}
    x = jax.ShapeDtypeStruct((96, 32), "float32")
    gradient = funcga.value_and_grad(loss)
    plan = funcga.plan(gradient, params, x, memory="50 KB")
    assert plan.parts["arguments"] == 4 * (32 * 64 + 64 * 8) + 4 * 96 * 32
    assert plan.parts["results"] >= 4 * (32 * 64 + 64 * 8 + 1)
    assert plan.fits == (plan.peak_bytes <= 50_000)
    real = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (params, x))
    sizes = jax.jit(funcga.accumulate(gradient, plan.n)).lower(*real).compile().memory_analysis()
    expected = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    assert plan.peak_bytes == expected - sizes.alias_size_in_bytes


@pytest.mark.parametrize("seed", range(10))
def test_the_search(seed):
    """Of peaks on a line, and of bent ones, whatever n = 1 takes."""
    draw = random.Random(seed)
    rows, a, c = draw.randint(1, 300), draw.randint(0, 1000), draw.randint(1, 50)
    bend = draw.choice([0, 0, 0.02])
    seen = []

    def peak(n):
        size = -(-rows // n)
        return a + c * size + int(bend * size * size) - (n == 1) * draw_first

    draw_first = draw.choice([0, 0, min(a, 7)])
    memory = draw.randint(a, a + 3 * c * rows // 2 + 2)
    n = smallest_that_fits(lambda n: seen.append(n) or peak(n), rows, memory)
    assert n == next((k for k in range(1, rows + 1) if peak(k) <= memory), rows)
    if not bend:
        assert len({*seen}) <= 5


def test_auto_begins_with_the_plan(monkeypatch):
    model, batch = transformer()
    plan, sizes = funcga.plan(module_value_and_grad(model, mean_loss), *batch, memory=MEMORY), []
    own = plan.parts["parameters"] + plan.parts["batch"]
    monkeypatch.setattr("funcga.tools.plan._free_on_host", lambda: MEMORY - own)
    seen = lambda module, x, y: sizes.append(len(x)) or mean_loss(module, x, y)
    step = funcga.accumulate(module_value_and_grad(model, seen), "auto")
    loss_value, _ = step(*batch)
    # What was tried out is the answer of the plan: everything before it was looked at without numbers.
    assert sizes[-plan.n :] == [len(x) for x in batch[0].tensor_split(plan.n)]
    sizes.clear()
    step(*batch)
    assert len(sizes) == plan.n == step.n > 1
    torch.testing.assert_close(loss_value, mean_loss(model, *batch))


def of_one_row(memory):
    w = torch.empty(8, device="meta")
    return funcga.plan(funcga.value_and_grad(lambda w, x: (w * x).sum()), w, w, memory=memory)


def test_memory_is_read_and_shown():
    for text, count, shown in (
        (3, 3, "3 B"),
        ("3", 3, "3 B"),
        ("14 GiB", 14 * 2**30, "14.00 GiB"),
        ("1.5kb", 1500, "1.46 KiB"),
        (" 2 MB ", 2_000_000, "1.91 MiB"),
        ("3072 TiB", 3 * 2**50, "3072.00 TiB"),
    ):
        plan = of_one_row(text)
        assert plan.memory == count
        assert shown in str(plan)
    for text in (0, -1, True, 0.5, "", "GiB", "3 QB", "-3 GB"):
        with pytest.raises(funcga.FuncgaError, match="no number of bytes"):
            of_one_row(text)


def over_replicas(group, make, n, how):
    """(what was predicted, what the first window and the next ones took), and what was sent while planning."""
    model, batch = make()
    across = group if how == "plain" else Replicas(group, wire_dtype=torch.bfloat16)
    gradient, params = funcga.value_and_grad(pure_loss(model, mean_loss)), trainable(model)
    step = funcga.accumulate(gradient, n, fold=(funcga.max(), funcga.mean()) if how == "max" else funcga.mean(),
                             weight=counts, across=across)  # fmt: skip
    with Watch() as planning:
        plan = funcga.plan(step, params, *batch, memory=10**12)
        parts = peak(fresh(step_program(step), split=Split(n)), lambda p: BACKEND.loop.accumulate(p, BACKEND), (params, *batch), {}, BACKEND)  # fmt: skip
    assert plan.n == 1
    taken = []
    for _ in range(2):
        with Watch() as watch:
            result = step(params, *batch)
        taken.append(watch.bytes)
        del result
    return sum(parts.values()) - parts["parameters"] - parts["batch"], taken, planning.collectives


def over_replicas_in_all_ways(group):
    return [over_replicas(group, transformer, n, how) for how, n in (("plain", 1), ("wire", 4), ("max", 4))]


def test_over_replicas():
    """The plan is that of the first window, in which the sums of all leaves begin before the first gradient."""
    for found in processes().run(over_replicas_in_all_ways, size=2):
        for predicted, taken, sent in found:
            assert predicted == max(taken)
            assert sent == []


def test_what_is_compiled_stays_so_after_a_plan():
    model, batch = mlp()
    expected = funcga.plan(module_value_and_grad(model, mean_loss), *batch, memory=10**9)
    graphs = []
    compiled = lambda function: torch.compile(function, backend=lambda graph, _: graphs.append(graph) or graph)
    for make in (lambda: (compiled(model), mean_loss), lambda: (model, compiled(mean_loss))):
        torch._dynamo.reset()
        graphs.clear()
        gradient = module_value_and_grad(*make())
        assert funcga.plan(gradient, *batch, memory=10**9) == expected
        assert not graphs
        funcga.accumulate(gradient, 1)(*batch)
        assert len(graphs) == 1


def test_what_cannot_be_planned(monkeypatch):
    def broken(module, x, y):
        raise KeyError("mine")

    model, batch = mlp()
    step, params = of_params(mean_loss)(model, 2)
    with pytest.raises(TypeError, match="weight"):
        funcga.plan(step, *params, *batch, weight=len)
    assert funcga.plan(step, *params, *batch, memory="1 GiB").n == 1
    reads = lambda module, x, y: mean_loss(module, x, y) * x.sum().item()
    with pytest.raises(funcga.FuncgaError, match="asks for numbers that are computed"):
        funcga.plan(module_value_and_grad(model, reads), *batch)
    with pytest.raises(KeyError, match="mine"):
        funcga.plan(module_value_and_grad(model, broken), *batch)
    step = funcga.accumulate(module_value_and_grad(model, mean_loss), "auto")
    torch.testing.assert_close(step(*batch)[0], mean_loss(model, *batch))


def test_half_lives():
    for array in (float, torch.tensor, jnp.asarray):
        beta = float(funcga.transforms.beta_for_half_life(array(1000.0), 4000))
        assert beta**4 == pytest.approx(0.5, rel=1e-6)
    with pytest.raises(funcga.FuncgaError, match="half_life"):
        funcga.transforms.beta_for_half_life(1000.0, 0)
    with pytest.raises(funcga.FuncgaError, match="tokens"):
        funcga.transforms.beta_for_half_life(-1, 4000)


def test_losses_of_the_whole_batch():
    """In two passes, whose summaries are held."""
    params = {"a": torch.randn(20, 64), "b": torch.randn(64, 16)}
    summary_fn = lambda p, x: F.normalize(torch.tanh(x @ p["a"]) @ p["b"], dim=1)
    contrast = lambda p, s: F.cross_entropy(s @ s.T, torch.arange(len(s)))
    step = funcga.coupled(summary_fn, contrast, 7)
    assert predicted(step, (params, torch.ones(40, 20))) == counted(step, (params, torch.ones(40, 20)))
    plan = funcga.plan(step, params, torch.ones(40, 20), memory=40_000)
    assert (
        counted(funcga.coupled(summary_fn, contrast, plan.n), (params, torch.ones(40, 20))) == plan.peak_bytes <= 40_000
    )
