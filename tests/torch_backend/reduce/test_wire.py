"""How leaves travel: which bucket has which of them, and arrays as bytes. No process is needed for it."""

import pytest
import torch

import funcga
import torch_backend
from funcga._fold import bind
from torch_backend.reduce.wire import Sums, nbytes, pack, planned, unpack
from torch_backend.replicas import as_bytes

ARRAYS = [
    torch.arange(6.0).view(2, 3).T,
    torch.tensor(True),
    torch.zeros(0, 4, dtype=torch.int16),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.arange(5, dtype=torch.bfloat16)[::2],
    torch.ones(4, 4)[:, 1:2][:1],
    torch.tensor([-1, 2**62]),
]


def test_arrays_of_any_dtype_come_back_from_bytes():
    kinds = [(tuple(array.shape), array.dtype) for array in ARRAYS]
    data = pack(ARRAYS, torch.device("cpu"))
    assert data.shape == (nbytes(kinds),)
    for array, own in zip(ARRAYS, unpack(data, kinds), strict=True):
        assert own.dtype == array.dtype
        assert own.equal(array)
        assert own.untyped_storage().nbytes() == array.numel() * array.itemsize
    assert pack([], torch.device("cpu")).shape == (0,)


def test_the_bytes_of_a_contiguous_array_are_in_its_own_memory():
    array = torch.ones(3)
    assert as_bytes(array).data_ptr() == array.data_ptr()


def plan(likes, bucket_bytes=2**20, wire_dtype=None, sums=None):
    folds = [bind(funcga.sum(), like, str, torch_backend.arrays) for like in likes]
    sums = range(len(likes)) if sums is None else sums
    return planned(folds, dict(enumerate(likes)), sums, bucket_bytes, wire_dtype)


def test_a_leaf_begins_where_memory_is_aligned():
    found = plan([torch.ones(()), torch.ones(100), torch.ones(20), torch.ones(3, 2)])
    (bucket,) = found.buckets
    assert [segment.leaf for segment in bucket.segments] == [0, 1, 2, 3]
    assert [segment.start for segment in bucket.segments] == [0, 16, 128, 160]
    assert bucket.length == 166


@pytest.mark.parametrize(("bucket_bytes", "counts"), [(1, [1, 1, 1, 1]), (900, [2, 2]), (2**20, [4])])
def test_a_bucket_has_as_many_leaves_as_go_into_it(bucket_bytes, counts):
    found = plan([torch.ones(100)] * 4, bucket_bytes)
    assert [len(bucket.segments) for bucket in found.buckets] == counts


def test_a_bucket_is_of_one_dtype_and_sent_as_one():
    likes = [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64), torch.ones(())]
    kinds = lambda found: {(b.kind.dtype, b.kind.wire): [segment.leaf for segment in b.segments] for b in found.buckets}
    assert kinds(plan(likes)) == {(torch.int64, torch.int64): [1], (torch.float32, torch.float32): [0, 2, 3]}
    assert kinds(plan(likes, wire_dtype=torch.bfloat16)) == {
        (torch.float32, torch.bfloat16): [0, 2],
        (torch.int64, torch.int64): [1],
        (torch.float32, torch.float32): [3],  # a scalar is not rounded
    }


def test_what_is_no_sum_is_in_no_bucket():
    found = plan([torch.ones(3), torch.ones(2, 2)], sums=[])
    assert found.gathered == {0: (3,), 1: (2, 2)}
    (bucket,) = found.buckets  # for the mark alone
    assert bucket.length == 0
    assert Sums(found).mark.item() == 0


def test_a_few_counts_go_with_what_is_gathered():
    counts, many = torch.ones((), dtype=torch.int64), torch.ones(9, dtype=torch.int64)
    assert plan([torch.ones(30), counts, torch.ones(3)], sums=[0, 1]).gathered == {1: (), 2: (3,)}
    assert plan([torch.ones(30), many, torch.ones(3)], sums=[0, 1]).gathered == {2: (3,)}
    assert plan([torch.ones(30), counts], sums=[0, 1]).gathered == {}


def test_leaves_are_views_of_their_buckets():
    strided = torch.empty_like(torch.ones(4, 3).T)
    sums = Sums(plan([strided, torch.ones(5, dtype=torch.complex64), torch.ones(7)]))
    assert sums.views[0].stride() == strided.stride()
    assert sums.views[1].dtype == torch.complex64
    for leaf, view in sums.views.items():
        view.fill_(leaf + 1)
    assert [{*view.flatten().tolist()} for view in sums.views.values()] == [{1}, {2}, {3}]
    assert sums.mark.item() == 0


@pytest.mark.parametrize("like", [torch.ones(()), torch.ones(4, 3).T, torch.ones(2, 1, 3), torch.ones(0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_segment_lies_as_torch_says(like, dtype):
    like = torch.empty_like(like, dtype=dtype)
    (segment,) = plan([like]).buckets[0].segments
    real = torch.view_as_real(like) if dtype.is_complex else like
    assert (segment.shape, segment.stride) == (tuple(real.shape), real.stride())
    assert plan([like]).buckets[0].length == segment.start + real.numel()
