"""A step remembers how it cut its last batch. Whatever came before, a call returns or raises what a new step would."""

import itertools
import warnings
import weakref

import torch

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
    "another dtype": (X.to(torch.int64),),
    "fewer rows": (X[:5],),
    "two arguments": (X, X[:, 0]),
    "a dict": ({"a": X, "b": X[:, 0]},),
    "a dict with a None": ({"a": X, "b": None},),
    "a list of rows": ([X, X],),
    "a list of examples": ([torch.ones(3), torch.ones(4)],),
    "a list of rows, not all floats": ([torch.ones(2, 2, 2)] * 5 + [torch.ones(2, 2, 2).long()],),
    "made in inference mode": (inferred(),),
    "requires grad": (X.clone().requires_grad_(),),
    "a scalar": (torch.tensor(1.0),),
    "sparse": (X.to_sparse(),),
    "nested": (nested(),),
    "no rows": (X[:0],),
    "no batch": (),
}


def outcome(step, batch) -> object:
    try:
        return [leaf.tolist() for leaf in (lambda loss, grads: (loss, grads["w"]))(*step({"w": W}, *batch))]
    except Exception as error:
        return type(error), str(error)


W = torch.tensor(3.0)


def new_step():
    return funcga.accumulate(funcga.value_and_grad(loss_fn), 2)


def test_what_came_before_changes_no_call():
    alone = {name: outcome(new_step(), batch) for name, batch in BATCHES.items()}
    assert sum(isinstance(result, list) for result in alone.values()) >= 5  # and the others raise
    step = new_step()
    for first, second in itertools.permutations(BATCHES, 2):
        assert outcome(step, BATCHES[first]) == alone[first], first
        assert outcome(step, BATCHES[second]) == alone[second], f"{second}, after {first}"


def test_nothing_of_a_batch_outlives_its_call():
    step, batch = new_step(), torch.ones(6, 2)
    for _ in range(2):
        step({"w": W}, batch)
    ended = weakref.ref(batch)
    del batch
    assert ended() is None
