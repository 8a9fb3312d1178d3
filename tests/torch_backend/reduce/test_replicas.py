"""Replicas in torch: real processes, joined by gloo. A window over all of them equals the whole batch on one device."""

import functools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import funcga
from tests import kits
from tests.processes import Failed, processes
from tests.torch_backend.wrapped.test_wrapped import Collectives
from torch_backend import Replicas

TREE = torch.utils._pytree


difference = functools.partial(kits.difference, kits.TORCH)


def problem(dtype=torch.float32):
    """Parameters, and 24 rows with 1 to 8 tokens each."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 30), "b": (30,), "c": (30, 2), "rare": (3,)}
    params = {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in shapes.items()}
    x, y = torch.randn(24, 5, generator=generator, dtype=dtype), torch.randn(24, 2, generator=generator, dtype=dtype)
    return params, x, y, torch.randint(1, 9, (24,), generator=generator)


def tokens_of(x, y, tokens):
    return tokens.sum()


def summed(params, x, y, tokens):
    """A sum over tokens; only rows with many of them use one of the parameters."""
    loss = (((torch.tanh(x @ params["a"] + params["b"]) @ params["c"] - y) ** 2).sum(1) * tokens).sum()
    return loss + (params["rare"].sum() * tokens[tokens > 6].sum() if (tokens > 6).any() else 0)


def averaged(params, x, y, tokens):
    return summed(params, x, y, tokens) / tokens.sum()


def made(across, n=2):
    return funcga.accumulate(funcga.value_and_grad(averaged), n, weight=tokens_of, across=across)


def part(dtype, bounds, rank):
    params, *batch = problem(dtype)
    return params, [x[bounds[rank] : bounds[rank + 1]] for x in batch]


# ------------------------------------------------------------------------------------------------------- other folds


def statistics(params, x, y, tokens):
    predicted = torch.tanh(x @ params["a"] + params["b"]) @ params["c"]
    return {
        "largest": predicted.amax(),
        "least": predicted.amin(0),
        "table": predicted.mean(0)[:, None] * torch.ones(40),  # too large for the tail
        "spread": predicted.mean(),
        "exponentials": 1e4 * predicted.logsumexp(0),
        "rows": predicted,
        "wide": predicted.T.contiguous(),
        "flags": (tokens > 3)[:, None],
        "halves": predicted.bfloat16()[:, ::2],
        "empty": predicted[:0].short(),
        "pairs": torch.complex(predicted, predicted).conj(),
        "count": (tokens > 3).sum(),
        "seen": (tokens > 3).any(),
        "counts": tokens.new_ones(30),
        "sums": predicted.mean(0)[:, None] * torch.ones(40),
        "custom": predicted.abs().sum(0),
        "squares": predicted.mean(0),
        "complex": torch.complex(predicted.sum(0), predicted.sum(0)),
        "nothing": None,
    }


PRODUCT = funcga.Fold(
    funcga.Reducer(
        lambda xp, v, w: xp.exp(-v),
        funcga.Monoid(lambda xp, like: xp.ones_like(like), lambda xp, a, b: a * b),
    ),
    funcga.normalizers.identity,
)
# A sum of two arrays for each leaf, and what they come to.
SQUARES = funcga.Fold(
    funcga.Reducer(lambda xp, v, w: (w * v, w * v * v), funcga.monoids.sum, kinds=("float",)),
    funcga.normalizers.Normalizer(lambda xp, reduced, tally: reduced[1] - reduced[0] ** 2 / tally.weight),
)
STATISTICS = {
    "largest": funcga.max(),
    "least": funcga.min(),
    "table": funcga.max(),
    "spread": funcga.moments(),
    "exponentials": funcga.logsumexp(),
    "rows": funcga.concat(),
    "wide": funcga.concat(axis=1),
    **{name: funcga.concat() for name in ("flags", "halves", "empty", "pairs")},
    "count": funcga.sum(),
    "seen": funcga.sum(),
    "counts": funcga.sum(),
    "sums": funcga.mean(),
    "custom": PRODUCT,
    "squares": SQUARES,
    "complex": funcga.mean(),
    "nothing": funcga.mean(),
}


def folded(group, dtype, bounds, n):
    params, batch = part(dtype, bounds, dist.get_rank(group))
    step = funcga.accumulate(statistics, n, fold=STATISTICS, weight=tokens_of, across=group)
    step(params, *batch)
    with counted() as calls:
        result = step(params, *batch)
    return result, [name for name, _ in calls]


def test_every_fold_merges():
    """The moments over single rows: then they are those of one replica too, whatever the layout."""
    bounds = [0, 5, 5, 20, 24]
    params, *batch = problem(torch.float64)
    expected = funcga.accumulate(statistics, 24, fold=STATISTICS, weight=tokens_of)(params, *batch)
    for result, calls in processes().run(folded, torch.float64, bounds, 24, size=len(bounds) - 1):
        assert result.keys() == expected.keys()
        for name in expected:
            assert TREE.tree_structure(result[name]) == TREE.tree_structure(expected[name])
            if expected[name] is not None:
                if name in ("flags", "empty"):
                    assert torch.equal(result[name], expected[name])
                else:
                    assert difference(result[name], expected[name]) <= 1e-13, name
                assert kits.dtypes(kits.TORCH, result[name]) == kits.dtypes(kits.TORCH, expected[name])
        # the header, floats, integers, values that are not sums, and the numbers of rows that are collected, and these
        assert calls == ["allgather_", *["allreduce_"] * 2, *["allgather_"] * 3]


def holds_nan(group):
    x = torch.tensor([1.0, float("nan"), 3.0]) if dist.get_rank(group) == 0 else torch.tensor([2.0, 0.0, -1.0])
    step = lambda fold: funcga.accumulate(lambda x: x.mean(0), 1, fold=fold, in_axes=0, across=group)
    return [step(fold)(rows) for fold in (funcga.max(), funcga.min()) for rows in (x[None], x.repeat(40)[None])]


def test_the_extremes_of_nan_are_nan():
    for result in processes().run(holds_nan, size=2):
        for found, (low, high) in zip(result, [(2.0, 3.0)] * 2 + [(1.0, -1.0)] * 2, strict=True):
            torch.testing.assert_close(found[:3], torch.tensor([low, float("nan"), high]), equal_nan=True)


def threads(group, bounds, size):
    rank = dist.get_rank(group)
    x = torch.arange(float(bounds[-1]))[bounds[rank] : bounds[rank + 1]]
    step = funcga.accumulate(
        lambda state, x: (
            {"last": x[-1], "seen": state["seen"] + len(x), "own": state["own"], "new": x.sum()},
            x.sum(),
        ),
        2,
        in_axes=(funcga.CARRY, 0),
        fold=(funcga.carry(), funcga.sum()),
        across=group,
    )
    own = object()
    state, total = step({"last": torch.tensor(-1.0), "seen": 0, "own": own, "new": 0}, x)
    return {**state, "own": state["own"] is own}, total


@pytest.mark.parametrize(("bounds", "last", "seen"), [([0, 4, 9, 10], 9.0, 1), ([0, 4, 4, 4], 3.0, 4)])
def test_state_is_that_of_the_last_replica_that_folded(bounds, last, seen):
    """Numbers too, and an array in the place of a number; any other object stays where it is."""
    for state, total in processes().run(threads, bounds, 2, size=3):
        assert state["last"] == last
        assert state["seen"] == seen
        assert isinstance(state["seen"], int)
        assert state["own"]
        assert isinstance(state["new"], torch.Tensor)
        assert total == sum(range(bounds[-1]))


# ---------------------------------------------------------------------------------------------- weights, and nothing


def weighs(group):
    return [weighed(group, weights, streams) for weights in WEIGHTS for streams in (False, True)]


def weighed(group, weights, streams):
    """A value that shows its weight, folded with the weights of this rank."""
    x = torch.tensor([[float(v), float(w)] for v, w in weights[dist.get_rank(group)]], dtype=torch.float64)
    grad_fn = lambda p, x: {"single": x[0, 0].float() * p, "double": x[0, 0] * torch.ones(100, dtype=torch.float64)}
    weight = lambda x: int(w) if (w := x[0, 1].item()).is_integer() and w < 1e30 else w
    if streams:
        step = funcga.stream(grad_fn, weight=weight, across=group)
        return step(torch.ones(()), (row[None] for row in x))
    return funcga.accumulate(grad_fn, len(x), weight=weight, across=group)(torch.ones(()), x)


# (value, weight) of the micro-batches of two ranks
WEIGHTS = [
    [[(1, 3), (2, 3)], [(3, 3)]],
    [[(1, 3), (2, 5)], [(3, 7)]],
    [[(1, 1e-20)], [(3, 1e20), (4, 2e20)]],
    [[(1, 0), (2, 0)], [(3, 5)]],
    [[(1, 0)], [(3, 0), (4, 0)]],
    [[(1, 0.1), (2, 0.7)], [(3, 0.3)]],
    [[(1, 1e300)], [(2, 3e300)]],
    [[(1, 2**62)], [(3, 2**62), (2, 2**70)]],
]


def test_any_weights_on_any_rank():
    for found in processes().run(weighs, size=2):
        for index, result in enumerate(found):
            check_weights(result, WEIGHTS[index // 2])


def check_weights(result, weights):
    pairs = [pair for rank in weights for pair in rank]
    total = sum(w for _, w in pairs)
    expected = sum(v * (w / total) for v, w in pairs) if total else 0.0
    assert result["double"].tolist() == pytest.approx([expected] * 100, rel=1e-15)
    assert result["single"].item() == pytest.approx(expected, rel=1e-7)


# -- what travels, and when


@contextmanager
def counted():
    """What each window calls: a header, which says what is to be merged, and then what is merged."""
    with Collectives() as mode:
        yield mode.calls


def deep(params, x):
    for layer in params:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x**2).mean()


def layers(count, width=64):
    generator = torch.Generator().manual_seed(1)
    return [{"w": torch.randn(width, width, generator=generator) / 8, "b": torch.zeros(width)} for _ in range(count)]


def sends(group, count, n, options, calls=2):
    """What each call sends, and how much of it before the last backward pass was over."""
    params, x = layers(count), torch.ones(8, 64)
    early, found = [], []

    def loss_fn(params, x):
        first = {**params[0], "w": params[0]["w"].clone()}
        first["w"].register_hook(lambda _: early.append(len(sent)))  # its gradient is the last of a backward pass
        return deep([first, *params[1:]], x)

    step = funcga.accumulate(funcga.value_and_grad(loss_fn), n, across=Replicas(group, **options))
    with counted() as sent:
        for _ in range(calls):
            sent.clear()
            step(params, x)
            found.append(list(sent))
    return found, early


@pytest.mark.parametrize(("n", "count"), [(1, 12), (8, 2)])
def test_one_reduction_whatever_n_and_however_many_leaves(n, count):
    for calls, _ in processes().run(sends, count, n, {}, size=2):
        gradient = 4 * count * (64 * 64 + 64)
        assert [name for name, _ in calls[1]] == ["allgather_", "allreduce_"]
        assert calls[1][0][1] <= 256  # the header
        assert gradient <= calls[1][1][1] <= gradient + 512
        assert [name for name, _ in calls[0]] == ["allgather_", "allreduce_"]


def test_buckets_are_sent_one_after_the_other_when_everything_is_folded():
    leaf = 4 * 64 * 64
    for calls, early in processes().run(sends, 12, 4, {"bucket_bytes": 2 * leaf + 1024}, size=2):
        assert (calls[1][0][0], calls[1][0][1] <= 256) == ("allgather_", True)
        sizes = [size for _, size in calls[1][1:]]
        assert len(sizes) == 6
        assert sum(sizes) <= 12 * (leaf + 256) + 512
        assert early == [0] * 8


def rounds(group):
    """What a replica has on its own, and all of them together, as sent exactly and in bfloat16."""
    params, x = layers(3), torch.ones(8, 64) * (1 + dist.get_rank(group))
    ways = None, group, Replicas(group, wire_dtype=torch.bfloat16)
    return [funcga.accumulate(funcga.value_and_grad(deep), 2, across=across)(params, x) for across in ways]


def test_bfloat16_on_the_wire_rounds_once_a_replica():
    """Each contribution to 8 bits, and their sum: by at most half a unit of the last, 2**-8 of the number."""
    (first, exact, sent), (second, _, _) = processes().run(rounds, size=2)
    assert difference(sent[0], exact[0]) <= 1e-7  # a scalar is not rounded
    assert difference(sent[1], exact[1]) > 1e-5
    for a, b, merged, found in zip(*map(TREE.tree_leaves, (first[1], second[1], exact[1], sent[1])), strict=True):
        bound = 2.0**-8 * ((a.abs() + b.abs()) / 2 + merged.abs()) * 1.01 + 1e-9
        assert ((found - merged).abs() <= bound).all()
    for calls, _ in processes().run(sends, 4, 2, {"wire_dtype": torch.bfloat16}, size=2):
        assert [name for name, _ in calls[1]] == ["allgather_", "allreduce_"]  # the loss is in the header
        assert 0 <= calls[1][1][1] - 2 * 4 * (64 * 64 + 64) <= 256


def many_scalars(group):
    """More scalars than there is room for in a header, as sent in bfloat16."""
    across = Replicas(group, wire_dtype=torch.bfloat16)
    step = funcga.accumulate(
        lambda w, x: ([k * x.mean() for k in range(7)], w), 2, across=across, fold=(funcga.mean(), funcga.sum())
    )
    with counted() as calls:
        found, _ = step(torch.ones(100), torch.ones(4) / 3 + dist.get_rank(group))
    return [abs(each.item() - k * 5 / 6) for k, each in enumerate(found)], calls


def test_scalars_are_not_rounded_on_the_wire():
    for errors, calls in processes().run(many_scalars, size=2):
        assert max(errors) <= 1e-6
        assert sorted(size for name, size in calls if name == "allreduce_") == [3 * 4 + 4, 200]  # and a mark


CLIPPED = funcga.Fold(
    funcga.Reducer(lambda xp, v, w: w * v / (1 + abs(v).max()), funcga.monoids.sum), funcga.normalizers.by_weight
)


def mixes(group):
    """A fold of the user's that is a sum, for parameters that are not contiguous."""
    torch.manual_seed(0)
    params = {"c": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), "t": torch.randn(6, 4).T}
    x = torch.randn(24, 3, 8, 8)
    loss = lambda p, x: ((F.conv2d(x, p["c"]).mean((2, 3)) @ p["t"]) ** 2).mean()
    gradient = funcga.grad(loss)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = x[24 * rank // size : 24 * (rank + 1) // size]
    found = []
    for fold in (funcga.mean(), CLIPPED):
        step = funcga.accumulate(gradient, 24 // size, fold=fold, across=group)
        step(params, own)
        with counted() as calls:
            grads = step(params, own)
        assert fold is CLIPPED or all(grads[k].stride() == params[k].stride() for k in params)
        expected = funcga.accumulate(gradient, 24, fold=fold)(params, x)
        found.append((difference(grads, expected), [name for name, _ in calls]))
    return found


def test_folds_of_ones_own_and_parameters_that_are_not_contiguous():
    for found in processes().run(mixes, size=3):
        for error, calls in found:
            assert error <= 1e-6
            assert calls == ["allgather_", "allreduce_"]


# What lies in front of what: a leaf without elements, an odd number of reals, complex numbers.
NEIGHBOURS = {
    "empty first": {"e": (0,), "w": (3,)},
    "empty last": {"w": (3,), "e": (0, 4)},
    "empty alone": {"e": (0,)},
    "complex behind an odd number": {"w": (3,), "c": (2,), "e": (0,), "d": (5,), "f": (2, 2)},
    "complex first": {"c": (3,), "w": (3,), "f": (1,)},
}


def neighbours(group, name):
    """The errors against autograd on the whole batch."""
    torch.manual_seed(0)
    rank, rows = dist.get_rank(group), torch.randn(12, dtype=torch.float64)
    dtype = lambda key: torch.complex128 if key in "cf" else torch.float64
    params = {key: torch.randn(shape, dtype=dtype(key)) for key, shape in NEIGHBOURS[name].items()}
    own = rows[4 * rank : 4 * rank + 4]

    def loss_fn(params, x):
        each = [(p.flatten()[:, None] * x * (1 + 2j if p.is_complex() else 1)).abs().square() for p in params.values()]
        return torch.cat(each).sum() + 0 * x.sum()

    def expected(rows):
        leaves = {key: p.clone().requires_grad_() for key, p in params.items()}
        loss_fn(leaves, rows).backward()
        return {key: leaf.grad / 12 for key, leaf in leaves.items()}

    errors = []
    for bucket_bytes in (2**22, 8):
        across = Replicas(group, bucket_bytes=bucket_bytes)
        step = funcga.accumulate(funcga.grad(loss_fn), 2, fold=funcga.per_weight(), across=across)
        wanted, found = expected(rows), step(params, own)
        errors += [difference(found[key], wanted[key]) for key in params]
    # as torch.func returns it, and a user's function: conjugated lazily
    lazily = funcga.accumulate(
        lambda x: x.sum() * torch.tensor([1j] * 3).conj(), 1, fold=funcga.sum(), in_axes=0, across=group
    )
    return [*errors, difference(lazily(own), -1j * rows.sum() * torch.ones(3))]


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_leaves_of_any_number_of_elements_beside_each_other(name):
    assert max(error for errors in processes().run(neighbours, name, size=3) for error in errors) <= 1e-6


# -- refusals, on every replica, before anything is reduced


def refused(function, *args, size):
    """The text of the FuncgaError that every rank raises."""
    with pytest.raises(Failed) as failure:
        processes().run(function, *args, size=size)
    assert {error and error[0] for error in failure.value.errors} == {"FuncgaError"}, failure.value
    return [text for _, text in failure.value.errors]


def unlike(group, what):
    """Rank 1 has another tree, in the first call."""
    odd = dist.get_rank(group) == 1
    params, *batch = problem()
    fold = {"loss": funcga.sum()} if odd and what == "fold" else {"loss": funcga.mean()}
    if odd and what == "shape":
        params["b"] = torch.zeros(1)
    if odd and what == "missing":
        del params["rare"]
        batch = [x[:1] for x in batch[:2]] + [torch.ones(1, dtype=torch.int64)]
    if odd and what == "dtype":
        params["a"] = params["a"].double()
        batch = [batch[0].double(), *batch[1:]]
    if odd and what == "order":
        params = dict(reversed(params.items()))
    across = Replicas(group, bucket_bytes=1024) if odd and what == "buckets" else group
    loss = lambda p, x, y, t: averaged({k: v.to(x.dtype) for k, v in p.items()}, x, y.to(x.dtype), t)
    value_and_grad = lambda *args: (lambda v, g: ({"loss": v.float()}, g))(*funcga.value_and_grad(loss)(*args))
    funcga.accumulate(value_and_grad, 1, fold=(fold, funcga.mean()), across=across)(params, *batch)


def given(group, across, **options):
    funcga.accumulate(funcga.grad(averaged), 2, across=Replicas(group, **options) if options else across)(*problem())


def given_a_square(group):
    given(group, dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def nobody_has_data(group, first):
    params, *batch = problem()
    step = made(group)
    if not first:
        step(params, *batch)
    step(params, *(x[:0] for x in batch))


def transformed(group):
    params, *batch = problem()
    step = made(group)
    torch.func.vmap(lambda scale: step({k: v * scale for k, v in params.items()}, *batch))(torch.ones(2))


def communicates(group):
    def loss_fn(w, x):
        loss = (w * x).mean()
        dist.all_reduce(loss.detach().clone(), group=group)
        return loss

    funcga.accumulate(funcga.grad(loss_fn), 2, drop="microbatch", across=group)(torch.ones(()), torch.ones(4))


def checks(group, changed, how):
    params = {"layers": [{"w": torch.arange(12.0).view(3, 4)}, {"w": torch.ones(3, dtype=torch.bfloat16)}], "n": None}
    params["z"] = torch.zeros(0)
    if dist.get_rank(group) in changed:
        if how == "bit":
            params["layers"][0]["w"][1, 2] = torch.nextafter(torch.tensor(6.0), torch.tensor(7.0))
        if how == "swapped":
            params["layers"][0]["w"] = params["layers"][0]["w"].flip(0)
        if how == "two":
            params["layers"] = [{"w": layer["w"] + 1} for layer in params["layers"]]
        if how == "missing":
            del params["z"]
    funcga.check_replicas(params, group)


def signs(group):
    """An even number of bits that differ."""
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
    odd = dist.get_rank(group)
    ones, sign = torch.full((4,), 2.0 * (1 - odd), dtype=torch.float64), -1 if odd else 1
    params = {"r": rotation * sign, "z": ones, "c": torch.complex(rotation, rotation) * sign, "same": rotation}
    funcga.check_replicas(params, group)


FOUND = " (weighted, by_weight) on rank "
# (what is called with the group, words of the error)
REFUSED = {
    "shape": ((unlike, "shape"), f"`output[1]['b']` is float32[30]{FOUND}0 and float32[1]{FOUND}1"),
    "missing": ((unlike, "missing"), f"`output[1]['rare']` is float32[3]{FOUND}0 and missing on rank 1"),
    "dtype": ((unlike, "dtype"), f"`output[1]['a']` is float32[5, 30]{FOUND}0 and float64[5, 30]{FOUND}1"),
    "fold": ((unlike, "fold"), f"`output[0]['loss']` is float32[]{FOUND}0 and float32[] (sum, identity) on rank 1. They "
        "are merged leaf by leaf: build the model, the batch and the fold alike on every rank."),
    "order": ((unlike, "order"), "the replicas fold different structures: rank 1 has the leaves of rank 0 in another order"),
    "buckets": ((unlike, "buckets"), "`across` is sent in buckets of 4194304 bytes as accumulated on rank 0 and sent in "
        "buckets of 1024 bytes as accumulated on rank 1"),
    "text": ((given, "data"), "across= is 'data', and the arrays of the call are torch tensors. Give a process group of "
        "which this process is a member, across=torch.distributed.group.WORLD, or a 1-D device mesh such as mesh['dp']"),
    "no member": ((given, dist.GroupMember.NON_GROUP_MEMBER), "Give a process group of which this process is a member"),
    "wire": ((given, None, {"wire_dtype": torch.int8}), "wire_dtype is torch.int8: gradients can be sent as torch.float32, "
        "torch.float64 or torch.bfloat16; None sends them as they are accumulated."),
    "nobody": ((nobody_has_data, True), "no replica has a micro-batch to fold"),
    "nobody, later": ((nobody_has_data, False), "no replica has a micro-batch to fold"),
    "transformed": ((transformed,), "across= was given inside of a torch.func transform, or of a loss that is being differentiated, where replicas"),
    "a loss that communicates, and drop=": ((communicates,), "collectives of that group"),
    "a bit": ((checks, (1,), "bit"), "the replicas have different parameters: `params['layers'][0]['w']` is float32[3, 4] with the hash"),
    "swapped": ((checks, (0,), "swapped"), "Send them around once before training: for p in params.values(): "
        "torch.distributed.broadcast(p, src=0, group=group)."),
    "two": ((checks, (2,), "two"), "on rank 2; `params['layers'][1]['w']` is bfloat16[3] with the hash"),
    "a parameter": ((checks, (1,), "missing"), "the replicas have different parameters: `params['z']` is float32[0] with the hash "
        "e4a6a0577479b2b4 on rank 0 and missing on rank 1."),
}  # fmt: skip
ALSO_REFUSED = {
    "square": ((given_a_square,), "Found the DeviceMesh have 2 dimensions"),
    "signs": ((signs,), "; `params['c']` is complex128[4, 4] with the hash"),
}  # fmt: skip


KIND = {"square": "RuntimeError"}  # what torch itself refuses
REDUCES_BEFORE = ("nobody, later", "a loss that communicates, and drop=")


def refusals(group, names):
    """The error of each, where nothing was reduced before it."""
    found = {}
    for name in names:
        function, *args = {**REFUSED, **ALSO_REFUSED}[name][0]
        options = args.pop() if args and isinstance(args[-1], dict) else {}
        with counted() as calls:
            try:
                found[name] = "nothing", function(group, *args, **options)
            except Exception as error:
                found[name] = type(error).__name__, str(error)
        assert name in REDUCES_BEFORE or {n for n, _ in calls} <= {"allgather_"}
    return found


@pytest.mark.parametrize(("names", "size"), [([*REFUSED], 3), (["square"], 4), (["signs"], 2)])
def test_refusals(names, size):
    words = {name: text for name, (_, text) in {**REFUSED, **ALSO_REFUSED}.items()}
    for found in processes().run(refusals, names, size=size):
        wrong = {
            name: error
            for name, error in found.items()
            if error[0] != KIND.get(name, "FuncgaError") or words[name] not in error[1]
        }
        assert wrong == {}


def compiles(group, fullgraph):
    params, x = layers(2), torch.ones(8, 64)
    step = funcga.accumulate(funcga.value_and_grad(deep), 2, across=group)
    return difference(torch.compile(step, backend="eager", fullgraph=fullgraph)(params, x), step(params, x))


def test_not_in_one_graph():
    with pytest.raises(Failed, match="funcga accumulates here; compile the loss, and not the step"):
        processes().run(compiles, True, size=2)
    assert processes().run(compiles, False, size=2) == [0.0, 0.0]  # the graph is broken where the step begins


def test_what_is_refused_in_one_process():
    with pytest.raises(funcga.FuncgaError, match=r'n="auto" was given together with across=, a replica that runs out'):
        funcga.accumulate(funcga.grad(averaged), "auto", across="data")
    with pytest.raises(funcga.FuncgaError, match=r"across= is <object .* after torch.distributed.init_process_group"):
        funcga.accumulate(funcga.grad(averaged), 2, across=object())(*problem())


def test_parameters_that_are_the_same():
    processes().run(checks, (), "none", size=3)
    processes().run(checks, (0, 1, 2), "bit", size=3)
