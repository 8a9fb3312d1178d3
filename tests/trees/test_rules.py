"""Rules and `match`: leaves of torch, flax and equinox by path, renamed and transposed, there and back."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcga
from funcga.tools.trees.rules import Rule, flax_to_torch, pairs, permuted, torch_to_flax
from tests import problems


def array(*shape, seed=0):
    return problems.rng(seed).normal(size=shape).astype("float32")


def right_of(lefts, rights, rules):
    return [*pairs(lefts, rights, rules)]


@pytest.mark.parametrize(
    ("lefts", "rights", "rules", "found"),
    [
        ("fc.weight fc.bias norm.weight embed.weight norm.running_mean norm.running_var own.weight",
         "fc.kernel fc.bias norm.scale embed.embedding norm.mean norm.var own.weight", torch_to_flax, None),
        ("fc.kernel fc.bias norm.scale embed.embedding norm.mean norm.var own.weight",
         "fc.weight fc.bias norm.weight embed.weight norm.running_mean norm.running_var own.weight", flax_to_torch, None),
        ("weight bias", "kernel bias", torch_to_flax, None),
        ("bn.weight bn.running_mean", "params.bn.scale batch_stats.bn.mean", torch_to_flax, None),
        ("params.bn.scale batch_stats.bn.mean", "bn.weight bn.running_mean", flax_to_torch, None),
        ("bn.num_batches_tracked num_batches_tracked", "", torch_to_flax, ""),
        ("bn.num_batches_tracked", "bn.num_batches_tracked", torch_to_flax, None),
        ("fc1.weight fc1.bias", "Dense_1.kernel Dense_1.bias", [Rule(r"fc(\d)\.(.*)", r"Dense_\1.\2"), *torch_to_flax], None),
        ("a", "a b c", [Rule("a", "b"), Rule("a", "c")], "b"),
        ("a", "a c b", [Rule("a", "c"), Rule("a", "b")], "c"),
        ("a", "d", [Rule("a", "b"), Rule("a", "c")], "a"),
        ("aa", "b", [Rule("a", "b")], "aa"),  # all of the path
        ("a b", "a b", [Rule("a", "tmp"), Rule("b", "a"), Rule("tmp", "b")], "b a"),  # swapped through a third
        ("w", "lkjihgfedcbaw", [Rule("(.*)", rf"{letter}\1") for letter in "abcdefghijkl"], None),
    ],
)  # fmt: skip
def test_rules_compose_and_the_first_wins(lefts, rights, rules, found):
    assert right_of(lefts.split(), rights.split(), rules) == (rights if found is None else found).split()


@pytest.mark.parametrize(
    ("torch_shape", "flax_shape"), [((2, 3), (3, 2)), ((2, 3, 5), (5, 3, 2)), ((2, 3, 5, 7), (5, 7, 3, 2))]
)
def test_layouts_there_and_back(torch_shape, flax_shape):
    x = array(*torch_shape)
    there, back = [Rule("w", "v", axes="oi->io")], [Rule("v", "w", axes="io->oi")]
    moved = permuted(x, there)
    assert moved.shape == flax_shape
    assert moved[(*(0,) * (len(flax_shape) - 2), 2, 1)] == x[(1, 2, *(0,) * (len(torch_shape) - 2))]
    np.testing.assert_array_equal(permuted(moved, back), x)


def test_layers_mean_the_same_with_the_weights_carried_over():
    """A square layer too, which no shape tells from its transpose."""
    linen = pytest.importorskip("flax.linen")
    x = array(2, 4, 6, 6)
    conv, dense, norm = torch.nn.Conv2d(4, 4, 3), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4, eps=1e-6)
    for layer, own, given, channels_last in (
        (dense, linen.Dense(4), x[:, :, 0, 0], False),
        (conv, linen.Conv(4, (3, 3), padding="VALID"), x, True),
        (norm, linen.LayerNorm(), x[:, :, 0, 0], False),
    ):
        there = jnp.moveaxis(jnp.asarray(given), 1, -1) if channels_last else jnp.asarray(given)
        like = jax.eval_shape(own.init, jax.random.key(0), there)
        params = funcga.trees.match(dict(layer.named_parameters()), like, rules=torch_to_flax)
        found = own.apply(params, there)
        expected = layer(torch.tensor(given)).detach().numpy()
        assert funcga.compare(jnp.moveaxis(found, -1, 1) if channels_last else found, expected).ok
        back = funcga.trees.match(params, layer.state_dict(), rules=flax_to_torch)
        assert funcga.compare(back, layer.state_dict()).worst.status == "equal"


def test_embeddings_and_running_statistics():
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            return linen.BatchNorm(use_running_average=True, name="1")(linen.Embed(5, 3, name="0")(tokens))

    module = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.BatchNorm1d(3)).eval()
    module[1].running_mean += 0.5
    tokens = np.array([1, 4, 1])
    like = jax.eval_shape(Net().init, jax.random.key(0), tokens)
    variables = funcga.trees.match(module.state_dict(), like, rules=torch_to_flax)
    assert funcga.compare(Net().apply(variables, tokens), module(torch.tensor(tokens)).detach()).ok
    assert funcga.compare(module.state_dict(), variables, rules=torch_to_flax).ok


def test_equinox_modules_keep_what_is_no_array():
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    rules = [Rule(r"0\.(.*)", r"layers.0.\1"), Rule(r"2\.(.*)", r"layers.1.\1")]
    moved = funcga.trees.match(module.state_dict(), model, rules=rules)
    x = array(2)
    assert type(moved) is equinox.nn.MLP
    assert funcga.compare(moved(jnp.asarray(x)), module(torch.tensor(x)).detach()).ok


def test_match_copies_and_keeps_dtypes_and_order(x64):
    given = {"b": np.ones(2), "a": np.zeros(3, "float32")}
    like = {"b": torch.ones(2), "a": torch.ones(3)}
    moved = funcga.trees.match(given, like)
    assert [*moved] == ["b", "a"]
    assert [str(leaf.dtype) for leaf in moved.values()] == ["torch.float64", "torch.float32"]
    moved["b"].zero_()
    assert given["b"].sum() == 2
    assert funcga.trees.match({"x.y": torch.ones(2)}, {"x": {"y": jnp.zeros(2), "z": None}})["x"]["z"] is None


def test_what_stands_for_a_tensor_becomes_one():
    with torch.device("meta"):
        like = torch.nn.Linear(3, 2)
    moved = funcga.trees.match({"weight": array(2, 3), "bias": array(2)}, like.state_dict())
    np.testing.assert_array_equal(moved["weight"].numpy(), array(2, 3))


def test_a_tree_of_numpy_stays_one():
    given = {"0.weight": torch.ones(2, 3)}
    moved = funcga.trees.match(given, {"0": {"kernel": np.zeros((3, 2)), "name": "a"}}, rules=torch_to_flax)
    assert moved["0"]["name"] == "a"
    assert type(moved["0"]["kernel"]) is np.ndarray
    moved["0"]["kernel"] += 1
    assert given["0.weight"].sum() == 6


def refusal(call):
    with pytest.raises(funcga.FuncgaError) as raised:
        call()
    return str(raised.value)


def test_missing_and_new_paths_are_named():
    like = {"Dense_0": {"kernel": jnp.ones((2, 2))}, "Dense_1": {"kernel": jnp.ones((2, 2))}}
    given = {"Dense_O": {"kernel": np.ones((2, 2))}, "Dense_1": {"kernel": np.ones((2, 2))}}
    assert refusal(lambda: funcga.trees.match(given, like)) == (
        "the trees have different leaves: in tree, missing `Dense_0.kernel`, new `Dense_O.kernel`. Say what is called what: "
        r"rules=[funcga.trees.Rule(r'fc1\.(.*)', r'Dense_0.\1'), *funcga.trees.torch_to_flax]."
    )
    many = {f"x{k}": jnp.ones(1) for k in range(10)}
    assert "and 6 more, new nothing" in refusal(lambda: funcga.trees.match({}, many))


def test_shapes_that_do_not_fit():
    text = refusal(lambda: funcga.trees.match({"w": np.ones((2, 3), "float32")}, {"w": jnp.ones((3, 2))}))
    assert text == (
        "`w` is float32[2, 3] and `w` of `like` is float32[3, 2]: the shapes differ, and nothing is reshaped. If the axes "
        "are permuted, put funcga.trees.Rule(r'w', r'w', axes='oi->io') before the other rules; else make `like` of a model "
        "of the same sizes."
    )
    rule = eval(text[text.index("funcga.trees.Rule") : text.index(" before")])
    assert funcga.trees.match({"w": np.ones((2, 3))}, {"w": torch.ones(3, 2)}, rules=[rule])["w"].shape == (3, 2)


def test_axes_may_be_a_function_and_compare_says_both_names():
    """What no permutation can do: heads in axes of their own."""
    w = array(6, 4)
    heads = Rule(r"q\.weight", r"query.kernel", axes=lambda weight: weight.T.reshape(4, 2, 3))
    moved = funcga.trees.match({"q.weight": w}, {"query": {"kernel": jnp.zeros((4, 2, 3))}}, rules=[heads])
    np.testing.assert_array_equal(moved["query"]["kernel"][1, 1], w[3:, 1])
    report = funcga.compare({"q": {"weight": w}}, moved, rules=[heads])
    assert report.ok
    assert "query.kernel (q.weight)" in str(report)


def with_axes(axes, shape=(2, 3)):
    return funcga.compare({"a": np.ones(shape)}, {"b": np.ones(3)}, rules=[Rule("a", "b", axes=axes)])


REFUSED = [
    (lambda: right_of(["a", "b"], ["c"], [Rule("[ab]", "c")]), "`a` and `b` of the left tree are both `c` by these rules. Make a "
     "pattern narrower, so that each leaf has a path of its own."),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "error"), [
    (("(", "b"), re.error),
    (("a", r"\1"), re.error),
    (("a", "b", (0, 2)), ValueError),
    (("a", "b", (0.0, 1.0)), TypeError),
    (("a", "b", (1, 0, 2)), ValueError),
    (("a", "b", "oihw"), KeyError),
    (("a", "b", lambda a: 1 / 0), ZeroDivisionError),
])  # fmt: skip
def test_what_python_and_numpy_refuse_of_rules(rule, error):
    with pytest.raises(error):
        funcga.compare({"a": np.ones((2, 3))}, {"b": np.ones(3)}, rules=[Rule(*rule)])


def test_a_function_that_returns_no_array_makes_nothing_close():
    assert not with_axes(lambda a: None).ok


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_rules_cannot_do(call, text):
    assert text in refusal(call)
