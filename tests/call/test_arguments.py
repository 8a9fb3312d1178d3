"""How arguments are read: lists of examples or of parts, and names for messages."""

import functools
import re

import numpy as np
import pytest
import torch

import funcga


def test_what_is_whole_is_not_rebuilt():
    params, seen = {"w": torch.ones(6), "f": object()}, []
    funcga.accumulate(lambda params, x: seen.append(params) or x.sum(), 2)(params, torch.ones(6))
    assert all(each is params for each in seen)


# Lists: of the parts of a batch, as a DataLoader makes them, or of examples


def arrays_of(kit, *shapes, dtype="float32"):
    return [kit.arrays(np.ones(shape, dtype)) for shape in shapes]


IMAGES = [(3, 8, 8)] * 5
EXAMPLES = {
    "images": lambda kit: ({"images": arrays_of(kit, *IMAGES)},),
    "images in a list": lambda kit: (arrays_of(kit, *IMAGES),),
    "examples with an image": lambda kit: ([{"image": image} for image in arrays_of(kit, *IMAGES)],),
    "tokens": lambda kit: ({"tokens": arrays_of(kit, (7,), (7,))},),
    "images and as many boxes in each": lambda kit: (
        arrays_of(kit, (6, 3))[0],
        [{"boxes": boxes} for boxes in arrays_of(kit, *[(6, 4)] * 6)],
    ),
}
PARTS = {
    "layers with states beside tokens": lambda kit: (
        {"x": arrays_of(kit, (6, 4))[0], "layers": [{"state": state} for state in arrays_of(kit, *[(6, 4)] * 5)]},
    ),
    "inputs and labels": lambda kit: (arrays_of(kit, (6, 3), (6,)),),
    "tokens, mask and labels": lambda kit: (arrays_of(kit, (2, 9), (2, 9), (2, 9), dtype="int32"),),
    "many views": lambda kit: (arrays_of(kit, *[(16, 3, 8, 8)] * 10),),
    "views and labels": lambda kit: (arrays_of(kit, (6, 3, 8, 8), (6, 3, 8, 8)), *arrays_of(kit, (6,))),
    "layers beside tokens": lambda kit: (
        {"x": arrays_of(kit, (6, 4))[0], "hidden": arrays_of(kit, *[(6, 4, 5)] * 12)},
    ),
    "pairs of pairs": lambda kit: ([arrays_of(kit, (6, 3), (6, 3)), arrays_of(kit, (6, 2), (6, 2))],),
    "a tuple": lambda kit: ({"x": tuple(arrays_of(kit, *IMAGES))},),
    "parts of several kinds": lambda kit: ({"x": arrays_of(kit, (6, 3), (6,))},),
}


UNEVEN = {
    "images and boxes": lambda kit: (arrays_of(kit, *IMAGES), [{"boxes": b} for b in arrays_of(kit, (2, 4), (1, 4))]),
    "tokens of several lengths": lambda kit: (arrays_of(kit, (7,), (5,), (6,)),),
}


@pytest.mark.parametrize("name", [*EXAMPLES, *UNEVEN])
def test_a_list_of_examples_is_refused(kit, name):
    batch = {**EXAMPLES, **UNEVEN}[name](kit)
    text = "different numbers of rows" if name in UNEVEN else "a list of .* these look like examples"
    gradient = lambda params, *batch: params
    params = kit.arrays(np.ones(2, "float32"))
    with pytest.raises(funcga.FuncgaError, match=text):
        funcga.accumulate(gradient, 1)(params, *batch)
    with pytest.raises(funcga.FuncgaError, match=text):
        funcga.stream(gradient)(params, [batch])
    assert kit.numpy(funcga.stream(gradient, weight=lambda *batch: 2)(params, [batch])).tolist() == [1, 1]


def test_what_is_said_of_a_list_of_examples(kit):
    batch, params = {"images": arrays_of(kit, *IMAGES)}, kit.arrays(np.ones(2, "float32"))
    step = funcga.accumulate(lambda params, batch: params, 2)
    with pytest.raises(funcga.FuncgaError) as caught:
        step(params, batch)
    assert str(caught.value) == (
        "a list of 5 arrays is split: axis 0 of each would be taken for the rows, and these look like examples. If they are, "
        "stack them, or stream micro-batches with weight=. If axis 0 is the rows, make it a tuple."
    )
    assert kit.numpy(step(params, {"images": tuple(batch["images"])})).tolist() == [1, 1]
    by_key = funcga.accumulate(lambda params, batch: params, 2, in_axes=(None, {"images": 0}))
    assert kit.numpy(by_key(params, batch)).tolist() == [1, 1]


@pytest.mark.parametrize("name", PARTS)
def test_a_list_of_parts_is_split(kit, name):
    batch = PARTS[name](kit)
    rows = kit.backend.trees.flatten(batch)[0][0].shape[0]
    gradient = lambda params, *batch: kit.backend.trees.flatten(batch)[0][0].sum() / rows
    params = kit.arrays(np.ones(2, "float32"))
    for step in (
        funcga.accumulate(gradient, 2, fold=funcga.sum()),
        lambda params, *batch: funcga.stream(gradient, fold=funcga.sum())(params, [batch]),
    ):
        assert float(step(params, *batch)) == pytest.approx(float(gradient(params, *batch)))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda params, batch: 0, "batch"),
        (lambda *batch: 0, "args[1]"),
        (lambda params, *batch: 0, "args[1]"),
        (functools.partial(lambda params, x, y: 0, 1), "y"),
        (funcga.grad(lambda w, data: 0), "data"),
    ],
)
def test_names_of_arguments(function, name):
    with pytest.raises(funcga.FuncgaError, match=re.escape(f"`{name}`")):
        funcga.accumulate(function, 2)(torch.ones(2), torch.ones(()))
