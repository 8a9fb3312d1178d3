"""Every refusal: what was found, where, and the line to write instead. The texts are pinned here."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcga
import torch_backend
from funcga import CARRY, FuncgaError, accumulate, stream
from tests import problems
from tests.kits import counted

X = np.arange(12, dtype="float32").reshape(6, 2)


def check_refused(text, function, *args, **kwargs):
    with pytest.raises(FuncgaError) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    assert text in str(caught.value)
    return str(caught.value)


class Loader:
    """What yields micro-batches, as a DataLoader does."""

    def __iter__(self):
        return iter([])


def function(*args, **options):
    """What makes a step, and is refused as such."""
    return lambda: args[0](*args[1:], **options)


SAY_ONE = (
    " of n and microbatch_size were given. Say one: accumulate(grad_fn, n=8) for 8 micro-batches, or "
    "accumulate(grad_fn, microbatch_size=4) for micro-batches of 4 rows."
)
NO_INT = ": it must be an int, at least 1. Write n=8"
NO_FUNCTION = "grad_fn is 3, which is no function. Pass one, such as funcga.value_and_grad(loss_fn)"
LINEAR = torch.nn.Linear(2, 1)
# Without arrays: what is refused where a step is made.
MADE = [
    (f"n is 0{NO_INT}", function(accumulate, len, 0)),
    (f"n is -2{NO_INT}", function(funcga.windows, [], -2)),
    (f'n is 2.0{NO_INT}, or n="auto".', function(accumulate, len, 2.0)),
    (f"n is '8'{NO_INT}", function(accumulate, len, "8")),
    (f"n is True{NO_INT}", function(funcga.windows, [], True)),
    ("microbatch_size is 0: it must be an int, at least 1. Write microbatch_size=8.", function(accumulate, len, microbatch_size=0)),
    ("neither" + SAY_ONE, function(accumulate, len)),
    ("both" + SAY_ONE, function(accumulate, len, 2, microbatch_size=2)),
    (NO_FUNCTION, function(accumulate, 3, 2)),
    (NO_FUNCTION, function(stream, 3)),
    ("grad_fn is {'w': array([[ 0.,  1.],", function(accumulate, {"w": X}, 2)),
    ("weight is 3, which is no function. Pass one, such as lambda batch:", function(accumulate, len, 2, weight=3)),
    ("loss_fn is None, which is no function. Pass one, such as loss_fn(params, *batch) -> scalar",
        function(funcga.grad, None)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "call"), MADE)
def test_made(text, call):
    check_refused(text, call)


def of_batch(params, batch):
    return batch


def with_totals(params, x, *, totals):
    return (params * x).sum() / totals["rows"]


def summed(x):
    return x.sum()


def count(kit):
    return lambda x: (x.mean(), {"correct": kit.cast(x.sum(), "int32")})


def split(batch, function=of_batch, in_axes=None):
    """A call of a step with these arguments, the second of which is split."""
    return lambda kit, x: lambda: accumulate(function, 2, in_axes=in_axes)(x, batch(x))


def folded(grad_fn, fold=None, n=2, **options):
    """A call of a step of the batch alone."""
    options |= {} if fold is None else {"fold": fold}
    return lambda kit, x: lambda: accumulate(grad_fn, n, in_axes=0, **options)(x)


def carried(grad_fn, in_axes, fold):
    return lambda kit, x: lambda: accumulate(grad_fn, 2, in_axes=in_axes, fold=fold)(kit.arrays(np.float32(0)), x)


def streamed(*microbatches, grad_fn=of_batch, **options):
    """A call of a stream of the parameters, and of what is given as its micro-batches."""
    return lambda kit, x: lambda: stream(grad_fn, **options)(x, *[of(x) for of in microbatches])


STREAM = "A DataLoader is folded by stream."
NO_SPLIT = "no argument is split, so there are no rows to make micro-batches of."
KEYWORDS = "Keyword arguments are passed whole: pass what is to be split by position."
MEAN, BOTH = funcga.mean(), (funcga.mean(), funcga.carry())
TWO = lambda x: (x.sum(), {"loss": x.sum(), "n": x.sum()})
GIVEN = {
    "a loader": (split(lambda x: Loader()), f"`batch` is of type Loader: it has no axis 0 to split. Only {{kit}} arrays are split: "
        f"convert it, make it a tree of arrays, or pass it whole: in_axes with None in its place, or by keyword. {STREAM}"),
    "a loader alone": (lambda kit, x: lambda: accumulate(of_batch, 2)(Loader()), f"`funcga.to_jax(batch)`. {STREAM}"),
    "no rows": (lambda kit, x: lambda: accumulate(summed, 1, in_axes=0)(x[:0]),
        "the batch has 0 rows (`x` is empty): there is nothing to fold."),
    "unequal rows": (lambda kit, x: lambda: accumulate(lambda params, batch, labels: 1 / 0, 2)(x, {"x": x}, x[:5]),
        "the split arguments have different numbers of rows: `batch['x']` has 6 and `labels` has 5; micro-batches cut all of them "
        "alike. Pass what has no rows whole: in_axes with None in its place."),
    "a scalar": (split(lambda x: {"k": x[0, 0]}), "`batch['k']` is float32[]: it has no axis 0 to split."),
    "a string": (split(lambda x: "s"), "`batch` is of type str: it has no axis 0 to split. Only {kit} arrays are split"),
    "a float": (split(lambda x: 1.0), "`batch` is of type float: it has no axis 0 to split."),
    "an axis": (split(lambda x: x, in_axes=(None, 2)), "`batch` is float32[6, 2]: it has no axis 2 to split."),
    "nothing is split": (split(lambda x: x, in_axes=(None, None)), NO_SPLIT),
    "one argument": (lambda kit, x: lambda: accumulate(summed, 2)(x), NO_SPLIT),
    "in_axes: too few": (split(lambda x: x, in_axes=(0,)), "in_axes is (0,), and the call has 2 positional arguments. Give an "
        "axis for all of them, or one entry each, such as in_axes=(None, 0):"),
    "in_axes: a string": (split(lambda x: x, in_axes="rows"), "in_axes is 'rows', and the call has 2 positional arguments."),
    "in_axes: a key is missing": (split(lambda x: {"x": x, "y": x}, in_axes=(None, {"x": 0})), "in_axes is no prefix of the "
        "arguments: at batch it has dict(['x']), and there is dict(['x'], ['y']). Give one value for all that stands below, or "
        "a container with the same keys."),
    "in_axes: too deep": (split(lambda x: {"x": x, "y": x}, in_axes=(None, {"x": (0,), "y": 0})),
        "at batch['x'] it has tuple([0]), and there is an array."),
    "in_axes: no axis": (split(lambda x: {"x": x}, in_axes=(None, 1.5)), "at batch it has float, and there is dict(['x'])."),
    "a huge weight": (folded(summed, weight=lambda x: 10**400), "it must be finite and at least 0"),
    "a weight that is no scalar": (folded(summed, weight=lambda x: x.sum(0)), "the weight of a micro-batch is float32[2]; it "
        "must be a real number or a 0-d array, such as the number of tokens: "
        'weight=lambda batch: (batch["labels"] != -100).sum()'),
    "all by keyword": (lambda kit, x: lambda: accumulate(of_batch, 2)(params=x, batch=x), KEYWORDS),
    "by keyword": (lambda kit, x: lambda: accumulate(of_batch, 2)(x, batch=x), KEYWORDS),
    "too many folds": (folded(TWO, (MEAN,) * 3), "fold= is no Fold, and the tree of folds is no prefix "
        "of what grad_fn returns: at output it has tuple([0], [1], [2]), and there is tuple([0], [1])."),
    "a fold is missing": (folded(TWO, (MEAN, {"loss": MEAN})), "at output[1] it has dict(['loss']), and"),
    "a fold is too deep": (folded(TWO, ((MEAN,), MEAN)), "at output[0] it has tuple([0]), and there is an array"),
    "a fold by name": (folded(TWO, "mean"), "fold= is no Fold, and the tree of folds is no prefix"),
    "a fold that is not called": (folded(TWO, funcga.mean), "at output it has function, and there is"),
    "integers": (lambda kit, x: folded(count(kit))(kit, x), "output[1]['correct'] is int32[], and the fold `weighted, "
        "by_weight` is not defined for int values. Give it a fold of its own, as in fold={'w': funcga.mean(), 'count': funcga.sum()}: "
        "integers are averaged by funcga.mean(dtype='float32'), and a random key is threaded by funcga.carry(). Or leave it out, None "
        "in its place."),
    "bools": (folded(lambda x: x.sum() > 0), "output is bool[], and the fold `weighted, by_weight` is not defined for bool values."),
    "integers by weight": (lambda kit, x: folded(count(kit), funcga.per_weight())(kit, x), "is not defined for int values. Give it a fold"),
    "complex extremes": (lambda kit, x: folded(lambda x: kit.cast(x[0], "complex64"), funcga.max())(kit, x),
        "output is complex64[2], and the fold `max, identity` is not defined for complex values."),
    "an unknown dtype": (lambda kit, x: folded(summed, funcga.mean(dtype="float64" if kit.name == "jax" else "float23"))(kit, x),
        "is no dtype of"),
    "rows of a scalar": (folded(summed, funcga.concat()), "output is float32[]: it has no axis 0 for concat(axis=0) to collect"),
    "a row for each example": (folded(lambda x: x, n=5), "fold what has a row for each example with funcga.concat()"),
    "another shape": (folded(lambda x: x, n=5), "grad_fn returned output as float32[1, 2] for"),
    "a column for each": (folded(lambda x: x.T, MEAN, 5), "or concat(axis=1) if that is axis 1"),
    "rows along another axis": (folded(lambda x: x.T, funcga.concat(), 5), "float32[2, 1] for"),
    "CARRY alone": (carried(lambda s, x: (x.mean(), s), (CARRY, 0), MEAN),
        "have different structures: missing `s`, new nothing. Here each carried argument needs the output that replaces it, in "
        "the structure it came in: accumulate(grad_fn, n, in_axes=(None, funcga.CARRY, 0), fold=(funcga.mean(), funcga.carry()))."),
    "carry() alone": (carried(lambda s, x: (x.mean(), s), (None, 0), BOTH),
        "the arguments that are funcga.CARRY in in_axes, and what grad_fn returns with the fold funcga.carry(), have different "
        "structures: missing nothing, new `output[1]`."),
    "another structure of a state": (carried(lambda s, x: (x.mean(), {"s": s}), (CARRY, 0), BOTH),
        "have different structures: missing `s`, new `output[1]['s']`."),
    "an empty stream": (streamed(lambda x: iter(())), "the stream is empty: there is no micro-batch to fold, and so no "
        "structure to return."),
    "a batch": (streamed(lambda x: x), "one batch, not an iterable of micro-batches. Split it with funcga.accumulate(grad_fn, n)"),
    "a batch in a dict": (streamed(lambda x: {"x": x}), "microbatches is of type dict: one batch, not an iterable of micro-batches."),
    "another shape in a stream": (lambda kit, x: lambda: stream(lambda b: b, in_axes=0)([x, x[:3]]), "grad_fn returned"),
}  # fmt: skip


# What Python, torch or JAX refuse themselves: an error of theirs, and never a result.
THEIRS = {
    "a keyword that is none": (lambda kit, x: lambda: accumulate(len, num_microbatches=8), TypeError, "'num_microbatches'"),
    "argnums": (lambda kit, x: lambda: funcga.grad(lambda w: w.sum(), "x")(x), TypeError, "str"),
    "a model": (lambda kit, x: lambda: accumulate(LINEAR, 2)(x), ValueError, "no argument is split"),
    "no iterable": (lambda kit, x: lambda: funcga.windows(3, 2), TypeError, "not iterable"),
    "weights of another arity": (lambda kit, x: lambda: accumulate(lambda p, x, y: x, 2, weight=lambda batch: 1)(x, x, x),
        TypeError, "takes 1 positional argument but 2 were given"),
    "totals that nobody counts": (split(lambda x: x, funcga.grad(with_totals)), TypeError, "argument: 'totals'"),
    "an output that is no array": (folded(lambda x: (x.sum(), "a")), (TypeError, ValueError), "str"),
    "a stream of a number": (streamed(lambda x: 3), TypeError, "not iterable"),
    "no arguments": (lambda kit, x: lambda: stream(of_batch)(), ValueError, "not enough values"),
    "no state": (lambda kit, x: lambda: funcga.Accumulator().update(None, x), AttributeError, "tally"),
    "a value as a state": (lambda kit, x: lambda: funcga.Accumulator().finalize(x), AttributeError, "tally"),
    "parts of a fold": (folded(lambda x: x.sum(), funcga.Fold(funcga.reducers.concat, None)), AttributeError, "'function' object has no attribute"),
    "weights of nothing": (streamed(lambda x: [x], in_axes=(None, None), weight=lambda x: 1), TypeError, "missing 1 required"),
}  # fmt: skip


@pytest.mark.parametrize("case", THEIRS)
def test_what_others_refuse(kit, case):
    call, kind, text = THEIRS[case]
    with pytest.raises(kind, match=text):
        call(kit, kit.arrays(X))()


@pytest.mark.parametrize("case", GIVEN)
def test_given(kit, case):
    call, text = GIVEN[case]
    check_refused(text.replace("{kit}", kit.name), call(kit, kit.arrays(X)))


def test_an_error_of_the_weight_is_its_own(kit):
    def weight(x, y):
        raise TypeError("mine")

    x = kit.arrays(X)
    with pytest.raises(TypeError, match="mine"):
        accumulate(lambda p, x, y: x.sum(), 2, weight=weight)(x, x, x)


# --- of one framework


def test_what_a_model_may_do():
    """Its outputs may be folded, a traced function is no model, and a call may bring its own totals."""
    x = torch.arange(8.0).reshape(4, 2)
    outputs = accumulate(LINEAR, 3, in_axes=0, fold=funcga.concat())(x)
    torch.testing.assert_close(outputs, LINEAR(x).detach())
    traced = torch.fx.symbolic_trace(lambda params, x: x.sum() * params)
    assert accumulate(traced, 2, fold=funcga.sum())(torch.ones(()), x) == 28
    accumulate(funcga.grad(with_totals), 2)(x[0], x, totals={"rows": 4})
    f = torch_backend.module_value_and_grad(LINEAR, lambda m, x, *, totals: m(x).sum() / totals["rows"])
    with pytest.raises(TypeError, match=r"argument: .totals."):
        accumulate(f, 2)(x)


def test_what_a_step_returns_is_not_its_gradients():
    step = accumulate(torch_backend.module_value_and_grad(LINEAR, lambda m, x: m(x).mean()), 2)
    params, result = torch_backend.trainable(LINEAR), step(torch.ones(4, 2))
    text = "of loss, grads = step(...) the gradients alone"
    check_refused(text, torch_backend.assign_grads, LINEAR, result)
    check_refused(text, torch_backend.assign_grads, params, result)
    check_refused(text, torch_backend.apply_updates, params, result)
    check_refused("A gradient has its parameter's shape", torch_backend.assign_grads, [*params.values()], result)


def test_arrays_of_no_framework_or_of_two():
    step, x = accumulate(of_batch, 2), torch.ones(2)
    says = check_refused(
        "no array was found in `params`, `batch`. A fold needs torch tensors or JAX arrays", step, 1.0, [2.0]
    )
    assert "Convert first: `funcga.to_torch(batch)` or `funcga.to_jax(batch)`." in says
    check_refused("no array was found in nothing", accumulate(lambda: 1, 2))
    text = (
        "the arguments mix frameworks: `params['w']` is a torch tensor and `batch['x']` is a JAX array. One call folds "
        "in one framework. Convert first: `funcga.to_torch(batch)` or `funcga.to_jax(batch)`."
    )
    check_refused(text, step, {"w": x}, {"x": funcga.to_jax(X)})
    params, batch = {"w": jnp.ones(2)}, {"x": torch.ones(6, 2), "y": torch.ones(6)}
    loss_fn = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)
    for made in (jax.value_and_grad(loss_fn), jax.jit(jax.grad(loss_fn)), funcga.value_and_grad(loss_fn)):
        check_refused("the arguments mix frameworks", accumulate(made, 2), params, batch["x"], batch["y"])
        accumulate(made, 2)(params, funcga.to_jax(batch["x"]), funcga.to_jax(batch["y"]))
    text = (
        "`batch` is a NumPy array float32[6, 2]: it has no axis 0 to split. Only torch arrays are split: convert it, make "
        "it a tree of arrays, or pass it whole: in_axes with None in its place, or by keyword."
    )
    check_refused(text, step, x, X)
    # a dtype of the other framework is no array of it
    assert float(accumulate(lambda x, dtype: x.sum(), 2, in_axes=(0, None))(torch.ones(4), jax.numpy.float32)) == 2


def test_what_jax_cannot_tell_apart():
    @dataclasses.dataclass
    class Settings:
        scale: float = 1.0

    step, x = accumulate(lambda p, x, settings: p * x.sum() * settings.scale, 2), funcga.to_jax(X)
    text = "an argument is neither an array nor hashable (unhashable type: 'Settings'). Outside of jit this call is compiled,"
    check_refused(text, step, x, x, settings=Settings())
    assert jax.jit(lambda x: step(x, x, settings=Settings()))(x).shape == X.shape


def test_another_structure_for_another_microbatch():
    step = lambda gradient: accumulate(gradient, 3, in_axes=0)(torch.from_numpy(X))
    check_refused(
        "grad_fn returned another structure for micro-batch 2 than for the first: missing `output['a']`, new "
        "`output['b']`. A fold needs one structure. Return the same keys for every micro-batch, with zeros where there "
        "is nothing to add.",
        step, lambda x: {"a" if x[0, 0] == 0 else "b": x.sum()},
    )  # fmt: skip
    text = "output['a'] as None for micro-batch 2 and as float32[] for the first"
    check_refused(text, step, lambda x: {"a": x.sum() if x[0, 0] == 0 else None})
    text = "output as float64[] for micro-batch 2 and as float32[] for the first"
    check_refused(text, step, lambda x: x.sum() if x[0, 0] == 0 else x.sum().double())
    # the order of a dict may change
    gradient = lambda x: {"a": x.sum(), "b": -x.sum()} if x[0] == 0 else {"b": -x.sum(), "a": x.sum()}
    assert accumulate(gradient, 2, in_axes=0, fold=funcga.sum())(torch.arange(4.0)) == {"a": 6, "b": -6}


def test_64_bits(kit):
    step = accumulate(summed, 2, in_axes=0, fold=funcga.mean(dtype="float64"))
    text = "'float64' is no dtype of JAX here, as 64-bit types are switched off"
    assert 'jax.config.update("jax_enable_x64", True)' in check_refused(text, step, funcga.to_jax(X))
    value = kit.arrays(X)
    with jax.enable_x64(True):
        narrow, wide = (funcga.Accumulator(funcga.mean(dtype=dtype)) for dtype in ("float32", "float64"))
        states = [each.update(each.init(value), value) for each in (narrow, wide)]
        with pytest.raises((IndexError, ValueError)):  # one state counts in 64 bits, and the other in two halves of 32
            wide.merge(*states)


def test_nothing_is_changed_by_a_failed_call(kit):
    params, batch, _ = problems.regression()
    params, batch = kit.arrays(params), kit.arrays(batch)
    before = kit.leaves((params, batch))
    gradient, calls = counted(lambda p, x, y: p)
    check_refused(
        "fold= is no Fold, and the tree of folds",
        accumulate(gradient, 2, fold={"w": funcga.mean()}),
        params,
        *batch,
    )
    assert len(calls) == 1
    for a, b in zip(before, kit.leaves((params, batch)), strict=True):
        np.testing.assert_array_equal(a, b)


def python(code, **variables):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **variables).stderr


def test_a_framework_that_is_not_installed(tmp_path):
    for framework in ("torch", "jax"):
        assert (
            f"funcga.errors.FuncgaError: {framework} is not installed, and this call needs it. Install it: pip install 'funcga[{framework}]'"
            in python(f"import sys; sys.modules['{framework}'] = None\nimport funcga\nfuncga.to_{framework}([1])")
        )
    (tmp_path / "torch_backend.py").write_text("x = 1")
    assert "AttributeError: module 'torch_backend' has no attribute 'BACKEND'" in python(
        "import sys; sys.path.insert(0, '.')\nimport funcga\nfuncga.to_torch([1])", cwd=tmp_path
    )


WITHOUT_NUMPY = {
    "funcga.verify": "funcga.verify",
    "from funcga import watch": "funcga.watch",
    "funcga.compare(w, w)": "funcga.compare",
    "funcga.checks.Report": "funcga.checks.Report",
}


def test_torch_needs_no_numpy_and_what_needs_it_says_so():
    """numpy is hidden before torch is imported; the answers are printed one a line."""
    code = "import sys, warnings\nwarnings.simplefilter('ignore')\nsys.modules['numpy'] = None\nimport torch, funcga\n"
    code += "w = {'w': torch.ones(2)}\nassert torch.equal(funcga.to_torch(w)['w'], w['w'])\n"
    code += "step = funcga.accumulate(funcga.grad(lambda w, x: (w['w'] * x).mean()), 2)\nstep(w, torch.ones(4, 2))\n"
    for line in WITHOUT_NUMPY:
        code += f"try: {line}\nexcept Exception as error: print(type(error).__name__, error, file=sys.stderr)\n"
    found = [line for line in python(code).splitlines() if "numpy is not installed" in line]
    assert found == [
        f"FuncgaError numpy is not installed, and {name} needs it. Install it: pip install numpy"
        for name in WITHOUT_NUMPY.values()
    ]


# --- calls that another signature would take


def mse(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean()


def mse_of_dict(params, batch):
    return mse(params, batch["x"], batch["y"])


def regression(kit):
    return kit.arrays(({"w": np.ones(2, "float32")}, X, X[:, 0]))


@pytest.mark.parametrize("foreign", [False, True])
def test_arguments_of_another_number(kit, foreign):
    """Python says what grad_fn takes."""
    params, x, y = regression(kit)
    gradient = funcga.value_and_grad
    if foreign:
        gradient = jax.value_and_grad if kit.name == "jax" else torch.func.grad_and_value
    step, streamed = funcga.accumulate(gradient(mse), 2), funcga.stream(gradient(mse))
    of_dict = gradient(mse_of_dict)
    window, missing = [(x[:3], y[:3]), (x[3:], y[3:])], r"mse\(\) missing 1 required positional argument: 'y'"
    for text, call in [
        *[(missing, lambda a=a: step(*a)) for a in [(params, (x, y)), (params, window), (params, {"x": x, "y": y})]],
        (r"mse\(\) takes 3 positional arguments but 4 ", lambda: step(params, x, y, y)),
        (r"mse\(\) got an unexpected keyword argument 'z'", lambda: step(params, x, y, z=1)),
        *[(missing, lambda items=items: streamed(params, items)) for items in [(x, y), [{"x": x, "y": y}], [(x,)]]],
        (r"mse\(\) takes 3 positional arguments but 4 ", lambda: streamed(params, [*window, (x, y, y)])),
        (r"mse_of_dict\(\) takes 2 ", lambda: funcga.accumulate(of_dict, 2)(params, x, y)),
        (r"mse_of_dict\(\) takes 2 ", lambda: funcga.stream(of_dict)(params, window)),
    ]:
        with pytest.raises(TypeError, match=text):
            call()


def test_a_type_error_of_the_loss_is_its_own(kit):
    params, x, y = regression(kit)

    def raises(params, x, y):
        return mse(params, x)

    def injects(params, x):
        return taken(params, x, None)

    def taken(params, x, noise):
        return len(noise)

    injects.__wrapped__ = taken
    for loss, args, name in [(raises, (x, y), "raises"), (injects, (x,), "taken")]:
        for call in [
            lambda loss=loss, args=args: funcga.accumulate(funcga.value_and_grad(loss), 2)(params, *args),
            lambda loss=loss, args=args: funcga.stream(funcga.value_and_grad(loss))(params, [args]),
        ]:
            with pytest.raises(TypeError) as caught:
                call()
            assert caught.traceback[-1].name == name


def test_a_window_of_dicts_is_no_batch(kit):
    params, x, y = regression(kit)
    step = funcga.accumulate(funcga.value_and_grad(mse_of_dict), 2)
    with pytest.raises(TypeError, match="list indices must be integers"):
        step(params, [{"x": x, "y": y}, {"x": x, "y": y}])


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("text", "`batch` is of type str"),
        (3, "`batch` is of type int"),
        (None, "no argument is split"),
        (np.ones((), "float32"), "`batch` is float32[]: it has no axis 0"),
        ({"x": X, "id": "a"}, "`batch['id']` is of type str"),
        (
            {"x": X, "y": X[:3]},
            "the split arguments have different numbers of rows: `batch['x']` has 6 and `batch['y']` has 3",
        ),
    ],
    ids=["str", "int", "None", "scalar", "dict", "ragged"],
)
def test_micro_batches_whose_rows_cannot_be_counted(kit, item, reason):
    params = kit.arrays({"w": np.ones(2, "float32")})
    convert = lambda leaf: kit.arrays(leaf) if isinstance(leaf, np.ndarray) else leaf
    item = {key: convert(leaf) for key, leaf in item.items()} if isinstance(item, dict) else convert(item)
    gradient = funcga.value_and_grad(lambda params, batch: (params["w"] ** 2).sum())
    message = check_refused("Write stream(grad_fn, weight=lambda batch: ", funcga.stream(gradient), params, [item])
    start = "the rows of a micro-batch are its weight unless weight= says it, and they cannot be counted: "
    assert message.startswith(start + reason)
    step = stream(gradient, weight=lambda batch: 1)
    assert float(step(params, [item])[0]) == 2


def test_lists_beside_an_array_have_its_rows():
    step = accumulate(funcga.grad(lambda params, images, boxes: sum((params * box).sum() for box in boxes)), 2)
    batch = torch.ones(4, 2), [torch.ones(3, 2), torch.ones(2, 2), torch.ones(1, 2), torch.ones(2, 2)]
    check_refused("have different numbers of rows: `images` has 4 and `boxes[0]` has 3", step, torch.ones(1, 2), *batch)
