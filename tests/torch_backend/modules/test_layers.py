"""BatchNorm in accumulation: running statistics merged once a window are those of one batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend
from funcga import FuncgaError
from tests.kits import LIMITS, TORCH, difference
from tests.test_errors import check_refused

FOLD = ((funcga.mean(), funcga.pooled()), funcga.mean())


def net(momentum=0.1, dims=2):
    torch.manual_seed(0)
    layers = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv1d, nn.BatchNorm1d)
    return nn.Sequential(layers[0](2, 3, 2), layers[1](3, momentum=momentum), nn.Flatten(), nn.LazyLinear(2)).double()


def batch(rows=11, dims=2):
    """Rows that get brighter: micro-batches differ by more than their rows do."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 2, *(4,) * dims, generator=generator, dtype=torch.float64)
    return x + torch.linspace(0, 8, rows).double()[(slice(None),) + (None,) * (dims + 1)], torch.arange(rows) % 2


def entropy(module, x, y):
    return F.cross_entropy(module(x), y)


def observing(module, n, loss_fn=entropy, stream=False, **options):
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn, statistics=True), has_aux=True)
    return funcga.stream(gradient, fold=FOLD) if stream else funcga.accumulate(gradient, n, fold=FOLD, **options)


def parameters(module):
    return dict(module.named_parameters())


def buffers_after_one_batch(module, x):
    whole = copy.deepcopy(module)
    whole(x)
    return dict(whole.named_buffers())


class Unchanged:
    """That nothing of a module is another one than before, momenta and hooks among it."""

    def __init__(self, module):
        self.module, self.before = module, self.look(module)
        self.values = {k: v.clone() for k, v in module.state_dict().items()}

    def look(self, module):
        layers = [(m.training, getattr(m, "momentum", 0), len(m._forward_pre_hooks)) for m in module.modules()]
        return layers, [id(t) for t in module.state_dict(keep_vars=True).values()]

    def check(self):
        assert self.look(self.module) == self.before
        assert all(torch.equal(v, self.values[k]) for k, v in self.module.state_dict().items())


@pytest.mark.parametrize(("dims", "momentum"), [(2, 0.1), (2, None), (1, 0.0)])
def test_merged_buffers_are_those_of_one_batch(dims, momentum):
    module, (x, y) = net(momentum, dims), batch(dims=dims)
    module(x)  # LazyLinear, and one batch that a cumulative average has seen
    unchanged, expected = Unchanged(module), buffers_after_one_batch(module, x)
    for options in ({"n": 1}, {"n": 4}, {"n": 5}, {"n": None, "microbatch_size": 4}):
        (_, statistics), _ = observing(module, **options)(parameters(module), x, y)
        assert {*statistics} == {"1"}
        assert float(statistics["1"].count[0]) == len(x) * 3**dims
        found = torch_backend.running_buffers(module, statistics)
        assert {*found} == {*expected}
        for name, buffer in expected.items():
            assert found[name].dtype == buffer.dtype
            torch.testing.assert_close(found[name], buffer, rtol=1e-13, atol=1e-13)
        unchanged.check()
    assert module.load_state_dict(found, strict=False).unexpected_keys == []
    assert int(module[1].num_batches_tracked) == 2


def made(**options):
    module, (x, y) = net(**options), batch()
    module(x)
    return module, x, y


def test_in_a_stream_in_torch_func_and_beside_aux():
    module, x, y = made()
    unchanged = Unchanged(module)
    result = observing(module, 4)(parameters(module), x, y)
    sizes = [3, 3, 3, 2]
    window = list(zip(x.split(sizes), y.split(sizes), strict=True))
    assert difference(TORCH, observing(module, 4, stream=True)(parameters(module), window), result) == 0
    loss = torch_backend.pure_loss(module, entropy, statistics=True)
    generic = lambda *args: grad_and_value(loss, has_aux=True)(*args)[::-1]
    assert difference(TORCH, funcga.accumulate(generic, 4, fold=FOLD)(parameters(module), x, y), result) == 0

    loss = torch_backend.pure_loss(module, lambda m, x, y: (entropy(m, x, y), {"rows": len(x)}), statistics=True)
    fold = ((funcga.mean(), ({"rows": funcga.sum()}, funcga.pooled())), funcga.mean())
    step = funcga.accumulate(funcga.value_and_grad(loss, has_aux=True), 4, fold=fold)
    (_, (aux, statistics)), _ = step(parameters(module), x, y)
    assert int(aux["rows"]) == len(x)
    assert difference(TORCH, statistics, result[0][1]) == 0
    unchanged.check()


def test_checkpoints_run_the_layers_again_and_disturb_nothing():
    module, x, y = made()
    unchanged = Unchanged(module)
    expected = observing(module, 4)(parameters(module), x, y)
    for reenter in (False, True):

        def checkpointed(module, x, y, reenter=reenter):
            zero = 0 * module[3].weight.sum()  # a checkpoint that reenters asks for an input that requires grad
            return F.cross_entropy(module[2:](checkpoint(module[:2], x + zero, use_reentrant=reenter)), y)

        found = observing(module, 4, checkpointed)(parameters(module), x, y)
        assert difference(TORCH, found, expected) <= LIMITS["float64"]
    unchanged.check()


def test_layers_that_are_frozen_or_skipped():
    module, x, y = made()
    branches = nn.ModuleDict({"frozen": nn.BatchNorm2d(2).eval(), "skipped": nn.BatchNorm2d(2), "net": module})
    branches["untracked"] = nn.BatchNorm2d(2, track_running_stats=False)
    branches.double()
    forward = lambda m, x, y: entropy(m["net"], m["untracked"](m["frozen"](x)), y)
    params = {name: p for name, p in branches.named_parameters() if "skipped" not in name}
    (_, statistics), _ = observing(branches, 4, forward)(params, x, y)
    assert {*statistics} == {"skipped", "net.1"}
    assert float(statistics["skipped"].count.sum()) == 0
    found, own = torch_backend.running_buffers(branches, statistics), dict(branches.named_buffers())
    assert all(torch.equal(found[name], own[name]) for name in found if name.startswith("skipped"))
    assert int(found["net.1.num_batches_tracked"]) == int(own["net.1.num_batches_tracked"]) + 1


# --- refusals


class Manual(nn.BatchNorm2d):
    """As the guides have it for all micro-batches but the last: batch statistics, and no update."""

    def forward(self, x):
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


def test_refusals():
    module, x, y = made()
    twice = lambda m, x, y: entropy(m, x, y) + m(x).mean()
    evaluated, synced, manual = (copy.deepcopy(module) for _ in range(3))
    evaluated.eval()
    synced[1], manual[1] = nn.SyncBatchNorm(3).double(), Manual(3).double()
    step = lambda module, loss=entropy, n=4: observing(module, n, loss)(parameters(module), x, y)
    (_, good), _ = step(module)
    assert step(evaluated)[0][1] == {}  # nothing tracks
    buffers = lambda pooled: torch_backend.running_buffers(module, pooled)
    cases = [
        (
            lambda: torch_backend.pure_loss(module, entropy, buffers=True, statistics=True),
            "pure_loss was given buffers=True and statistics=True: running statistics are threaded from one micro-batch "
            "to the next, or pooled over them all. Give one of the two.",
        ),
        (
            lambda: step(module, twice),
            "the BatchNorm layer `1` ran twice in one forward pass: its statistics are then those of two batches. Use a "
            "layer for each of the two, or thread the buffers: pure_loss(module, loss_fn, buffers=True).",
        ),
        (
            lambda: step(synced),
            "`1` is a SyncBatchNorm, whose statistics are those of all replicas already, with the count of one. Use "
            "BatchNorm, and let funcga merge them: accumulate(..., fold=..., across=group).",
        ),
        (
            lambda: step(manual),
            "what the BatchNorm layer `1` saw of the micro-batch is not known: its forward() is not that of "
            "torch.nn.BatchNorm, or was called by name, or compiled by itself. Call the layer as it is, layer(x), or thread",
        ),
        (
            lambda: step(module, lambda m, x, y: F.cross_entropy(m[2:](m[1].forward(m[0](x))), y)),
            "what the BatchNorm layer `1` saw of the micro-batch is not known",
        ),
        (
            lambda: buffers({"1": x[0, 0]}),
            "the pooled statistics are not those of these layers: at statistics['1'] it has an array, and there is dict",
        ),
        (
            lambda: buffers({"1": funcga.normalizers.Pooled(x, x, x)}),
            "`1.mean` is float64[3], and the pooled statistics for it are float64[11, 2, 4, 4]. Give a Pooled of that shape: "
            "what fold=funcga.pooled() makes of the statistics of micro-batches.",
        ),
    ]
    for call, text in cases:
        with pytest.raises(FuncgaError) as caught:
            call()
        assert text in str(caught.value)
    with pytest.raises(KeyError, match="11"):
        buffers({"11": good["1"]})
    for checked in (module, synced, manual):
        assert checked[1].momentum == 0.1
        assert not checked[1]._forward_pre_hooks


@pytest.mark.parametrize("options", [{}, {"buffers": True}, {"statistics": True}])
def test_what_refuses_one_row_does_so_in_its_own_words(options):
    module, x, y = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(9, 3), torch.arange(9) % 4
    unchanged, gradient = Unchanged(module), torch_backend.pure_loss(module, entropy, **options)
    fold, axes, args = funcga.mean(), None, (x, y)
    if options:
        fold = FOLD if "statistics" in options else ((funcga.mean(), funcga.carry()), funcga.mean())
    if "buffers" in options:
        axes, args = (None, funcga.CARRY, 0, 0), (dict(module.named_buffers()), x, y)
    step = funcga.accumulate(
        funcga.value_and_grad(gradient, has_aux=bool(options)), microbatch_size=4, fold=fold, in_axes=axes
    )
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        step(parameters(module), *args)
    unchanged.check()
    own = funcga.accumulate(torch_backend.module_value_and_grad(module, entropy), microbatch_size=4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        own(x, y)


def test_losses_that_do_not_take_the_module():
    module, x, y = nn.Linear(3, 2), torch.ones(6, 3), torch.ones(6, 2)
    params = torch_backend.trainable(module)
    of_module = lambda module, x, y: F.mse_loss(module(x), y)
    wrong = pytest.raises(TypeError, match=r"takes \d positional arguments? but \d were given")
    for loss_fn, args in [
        (lambda batch: F.mse_loss(module(batch["x"]), batch["y"]), ({"x": x, "y": y},)),
        (of_module, (x, y, y)),
    ]:
        own, pure = (make(module, loss_fn) for make in (torch_backend.module_value_and_grad, torch_backend.pure_loss))
        for call, given in [
            (pure, (params, *args)),
            (funcga.accumulate(own, 2), args),
            (funcga.stream(own), ([args],)),
        ]:
            with wrong:
                call(*given)
    own = torch_backend.module_value_and_grad(module, of_module)
    # The step of a module is called with the batch alone: what else comes first is no part of a batch.
    with wrong:
        own(params, x, y)
    check_refused("the split arguments have different numbers of rows", funcga.accumulate(own, 2), params, x, y)
    check_refused("the rows of a micro-batch are its weight", funcga.stream(own), params, [(x, y)])
    check_refused("`x` is of type Linear", funcga.accumulate(own, 2), module, x, y)
    check_refused("`x` is of type Linear", funcga.stream(own), module, [(x, y)])
    with wrong:
        funcga.accumulate(torch_backend.module_value_and_grad(module, module), 2)(x, y)
    with wrong:
        funcga.accumulate(funcga.value_and_grad(module), 2)(params, x)
    check_refused("Keyword arguments are passed whole", funcga.accumulate(own, 2), x=x, y=y)

    def raises(module, x, y):
        return of_module(module, x)

    with pytest.raises(TypeError, match=r"<lambda>\(\) missing 1 required positional argument"):
        funcga.accumulate(torch_backend.module_value_and_grad(module, raises), 2)(x, y)
