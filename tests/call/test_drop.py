"""`drop=` and `drop_if=` of a step: micro-batches are left out by a test of their loss and gradients."""

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

NAN = float("nan")
PARTS = [(0, 3), (3, 6), (6, 8), (8, 10)]  # of 10 rows in 4 micro-batches
KINDS = ["w nan", "w inf", "b nan", "b inf", "loss nan", "loss inf"]
pytestmark = pytest.mark.usefixtures("x64")


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


def made(how, gradient, n=4, **choices):
    """A step of arguments that are cut on axis 0, but for the first, and for a state."""
    if how == "accumulate":
        return funcga.accumulate(gradient, n, **choices)
    stream, whole = funcga.stream(gradient, **choices), 2 if "in_axes" in choices else 1
    edges = lambda rows: zip(*[(part[0], part[-1] + 1) for part in np.array_split(np.arange(rows), n)], strict=True)
    return lambda *args: stream(
        *args[:whole], [tuple(arg[a:b] for arg in args[whole:]) for a, b in zip(*edges(len(args[-1])), strict=True)]
    )


@pytest.mark.parametrize("how", ["accumulate", "stream"])
def test_drop_if_is_asked_of_what_grad_fn_returns(kit, how):
    params, x, flags = problem(kit)
    x = kit.numpy(x)
    x = kit.arrays(np.concatenate([x[:3], 100 * x[3:6], x[6:]]))
    rows = [row for row in range(10) if not 3 <= row < 6]
    large = lambda output: (output[1]["w"] ** 2).sum() < 1e-20  # where tanh is flat
    gradient = funcga.value_and_grad(loss_of(kit.xp))
    loss, grads = made(how, gradient, drop="microbatch", drop_if=large)(params, x, kit.arrays(flags))
    assert difference(kit, {"loss": loss, "grads": grads}, kit.arrays(expected(params, x, rows))) <= 1e-12
    flags[0, 0] = 1
    for no in (False, np.bool_(False), np.array(False)):
        never = made(how, gradient, drop="microbatch", drop_if=lambda output, no=no: no)
        assert np.isnan(kit.numpy(never(params, x, kit.arrays(flags)))[1]["w"]).all()


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_what_weighs_nothing_is_in_a_plain_sum_and_in_no_exact_mean(kit, drop):
    """The second micro-batch is masked, so that its loss is NaN."""
    params, x, mask = kit.arrays((np.ones(2), np.ones((4, 2)), np.array([1.0, 1, 0, 0])))
    gradient = funcga.grad(lambda params, x, mask: (x @ params * mask).sum() / mask.sum())
    options = {"weight": lambda x, mask: mask.sum(), "drop": drop, "observe": funcga.dropped()}
    of_sum = (1, 1) if drop == "microbatch" else (0, 2)
    for fold, (wanted, count) in ((funcga.reproducible(funcga.mean()), (1, 0)), (funcga.sum(), of_sum)):
        grads, dropped = funcga.accumulate(gradient, 2, fold=fold, **options)(params, x, mask)
        assert (kit.numpy(grads).tolist(), int(dropped)) == ([wanted] * 2, count)


@pytest.mark.parametrize("how", ["accumulate", "stream"])
def test_threaded_state_stays_as_it_was(kit, how):
    gradient = lambda w, state, x: (w * x.sum(), {"steps": state["steps"] + 1, "seen": state["seen"] + x.sum()})
    options = {"fold": (funcga.sum(), funcga.carry()), "in_axes": (None, CARRY, 0)}
    w, state, x = kit.arrays((np.ones(()), {"steps": np.int32(0), "seen": np.ones(())}, np.array([1.0, NAN, 2, 4])))
    for drop, wanted in (("microbatch", (7, 3, 8)), ("window", (0, 0, 1))):
        value, after = made(how, gradient, drop=drop, **options)(w, state, x)
        assert (float(value), int(after["steps"]), float(after["seen"])) == wanted


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_state_that_requires_grad_comes_back_without_a_graph(drop):
    loss_fn = lambda w, state, x: ((x * w).mean(), state * 0.5 + x.sum(0))
    fold = ((funcga.mean(), funcga.carry()), funcga.mean())
    gradient = funcga.value_and_grad(loss_fn, has_aux=True)
    step = funcga.accumulate(gradient, 2, fold=fold, in_axes=(None, CARRY, 0), drop=drop)
    state = torch.ones(3, requires_grad=True)
    (_, after), _ = step(torch.ones(3), state, torch.full((4, 3), NAN))
    assert not after.requires_grad
    torch.testing.assert_close(after, state.detach(), rtol=0, atol=0)


def test_state_that_is_written_to_in_place_is_put_back():
    def gradient(w, state, x):
        state += 1
        return w * x.sum() / (x.max() < 5).float(), state

    options = {"fold": (funcga.sum(), funcga.carry()), "in_axes": (None, CARRY, 0)}
    step, state = funcga.accumulate(gradient, 3, drop="microbatch", **options), torch.zeros(())
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
        refused(lambda make=make: make(drop_if=abs), "drop is None", "that says whether to drop it")
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
    with pytest.raises(TypeError, match="'drop'"):
        funcga.coupled(lambda w, x: w * x, lambda w, s: s.mean(), 2, drop="microbatch")


def test_what_a_test_of_ones_own_raises_comes_through(kit):
    w, x = kit.arrays((np.ones((), "float32"), np.ones(4, "float32")))
    branches = lambda output: True if output[0] > 3 else output[2]
    error = IndexError if kit.name == "torch" else jax.errors.TracerBoolConversionError
    with pytest.raises(error):
        funcga.accumulate(funcga.value_and_grad(lambda w, x: (w * x).mean()), 2, drop="window", drop_if=branches)(w, x)


# -- what torch has of its own


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


def test_exact_sums_have_the_bits_of_what_was_kept(kit):
    params, x, flags = problem(kit)
    gradient, fold = funcga.value_and_grad(loss_of(kit.xp)), funcga.reproducible(funcga.mean())
    whole, plain = kit.arrays(flags.copy()), funcga.stream(gradient, fold=fold)
    flags[4, 1] = 1
    wanted = plain(params, [(x[a:b], whole[a:b]) for a, b in (PARTS[3], PARTS[0], PARTS[2])])
    found = made("stream", gradient, fold=fold, drop="microbatch")(params, x, kit.arrays(flags))
    assert all(np.array_equal(a, b) for a, b in zip(kit.leaves(found), kit.leaves(wanted), strict=True))


# -- derivatives of a step that leaves micro-batches out


def mean_square(kit):
    return lambda w, x: (kit.xp.tanh(x @ w) ** 2).mean()


def masked_mean_square(kit):
    """NaN where the mask is all zeros."""
    return lambda w, x, mask: (kit.xp.tanh(x @ w) ** 2 * mask).sum() / mask.sum()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch.func.jacfwd
@pytest.mark.parametrize(
    ("how", "way"),
    [("drop", "jacfwd"), ("drop stream", "jacrev"), ("drop both", "grad"), ("weight", "jacfwd"), ("weight", "grad")],
)
def test_derivatives_of_a_step_are_those_of_what_it_folds(kit, how, way):
    """As the same transform of the gradient over the remaining rows has them, without any step."""
    r, transforms = np.random.default_rng(0), torch.func if kit is TORCH else jax
    w, x, mask = r.normal(size=3), r.normal(size=(6, 3)), np.array([0.0, 0, 0, 1, 1, 1])
    kept = kit.arrays(x[3:])
    if "drop" in how:
        x[:3] = 100
        flat = lambda grads: (grads**2).sum() < 1e-20  # where tanh is
        loss, batch, choices = mean_square(kit), (x,), {"drop": "microbatch", "drop_if": flat}
    else:
        loss, batch, choices = masked_mean_square(kit), (x, mask), {"weight": lambda x, mask: mask.sum()}
    if "both" in how:
        choices["weight"] = lambda x: 0 * x[1, 0] + 2
    step = made("stream" if "stream" in how else "accumulate", funcga.grad(loss), 2, **choices)
    plain = lambda w: transforms.grad(mean_square(kit))(w, kept)
    w, batch = kit.arrays(w), [kit.arrays(a) for a in batch]
    if way == "grad":
        found = funcga.grad(lambda w, *batch: (step(w, *batch) ** 2).sum())(w, *batch)
        expected = transforms.grad(lambda w: (plain(w) ** 2).sum())(w)
    else:
        found, expected = getattr(transforms, way)(step)(w, *batch), transforms.jacrev(plain)(w)
    assert difference(kit, found, expected) < 1e-12
    if kit is JAX:  # compiled, and of what the loss closes over
        assert difference(kit, jax.jit(jax.jacrev(lambda w: step(w, *batch)))(w), transforms.jacrev(plain)(w)) < 1e-12


def test_the_derivative_of_what_is_not_finite_is_nan(kit):
    """It is dropped, and its derivative is no number: an error that nobody overlooks."""
    step = funcga.accumulate(funcga.grad(mean_square(kit)), 2, drop="microbatch")
    w, x = kit.arrays((np.ones(3), np.concatenate([np.full((1, 3), NAN), np.ones((3, 3))])))
    assert np.isfinite(kit.numpy(step(w, x))).all()
    assert np.isnan(kit.numpy(funcga.grad(lambda w: (step(w, x) ** 2).sum())(w))).all()


def test_a_compiled_loss():
    params, x, flags = problem(TORCH)
    flags[4, 0] = 1
    flags = TORCH.arrays(flags)
    loss_fn = torch.compile(loss_of(torch), backend="aot_eager")
    loss, grads = funcga.accumulate(funcga.value_and_grad(loss_fn), 4, drop="microbatch")(params, x, flags)
    wanted = expected(params, x, [0, 1, 2, 6, 7, 8, 9])
    assert difference(TORCH, {"loss": loss, "grads": grads}, TORCH.arrays(wanted)) <= 1e-12


@pytest.mark.parametrize("dropped", [[0], [2], [0, 1], [0, 1, 2]])
@pytest.mark.parametrize("scope", ["microbatch", "window"])
def test_sparse_gradients(dropped, scope):
    """The gradients of an embedding are sparse, and their sum is dense, whichever micro-batch is the first."""
    table, indices = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 7, (9,))
    targets = torch.randn(9, 4, dtype=torch.float64)
    kept = torch.ones(3, 3, dtype=torch.bool)
    kept[dropped] = False
    targets[(~kept).reshape(-1)] = float("nan")
    loss = lambda params, i, t: (torch.nn.functional.embedding(i, params["e"], sparse=True) - t).square().mean()
    _, grads = funcga.accumulate(funcga.value_and_grad(loss), 3, drop=scope)({"e": table}, indices, targets)
    expected = torch.zeros_like(table)
    if scope == "microbatch" and kept.any():
        leaf, rows = table.clone().requires_grad_(), kept.reshape(-1)
        (leaf[indices[rows]] - targets[rows]).square().mean().backward()
        expected = leaf.grad
    assert grads["e"].layout is torch.strided
    torch.testing.assert_close(grads["e"], expected)
