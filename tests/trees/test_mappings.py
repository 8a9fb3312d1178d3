"""Mappings as batches: what tokenizers and feature extractors return, and every other mapping, in both frameworks."""

import collections
import types

import numpy as np
import pytest

import funcga
from funcga._trees.mappings import Kind, rebuilt
from tests.kits import JAX, LIMITS, TORCH, difference

transformers = pytest.importorskip("transformers")


class Attributes(collections.UserDict):
    """As `BatchEncoding`: what it holds is an attribute too."""

    def __getattr__(self, name):
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Strange(collections.abc.Mapping):
    """It is not made of a dict."""

    def __init__(self, x, y):
        self.held = {"x": x, "y": y}

    def __getitem__(self, key):
        return self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


class OfDict(dict):
    pass


class Counted(collections.defaultdict):
    pass


MAPPINGS = {
    "BatchEncoding": transformers.BatchEncoding,
    "BatchFeature": transformers.BatchFeature,
    "UserDict": collections.UserDict,
    "MappingProxyType": types.MappingProxyType,
    "OrderedDict": collections.OrderedDict,
    "ChainMap": collections.ChainMap,
    "defaultdict": lambda data: collections.defaultdict(int, data),
    "a subclass of UserDict": Attributes,
    "a subclass of dict": OfDict,
    "a subclass of defaultdict": lambda data: Counted(int, data),
    "not made of a dict": lambda data: Strange(**data),
}
FALLS_BACK = ("not made of a dict", "a subclass of defaultdict")


def problem(kit, make):
    r = np.random.default_rng(0)
    data = kit.arrays({"y": r.normal(size=(12,)).astype("float32"), "x": r.normal(size=(12, 3)).astype("float32")})
    return kit.arrays({"w": r.normal(size=3).astype("float32")}), make(data), data


def loss_fn(seen):
    def loss(params, batch):
        seen.append(batch)
        return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()

    return loss


@pytest.mark.parametrize("kit", [TORCH, JAX], ids=["torch", "jax"])
@pytest.mark.parametrize("kind", MAPPINGS)
def test_a_mapping_is_a_batch(kind, kit):
    params, batch, data = problem(kit, MAPPINGS[kind])
    seen, weighed = [], []
    weight = lambda batch: (weighed.append(batch), (batch["y"] > 0).sum())[1]
    expected = funcga.accumulate(funcga.value_and_grad(loss_fn([])), 4, weight=weight)(params, data)
    weighed.clear()
    found = funcga.accumulate(funcga.value_and_grad(loss_fn(seen)), 4, weight=weight)(params, batch)
    assert difference(kit, found, expected) <= LIMITS["float32"]
    wanted = dict if kind in FALLS_BACK else type(batch)
    assert {type(b) for b in seen + weighed} == {wanted}
    assert list(seen[0]) == ["y", "x"] or wanted in (dict, collections.OrderedDict, collections.defaultdict)
    items = [MAPPINGS[kind]({k: v[i : i + 3] for k, v in data.items()}) for i in range(0, 12, 3)]
    streamed = funcga.stream(funcga.value_and_grad(loss_fn(seen)), weight=weight)(params, iter(items))
    assert difference(kit, streamed, expected) <= LIMITS["float32"]
    assert batch["x"] is data["x"]


@pytest.mark.parametrize("kit", [TORCH, JAX], ids=["torch", "jax"])
def test_mappings_inside_of_others_and_in_axes(kit):
    params, batch, data = problem(kit, collections.UserDict)
    inner = lambda params, batch, rest: loss_fn([])(params, {"x": batch["deep"][0]["x"], **rest})
    nested = transformers.BatchEncoding({"deep": [types.MappingProxyType({"x": data["x"]})]})
    rest = collections.UserDict({"y": data["y"], "scale": data["y"]})
    step = funcga.accumulate(funcga.grad(inner), 4, in_axes=(None, 0, {"y": 0, "scale": None}))
    expected = funcga.accumulate(funcga.grad(loss_fn([])), 4)(params, data)
    assert difference(kit, step(params, nested, rest), expected) <= LIMITS["float32"]
    with pytest.raises(funcga.FuncgaError, match=r"\['deep'\]\[0\]\['x'\]` has 12 .*\['y'\]` has 11"):
        step(params, nested, collections.UserDict({**rest, "y": data["y"][:11]}))
    with pytest.raises(funcga.FuncgaError, match="one batch, not an iterable of micro-batches"):
        funcga.stream(funcga.grad(loss_fn([])))(params, batch)


def test_a_batch_of_a_tokenizer_has_its_methods():
    torch = pytest.importorskip("torch")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(12).reshape(6, 2), "labels": torch.ones(6)})
    seen = []

    def loss(w, batch):
        seen.append((batch.to("cpu").input_ids.shape, batch.labels.shape, [*batch.keys()]))
        return (w * batch["input_ids"].float()).mean()

    funcga.accumulate(funcga.grad(loss), 3)(torch.ones(()), batch)
    assert seen == [((2, 2), (2,), ["input_ids", "labels"])] * 3


def test_torch_takes_mappings_everywhere():
    """As parameters, beside the loss, threaded, and in a module's own gradient."""
    import torch

    import torch_backend

    params, batch, data = problem(TORCH, transformers.BatchEncoding)
    proxy = types.MappingProxyType(params)
    aux = lambda p, b: (loss_fn([])(p, b), collections.UserDict({"rows": b["y"]}))
    step = funcga.accumulate(
        funcga.value_and_grad(aux, has_aux=True), 4, fold=((funcga.mean(), {"rows": funcga.concat()}), funcga.mean())
    )
    (value, more), grads = step(proxy, batch)
    expected = funcga.accumulate(funcga.value_and_grad(loss_fn([])), 4)(params, data)
    assert (type(grads), type(more)) == (types.MappingProxyType, collections.UserDict)
    assert torch.equal(more["rows"], data["y"])
    assert difference(TORCH, (value, dict(grads)), expected) <= LIMITS["float32"]
    module = torch.nn.Linear(3, 1)
    mse = lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2).mean()
    driven = torch_backend.module_value_and_grad(module, mse)
    found = funcga.accumulate(driven, 4)(batch)
    pure = funcga.accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, mse)), 4)
    other = pure(types.MappingProxyType(dict(module.named_parameters())), batch)
    assert difference(TORCH, found, (other[0], dict(other[1]))) <= LIMITS["float32"]
    torch_backend.assign_grads(module, other[1])
    assert torch.equal(module.weight.grad, other[1]["weight"])


@pytest.mark.parametrize("kit", [TORCH, JAX], ids=["torch", "jax"])
def test_verify_takes_them(kit):
    params, batch, _ = problem(kit, transformers.BatchEncoding)
    assert funcga.verify(funcga.value_and_grad(loss_fn([])), params, batch, n=4).ok


def test_what_cannot_be_rebuilt_is_a_dict():
    class Raises(collections.UserDict):
        def __init__(self, data):
            raise KeyError("mine")

    class Changes(collections.UserDict):
        def __getitem__(self, key):
            return 2 * super().__getitem__(key)

    for kind in (Raises, Changes, Strange, Counted):
        assert type(rebuilt(Kind(kind, ("a", 1)), (1, 2))) is dict
    assert rebuilt(Kind(Changes, ("a", 1)), (1, 2)) == {"a": 1, 1: 2}
