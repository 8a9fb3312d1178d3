"""How arguments are read and cut: the plan of the micro-batches, axes as in vmap, names for messages."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funcga
from funcga.arguments import CARRY, argument_names, groups, read_arguments, starts


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
    assert arguments.state()[0] is x


def test_one_axis_for_all(kit):
    x = kit.arrays(np.ones((4, 2), "float32"))
    assert read(kit, (x, x), 0).rows() == 4
    assert read(kit, (x, x), -1).rows() == 2


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
