"""`compare`: the numbers of a leaf, the limits and their reasons, and that a report says what it found."""

import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import funcga
from funcga.tools.compare import row as differences
from funcga.tools.compare import tolerances
from tests import problems

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


def native(dtype):
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def rng_array(seed, *shape, dtype="float32"):
    return problems.rng(seed).normal(size=shape).astype(native(dtype))


def only(left, right, **options):
    (found,) = funcga.compare(left, right, **options).rows
    return found


def row(path, left, right, limit=None):
    return only(left, right, rtol=limit)


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulps_count_the_floats_between(dtype):
    """Against the list of all floats in their order, which is short enough in 16 bits; neighbours elsewhere."""
    of = native(dtype)
    if of.itemsize <= 2:
        every = np.arange(2 ** (8 * of.itemsize), dtype=f"uint{8 * of.itemsize}").view(of)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            wide = every.astype("float64")
        values = np.unique(wide[np.isfinite(wide)])
        for a, b in ((0, -1), (3, 4), (len(values) // 2, len(values) // 2 + 9)):
            pair = values[[a, b]].astype(of)
            assert row("", pair[:1], pair[1:]).ulps == abs(b % len(values) - a)
    else:
        one = np.ones(1, of)
        assert row("", one, np.nextafter(one, of.type(2))).ulps == 1
        assert row("", -np.nextafter(0 * one, one), np.nextafter(0 * one, one)).ulps == 2
    assert row("", np.array([-0.0], of), np.array([0.0], of)).ulps == 0


def test_numbers_are_those_of_float64_mathematics(monkeypatch):
    monkeypatch.setattr(differences, "CHUNK", 7)
    left, right = rng_array(0, 5, 4), rng_array(1, 5, 4)
    a, b = left.astype("float64"), right.astype("float64")
    found = row("w", left, right)
    assert found.absolute == np.abs(a - b).max()
    assert found.relative == np.abs(a - b).max() / np.abs(b).max()
    assert found.index == np.unravel_index(np.abs(a - b).argmax(), a.shape)
    assert found.values == (left[found.index], right[found.index])
    np.testing.assert_allclose(found.cosine, (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()), rtol=1e-14)
    transposed = row("w", left.T, right.T)
    assert (transposed.absolute, transposed.index) == (found.absolute, found.index[::-1])


@pytest.mark.parametrize(("left", "right", "apart"), [
    (np.uint64(2**64 - 1), -1, 2.0**64),
    (np.uint64(2**64 - 1), np.uint64(2**64 - 2), 1),
    (2**53 + 1, 2.0**53, 1),
    (2.0**53, np.uint64(2**53 + 1), 1),
    (2**53 + 1, complex(2**53), 1),
    (np.uint64(2**64 - 1), 2.0**64, 1),
    (np.int8(-1), np.uint8(255), 256),
    (True, -1, 2),
    (np.int64(-(2**63)), np.int64(2**63 - 1), 2.0**64),
    (np.int8(126), np.int8(127), 1),
])  # fmt: skip
def test_integers_are_exact_beside_other_dtypes(left, right, apart):
    for a, b in ((left, right), (right, left)):
        found = only(a, b, check_dtype=False)
        assert (found.absolute, found.status == "equal") == (apart, False)
    assert only(2**53, 2.0**53, check_dtype=False).status == "equal"
    assert only(np.int64(2**63 - 1), np.int64(2**63 - 1)).status == "equal"


NAN, MOST = np.array([1, np.nan, 3], "float32"), np.finfo("float64").max
COMPLEX = np.array([1 + 1j, complex(np.inf, 1)])
ROWS = [
    (2**64, 2**64, {}, {"status": "equal"}),
    (2**64, 2**64 + 1, {}, {"status": "beyond"}),
    (2**64, 1, {}, {"status": "dtype"}),
    (NAN, NAN, {}, {"status": "nan", "nans": (1, 1), "index": (1,)}),
    (NAN, np.array([1, 2, 3], "float32"), {"rtol": 1e9}, {"status": "nan"}),
    (np.array([-MOST]), np.array([MOST]), {}, {"ulps": 2 * float(np.array(MOST).view("int64")), "status": "beyond"}),
    (COMPLEX, COMPLEX + np.array([0.5j, 0]), {}, {"absolute": 0.5, "values": (1 + 1j, 1 + 1.5j), "ulps": None}),
    (COMPLEX, COMPLEX + np.array([0, 1j]), {}, {"status": "inf"}),
    (np.zeros((0, 3)), np.zeros((0, 3)), {}, {"status": "equal"}),
    (np.zeros(2), np.zeros(2), {}, {"relative": 0}),
    (np.ones(2), np.zeros(2), {}, {"relative": math.inf, "status": "beyond", "cosine": None}),
    (np.ones(2), np.zeros(2), {"atol": 1.0}, {"status": "within"}),
    (np.float32(2.5), np.float32(2), {}, {"index": (), "values": (2.5, 2), "absolute": 0.5}),
    (np.ones(2, "float32"), np.ones(2), {}, {"status": "dtype", "limit": tolerances.limit("float32")}),
    (np.ones(2, "float32"), np.ones(2), {"check_dtype": False}, {"status": "equal"}),
    (np.ones(2, "float32"), np.ones((1, 2), "float32"), {}, {"status": "shape"}),
    (jnp.ones(2), torch.ones(2), {}, {"status": "equal", "path": ""}),
]


@pytest.mark.parametrize(("left", "right", "options", "expected"), ROWS)
def test_what_a_row_says(left, right, options, expected):
    found = only(left, right, **options)
    assert {name: getattr(found, name) for name in expected} == expected


def test_infinities_match_by_sign_and_place():
    inf = np.array([np.inf, -np.inf, 3], "float32")
    assert row("", inf, inf).status == "equal"
    assert row("", inf, inf + np.array([0, 0, 1e-7], "float32")).ok
    for other in ([-np.inf, -np.inf, 3], [np.inf, 5, 3], [np.inf, -np.inf, np.inf]):
        found = row("", inf, np.array(other, "float32"), limit=1e9)
        assert (found.status, found.absolute) == ("inf", math.inf)
        assert found.values[0] != found.values[1]


def test_limits_come_from_the_dtype_and_the_sum():
    assert tolerances.limit("float32") == 4 * 2**-23 * 16
    assert tolerances.limit("float64", 10_000) == 4 * 2**-52 * 100
    assert tolerances.limit("bfloat16") == 4 * 2**-7 * math.sqrt(32) == tolerances.limit("bfloat16", 10**6)
    assert tolerances.limit("float16", 10**12) == 4 * 2**-23 * 10**6
    assert tolerances.limit("float8_e4m3fn") == tolerances.limit("float8_e5m2") == tolerances.MOST < 1
    assert tolerances.limit("int32") == tolerances.limit("bool") == 0
    for dtype in FLOATS:
        assert tolerances.epsilon(dtype) == float(ml_dtypes.finfo(native(dtype)).eps)


def test_the_report_says_where_its_limits_come_from():
    tree = {"w": np.ones(2, "float32"), "h": np.ones(2, native("bfloat16")), "n": np.arange(2)}
    assert funcga.compare(tree, tree, atol=1e-9).tolerance == (
        "rel may be, by dtype: float32 7.6e-06 (4 eps x sqrt(256) terms); bfloat16 0.18 (4 eps x sqrt(32) operations); "
        "int64 0 (exact), and abs 1e-09 more."
    )
    assert "float32 4.8e-06 (4 eps x sqrt(100) terms)" in funcga.compare(tree, tree, reduction=100).tolerance
    assert tolerances.reason("float16", 2**24 * 10**6) == (
        "float16 0.5 (the most, as 4 eps x sqrt(16777216000000) terms in float32 is more)"
    )
    assert funcga.compare(tree, tree, rtol=0.001).tolerance == "rel may be 0.001, as rtol= says."


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_real_difference_is_found_and_rounding_is_not(dtype):
    """Sums in another order are close; one term of 256 that is missing, or one step in bfloat16, is not."""
    x = problems.rng(0).uniform(0.5, 1, size=(256, 8)).astype(dtype)
    forward, backward = np.zeros(8, dtype), np.zeros(8, dtype)
    for a, b in zip(x, x[::-1], strict=True):
        forward, backward = forward + a, backward + b
    assert only(forward, backward).status == "within"
    assert only(forward - x[0], backward).status == "beyond"
    assert only(forward.astype(ml_dtypes.bfloat16).astype(dtype), backward).status == "beyond"


def test_trees_match_by_path_whatever_holds_them():
    w, b = rng_array(0, 3, 2), rng_array(1, 2)
    nested = {"hidden": {"weight": w, "bias": b}, "layers": [{"b": b}, (b, None)]}
    flat = {"layers.1.0": b, "layers.0.b": b, "hidden.bias": b, "hidden.weight": w}
    right = funcga.to_jax(nested)
    report = funcga.compare(funcga.to_torch(flat), right)
    assert report.ok
    assert [row.path for row in report.rows] == ["hidden.weight", "hidden.bias", "layers.0.b", "layers.1.0"]
    assert {row.status for row in report.rows} == {"equal"}
    assert funcga.compare(right, flat).ok
    assert funcga.compare(flat, {**flat, "other": None}).ok


def test_equinox_modules_and_their_static_fields():
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    left = {f"layers.{k}.{name}": funcga.to_torch(getattr(layer, name)) for k, layer in enumerate(model.layers) for name in ("weight", "bias")}  # fmt: skip
    assert funcga.compare(left, model).ok
    assert [row.path for row in funcga.compare(left, model).rows][:2] == ["layers.0.weight", "layers.0.bias"]


def test_flax_states():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    left = {"kernel": model.kernel[...], "bias": model.bias[...]}
    for right in (nnx.state(model), nnx.to_pure_dict(nnx.state(model))):
        report = funcga.compare(left, right)
        assert report.ok
        assert [row.path for row in report.rows] == ["bias", "kernel"]


def test_missing_and_extra_leaves():
    a = np.ones(2, "float32")
    report = funcga.compare({"a": a, "new": a}, {"z": a, "a": a}, names=("torch", "jax"))
    assert [(row.path, row.status, row.shapes) for row in report.rows] == [
        ("z", "missing", (None, (2,))), ("a", "equal", ((2,), (2,))), ("new", "extra", ((2,), None))
    ]  # fmt: skip
    assert not report.ok
    assert report.verdict == "2 of 3 leaves of torch and jax are not close; `z` is missing in torch."
    assert "`a` is in torch alone" in funcga.compare({"a": a}, {}, names=("torch", "jax")).verdict


def test_numbers_and_other_leaves():
    assert funcga.compare({"a": 1.5, "name": "adam"}, {"a": 1.5, "name": "adam"}).ok
    assert only(1, 2).absolute == 1
    found = only("adam", "sgd")
    assert (found.status, found.values) == ("beyond", ("'adam'", "'sgd'"))
    assert only("1", b"1").status == "dtype"
    assert only(torch.ones((), requires_grad=True), np.float32(1)).status == "equal"


def test_arrays_of_texts_and_dates_are_equal_or_not():
    texts, dates = np.array(["a", "b"]), np.array(["2020-01-01", "2021-01-01"], "datetime64[D]")
    for array, other in (
        (texts, ["a", "bc"]),
        (dates, ["2020-01-01", "2021-01-02"]),
        (texts.astype("S"), [b"a", b"c"]),
    ):
        assert only(array, array.copy()).status == "equal"
        found = only(array, np.array(other, array.dtype.kind if array is not dates else array.dtype))
        assert (found.status, found.index) == ("beyond", (1,))
        assert str(only(array, array[:1]).status) == "shape"
    assert found.values == ("b'b'", "b'c'")
    assert only(texts, texts.astype("S")).status == only(dates, dates.astype("datetime64[s]")).status == "dtype"
    assert only(texts, np.ones(2)).status == "dtype"
    assert only(dates, dates.astype("datetime64[s]"), check_dtype=False).status == "equal"
    assert only(np.array("a"), np.array("b")).index == ()
    assert "! beyond" in str(funcga.compare(texts, np.array(["a", "c"])))


def test_arrays_of_objects_and_structured_ones_are_equal_or_not():
    structured = np.array([(1, 2), (3, 4)], "f4, i4")
    for array in (structured, np.array([1, "a"], object), np.zeros(2, "V3")):
        assert only(array, array.copy()).status == "equal"
    assert only(structured, structured[::-1]).status == "beyond"
    assert only(np.array([1, "a"], object), np.array([1, "b"], object)).index == (1,)


def test_where_nothing_is_compared_nothing_is_close():
    left_out = [funcga.trees.Rule(".*", None)]
    for report in (
        funcga.compare({}, {}),
        funcga.compare({"p": None}, {"q": None}),
        funcga.compare({"p": np.ones(2)}, {}, rules=left_out),
    ):
        assert (report.ok, report.worst) == (False, None)
        with pytest.raises(AssertionError) as raised:
            report.assert_close()
        assert str(raised.value) == report.verdict
    assert report.verdict == ("Nothing was compared: left and right have no leaves, or only what the rules leave out.")


def mixed_report():
    a = rng_array(0, 3, 2)
    right = {"same": a, "close": a, "far": a, "farther": a, "nan": a, "shape": a, "inf": a, "lost": a}
    nan, far = a.copy(), a.copy()
    nan[2, 1], far[1, 0] = np.nan, a[1, 0] + 0.5
    left = {"same": a, "close": a * np.float32(1 + 2e-7), "far": far, "farther": a + 10, "nan": nan, "shape": a[0], "inf": a / 0}  # fmt: skip
    return funcga.compare(left, right)


@pytest.fixture(name="mixed")
def mixed_fixture():
    with np.errstate(divide="ignore"):
        return mixed_report()


def test_the_worst_is_what_is_furthest_from_its_limit(mixed):
    a = rng_array(0, 3)
    expected = ["equal", "within", "beyond", "beyond", "nan", "shape", "inf", "missing"]
    assert [row.status for row in mixed.rows] == expected
    assert mixed.worst.status in ("nan", "shape", "inf", "missing")
    assert funcga.compare({"a": a + 1, "b": a + 2}, {"a": a, "b": a}).worst.path == "b"
    bad = {"a": a + np.float32(0.01), "b": a.astype("bfloat16") + native("bfloat16").type(0.25)}
    assert funcga.compare(bad, {"a": a, "b": a.astype("bfloat16")}).worst.path == "a"  # a smaller limit


def test_atol_is_part_of_the_limit_that_is_told():
    right = {"w": np.array([4.0]), "b": np.array([1e-9]), "zeros": np.zeros(1)}
    left = {"w": np.array([4 + 2e-14]), "b": np.array([1.5e-9]), "zeros": np.array([2e-9])}
    report = funcga.compare(left, right, atol=1e-8)
    assert report.verdict.endswith("are close; the worst, `zeros`, has abs 2.0e-9, where 1.0e-8 is the limit.")
    assert [row.allowed for row in report.rows] == pytest.approx([2.5e-9, 10, math.inf])
    assert str(report).splitlines()[2].split()[3:6] == ["5.0e-10", "5.0e-1", "1.0e+01"]
    del left["zeros"], right["zeros"]
    assert funcga.compare(left, right, atol=1e-8).verdict.endswith("`b`, has rel 5.0e-1, where 1.0e+01 is the limit.")
    assert only(left["b"], right["b"]).allowed == tolerances.limit("float64")


def test_assert_close_shows_the_worst_leaves(mixed):
    assert funcga.compare(np.ones(2), np.ones(2)).assert_close() is None
    with pytest.raises(AssertionError) as raised:
        mixed.assert_close()
    message = str(raised.value)
    assert message.startswith("6 of 8 leaves of left and right are not close; `nan` has NaN: 1 and 0.\nrel may be, by")
    assert "4 eps x sqrt(256) terms" in message
    assert [line.split()[0] for line in message.splitlines()[3:]] == ["nan", "shape", "inf", "lost", "farther", "far"]
    far = next(line for line in message.splitlines() if line.startswith("far "))
    assert "[1, 0]: " in far
    assert far.endswith("! beyond")
    many = {f"w{k}": np.full(2, float(k)) for k in range(1, 12)}
    with pytest.raises(AssertionError, match=r"\n\.\.\. and 3 more$"):
        funcga.compare(many, {name: -array for name, array in many.items()}).assert_close()


def test_the_report_in_text_and_in_a_table(mixed):
    text = str(mixed)
    assert text.splitlines()[0].split()[:8] == ["leaf", "shape", "dtype", "abs", "rel", "limit", "ulps", "cosine"]
    assert len(text.splitlines()) == 1 + 8 + 2
    assert text.endswith(mixed.verdict)
    assert all(row.path in text and row.status in text for row in mixed.rows)
    good = funcga.compare({"a": np.ones(2)}, {"a": np.ones(2)})
    assert (
        good.verdict
        == "1 of 1 leaves of left and right are close; the worst, `a`, has rel 0, where 1.4e-14 is the limit."
    )


def test_the_report_as_json(mixed):
    read = json.loads(json.dumps(mixed.as_dict(), allow_nan=False))
    assert (read["ok"], read["reduction"], read["rtol"]) == (False, 256, None)
    assert read["rows"][0]["shapes"] == [[3, 2], [3, 2]]
    assert read["rows"][4]["absolute"] is None
    assert read["rows"][4]["index"] == [2, 1]
    assert len(read["rows"]) == 8
    pair = funcga.compare(np.array([1j]), np.array([2j])).as_dict()["rows"][0]
    assert pair["values"] == [[0, 1], [0, 2]]


def test_the_picture(mixed, tmp_path):
    pytest.importorskip("matplotlib")
    mixed.plot(tmp_path / "report.svg")
    assert (tmp_path / "report.svg").read_bytes().startswith(b"<?xml")
    funcga.compare({}, {}).plot(tmp_path / "empty.png")
    with pytest.raises(ValueError, match="docx"):
        mixed.plot(tmp_path / "report.docx")


@pytest.mark.parametrize("options", [{"rtol": -1}, {"rtol": math.nan}, {"atol": math.nan}, {"reduction": 0}], ids=str)
def test_no_limit_that_is_none_makes_leaves_close(options):
    assert only(1.0, 1.0 + 1e-9, **options).status == "beyond"


@pytest.mark.parametrize(("tree", "text"), [
    (torch.nn.Linear(1, 1), r"left is a Linear, whose arrays have no paths. .* dict\(module.named_parameters\(\)\) or"),
    ({"m": torch.nn.Linear(1, 1)}, r"`m` of left is a Linear, whose arrays have no paths"),
    (torch.nn.Linear(1, 1).parameters(), r"left is a generator, whose arrays have no paths"),
    ({"m": {"a": 1}.values()}, r"`m` of left is a dict_values, whose arrays have no paths. .* or a list of the items"),
    ({"a.b": 1, "a": {"b": 2}}, "two leaves of left have the path `a.b`, as a key with a dot in it and as nested keys"),
    ({"k": np.ma.array([1.0, 2.0], mask=[0, 1])}, r"`k` is masked, .* Pass x.filled\(0\), or .* x.compressed\(\)"),
    (jax.random.key(0), r"^`the array` is key<fry>\[\], which cannot be converted: .* Use jax.random.key_data\(arr\)"),
    ({"k": jax.ShapeDtypeStruct((2,), "float32")}, r"`k` is float32\[2\], which cannot be converted: it is a shape without numbers"),
    ({"k": torch.ones(2, device="meta")}, r"`k` is float32\[2\], which cannot be converted: Cannot copy out of meta tensor"),
])  # fmt: skip
def test_what_cannot_be_compared(tree, text):
    with pytest.raises(funcga.FuncgaError, match=text):
        funcga.compare(tree, tree)


def test_leaves_that_are_zero_but_for_rounding():
    right = {"w": rng_array(0, 8), "bias": np.full(2, 1e-9, "float32")}
    with pytest.raises(
        AssertionError,
        match=r"\nWhat is not close is 0 except for rounding, beside the largest leaf, .* give atol=\S+\.$",
    ) as raised:
        funcga.compare({**right, "bias": -right["bias"]}, right).assert_close()
    atol = float(str(raised.value).rpartition("atol=")[2].rstrip("."))
    assert funcga.compare({**right, "bias": -right["bias"]}, right, atol=atol).ok
    for wrong in ({**right, "bias": right["bias"] + 1}, {**right, "w": right["w"] * np.float32(1 + 1e-5)}):
        with pytest.raises(AssertionError) as raised:  # the one is no rounding, and the other leaf is not 0
            funcga.compare(wrong, right).assert_close()
        assert "atol=" not in str(raised.value)
