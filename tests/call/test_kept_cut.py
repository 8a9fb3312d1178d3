"""A step remembers how it cut its last batch. Whatever came before, a call returns or raises what a new step would."""

import itertools
import warnings
import weakref

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import funcga


def rows_of(tree) -> torch.Tensor:
    """Something that depends on every element of a batch, whatever it looks like."""
    if isinstance(tree, dict):
        tree = [value for _, value in sorted(tree.items())]
    if isinstance(tree, list | tuple):
        return sum(rows_of(each) for each in tree)
    return 0.0 if tree is None else tree.float().mean()


def loss_fn(params, batch, *more):
    return params["w"].square() * (rows_of(batch) + 2 * rows_of(more))


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors that are not jagged are a prototype of torch's
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(6.0)


X = torch.arange(12.0).reshape(6, 2)
BATCHES = {
    "rows": (X,),
    "other rows of the same shape": (X.square(),),
    "another dtype": (X.to(torch.int64),),
    "fewer rows": (X[:5],),
    "another number of columns": (X[:, :1],),
    "two arguments": (X, X[:, 0]),
    "two arguments of different lengths": (X, X[:5]),
    "a dict": ({"a": X, "b": X[:, 0]},),
    "a dict with other keys": ({"a": X, "c": X[:, 0]},),
    "a dict with a None": ({"a": X, "b": None},),
    "a list of rows": ([X, X],),
    "a list of examples": ([torch.ones(3), torch.ones(4)],),
    "a list of images": ([torch.ones(2, 2, 2)] * 6,),
    "a list of rows, not all floats": ([torch.ones(2, 2, 2)] * 5 + [torch.ones(2, 2, 2).long()],),
    "a tuple of rows": ((torch.ones(2, 2, 2),) * 6,),
    "made in inference mode": (inferred(),),
    "requires grad": (X.clone().requires_grad_(),),
    "a scalar": (torch.tensor(1.0),),
    "a number": (3.0,),
    "sparse": (X.to_sparse(),),
    "nested": (nested(),),
    "packed": (pack_sequence([torch.ones(3), torch.ones(2)]),),
    "no rows": (X[:0],),
    "no batch": (),
}


def outcome(step, batch) -> object:
    try:
        return [leaf.tolist() for leaf in (lambda loss, grads: (loss, grads["w"]))(*step({"w": W}, *batch))]
    except Exception as error:
        return type(error), str(error)


W = torch.tensor(3.0)


def new_step(**options):
    return funcga.accumulate(funcga.value_and_grad(loss_fn), 2, **options)


@pytest.mark.parametrize("weight", [None, lambda *batch: 2.0])
def test_what_came_before_changes_no_call(weight):
    alone = {name: outcome(new_step(weight=weight), batch) for name, batch in BATCHES.items()}
    assert sum(isinstance(result, list) for result in alone.values()) >= 8  # and the others raise
    step = new_step(weight=weight)
    for first, second in itertools.permutations(BATCHES, 2):
        assert outcome(step, BATCHES[first]) == alone[first], first
        assert outcome(step, BATCHES[second]) == alone[second], f"{second}, after {first}"


def test_state_is_threaded_at_every_call():
    """State that is threaded is cut into nothing, and each call begins with its own."""
    counted = lambda params, seen, x: (params["w"] * x.mean(), seen + len(x))
    options = {"in_axes": (None, funcga.CARRY, 0), "fold": (funcga.mean(), funcga.carry())}
    step = funcga.accumulate(counted, 3, **options)
    for start in (0, 5, 5, 7):
        assert step({"w": W}, torch.tensor(start), X)[1] == start + 6


def test_nothing_of_a_batch_outlives_its_call():
    step, batch = new_step(), torch.ones(6, 2)
    for _ in range(2):
        step({"w": W}, batch)
    ended = weakref.ref(batch)
    del batch
    assert ended() is None
