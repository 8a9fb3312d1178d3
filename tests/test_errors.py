"""Every refusal: what was found, where, and the line to write instead. The texts are pinned here."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import funcga
import torch_backend
from funcga import CARRY, FuncgaError
from tests import problems
from tests.kits import counted

X = np.arange(12, dtype="float32").reshape(6, 2)


def check_refused(text, function, *args, **kwargs):
    with pytest.raises(FuncgaError) as caught:
        function(*args, **kwargs)
    assert text in str(caught.value)
    return str(caught.value)


def test_it_is_a_value_error():
    assert issubclass(FuncgaError, ValueError)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "n is 0: it must be at least 1. Write n=1 for one micro-batch."),
        (-2, "n is -2: it must be at least 1. Write n=1 for one micro-batch."),
        (2.0, "n is 2.0: it must be an int, at least 1. Write n=8"),
        ("8", "n is '8': it must be an int, at least 1. Write n=8"),
        (True, "n is True: it must be an int, at least 1. Write n=8"),
    ],
)
def test_n(n, text):
    check_refused(text, funcga.accumulate, lambda x: x, n)
    check_refused(
        text.replace("n is", "microbatch_size is").replace("n=", "microbatch_size="),
        funcga.accumulate,
        lambda x: x,
        microbatch_size=n,
    )
    check_refused(text, funcga.windows, [], n)
    if n in ("8", 2.0):
        check_refused(text + ', or n="auto".', funcga.accumulate, lambda x: x, n)


class Loader:
    """What yields micro-batches, as a DataLoader does."""

    def __iter__(self):
        return iter([])


STREAM = (
    "If the Loader yields micro-batches, stream them: for window in funcga.windows(loader, 8): "
    "funcga.stream(grad_fn)(params, window), without params for module_value_and_grad."
)


def test_a_loader_in_place_of_a_batch(kit):
    step = funcga.accumulate(lambda params, batch: batch, 2)
    check_refused(
        f"`batch` is of type Loader, and in_axes splits it on axis 0: only {kit.name} arrays can be split. {STREAM}",
        step,
        kit.arrays(X),
        Loader(),
    )
    check_refused(f"which also say in which framework it runs. {STREAM}", step, Loader())


def test_totals_that_nobody_counts(kit):
    def loss_fn(params, x, *, totals):
        return (params * x).sum() / totals["rows"]

    x = kit.arrays(X)
    text = "loss_fn asks for `totals`, and the step does not count any: "
    says = "Give the step totals= as well, such as accumulate(grad_fn, n, fold=funcga.sum(), totals=lambda batch: "
    for step, batch in (
        (funcga.accumulate(funcga.value_and_grad(loss_fn), 2), x),
        (funcga.stream(funcga.grad(loss_fn)), [x]),
    ):
        assert says in check_refused(text, step, x[0], batch)
    # A call may bring its own.
    funcga.accumulate(funcga.grad(loss_fn), 2)(x[0], x, totals={"rows": 6})


def test_a_module_asks_for_totals():
    module = torch.nn.Linear(2, 1)
    f = torch_backend.module_value_and_grad(module, lambda m, x, *, totals: m(x).sum() / totals["rows"])
    check_refused("loss_fn asks for `totals`, and the step", funcga.accumulate(f, 2), torch.ones(4, 2))


def test_a_model_is_no_gradient_function():
    text = (
        "which returns outputs, and what is accumulated is a gradient. Write "
        "accumulate(torch_backend.module_value_and_grad(model, loss_fn), n) for a module of torch; in JAX "
        "accumulate(funcga.value_and_grad(loss_fn), n), with a loss_fn of the parameters. To fold the outputs of a "
        "model, say in_axes=0."
    )
    model, x = torch.nn.Linear(2, 1), torch.arange(8.0).reshape(4, 2)
    for function in (funcga.accumulate, funcga.plan, funcga.verify):
        check_refused(
            f"grad_fn is a model, Linear, {text}", function, model, *([2] if function is funcga.accumulate else [x, x])
        )
    check_refused(f"grad_fn is a model, Linear, {text}", funcga.stream, model)
    check_refused(f"grad_fn is a model, Linear, {text}", funcga.accumulate, nnx.Linear(2, 1, rngs=nnx.Rngs(0)), 2)
    # Its outputs may be folded all the same, and a traced function is no model.
    outputs = funcga.accumulate(model, 3, in_axes=0, fold=funcga.concat())(x)
    torch.testing.assert_close(outputs, model(x).detach())
    traced = torch.fx.symbolic_trace(lambda params, x: x.sum() * params)
    assert funcga.accumulate(traced, 2, fold=funcga.sum())(torch.ones(()), x) == 28


def test_what_a_step_returns_is_not_its_gradients():
    module, x = torch.nn.Linear(2, 1), torch.ones(4, 2)
    step = funcga.accumulate(torch_backend.module_value_and_grad(module, lambda m, x: m(x).mean()), 2)
    params = torch_backend.trainable(module)
    text = "Unpack what a step returns: loss, grads = step(...), and give the gradients alone."
    check_refused(text, torch_backend.assign_grads, module, step(x))
    check_refused(text, torch_backend.assign_grads, params, step(x))
    check_refused(text, torch_backend.apply_updates, params, step(x))
    check_refused("alone of loss, grads = step(...)", torch_backend.assign_grads, [*params.values()], step(x))


def test_n_or_microbatch_size():
    says = (
        "Say one: accumulate(grad_fn, n=8) for 8 micro-batches, or accumulate(grad_fn, microbatch_size=4) for "
        "micro-batches of 4 rows."
    )
    check_refused("neither of n and microbatch_size were given. " + says, funcga.accumulate, lambda x: x)
    check_refused(
        "both of n and microbatch_size were given. " + says, funcga.accumulate, lambda x: x, 2, microbatch_size=2
    )


def test_functions():
    check_refused(
        "grad_fn is 3, which is no function. Pass one, such as funcga.value_and_grad(loss_fn)", funcga.accumulate, 3, 2
    )
    check_refused(
        "grad_fn is 3, which is no function. Pass one, such as funcga.value_and_grad(loss_fn)", funcga.stream, 3
    )
    check_refused(
        "weight is 3, which is no function. Pass one, such as lambda batch:", funcga.accumulate, len, 2, weight=3
    )
    check_refused("loss_fn is None, which is no function. Pass loss_fn(params, *batch) -> scalar.", funcga.grad, None)
    check_refused("argnums is 'x': it must be an int or a tuple of ints. Write argnums=0.", funcga.grad, len, "x")


def test_no_rows(kit):
    check_refused(
        "the batch has 0 rows (`x` is empty): there is nothing to fold.",
        funcga.accumulate(lambda x: x.sum(), 1, in_axes=0),
        kit.arrays(X[:0]),
    )


def test_unequal_rows(kit):
    def gradient(params, batch, labels):
        raise AssertionError("no work is done before the refusal")

    step = funcga.accumulate(gradient, 2)
    check_refused(
        "the split arguments have different numbers of rows: `batch['x']` has 6 (axis 0 of float32[6, 2]); `labels` has "
        "5 (axis 0 of float32[5, 2]). Micro-batches cut all of them alike. Pass what has no rows whole: in_axes with "
        "None in its place.",
        step, kit.arrays(X), {"x": kit.arrays(X)}, kit.arrays(X[:5]),
    )  # fmt: skip


def test_what_cannot_be_split(kit):
    step = lambda axes, *args: funcga.accumulate(lambda params, batch: batch, 2, in_axes=axes)(*args)
    x = kit.arrays(X)
    check_refused(
        "`batch['k']` is float32[], a scalar: it has no axis 0 to split. Pass it whole: in_axes with None in its place, "
        "or as a keyword argument.",
        step, None, x, {"k": x[0, 0]},
    )  # fmt: skip
    check_refused(
        f"`batch` is of type str, and in_axes splits it on axis 0: only {kit.name} arrays can be split. "
        "Make it a tree of arrays, such as a dict or a dataclass, or pass it whole: in_axes with None in its place.",
        step,
        None,
        x,
        "s",
    )
    check_refused("`batch` is of type float, and in_axes splits it on axis 0:", step, None, x, 1.0)
    check_refused(
        "`batch` is float32[6, 2]: axis 2 is out of range. in_axes for it lies between -2 and 1.", step, (None, 2), x, x
    )
    check_refused("no argument is split, so there are no rows to make micro-batches of.", step, (None, None), x, x)
    check_refused(
        "no argument is split, so there are no rows to make micro-batches of.", funcga.accumulate(lambda x: x, 2), x
    )


def test_numpy_is_not_split_in_torch():
    check_refused(
        "`batch` is a NumPy array float32[6, 2], and in_axes splits it on axis 0: only torch arrays can be split. Convert "
        "it, `funcga.to_torch(batch)`, or pass it whole: in_axes with None in its place.",
        funcga.accumulate(lambda params, batch: batch, 2), torch.ones(2), X,
    )  # fmt: skip


def test_in_axes(kit):
    x = kit.arrays(X)
    step = lambda axes: funcga.accumulate(lambda params, batch: batch["x"], 2, in_axes=axes)(x, {"x": x, "y": x})
    check_refused(
        "in_axes has 1 entries and the call has 2 positional arguments. Give one entry each, such as in_axes=(None, 0);",
        step,
        (0,),
    )
    check_refused(
        "in_axes is 'rows'. Give an axis for all arguments, or a tuple with one entry for each of the 2:", step, "rows"
    )
    check_refused(
        "in_axes is no prefix of the arguments: at batch it has dict(['x']: 0), and there is dict(",
        step,
        (None, {"x": 0}),
    )
    check_refused("at batch['x'] it has tuple([0]: 0), and there is float32[6, 2].", step, (None, {"x": (0,), "y": 0}))
    check_refused("at batch it has 1.5, and there is dict(", step, (None, 1.5))


def test_no_array():
    step = funcga.accumulate(lambda params, batch: params, 2)
    says = check_refused(
        "no array was found in `params`, `batch` (looked for torch tensors and JAX arrays)", step, 1.0, [2.0]
    )
    assert "Convert first: `funcga.to_torch(batch)` or `funcga.to_jax(batch)`." in says
    check_refused("no array was found in the call, which has no arguments", funcga.accumulate(lambda: 1, 2))


def test_mixed_frameworks():
    check_refused(
        "the arguments mix frameworks: `params['w']` is a torch tensor and `batch['x']` is a JAX array. One call folds "
        "in one framework. Convert first: `funcga.to_torch(batch)`.",
        funcga.accumulate(lambda params, batch: params, 2), {"w": torch.ones(2)}, {"x": funcga.to_jax(X)},
    )  # fmt: skip


@pytest.mark.parametrize("bad", [-1, -0.5, float("nan"), float("inf"), np.float32(-1)])
@pytest.mark.host
def test_weights_out_of_range(kit, bad):
    step = funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, weight=lambda x: bad)
    check_refused("it must be finite and at least 0, such as the number of rows or tokens in it.", step, kit.arrays(X))
    accumulator = funcga.Accumulator()
    value = kit.arrays(X)
    check_refused(
        "the weight of a micro-batch is",
        accumulator.update,
        accumulator.init(value),
        value,
        kit.arrays(np.float32(bad)),
    )


def test_weights_beyond_a_float(kit):
    check_refused(
        "it must be finite and at least 0",
        funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, weight=lambda x: 10**400),
        kit.arrays(X),
    )


def test_weights_of_nothing(kit):
    step = funcga.stream(lambda p, x: x.sum(), in_axes=(None, None), weight=lambda x: 1)
    check_refused(
        "weight= is called with the arguments that are split, and in_axes splits none. Give an argument an axis:",
        step,
        kit.arrays(X),
        [kit.arrays(X)],
    )


def test_arguments_by_keyword(kit):
    step = funcga.accumulate(lambda params, batch: batch.sum(), 2)
    says = "Keyword arguments are passed whole: pass what is to be split by position"
    check_refused(
        f"{says}. Write step(x, y), or step(batch) in place of step(**batch).",
        step,
        params=kit.arrays(X),
        batch=kit.arrays(X),
    )
    check_refused(
        f"{says}, step(params, batch) in place of step(params, **batch).", step, kit.arrays(X), batch=kit.arrays(X)
    )


def test_parts_that_make_no_fold():
    check_refused("a Fold was given <function concat", funcga.Fold, funcga.reducers.concat, funcga.normalizers.identity)
    check_refused("where it takes a Normalizer. Write", funcga.Fold, funcga.reducers.sum, None)


def test_what_jax_cannot_tell_apart():
    @dataclasses.dataclass
    class Settings:
        scale: float = 1.0

    step = funcga.accumulate(lambda p, x, settings: p * x.sum() * settings.scale, 2)
    x = funcga.to_jax(X)
    check_refused(
        "an argument of type Settings is neither an array nor hashable. Outside of jit this call is compiled,",
        step,
        x,
        x,
        settings=Settings(),
    )
    inside = jax.jit(lambda x: step(x, x, settings=Settings()))
    assert inside(x).shape == X.shape


def test_other_objects_of_a_framework_are_no_arrays():
    x = torch.ones(4)
    out = funcga.accumulate(lambda x, dtype: x.sum(), 2, in_axes=(0, None))(x, jax.numpy.float32)
    assert float(out) == 2


def test_weights_seen_on_the_host():
    step = funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, weight=lambda x: -x.sum())
    check_refused("the weight of a micro-batch is -15.0;", step, torch.from_numpy(X))


@pytest.mark.parametrize("bad", ["a", None, 1j, (1,)])
def test_weights_that_are_no_numbers(kit, bad):
    check_refused(
        "the weight of a micro-batch is",
        funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, weight=lambda x: bad),
        kit.arrays(X),
    )


def test_weights_that_are_no_scalars(kit):
    check_refused(
        "the weight of a micro-batch is float32[2]; it must be a real number or a 0-d array, such as the number of "
        'tokens: weight=lambda batch: (batch["labels"] != -100).sum()',
        funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, weight=lambda x: x.sum(0)), kit.arrays(X),
    )  # fmt: skip


def test_folds_that_are_no_prefix(kit):
    gradient = lambda x: (x.sum(), {"loss": x.sum(), "n": x.sum()})
    step = lambda fold: funcga.accumulate(gradient, 2, in_axes=0, fold=fold)(kit.arrays(X))
    mean = funcga.mean()
    check_refused(
        "the tree of folds is no prefix of what grad_fn returns: at output it has tuple([0]: Fold, [1]: Fold, [2]: "
        "Fold), and there is tuple([0]: float32[], [1]: dict(['loss']: float32[], ['n']: float32[])). Give one "
        "Fold for all that stands below, such as funcga.mean(), or a container with the same keys.",
        step, (mean, mean, mean),
    )  # fmt: skip
    check_refused("at output[1] it has dict(['loss']: Fold)", step, (mean, {"loss": mean}))
    check_refused("at output[0] it has tuple([0]: Fold)", step, ((mean,), mean))
    check_refused("fold= is 'mean'. Pass a Fold, such as funcga.mean(), or a tree of them.", step, "mean")
    check_refused("fold= is <function mean", step, funcga.mean)


def test_integers_are_not_averaged(kit):
    x = kit.arrays(X)
    count = lambda x: (x.mean(), {"correct": kit.cast(x.sum(), "int32")})
    check_refused(
        "output[1]['correct'] is int32[], and integers are not averaged silently. Count it with funcga.sum(), in a tree "
        "of folds such as fold=((funcga.mean(), funcga.sum()), funcga.mean()); or average it in floats: "
        'funcga.mean(dtype="float32").',
        funcga.accumulate(count, 2, in_axes=0), x,
    )  # fmt: skip
    check_refused(
        "output is bool[], and bools are not averaged silently.",
        funcga.accumulate(lambda x: x.sum() > 0, 2, in_axes=0),
        x,
    )
    check_refused(
        "and integers are not averaged silently.", funcga.accumulate(count, 2, in_axes=0, fold=funcga.per_weight()), x
    )
    check_refused("output is complex64[2], and the fold `max, identity` is not defined for complex values.",
            funcga.accumulate(lambda x: kit.cast(x[0], "complex64"), 2, in_axes=0, fold=funcga.max()), x)  # fmt: skip


def test_dtypes_the_framework_lacks(kit):
    bad = object() if kit.name == "jax" else "float23"
    check_refused(
        "the fold asks for dtype",
        funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, fold=funcga.mean(dtype=bad)),
        kit.arrays(X),
    )


def test_concat_without_an_axis(kit):
    check_refused("output is float32[]: it has no axis 0 for concat(axis=0) to collect along.",
            funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, fold=funcga.concat()), kit.arrays(X))  # fmt: skip


def test_outputs_that_are_no_arrays(kit):
    check_refused("output[1] of grad_fn is of type str, which cannot be folded. Return arrays or numbers;",
            funcga.accumulate(lambda x: (x.sum(), "a"), 2, in_axes=0), kit.arrays(X))  # fmt: skip


def test_another_structure_for_another_microbatch():
    step = lambda gradient: funcga.accumulate(gradient, 3, in_axes=0)(torch.from_numpy(X))
    check_refused(
        "grad_fn returned another structure for micro-batch 2 than for the first: missing `output['a']`, new "
        "`output['b']`. A fold needs one structure. Return the same keys for every micro-batch, with zeros where there "
        "is nothing to add.",
        step, lambda x: {"a" if x[0, 0] == 0 else "b": x.sum()},
    )  # fmt: skip
    check_refused(
        "output['a'] as None for micro-batch 2 and as float32[] for the first",
        step,
        lambda x: {"a": x.sum() if x[0, 0] == 0 else None},
    )
    check_refused(
        "output as float64[] for micro-batch 2 and as float32[] for the first",
        step,
        lambda x: x.sum() if x[0, 0] == 0 else x.sum().double(),
    )


def test_another_shape_for_another_microbatch(kit):
    """A row for each example under a fold that adds would broadcast, or be added to another example's."""
    says = check_refused(
        "grad_fn returned output as float32[1, 2] for", funcga.accumulate(lambda x: x, 5, in_axes=0), kit.arrays(X)
    )
    assert "if it has a row for each example, fold it with funcga.concat()." in says
    for fold in (funcga.concat(), funcga.mean()):
        step = funcga.accumulate(lambda x: x.T, 5, in_axes=0, fold=fold)
        assert "float32[2, 1] for" in check_refused("fold it with funcga.concat(axis=1).", step, kit.arrays(X))


def test_the_order_of_a_dict_may_change():
    x = torch.arange(4.0)
    gradient = lambda x: {"a": x.sum(), "b": -x.sum()} if x[0] == 0 else {"b": -x.sum(), "a": x.sum()}
    out = funcga.accumulate(gradient, 2, in_axes=0, fold=funcga.sum())(x)
    assert (float(out["a"]), float(out["b"])) == (6, -6)


def test_carry(kit):
    x, s = kit.arrays(X), kit.arrays(np.float32(0))
    step = lambda gradient, axes, fold: funcga.accumulate(gradient, 2, in_axes=axes, fold=fold)(s, x)
    both = (funcga.mean(), funcga.carry())
    check_refused(
        "`s` is funcga.CARRY in in_axes, and no output has the fold funcga.carry(): each carried argument needs the "
        "output that replaces it. Write both, as in accumulate(grad_fn, n, in_axes=(None, funcga.CARRY, 0), "
        "fold=(funcga.mean(), funcga.carry())).",
        step, lambda s, x: (x.mean(), s), (CARRY, 0), funcga.mean(),
    )  # fmt: skip
    check_refused(
        "no argument is funcga.CARRY in in_axes, and `output[1]` has the fold funcga.carry()",
        step,
        lambda s, x: (x.mean(), s),
        (None, 0),
        both,
    )
    check_refused("the carried argument `s` and what grad_fn returns for it, `output[1]`, have different structures: missing "
            "`s`, new `output[1]['s']`.", step, lambda s, x: (x.mean(), {"s": s}), (CARRY, 0), both)  # fmt: skip
    check_refused(
        "the carried state `s` came in as float32[] and grad_fn returned it as float32[2].",
        step,
        lambda s, x: (x.mean(), x[0]),
        (CARRY, 0),
        both,
    )


def test_streams(kit):
    x = kit.arrays(X)
    step = funcga.stream(lambda params, batch: batch.mean())
    check_refused("the stream is empty: there is no micro-batch to fold, and so no structure to return.", step, x, [])
    check_refused("the stream is empty", step, x, iter(()))
    check_refused("microbatches is of type int, which cannot be iterated over.", step, x, 3)
    check_refused(
        "one batch, not an iterable of micro-batches. Split it with funcga.accumulate(grad_fn, n)", step, x, x
    )
    check_refused("microbatches is of type dict: one batch, not an iterable of micro-batches.", step, x, {"x": x})
    check_refused(
        "stream's function was called without positional arguments. Call it as f(params, microbatches).", step
    )
    check_refused("grad_fn returned", funcga.stream(lambda b: b, in_axes=0), [x, x[:3]])


def test_nothing_is_changed_by_a_failed_call(kit):
    params, batch, _ = problems.regression()
    params, batch = kit.arrays(params), kit.arrays(batch)
    before = kit.leaves((params, batch))
    gradient, calls = counted(lambda p, x, y: p)
    check_refused("tree of folds", funcga.accumulate(gradient, 2, fold={"w": funcga.mean()}), params, *batch)
    assert len(calls) == 1
    for a, b in zip(before, kit.leaves((params, batch)), strict=True):
        np.testing.assert_array_equal(a, b)


def python(code, **variables):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **variables)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_framework_that_is_not_installed(framework):
    done = python(f"import sys; sys.modules['{framework}'] = None\nimport funcga\nfuncga.to_{framework}([1])")
    assert (
        f"funcga.errors.FuncgaError: {framework} is not installed, and this call needs it. Install it: pip install 'funcga[{framework}]'"
        in done.stderr
    )


def test_a_foreign_module_under_a_backends_name(tmp_path):
    (tmp_path / "torch_backend.py").write_text("x = 1")
    done = python("import sys; sys.path.insert(0, '.')\nimport funcga\nfuncga.to_torch([1])", cwd=tmp_path)
    assert (
        f"`import torch_backend` finds {tmp_path}/torch_backend.py, which is not funcga's: it hides the backend."
        in done.stderr
    )


def test_a_dtype_that_would_be_narrowed():
    step = funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, fold=funcga.mean(dtype="float64"))
    says = check_refused(
        "the fold asks for dtype 'float64', which the framework of this call does not have (64-bit types are",
        step,
        funcga.to_jax(X),
    )
    assert 'jax.config.update("jax_enable_x64", True)' in says


def test_states_of_two_widths(kit):
    value = kit.arrays(X)
    with jax.enable_x64(True):
        narrow, wide = (funcga.Accumulator(funcga.mean(dtype=dtype)) for dtype in ("float32", "float64"))
        states = [each.update(each.init(value), value) for each in (narrow, wide)]
        check_refused("one state counts in 64 bits and the other in 32:", wide.merge, *states)


def test_states_that_are_none(kit):
    value = kit.arrays(X)
    for call in (lambda: funcga.Accumulator().update(None, value), lambda: funcga.Accumulator().finalize(value)):
        check_refused("Start with state = accumulator.init(like) and pass on what update and merge return.", call)
    check_refused("iterable is of type int. Pass a DataLoader, a generator or a list.", funcga.windows, 3, 2)


def test_weights_of_another_arity(kit):
    x = kit.arrays(X)
    step = funcga.accumulate(lambda p, x, y: x.sum(), 2, weight=lambda batch: 1)
    check_refused("weight is called with each argument that is split, here 2, and does not take so many", step, x, x, x)

    def weight(x, y):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        funcga.accumulate(lambda p, x, y: x.sum(), 2, weight=weight)(x, x, x)


# --- calls that another signature would take


def mse(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean()


def mse_of_dict(params, batch):
    return mse(params, batch["x"], batch["y"])


def regression(kit):
    return kit.arrays(({"w": np.ones(2, "float32")}, X, X[:, 0]))


ONE_EACH = (
    "Pass one argument for each parameter: step(params, *batch) for a batch in a tuple. A list of micro-batches is "
    "folded by funcga.stream(grad_fn)(params, microbatches)."
)
SPREAD = (
    "A micro-batch that is a tuple or list is spread, grad_fn(params, *item), so it has one field for each parameter "
    "after the first; to pass it as one argument, yield (item,). A single batch is split by "
    "funcga.accumulate(grad_fn, n)(params, *batch)."
)


@pytest.mark.parametrize("foreign", [False, True])
def test_arguments_of_another_number(kit, foreign):
    params, x, y = regression(kit)
    gradient = funcga.value_and_grad
    if foreign:
        gradient = jax.value_and_grad if kit.name == "jax" else torch.func.grad_and_value
    taken = "grad_fn takes (params, x, y), and was called with {} positional arguments: "
    missing, extra = (
        ": mse() missing 1 required positional argument: 'y'. ",
        ": mse() takes 3 positional arguments but 4 ",
    )
    step, streamed = funcga.accumulate(gradient(mse), 2), funcga.stream(gradient(mse))
    window = [(x[:3], y[:3]), (x[3:], y[3:])]
    for args in [(params, (x, y)), (params, window), (params, {"x": x, "y": y})]:
        assert check_refused(taken.format(2)[:-2] + missing + ONE_EACH, step, *args)
    check_refused(taken.format(4)[:-2] + extra, step, params, x, y, y)
    check_refused("mse() got an unexpected keyword argument 'z'. " + ONE_EACH, step, params, x, y, z=1)
    for items in [(x, y), [{"x": x, "y": y}], [(x,)]]:
        check_refused(taken.format(2)[:-2] + missing + SPREAD, streamed, params, items)
    check_refused(taken.format(4)[:-2] + extra, streamed, params, [(x, y, y)])
    check_refused(taken.format(4)[:-2] + extra, streamed, params, [*window, (x, y, y)])
    of_dict = "grad_fn takes (params, batch), and was called with 3 positional arguments: mse_of_dict() takes 2 "
    check_refused(of_dict, funcga.accumulate(gradient(mse_of_dict), 2), params, x, y)
    check_refused(of_dict, funcga.stream(gradient(mse_of_dict)), params, window)


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


@pytest.mark.parametrize(
    ("function", "keyword", "advice"),
    [
        (funcga.accumulate, "gradient_accumulation_steps", "Here that is `n`: accumulate(grad_fn, n=8)."),
        (funcga.accumulate, "num_microbatches", "Here that is `n`: accumulate(grad_fn, n=8)."),
        (funcga.accumulate, "batch_size", "Here that is `microbatch_size`: accumulate(grad_fn, microbatch_size=4)."),
        (funcga.accumulate, "use_grad_mean", "Here that is `fold`: accumulate(grad_fn, fold=funcga.mean())."),
        (funcga.accumulate, "axis_name", "Here that is `across`: accumulate(grad_fn, across=...)."),
        (funcga.accumulate, "nonsense", "Its parameters are grad_fn, n, microbatch_size, fold, weight, in_axes, across, totals, observe, drop, drop_if."),
        (funcga.multi_steps, "every_k_schedule", "Here that is `n`: multi_steps(tx, n=8)."),
        (funcga.multi_steps, "accumulation_steps", "Here that is `n`: multi_steps(tx, n=8)."),
        (funcga.multi_steps, "batch_size", "Its parameters are tx, n, fold, drop, drop_if, across, observe, donate."),
        (funcga.stream, "n", "It folds all that it is given: funcga.windows(microbatches, n=8) gives it 8 at a time."),
        (funcga.stream, "steps", "It folds all that it is given: funcga.windows(microbatches, n=8) gives it 8 at a time."),
    ],
)  # fmt: skip
def test_keywords_of_other_libraries(function, keyword, advice):
    text = f"{function.__name__}() got an unexpected keyword argument '{keyword}'. {advice}"
    check_refused(text, function, lambda x: x, **{keyword: 8})


def test_positional_arguments_of_other_libraries():
    check_refused(
        "stream() takes 1 positional argument but 2 were given. Its parameters are grad_fn, fold, weight, in_axes, across, totals, observe, drop, drop_if, device.",
        funcga.stream, lambda x: x, 8,
    )  # fmt: skip
    check_refused("grad_fn is of type dict, which is no function.", funcga.accumulate, {"w": X}, [X])
    text = "windows() missing 1 required positional argument: 'n'. Its parameters are iterable, n, weight."
    check_refused(text, funcga.windows, [X])


def test_a_window_of_dicts_is_no_batch(kit):
    """The loss raises its own error, with a note beside it."""
    params, x, y = regression(kit)
    step = funcga.accumulate(funcga.value_and_grad(mse_of_dict), 2)
    with pytest.raises(TypeError, match="list indices must be integers") as caught:
        step(params, [{"x": x, "y": y}, {"x": x, "y": y}])
    start = "funcga: an argument is a list of dicts. If it is a window of micro-batches, stream it: "
    assert any(note.startswith(start) for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("item", "reason", "line"),
    [
        ("text", "`batch` is of type str", "lambda batch: ...) with what it weighs, 1 where all weigh alike."),
        (3, "`batch` is of type int", "lambda batch: ...) with what it weighs, 1 where all weigh alike."),
        (None, "it has no array", "lambda batch: ...) with what it weighs, 1 where all weigh alike."),
        (np.ones((), "float32"), "`batch` is float32[], a scalar", "lambda batch: ...) with what it weighs, 1 where all weigh alike."),
        ({"x": X, "id": "a"}, "`batch['id']` is of type str", "lambda batch: ...) with what it weighs, len(batch['x']), or 1 "),
        ({"x": X, "y": X[:3]}, "`batch['x']` has 6 (axis 0 of float32[6, 2]); `batch['y']` has 3", "lambda batch: ...) with what it weighs, len(batch['x']), or 1 "),
    ],
    ids=["str", "int", "None", "scalar", "dict", "ragged"],
)  # fmt: skip
def test_micro_batches_whose_rows_cannot_be_counted(kit, item, reason, line):
    params = kit.arrays({"w": np.ones(2, "float32")})
    convert = lambda leaf: kit.arrays(leaf) if isinstance(leaf, np.ndarray) else leaf
    item = {key: convert(leaf) for key, leaf in item.items()} if isinstance(item, dict) else convert(item)
    gradient = funcga.value_and_grad(lambda params, batch: (params["w"] ** 2).sum())
    message = check_refused("Write stream(grad_fn, weight=", funcga.stream(gradient), params, [item])
    start = "the rows of a micro-batch are its weight unless weight= says it, and they cannot be counted: "
    assert message.startswith(start + reason)
    assert line in message
    assert float(funcga.stream(gradient, weight=lambda batch: 1)(params, [item])[0]) == 2
