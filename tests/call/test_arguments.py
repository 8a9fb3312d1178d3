"""How arguments are read and cut: the plan of the micro-batches, axes as in vmap, names for messages."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funcga
from funcga._call.arguments import CARRY, argument_names, groups, read_arguments, starts


@given(st.integers(1, 200), st.data())
def test_n_microbatches_differ_by_at_most_one_row(rows, data):
    n = data.draw(st.integers(1, rows))
    sizes = [size for _, size in starts(groups(rows, n, None))]
    assert sizes == [len(part) for part in np.array_split(np.arange(rows), n)]
    assert len(groups(rows, n, None)) <= 2


@given(st.integers(1, 200), st.integers(1, 250))
def test_only_the_last_microbatch_is_smaller(rows, size):
    places = list(starts(groups(rows, None, size)))
    assert [start for start, _ in places] == list(range(0, rows, size))
    assert sum(rows for _, rows in places) == rows
    assert {rows for _, rows in places[:-1]} <= {size}


def read(kit, args, in_axes, function=lambda *args: None):
    return read_arguments(args, in_axes, function, kit.backend)


def test_the_default_passes_the_first_whole(kit):
    x = kit.arrays(np.arange(6.0, dtype="float32"))
    arguments = read(kit, (x, {"a": x}, [x]), None)
    whole, first, second = arguments.cut(2, 3, [])
    assert whole is x
    assert [float(v) for v in first["a"]] == [float(v) for v in second[0]] == [2, 3, 4]
    assert arguments.rows() == 6


def test_what_is_whole_is_not_rebuilt(kit):
    x = kit.arrays(np.ones(6, "float32"))
    params = {"w": x, "f": object()}
    assert read(kit, (params, x), None).cut(0, 2, [])[0] is params


def test_trees_of_axes(kit):
    x = kit.arrays(np.arange(12, dtype="float32").reshape(3, 4))
    arguments = read(kit, ({"x": x, "y": [x, None]}, x), ({"x": 1, "y": 1}, CARRY))
    cut, state = arguments.cut(1, 2, ["state"])
    assert (cut["x"].shape, cut["y"][0].shape, cut["y"][1], state) == ((3, 2), (3, 2), None, "state")
    assert arguments.rows() == 4
    assert arguments.state[0] is x


def test_one_axis_for_all(kit):
    x = kit.arrays(np.ones((4, 2), "float32"))
    assert read(kit, (x, x), 0).rows() == 4
    assert read(kit, (x, x), -1).rows() == 2


# Lists: of the parts of a batch, as a DataLoader makes them, or of examples


def arrays_of(kit, *shapes, dtype="float32"):
    return [kit.arrays(np.ones(shape, dtype)) for shape in shapes]


IMAGES = [(3, 8, 8)] * 5
EXAMPLES = {
    "images": lambda kit: ({"images": arrays_of(kit, *IMAGES)},),
    "images of several sizes": lambda kit: ({"images": arrays_of(kit, (3, 8, 8), (3, 6, 9))},),
    "images in a list": lambda kit: (arrays_of(kit, *IMAGES),),
    "images and masks": lambda kit: ({"images": arrays_of(kit, *IMAGES), "masks": arrays_of(kit, *IMAGES)},),
    "images and boxes": lambda kit: (arrays_of(kit, *IMAGES), [{"boxes": b} for b in arrays_of(kit, (2, 4), (1, 4))]),
    "examples with an image": lambda kit: ([{"image": image} for image in arrays_of(kit, *IMAGES)],),
    "tokens": lambda kit: ({"tokens": arrays_of(kit, (7,), (7,))},),
    "tokens of several lengths": lambda kit: (arrays_of(kit, (7,), (5,), (6,)),),
}
PARTS = {
    "inputs and labels": lambda kit: (arrays_of(kit, (6, 3), (6,)),),
    "inputs and targets alike": lambda kit: (arrays_of(kit, (6, 3), (6, 3)),),
    "tokens, mask and labels": lambda kit: (arrays_of(kit, (2, 9), (2, 9), (2, 9), dtype="int32"),),
    "views": lambda kit: (arrays_of(kit, (6, 3, 8, 8), (6, 3, 8, 8)),),
    "many views": lambda kit: (arrays_of(kit, *[(16, 3, 8, 8)] * 10),),
    "views and labels": lambda kit: (arrays_of(kit, (6, 3, 8, 8), (6, 3, 8, 8)), *arrays_of(kit, (6,))),
    "layers beside tokens": lambda kit: (
        {"x": arrays_of(kit, (6, 4))[0], "hidden": arrays_of(kit, *[(6, 4, 5)] * 12)},
    ),
    "pairs of pairs": lambda kit: ([arrays_of(kit, (6, 3), (6, 3)), arrays_of(kit, (6, 2), (6, 2))],),
    "a list of one": lambda kit: ({"x": arrays_of(kit, (6, 3))},),
    "a tuple": lambda kit: ({"x": tuple(arrays_of(kit, *IMAGES))},),
    "a tuple of parts": lambda kit: (tuple(arrays_of(kit, (6, 3), (6, 3))),),
    "dicts of parts": lambda kit: ([{"ids": a} for a in arrays_of(kit, (6, 3), (6, 3))],),
    "parts of several kinds": lambda kit: ({"x": arrays_of(kit, (6, 3), (6,))},),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_list_of_examples_is_refused(kit, name):
    batch = EXAMPLES[name](kit)
    gradient = lambda params, *batch: params
    params = kit.arrays(np.ones(2, "float32"))
    with pytest.raises(funcga.FuncgaError, match=r"is a list of .* these look like examples"):
        funcga.accumulate(gradient, 1)(params, *batch)
    with pytest.raises(funcga.FuncgaError, match=r"is a list of .* these look like examples"):
        funcga.stream(gradient)(params, [batch])
    assert kit.numpy(funcga.stream(gradient, weight=lambda *batch: 2)(params, [batch])).tolist() == [1, 1]


@pytest.mark.parametrize(
    "gradient", [lambda params, batch: params, funcga.grad(lambda params, batch: params.sum())], ids=["any", "grad"]
)
def test_what_is_said_of_a_list_of_examples(kit, gradient):
    batch = {"images": arrays_of(kit, *IMAGES)}
    with pytest.raises(funcga.FuncgaError) as caught:
        funcga.accumulate(gradient, 2)(kit.arrays(np.ones(2, "float32")), batch)
    assert str(caught.value) == (
        "`batch['images']` is a list of 5, the first float32[3, 8, 8]: axis 0 of each would be taken for the rows, and "
        "these look like examples. If they are, stack them, or stream micro-batches of them with weight=lambda batch: "
        "len(batch['images']). If axis 0 is the rows, say so: in_axes=(None, 0)."
    )
    assert kit.numpy(
        funcga.accumulate(lambda params, batch: params, 2, in_axes=(None, 0))(kit.arrays(np.ones(2, "float32")), batch)
    ).tolist() == [1, 1]


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


def test_weight_gets_the_split_ones(kit):
    x = kit.arrays(np.ones(4, "float32"))
    arguments = read(kit, (x, x, x), (None, 0, CARRY))
    assert arguments.split_args(("a", "b", "c")) == ["b"]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda params, batch: 0, ["params", "batch", "args[2]"]),
        (lambda *batch: 0, ["args[0]", "args[1]", "args[2]"]),
        (lambda params, *batch: 0, ["params", "args[1]", "args[2]"]),
        (functools.partial(lambda params, x, y: 0, 1), ["x", "y", "args[2]"]),
        (funcga.grad(lambda w, data, mask: 0), ["w", "data", "mask"]),
        (min, ["args[0]", "args[1]", "args[2]"]),
    ],
)
def test_names(function, names):
    assert argument_names(function, 3) == names
