"""`drop=` and `drop_if=` of a step: micro-batches are left out by a test of their loss and gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcga
import torch_backend
from benchmarks.torch_measure import Watch
from funcga import CARRY, FuncgaError
from tests.kits import JAX, TORCH, difference

NAN, INF = float("nan"), float("inf")
PARTS = [(0, 3), (3, 6), (6, 8), (8, 10)]  # of 10 rows in 4 micro-batches
KINDS = ["w nan", "w inf", "b nan", "b inf", "loss nan", "loss inf"]


@pytest.fixture(autouse=True)
def in_64_bits():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[TORCH, JAX], ids=lambda kit: kit.name)
def kit(request):
    return request.param


def constant(x):
    return x.detach() if isinstance(x, torch.Tensor) else jax.lax.stop_gradient(x)


def spoilt(xp, total, is_hot, kind):
    """0, with a derivative by `total` that is NaN or infinite where it is hot."""
    root = total - constant(total) if kind == "inf" else 0 * total
    one = xp.ones_like(root)
    return xp.where(is_hot, xp.sqrt(xp.where(is_hot, root, one)), 0 * one)


def loss_of(xp):
    """A loss that is finite where no flag is set, and has one leaf's gradient or the value spoilt where one is."""

    def loss_fn(params, x, flags):
        hot = flags.sum(0) > 0
        loss = (xp.tanh(x @ params["w"] + params["b"]) ** 2).mean()
        for index, kind in enumerate(KINDS):
            name, how = kind.split()
            if name == "loss":
                loss = loss + xp.where(hot[index], float(how), 0.0)
            else:
                loss = loss + spoilt(xp, params[name].sum(), hot[index], how)
        return loss

    return loss_fn


def problem(kit, rows=10):
    draw = np.random.default_rng(0).normal
    params = {"w": draw(size=3), "b": draw(size=())}
    x, flags = draw(size=(rows, 3)), np.zeros((rows, len(KINDS)))
    return kit.arrays(params), kit.arrays(x), flags


def expected(params, x, rows):
    """The loss and gradient of some rows, by hand."""
    w, b, x = (np.asarray(funcga.to_numpy(a)) for a in (params["w"], params["b"], x))
    h = np.tanh(x[rows] @ w + b)
    slope = 2 * h * (1 - h**2) / max(len(rows), 1)
    return {"loss": (h**2).sum() / max(len(rows), 1), "grads": {"w": slope @ x[rows], "b": slope.sum()}}


def gradients(kit, which):
    """A gradient function, and what brings its output into the order of loss and gradients."""
    if which == "funcga":
        return funcga.value_and_grad(loss_of(kit.xp)), lambda output: output
    if kit is TORCH:
        return torch.func.grad_and_value(loss_of(torch)), lambda output: output[::-1]
    return jax.value_and_grad(loss_of(jnp)), lambda output: output


def called(step, how, params, x, flags):
    if how == "accumulate":
        return step(params, x, flags)
    return step(params, [(x[a:b], flags[a:b]) for a, b in PARTS])


def made(how, gradient, **choices):
    return funcga.accumulate(gradient, 4, **choices) if how == "accumulate" else funcga.stream(gradient, **choices)


WAYS = [("accumulate", "the framework's"), ("stream", "funcga")]


@pytest.mark.parametrize(("how", "which"), WAYS)
@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_nan_and_inf_at_every_leaf_and_micro_batch(kit, how, which, drop):
    gradient, in_order = gradients(kit, which)
    params, x, flags = problem(kit)
    step = made(how, gradient, drop=drop)
    flags[:] = 1  # all of them
    everything = called(step, how, params, x, kit.arrays(flags.copy()))
    assert all((leaf == 0).all() for leaf in kit.leaves(everything))
    for spoilt_part in (None, *PARTS):
        for kind in range(len(KINDS) if spoilt_part else 1):
            flags[:] = 0
            rows = [*range(10)]
            if spoilt_part is not None:
                flags[spoilt_part[0], kind] = 1
                rows = [row for row in rows if not spoilt_part[0] <= row < spoilt_part[1]]
            loss, grads = in_order(called(step, how, params, x, kit.arrays(flags.copy())))
            wanted = expected(params, x, rows)
            if spoilt_part is not None and drop == "window":
                wanted = {"loss": np.zeros(()), "grads": {"w": np.zeros(3), "b": np.zeros(())}}
            found = kit.numpy({"loss": loss, "grads": grads})
            assert difference(kit, kit.arrays(found), kit.arrays(wanted)) <= 1e-12, (spoilt_part, KINDS[kind])


@pytest.mark.parametrize("fold", [funcga.per_weight(), (funcga.min(), funcga.moments())], ids=["sum", "mixed"])
def test_any_fold_leaves_a_micro_batch_out(kit, fold):
    params, x, flags = problem(kit)
    gradient = funcga.value_and_grad(loss_of(kit.xp))
    stream = funcga.stream(gradient, fold=fold)
    whole = kit.arrays(flags)
    for dropped in (0, 2):
        flags[:] = 0
        flags[PARTS[dropped][0], 1] = 1
        kept = [part for index, part in enumerate(PARTS) if index != dropped]
        wanted = stream(params, [(x[a:b], whole[a:b]) for a, b in kept])
        for how in ("accumulate", "stream"):
            found = called(made(how, gradient, fold=fold, drop="microbatch"), how, params, x, kit.arrays(flags))
            assert difference(kit, found, wanted) <= 1e-13


def test_drop_if_is_asked_of_what_grad_fn_returns(kit):
    params, x, flags = problem(kit)
    x = kit.numpy(x)
    x = kit.arrays(np.concatenate([x[:3], 100 * x[3:6], x[6:]]))
    rows = [row for row in range(10) if not 3 <= row < 6]
    large = lambda output: (output[1]["w"] ** 2).sum() < 1e-20  # where tanh is flat
    gradient = funcga.value_and_grad(loss_of(kit.xp))
    for how in ("accumulate", "stream"):
        step = made(how, gradient, drop="microbatch", drop_if=large)
        loss, grads = called(step, how, params, x, kit.arrays(flags))
        assert difference(kit, {"loss": loss, "grads": grads}, kit.arrays(expected(params, x, rows))) <= 1e-12
    flags[0, 0] = 1
    for no in (False, np.bool_(False), np.array(False)):
        never = funcga.accumulate(gradient, 4, drop="microbatch", drop_if=lambda output, no=no: no)
        assert np.isnan(kit.numpy(never(params, x, kit.arrays(flags)))[1]["w"]).all()


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_what_weighs_nothing_is_in_a_plain_sum_and_in_no_exact_mean(kit, drop):
    """The second micro-batch is masked, so that its loss is NaN."""
    params, x, mask = kit.arrays((np.ones(2), np.ones((4, 2)), np.array([1.0, 1, 0, 0])))
    gradient = funcga.grad(lambda params, x, mask: (x @ params * mask).sum() / mask.sum())
    for fold, wanted, count in ((funcga.reproducible(funcga.mean()), 1, 0), (funcga.sum(), drop == "microbatch", None)):
        step = funcga.accumulate(
            gradient, 2, fold=fold, weight=lambda x, mask: mask.sum(), drop=drop, observe=funcga.dropped()
        )
        grads, dropped = step(params, x, mask)
        assert kit.numpy(grads).tolist() == [wanted] * 2
        assert int(dropped) == (count if count is not None else 1 if drop == "microbatch" else 2)


def test_the_aux_of_grad_need_not_be_finite(kit):
    """That of value_and_grad is in the conformance table."""
    w, x = kit.arrays((np.ones(2), np.ones((4, 2))))
    loss_fn = lambda w, x: ((x * w).mean(), {"largest": -INF * x.sum(), "n": 1})
    fold = funcga.mean(), {"largest": funcga.max(), "n": funcga.sum()}
    step = funcga.accumulate(funcga.grad(loss_fn, has_aux=True), 2, fold=fold, drop="microbatch")
    assert int(step(w, x)[1]["n"]) == 2


def rnn(kit):
    def gradient(w, state, x, flags):
        hidden = kit.xp.tanh(state["h"] + w * x.sum())
        value = hidden.sum() / (1 - flags.max())  # infinite where a flag is set
        return value, {"h": hidden, "steps": state["steps"] + 1}

    return gradient


@pytest.mark.parametrize("how", ["accumulate", "stream"])
def test_threaded_state_stays_as_it_was(kit, how):
    _, x, _ = problem(kit)
    w, h, flags = kit.arrays((np.ones(()), np.ones(2), np.zeros(10)))
    state = {"h": h, "steps": kit.xp.zeros((), dtype=kit.xp.int32)}
    choices = {"fold": (funcga.mean(), funcga.carry()), "in_axes": (None, CARRY, 0, 0)}
    spoilt_flags = kit.arrays(np.array([0.0] * 4 + [1] + [0] * 5))

    def run(step, flags, parts=PARTS):
        if how == "accumulate":
            return step(w, state, x, flags)
        return step(w, state, [(x[a:b], flags[a:b]) for a, b in parts])

    value, after = run(made(how, rnn(kit), drop="microbatch", **choices), spoilt_flags)
    parts = [PARTS[0], *PARTS[2:]]
    wanted = funcga.stream(rnn(kit), **choices)(w, state, [(x[a:b], flags[a:b]) for a, b in parts])
    assert difference(kit, (value, after), wanted) <= 1e-14
    assert int(after["steps"]) == 3
    value, after = run(made(how, rnn(kit), drop="window", **choices), spoilt_flags)
    assert (float(value), int(after["steps"]), kit.numpy(after["h"]).tolist()) == (0, 0, [1, 1])


def test_state_that_is_written_to_in_place_is_put_back():
    def gradient(w, state, x):
        state += 1
        return w * x.sum() / (x.max() < 5).float(), state

    step = funcga.accumulate(
        gradient, 3, fold=(funcga.sum(), funcga.carry()), in_axes=(None, CARRY, 0), drop="microbatch"
    )
    state = torch.zeros(())
    value, after = step(torch.ones(()), state, torch.tensor([1.0, 7.0, 2.0]))
    assert (float(value), float(after), float(state)) == (3, 2, 0)


# -- refusals


def refused(call, *words):
    with pytest.raises(FuncgaError) as error:
        call()
    text = str(error.value)
    assert all(word in text for word in words), text
    assert text.count(". ") <= 2


def test_what_cannot_be_dropped_is_refused(kit):
    gradient = funcga.value_and_grad(lambda w, x: (w * x).mean())
    for make in (lambda **kw: funcga.accumulate(gradient, 2, **kw), lambda **kw: funcga.stream(gradient, **kw)):
        refused(lambda make=make: make(drop="all"), "drop is 'all'", '"microbatch"')
        refused(lambda make=make: make(drop_if=abs), "drop is None", "what grad_fn returns")
        refused(lambda make=make: make(drop="window", drop_if=3), "drop_if is 3")
    counted = funcga.value_and_grad(lambda w, x, *, totals: (w * x).sum() / totals)
    refused(lambda: funcga.accumulate(counted, 2, drop="microbatch", totals=len), "totals=", 'drop="window"')
    scaled = funcga.value_and_grad(lambda w, x: (w * x).mean(), scaled=True)
    refused(lambda: funcga.accumulate(scaled, 2, drop="window"), "scaled=True", "Leave drop out")
    w, x = kit.arrays((np.ones((), "float32"), np.ones(4, "float32")))
    step = funcga.accumulate(lambda w, x: w * x, 2, fold=funcga.concat(), drop="microbatch")
    refused(lambda: step(w, x), "output collects rows", "drop='microbatch'")
    step = funcga.accumulate(gradient, 2, drop="microbatch", drop_if=lambda output: output)
    refused(lambda: step(w, x), "drop_if returned", ".any()")
    for answer in (lambda output: output[0], lambda output: 1.5, lambda output: 1, lambda output: np.float32(0)):
        step = funcga.accumulate(gradient, 2, drop="microbatch", drop_if=answer)
        refused(lambda step=step: step(w, x), "drop_if returned", "Compare a number", "norm(output) > 100")
    summary = lambda w, x: w * x
    refused(lambda: funcga.coupled(summary, lambda w, s: s.mean(), 2, drop="microbatch"), "drop")


def test_what_a_test_of_ones_own_raises_says_where(kit):
    w, x = kit.arrays((np.ones((), "float32"), np.ones(4, "float32")))
    branches = lambda output: True if output[0] > 3 else output[2]
    error = IndexError if kit.name == "torch" else jax.errors.TracerBoolConversionError
    with pytest.raises(error) as caught:
        funcga.accumulate(funcga.value_and_grad(lambda w, x: (w * x).mean()), 2, drop="window", drop_if=branches)(w, x)
    assert any("raised in drop_if" in note and "return an array" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("drop", [None, "microbatch", "window"])
def test_complex_gradients_are_observed_and_dropped_without_a_warning(kit, drop):
    w, x = np.array([1 + 2j, -1j], "complex64"), np.array([1, 2j, 3, np.nan], "complex64")
    loss = lambda w, x: (abs(w * x.sum()) ** 2).sum()
    step = funcga.accumulate(funcga.grad(loss), 4, drop=drop, observe=[funcga.dropped(), funcga.gradient_norms()])
    grads, (count, norms) = step(*kit.arrays((w, x)))
    assert int(count) == {None: 0, "microbatch": 1, "window": 4}[drop]
    # The derivative of |w x|^2 is 2 |x|^2 w, or its conjugate.
    sizes = 2 * abs(x) ** 2
    if drop != "window":
        expected = np.sqrt((abs(np.outer(sizes, w)) ** 2).sum(1))
        np.testing.assert_allclose(kit.numpy(norms.microbatches), expected, rtol=1e-6)
    if drop == "microbatch":
        np.testing.assert_allclose(abs(kit.numpy(grads)), sizes[:3].mean() * abs(w), rtol=1e-6)


def test_a_window_with_totals(kit):
    loss_fn = lambda w, x, *, totals: (w * x).sum() / totals
    step = funcga.accumulate(
        funcga.value_and_grad(loss_fn), 2, fold=funcga.sum(), totals=lambda x: float(len(x)), drop="window"
    )
    w, x, spoilt_x = kit.arrays((np.ones(()), np.ones(4), np.array([1, 2, 3, NAN])))
    assert [float(leaf) for leaf in step(w, x)] == [1, 1]
    assert [float(leaf) for leaf in step(w, spoilt_x)] == [0, 0]


# -- what torch has of its own


def on_device(monkeypatch):
    """Lets no host see a bool: as on a CUDA device, where it is not waited for."""
    from torch_backend import arrays

    seen = arrays.scalar
    is_hidden = lambda weight: isinstance(weight, torch.Tensor) and weight.dtype == torch.bool
    monkeypatch.setattr(arrays, "scalar", lambda weight: weight if is_hidden(weight) else seen(weight))


HIDDEN = [funcga.mean(), funcga.sum(), funcga.moments(), funcga.reproducible(funcga.mean())]


@pytest.mark.parametrize("fold", HIDDEN, ids=lambda fold: fold.name)
def test_nothing_waits_for_a_device(monkeypatch, fold):
    params, x, flags = problem(TORCH)
    gradient, weight = funcga.value_and_grad(loss_of(torch)), lambda x, flags: (x[:, 0] > 0).sum() + 1
    observers = None if "moments" in fold.name else [funcga.dropped(), funcga.gradient_norms()]
    for weigh, (first, _), drop in itertools.product((None, weight), PARTS, ("microbatch", "window")):
        flags[:] = 0
        flags[first, 0] = 1
        step = funcga.accumulate(gradient, 4, drop=drop, weight=weigh, fold=fold, observe=observers)
        wanted = step(params, x, TORCH.arrays(flags))
        with monkeypatch.context() as patch:
            on_device(patch)
            found = step(params, x, TORCH.arrays(flags))
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14, equal_nan=True)
        assert observers is None or int(found[1][0]) == (1 if drop == "microbatch" else 4)


def test_what_is_compiled():
    """A whole step, or the loss."""
    params, x, flags = problem(TORCH)
    flags[4, 0] = 1
    flags = TORCH.arrays(flags)
    step = funcga.accumulate(funcga.value_and_grad(loss_of(torch)), 4, drop="window")
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for given in (flags, 0 * flags):
        torch.testing.assert_close(compiled(params, x, given), step(params, x, given), rtol=1e-13, atol=1e-14)
    loss_fn = torch.compile(loss_of(torch), backend="aot_eager")
    loss, grads = funcga.accumulate(funcga.value_and_grad(loss_fn), 4, drop="microbatch")(params, x, flags)
    wanted = expected(params, x, [0, 1, 2, 6, 7, 8, 9])
    assert difference(TORCH, {"loss": loss, "grads": grads}, TORCH.arrays(wanted)) <= 1e-12


def test_a_step_inside_of_a_transform():
    params, x, flags = problem(TORCH)
    flags[4, 0] = 1
    step = funcga.accumulate(funcga.grad(loss_of(torch)), 4, drop="microbatch")
    wanted = step(params, x, TORCH.arrays(flags))
    one = torch.func.vmap(lambda w, flags: step({"w": w, "b": params["b"]}, x, flags)["w"])
    both = one(torch.stack([params["w"]] * 2), torch.stack([TORCH.arrays(flags), 0 * TORCH.arrays(flags)]))
    torch.testing.assert_close(both[0], wanted["w"], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(both[1], step(params, x, 0 * TORCH.arrays(flags))["w"], rtol=1e-13, atol=1e-14)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.norm(x))


def spoilt_loss(module, x, flags):
    return (module(x) ** 2).mean() / (1 - flags.max())


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_a_modules_own_gradients_and_statistics(drop):
    torch.manual_seed(0)
    left, right = Net().double(), Net().double()
    right.load_state_dict(left.state_dict())
    x, flags = torch.randn(8, 3, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    flags[3] = 1
    gradient = torch_backend.module_value_and_grad(left, spoilt_loss)
    loss, grads = funcga.accumulate(gradient, 4, drop=drop)(x, flags)
    assert all(p.grad is None for p in left.parameters())
    if drop == "window":
        assert not loss
        assert not any(gradient.any() for gradient in grads.values())
    else:
        kept = [(x[a : a + 2], flags[a : a + 2] * 0) for a in (0, 4, 6)]
        wanted = funcga.stream(torch_backend.module_value_and_grad(right, spoilt_loss))(kept)
        torch.testing.assert_close((loss, grads), wanted, rtol=1e-13, atol=1e-14)
    for name, buffer in left.named_buffers():
        torch.testing.assert_close(buffer, dict(right.named_buffers())[name])


def test_hooks_and_frozen_parameters_and_errors_are_as_in_any_window():
    module = torch.nn.Linear(3, 1)
    module.bias.requires_grad_(False)
    seen = []
    module.weight.register_hook(lambda g: seen.append(1) or 2 * g)
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, lambda m, x: m(x).mean()))
    params = torch_backend.trainable(module)
    plain = funcga.accumulate(gradient, 2)(params, torch.ones(4, 3))
    found = funcga.accumulate(gradient, 2, drop="microbatch")(params, torch.ones(4, 3))
    torch.testing.assert_close(found, plain)
    assert len(seen) == 4

    def runs_backward(w, x):
        (w * x).sum().backward()
        return (w * x).mean()

    with pytest.raises(FuncgaError, match=r"called \.backward\(\)"):
        funcga.accumulate(funcga.grad(runs_backward), 2, drop="microbatch")(torch.ones(()), torch.ones(4))

    def writes(w, x):
        loss = (w * x).mean()
        with torch.no_grad():
            w.detach().add_(1)
        return loss

    with pytest.raises(FuncgaError, match="changed in place"):
        funcga.accumulate(funcga.grad(writes), 2, drop="microbatch")(torch.ones(()), torch.ones(4))


def test_sixteen_bits_are_summed_in_32():
    w, x = torch.ones(4, dtype=torch.bfloat16), torch.ones(512, 4, dtype=torch.bfloat16)
    loss_fn = lambda w, x: (w * x).sum()
    grads = funcga.accumulate(funcga.grad(loss_fn), 512, fold=funcga.sum(), drop="microbatch")(w, x)
    assert grads.tolist() == [512] * 4
    x[7] = INF
    assert funcga.accumulate(funcga.grad(loss_fn), 512, fold=funcga.mean(), drop="microbatch")(w, x).tolist() == [1] * 4


# -- bytes: the gradients of one micro-batch beside the sums, and only where something may be dropped


def wide_problem():
    params = {f"w{index}": torch.full((64, 64), 0.1) for index in range(8)}
    size = sum(p.nbytes for p in params.values())
    return params, torch.ones(8, 64), size


def deep(xp):
    def loss_fn(params, x):
        for index in range(8):
            x = xp.tanh(x @ params[f"w{index}"])
        return (x**2).mean()

    return loss_fn


def test_torch_holds_the_gradients_of_one_micro_batch():
    params, x, size = wide_problem()
    module = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    of_module = torch_backend.module_value_and_grad(module, lambda module, x: (module(x) ** 2).mean())
    for gradient, args in ((funcga.value_and_grad(deep(torch)), (params, x)), (of_module, (x,))):
        peaks = {}
        for drop in (None, "microbatch", "window"):
            step = funcga.accumulate(gradient, 4, drop=drop)
            step(*args)
            with Watch() as seen:
                step(*args)
            peaks[drop] = seen.bytes
        assert peaks["microbatch"] == peaks["window"]
        assert 1.9 * size < peaks["microbatch"] <= peaks[None] + 1.02 * size
        assert peaks["microbatch"] <= 2.1 * size


def test_jax_holds_the_gradients_of_one_micro_batch():
    params, x, size = wide_problem()
    params, x = JAX.arrays(params), JAX.arrays(x)

    def temporary(drop):
        step = funcga.accumulate(jax.value_and_grad(deep(jnp)), 4, drop=drop)
        return jax.jit(step).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary("microbatch") <= temporary(None) + 1.02 * size


# -- what observers say of it


@pytest.mark.parametrize(("how", "which"), WAYS)
def test_dropped_counts_and_norms_tell_which(kit, how, which):
    params, x, flags = problem(kit)
    gradient, _ = gradients(kit, which)
    observers = {"dropped": funcga.dropped(), "norms": funcga.gradient_norms(), "noise": funcga.gradient_noise()}
    for drop in ("microbatch", "window"):
        step, plain = made(how, gradient, drop=drop, observe=observers), made(how, gradient, drop=drop)
        for spoilt_parts in ([], [2], [0, 3], [0, 1, 2, 3]):
            flags[:] = 0
            for part in spoilt_parts:
                flags[PARTS[part][0], 1] = 1
            given = kit.arrays(flags.copy())
            result, observed = called(step, how, params, x, given)
            assert difference(kit, result, called(plain, how, params, x, given)) <= 1e-14
            gone = [0, 1, 2, 3] if drop == "window" and spoilt_parts else spoilt_parts
            assert int(observed["dropped"]) == len(gone)
            norms = kit.numpy(observed["norms"].microbatches)
            assert np.flatnonzero(np.isnan(norms)).tolist() == gone
            assert bool(kit.xp.isnan(observed["noise"].trace)) == (len(gone) > 2)


def test_nothing_is_dropped_without_drop(kit):
    w, x = kit.arrays((np.ones(()), np.array([1, NAN, 2, 3])))
    step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).mean()), 2, observe=funcga.dropped())
    gradient, count = step(w, x)
    assert (bool(kit.xp.isnan(gradient)), int(count)) == (True, 0)


def test_exact_sums_have_the_bits_of_what_was_kept(kit):
    params, x, flags = problem(kit)
    gradient, fold = funcga.value_and_grad(loss_of(kit.xp)), funcga.reproducible(funcga.mean())
    whole, plain = kit.arrays(flags.copy()), funcga.stream(gradient, fold=fold)
    flags[4, 1] = 1
    wanted = plain(params, [(x[a:b], whole[a:b]) for a, b in (PARTS[3], PARTS[0], PARTS[2])])
    step = funcga.stream(gradient, fold=fold, drop="microbatch")
    found = step(params, [(x[a:b], kit.arrays(flags)[a:b]) for a, b in PARTS])
    assert all(np.array_equal(a, b) for a, b in zip(kit.leaves(found), kit.leaves(wanted), strict=True))


# -- derivatives of a step that leaves micro-batches out


TRANSFORMS = {"torch": torch.func, "jax": jax}


def mean_square(kit):
    return lambda w, x: (kit.xp.tanh(x @ w) ** 2).mean()


def masked_mean_square(kit):
    """NaN where the mask is all zeros."""
    return lambda w, x, mask: (kit.xp.tanh(x @ w) ** 2 * mask).sum() / mask.sum()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch.func.jacfwd
@pytest.mark.parametrize(
    ("how", "way"),
    [
        ("drop", "jacfwd"),
        ("drop", "grad"),
        ("drop stream", "jacrev"),
        ("drop both", "grad"),
        ("weight", "jacfwd"),
        ("weight stream", "grad"),
        ("weight moments", "jacrev"),
    ],
)
def test_derivatives_of_a_step_are_those_of_what_it_folds(kit, how, way):
    """As the same transform of the gradient over the remaining rows has them, without any step."""
    r, transforms = np.random.default_rng(0), TRANSFORMS[kit.name]
    w, x = r.normal(size=3), r.normal(size=(6, 3))
    mask = np.array([0.0, 0, 0, 1, 1, 1])
    kept = kit.arrays(x[3:])
    if "drop" in how:
        x[0] = NAN
        loss, batch, choices = mean_square(kit), (x,), {"drop": "microbatch"}
    else:
        loss, batch, choices = masked_mean_square(kit), (x, mask), {"weight": lambda x, mask: mask.sum()}
    if "both" in how:
        choices["weight"] = lambda x: 0 * x[1, 0] + 2
    if "moments" in how:
        choices["fold"] = funcga.moments()
    if "stream" in how:
        streamed = funcga.stream(funcga.grad(loss), **choices)
        step = lambda w, *batch: streamed(w, [tuple(a[:3] for a in batch), tuple(a[3:] for a in batch)])
    else:
        step = funcga.accumulate(funcga.grad(loss), 2, **choices)
    result = (lambda *args: step(*args).mean) if "moments" in how else step
    plain = lambda w: transforms.grad(mean_square(kit))(w, kept)
    w, batch = kit.arrays(w), [kit.arrays(a) for a in batch]
    if way == "grad":
        found = funcga.grad(lambda w, *batch: (result(w, *batch) ** 2).sum())(w, *batch)
        expected = transforms.grad(lambda w: (plain(w) ** 2).sum())(w)
    else:
        found = getattr(transforms, way)(result)(w, *batch)
        expected = transforms.jacrev(plain)(w)
    assert difference(kit, found, expected) < 1e-12
    if kit is JAX:  # compiled, and of what the loss closes over
        assert difference(kit, jax.jit(jax.jacrev(lambda w: result(w, *batch)))(w), transforms.jacrev(plain)(w)) < 1e-12


def test_what_weighs_nothing_has_its_derivative_in_a_plain_sum(kit):
    """A sum has it, whatever it weighs; and so has its derivative."""
    transforms = TRANSFORMS[kit.name]
    r = np.random.default_rng(1)
    w, x, mask = kit.arrays((r.normal(size=3), r.normal(size=(6, 3)), np.array([0.0, 0, 0, 1, 1, 1])))
    total = lambda w, x, mask: (kit.xp.tanh(x @ w) ** 2).sum()
    step = funcga.accumulate(funcga.grad(total), 2, weight=lambda x, mask: mask.sum(), fold=funcga.per_weight())
    expected = transforms.jacrev(transforms.grad(total))(w, x, mask) / 3
    assert difference(kit, transforms.jacrev(step)(w, x, mask), expected) < 1e-12
