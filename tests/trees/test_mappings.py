"""Mappings and dataclasses as batches: what tokenizers return, and what people write, in both frameworks."""

import collections
import dataclasses
import types

import numpy as np
import pytest

import funcga
from tests.kits import JAX, LIMITS, TORCH, difference

transformers = pytest.importorskip("transformers")


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
    "UserDict": collections.UserDict,
    "MappingProxyType": types.MappingProxyType,
    "ChainMap": collections.ChainMap,
    "defaultdict": lambda data: collections.defaultdict(int, data),
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


# --- dataclasses, as they are


@dataclasses.dataclass
class Batch:
    x: object
    y: object


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    y: object = None


@dataclasses.dataclass
class Checked:
    """It looks at its fields, changes one, computes one, and has more than its fields."""

    x: object
    y: object
    positive: object = dataclasses.field(init=False)

    def __post_init__(self):
        assert self.x.shape[0] == len(self.y)
        self.positive = self.y > 0
        self.y = self.y + 1
        self.rows = len(self.y)


@dataclasses.dataclass(frozen=True)
class Config:
    """No arrays: a setting."""

    rate: float = 0.5


def registered(kind):
    """The same known to JAX, by JAX itself or by equinox."""
    jax, equinox = (pytest.importorskip(name) for name in ("jax", "equinox"))
    if kind == "equinox":
        return type("Module", (equinox.Module,), {"__annotations__": {"x": object, "y": object}})
    return jax.tree_util.register_dataclass(dataclasses.make_dataclass("Registered", ["x", "y"]), ["x", "y"], [])


def of_fields(params, batch):
    return ((batch.x @ params["w"] - batch.y) ** 2).mean()


@pytest.mark.parametrize("kit", [TORCH, JAX], ids=["torch", "jax"])
@pytest.mark.parametrize("kind", [Batch, Frozen, Checked, "register_dataclass", "equinox"])
def test_a_dataclass_is_a_batch(kind, kit):
    if isinstance(kind, str):
        if kit is TORCH:
            pytest.skip("of JAX")
        kind = registered(kind)
    params, _, data = problem(kit, dict)
    batch, seen = kind(data["x"], data["y"]), []
    values = {"x": batch.x, "y": batch.y}

    def loss(params, batch):
        seen.append(batch)
        return of_fields(params, batch)

    gradient, weight = funcga.value_and_grad(loss), lambda batch: (batch.y > 0).sum()
    expected = funcga.accumulate(funcga.value_and_grad(loss_fn([])), 4, weight=lambda b: (b["y"] > 0).sum())(
        params, values
    )
    found = funcga.accumulate(gradient, 4, weight=weight)(params, batch)
    assert difference(kit, found, expected) <= LIMITS["float32"]
    assert {type(each) for each in seen} == {kind}
    assert batch.x is data["x"]
    if kind is Checked:  # what it has beside its fields is of the micro-batch
        assert {each.rows for each in seen} == {3}
    cut = lambda i: {name: value[i : i + 3] for name, value in data.items()}
    items = [kind(**cut(i)) for i in range(0, 12, 3)]
    assert difference(kit, funcga.stream(gradient, weight=weight)(params, iter(items)), expected) <= LIMITS["float32"]
    if kind is not Checked:
        axes = funcga.accumulate(gradient, 4, weight=weight, in_axes=(None, kind(0, 0)))
        assert difference(kit, axes(params, batch), expected) <= LIMITS["float32"]
    if kit is TORCH or kind is Batch:
        assert funcga.verify(funcga.value_and_grad(of_fields), params, batch, n=4).ok


@pytest.mark.parametrize("kit", [TORCH, JAX], ids=["torch", "jax"])
def test_a_dataclass_without_arrays_is_a_setting(kit):
    params, batch, _ = problem(kit, dict)
    config, seen = Config(), []

    def loss(params, batch, config, other):
        seen.extend([config, other])
        return config.rate * loss_fn([])(params, batch)

    step = funcga.accumulate(funcga.grad(loss), 4, in_axes=(None, 0, None))
    step(params, batch, config, other=config)
    assert all(each is config for each in seen)
    with pytest.raises(funcga.FuncgaError, match=r"`config` is of type Config: it has no axis 0 to split"):
        funcga.accumulate(funcga.grad(loss), 4)(params, batch, config, other=config)


def test_dataclasses_everywhere_in_torch():
    """As parameters, in other containers, beside the loss, converted, and in a module's own gradient."""
    import torch

    import torch_backend

    params, _, data = problem(TORCH, dict)
    batch = {"deep": [Batch(data["x"], None), Frozen(data["y"])]}
    aux = lambda p, b: (of_fields({"w": p.x}, Batch(b["deep"][0].x, b["deep"][1].x)), Frozen(b["deep"][1].x, None))
    fold = ((funcga.mean(), Frozen(funcga.concat(), funcga.concat())), funcga.mean())
    step = funcga.accumulate(funcga.value_and_grad(aux, has_aux=True), 4, fold=fold)
    (value, more), grads = step(Frozen(params["w"], None), batch)
    expected = funcga.accumulate(funcga.value_and_grad(loss_fn([])), 4)(params, data)
    assert (type(more), type(grads)) == (Frozen, Frozen)
    assert torch.equal(more.x, data["y"])
    assert difference(TORCH, (value, {"w": grads.x}), expected) <= LIMITS["float32"]
    module = torch.nn.Linear(3, 1)
    own = torch_backend.module_value_and_grad(module, lambda m, b: ((m(b.x)[:, 0] - b.y) ** 2).mean())
    of_dict = torch_backend.module_value_and_grad(module, lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2).mean())
    found = funcga.accumulate(own, 4)(Batch(**data))
    assert difference(TORCH, found, funcga.accumulate(of_dict, 4)(data)) == 0
    with pytest.raises(funcga.FuncgaError, match=r"`b\.x` has 12 .*`b\.y` has 11"):
        funcga.accumulate(own, 4)(Batch(data["x"], data["y"][:11]))
    with pytest.raises(funcga.FuncgaError, match="in_axes is no prefix"):
        funcga.accumulate(own, 4, in_axes=({"x": 0},))(Batch(**data))


def test_what_jax_does_not_know_is_refused_where_it_traces():
    params, _, data = problem(JAX, dict)
    aux = lambda p, b: (loss_fn([])(p, b), Batch(b["x"].sum(), None))
    with pytest.raises(TypeError, match=r"Batch.* not a valid JAX type"):
        funcga.accumulate(funcga.value_and_grad(aux, has_aux=True), 4)(params, data)
    with pytest.raises(TypeError, match="Batch"):
        funcga.accumulate(funcga.grad(lambda p, b: loss_fn([])({"w": p.x}, b)), 4)(Batch(params["w"], None), data)
    aux = lambda p, b: (loss_fn([])(p, b), collections.UserDict(x=b["x"].sum()))
    with pytest.raises(TypeError, match=r"UserDict.* not a valid JAX type"):
        funcga.accumulate(funcga.value_and_grad(aux, has_aux=True), 4)(params, data)
