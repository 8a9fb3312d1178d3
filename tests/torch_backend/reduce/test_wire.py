"""How leaves travel: which message has which of them, and arrays as bytes. One process is enough for it."""

import pytest
import torch

import funcga
import torch_backend
from funcga._backend.dispatch import load
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold import bind
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.layout import Layout
from torch_backend.reduce.wire import Wire, add, nbytes, pack, plan_of, unpack
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


def plan(likes, bucket_bytes=2**20, wire_dtype=None, sums=None, most_numbers=0):
    folds = [bind(funcga.sum(), like, str, torch_backend.arrays) for like in likes]
    sums = range(len(likes)) if sums is None else sums
    return plan_of(folds, dict(enumerate(likes)), sums, {}, bucket_bytes, wire_dtype, most_numbers)


def leaves_of(found):
    return {(message.kind.dtype, message.kind.wire): [*message.leaves] for message in found.sums}


@pytest.mark.parametrize(("bucket_bytes", "counts"), [(1, [1, 1, 1, 1]), (900, [2, 2]), (2**20, [4])])
def test_a_message_has_as_many_leaves_as_go_into_it(bucket_bytes, counts):
    found = plan([torch.ones(100)] * 4, bucket_bytes)
    assert [len(message.leaves) for message in found.sums] == counts


def test_a_message_is_of_one_dtype_and_sent_as_one():
    likes = [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64), torch.ones(())]
    assert leaves_of(plan(likes)) == {(torch.int64, torch.int64): [1], (torch.float32, torch.float32): [0, 2, 3]}
    assert leaves_of(plan(likes, wire_dtype=torch.bfloat16)) == {
        (torch.float32, torch.bfloat16): [0, 2],
        (torch.int64, torch.int64): [1],
        (torch.float32, torch.float32): [3],  # a scalar is not rounded
    }


def test_the_smallest_message_is_the_last():
    """Its numbers are copied beside the mark of an error."""
    found = plan([torch.ones(7), torch.ones(900), torch.ones(20)], bucket_bytes=1)
    assert [message.leaves for message in found.sums] == [(1,), (2,), (0,)]


def test_what_is_no_sum_is_gathered():
    found = plan([torch.ones(3), torch.ones(2, 2)], sums=[])
    assert found.gathered == (0, 1)
    assert [message.leaves for message in found.sums] == [()]  # for the mark alone


def test_a_few_counts_go_with_what_is_gathered():
    counts, many = torch.ones((), dtype=torch.int64), torch.ones(9, dtype=torch.int64)
    assert plan([torch.ones(30), counts, torch.ones(3)], sums=[0, 1]).gathered == (1, 2)
    assert plan([torch.ones(30), many, torch.ones(3)], sums=[0, 1]).gathered == (2,)
    assert plan([torch.ones(30), counts], sums=[0, 1]).gathered == ()


def test_a_few_numbers_go_in_the_header():
    numbers = [torch.ones(()), torch.ones((), dtype=torch.float64)]
    assert plan(numbers, most_numbers=2).numbers == (0, 1)
    assert plan(numbers, most_numbers=2).sums == ()
    assert plan(numbers, most_numbers=1).numbers == ()
    assert plan([torch.ones((), dtype=torch.int64)], most_numbers=2).numbers == ()
    assert plan([torch.ones(1)], most_numbers=2).numbers == ()


class Doubling:
    """A carrier to another process that has the same numbers."""

    def allreduce(self, tensors):
        for tensor in tensors:
            tensor.mul_(2)
        return self

    def wait(self):
        pass


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_sums_come_back_as_they_were(bucket_bytes, wire_dtype):
    """In their shapes, strides and dtypes, whatever travels together; and so does a leaf that has nothing."""
    likes = [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.tensor([1 + 2j, 3]),
        torch.ones(0, 3),
        torch.tensor(5.0),
        torch.arange(4),
        torch.ones(2, 1, 3),
    ]
    found = plan(likes, bucket_bytes, wire_dtype)
    outputs = bind_outputs(likes)
    buffers = Buffers(Layout(outputs))
    buffers.reduced = [like.clone() for like in likes[:-1]] + [None]
    wire, mark = Wire(Doubling(), torch.device("cpu"), None), torch.ones(1)
    for message in found.sums:
        is_last = message is found.sums[-1]
        mark = torch.ones(1, dtype=message.kind.dtype) if is_last else None
        receive = add(buffers, found, message, wire, mark)
        assert all(buffers.reduced[leaf] is None for leaf in message.leaves)
        receive()
    assert mark.item() == 2
    for like, total in zip(likes[:-1], buffers.reduced, strict=False):
        assert (total.dtype, total.shape, total.stride()) == (like.dtype, like.shape, like.stride())
        assert total.equal(2 * like)
    assert buffers.reduced[-1].equal(torch.zeros(2, 1, 3))


def bind_outputs(likes):
    program = Program(lambda: None, funcga.sum())
    arguments = Arguments((), None, load("torch"))
    return program.bind(likes, arguments)[0]
