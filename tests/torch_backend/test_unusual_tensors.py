"""Tensors, modules and transforms that torch has and a fold cannot take: told in words that say what to write."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend

X = torch.arange(18.0).reshape(6, 3)
W = {"w": torch.tensor([1.0, 2.0, 3.0])}

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta", "ignore:.*nested tensors is in prototype", "ignore:.*torch.jit"
)


def refusal(call):
    """What is said, by funcga or by torch."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    return str(caught.value)


def of_rows(params, x):
    rows = x.unbind() if x.is_nested else [x.to_dense()]
    return sum((part @ params["w"]).sum() for part in rows)


def accumulated(loss, params=W, x=X, n=2):
    return funcga.accumulate(funcga.grad(loss), n)(params, x)


def streamed(loss, params=W, x=X, **options):
    return funcga.stream(funcga.grad(loss), **options)(params, [x, x])


def jagged():
    return torch.nested.nested_tensor([X[:2], X[2:]], layout=torch.jagged)


def without_a_shape():
    return torch.nested.nested_tensor([X[:2], X[2:]])


def of_sparse(params, x):
    return (params["w"] @ x.T).sum()


def sparse(layout=torch.sparse_coo):
    return {"w": torch.eye(3).to_sparse(layout=layout)}


def of_module(module, x):
    return module(x).mean()


def lazy():
    module = nn.Sequential(nn.LazyLinear(1))
    return torch_backend.pure_loss(module, of_module), dict(module.named_parameters())


def of_lazy(statistics=False):
    """A lazy module, its own gradient function and its loss, and its parameters."""
    module = (
        nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d(affine=False))
        if statistics
        else nn.Sequential(nn.LazyLinear(1))
    )
    loss = torch_backend.pure_loss(module, of_module)
    return torch_backend.module_value_and_grad(module, of_module), loss, dict(module.named_parameters())


BATCH = torch.ones(4, 3)
# Every way to ask for numbers before the module has run: torch refuses it.
OF_LAZY = {
    "a module, alone": lambda own, *_: own(BATCH),
    "a module": lambda own, *_: funcga.accumulate(own, 2)(BATCH),
    "a module, stream": lambda own, *_: funcga.stream(own)([BATCH, BATCH]),
    "a module, auto": lambda own, *_: funcga.accumulate(own, "auto")(BATCH),
    "a module, drop": lambda own, *_: funcga.accumulate(own, 2, drop="microbatch")(BATCH),
    "a module, coupled": lambda own, *_: funcga.coupled(own, lambda module, of: of.std(), 2)(BATCH),
    "pure_loss, any function": lambda own, loss, params: funcga.accumulate(torch.func.grad(loss), 2)(params, BATCH),
    "verify": lambda own, loss, params: funcga.verify(funcga.value_and_grad(loss), params, BATCH, n=2),
    "a module, plan": lambda own, *_: funcga.plan(own, BATCH),
    "plan": lambda own, loss, params: funcga.plan(funcga.grad(loss), params, BATCH),
    "assign_grads": lambda own, loss, params: torch_backend.assign_grads(params, dict.fromkeys(params, BATCH)),
}


@pytest.mark.parametrize("kind", OF_LAZY)
def test_lazy_parameters_that_torch_refuses_itself(kind):
    with pytest.raises((RuntimeError, ValueError), match=r"LazyModule|uninitialized parameter"):
        OF_LAZY[kind](*of_lazy())


def test_a_lazy_module_that_has_run_is_any_module():
    """For one and the same step."""
    own, loss, params = of_lazy()
    step, pure = funcga.accumulate(own, 2), funcga.accumulate(funcga.value_and_grad(loss), 2)
    for call in (lambda: step(BATCH), lambda: pure(params, BATCH)):
        with pytest.raises((RuntimeError, ValueError), match="uninitialized parameter"):
            call()
    with torch.no_grad():
        own.module(BATCH)
    own.module(BATCH).mean().backward()
    for grads in (step(BATCH)[1], pure(params, BATCH)[1]):
        for name, parameter in own.module.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad)


def test_a_lazy_parameter_is_converted_to_nothing():
    params = of_lazy()[2]
    for call in (lambda: funcga.to_numpy(params), lambda: funcga.compare(params, params)):
        assert "uninitialized parameter" in refusal(call)


def test_buffers_of_a_lazy_module():
    """Where they have to be copied before they are there, they are refused; else the module makes them."""
    for call in (
        lambda: funcga.accumulate(of_lazy(True)[0], 2, drop="microbatch")(BATCH),
        lambda: funcga.accumulate(of_lazy(True)[0], "auto")(BATCH),
    ):
        with pytest.raises(ValueError, match="uninitialized parameter"):
            call()
    own, *_ = of_lazy(True)
    funcga.accumulate(own, 2)(BATCH)
    assert own.module[1].num_batches_tracked == 2


def freezes(params, x):
    params["w"].requires_grad_(False)
    return (x @ params["w"]).sum() + params["b"].sum()


def freezes_in_a_module(x, n=None, detached=True):
    module = nn.Linear(3, 1)
    loss = torch_backend.pure_loss(module, lambda module, x: module.requires_grad_(False)(x).sum())
    params = {name: p.detach() if detached else p for name, p in module.named_parameters()}
    return funcga.grad(loss)(params, x) if n is None else accumulated(loss, dict(module.named_parameters()), x, n)


class OfTorchOpt:
    """A transform whose update takes its parameters by name, and writes to the gradients unless it is told not to."""

    def init(self, params):
        return ()

    def update(self, updates, state, *, params=None, inplace=True):
        return updates if inplace else {key: -update for key, update in updates.items()}, state


TWO = {**W, "b": torch.ones(1)}
SGD = torch_backend.from_optimizer(torch.optim.SGD, lr=0.1)
SPARSE = (
    "`params['w']` is a sparse tensor float32[3, 3], and sums of gradients are dense, as parameters have to be. Let the values "
    "be the parameter, and make the sparse tensor of them in loss_fn: torch.sparse_coo_tensor(indices, values, shape)."
)
SCRIPT = (
    "is one of TorchScript, whose parameters cannot be replaced by others for a pure loss. Use the module that it was made "
    "of; or torch_backend.module_value_and_grad(module, loss_fn), which runs on the module's own parameters."
)
FREEZES = (
    "loss_fn calls requires_grad_() on a parameter that it is given, whose gradient is being taken. Leave what is frozen out "
    "of the parameters, as a pure_loss allows; or use p.detach() in loss_fn."
)
RECORDED = {"w": W["w"].clone().requires_grad_()}
REFUSED = {
    "sparse parameters": (lambda: accumulated(of_sparse, sparse()), SPARSE),
    "sparse parameters, one micro-batch": (lambda: accumulated(of_sparse, sparse(torch.sparse_csr), n=1), SPARSE),
    "scripted": (lambda: torch_backend.pure_loss(torch.jit.script(nn.Linear(3, 1)), of_module), f"the module {SCRIPT}"),
    "a traced part": (
        lambda: torch_backend.pure_loss(nn.Sequential(nn.Tanh(), torch.jit.trace(nn.Linear(3, 1), X)), of_module),
        f"the part `1` of the module {SCRIPT}"),
    "freezes": (lambda: accumulated(freezes, TWO), FREEZES),
    "freezes, alone": (lambda: funcga.grad(freezes)(TWO, X), FREEZES),
    "freezes its module": (lambda: freezes_in_a_module(X, n=1), FREEZES),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind):
    call, text = REFUSED[kind]
    assert re.sub(r", float32\[2, j\d+, 3\]", "", refusal(call)) == text  # the number of a length of its own


OF_TORCH = {
    "a sparse batch": (lambda: accumulated(of_rows, x=X.to_sparse()), "SparseCPU"),
    "a compressed batch": (lambda: accumulated(of_rows, x=X.to_sparse_csr()), "do not have strides"),
    "a nested batch": (lambda: accumulated(of_rows, x=jagged()), "not supported for NestedTensor"),
    "no shape": (lambda: accumulated(of_rows, x=without_a_shape()), "it has no axis 0 to split"),
    "lazy": (lambda: accumulated(*lazy()), "uninitialized parameter"),
    "torch.func, compressed": (lambda: funcga.grad(of_rows)(RECORDED, X.to_sparse_csr()), "do not have strides"),
    "torch.func, nested": (lambda: funcga.grad(of_rows)(RECORDED, without_a_shape()), "support strides"),
    "freezes what is recorded": (lambda: freezes_in_a_module(X, detached=False), "a functorch transform"),
}


@pytest.mark.parametrize("kind", OF_TORCH)
def test_what_torch_refuses(kind):
    call, text = OF_TORCH[kind]
    assert text in refusal(call)


def test_torch_refuses_parameters_that_have_no_shape():
    for init in (funcga.multi_steps(SGD, 2).init, funcga.Accumulator().init):
        with pytest.raises((ValueError, RuntimeError), match="uninitialized parameter"):
            init(lazy()[1])


def test_a_transform_that_is_called_otherwise_is_refused_by_python():
    tx = funcga.multi_steps(OfTorchOpt(), 1)
    with pytest.raises(TypeError, match="positional"):
        tx.update(W, tx.init(W), W)


def test_what_the_refusals_say_works():
    indices = torch.tensor([[0, 1, 2], [0, 1, 2]])
    matrix = lambda p: torch.sparse_coo_tensor(indices, p["w"], (3, 3), check_invariants=True)
    got = accumulated(lambda p, x: torch.sparse.mm(matrix(p), x.T).mean())
    torch.testing.assert_close(got["w"], X.mean(0) / 3)
    for batch in (X.to_sparse(), X.to_sparse_csr(), jagged()):
        torch.testing.assert_close(streamed(of_rows, x=batch)["w"], X.sum(0))
        torch.testing.assert_close(funcga.grad(of_rows)(W, batch)["w"], X.sum(0))
    torch.testing.assert_close(streamed(of_rows, x=without_a_shape(), weight=lambda x: 2)["w"], X.sum(0))
    for module, name in (
        (torch.jit.script(nn.Linear(3, 1)), "weight"), (nn.Sequential(torch.jit.trace(nn.Linear(3, 1), X)), "0.weight")
    ):  # fmt: skip
        _, grads = funcga.accumulate(torch_backend.module_value_and_grad(module, of_module), 2)(X)
        torch.testing.assert_close(grads[name][0], X.mean(0))
    tx = OfTorchOpt()
    adapted = (tx.init, lambda grads, state, params: tx.update(grads, state, params=params, inplace=False))
    multi = funcga.multi_steps(adapted, 1)
    assert multi.update(W, multi.init(W), W)[0]["w"].tolist() == [-1, -2, -3]


def of_offloaded(module, x):
    with torch.autograd.graph.save_on_cpu():
        return module(x).square().mean()


LOSSES = {
    "checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False).square().mean(),
    "reentrant": lambda module, x: checkpoint(module, x.clone().requires_grad_(), use_reentrant=True).square().mean(),
    "offloaded": of_offloaded,
    "numpy": lambda module, x: module(x).mean() * float(module(x).detach().numpy().mean()),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_gradient_alone_takes_what_torch_func_does_not(kind):
    module, loss_fn = nn.Linear(3, 2).double(), LOSSES[kind]
    x, params = torch.randn(4, 3, dtype=torch.float64), dict(module.named_parameters())
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn))
    assert re.search("functorch|torch.func|storage", refusal(lambda: gradient(params, x)))
    with torch.no_grad():
        results = [gradient(params, x)]
    results.append(gradient({name: p.detach() for name, p in params.items()}, x))
    assert all(p.grad is None for p in module.parameters())
    loss = loss_fn(module, x)
    loss.backward()
    expected = loss.detach(), {name: p.grad for name, p in module.named_parameters()}
    for got in (*results, funcga.accumulate(gradient, n=1)(params, x)):
        torch.testing.assert_close(got, expected)


# -- sequences of several lengths


def packed(sequences):
    return nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)


def test_packed_sequences():
    torch.manual_seed(0)
    module, y = nn.GRU(3, 4, batch_first=True), torch.randn(8)
    sequences = [torch.randn(length, 3) for length in (5, 2, 4, 3, 1, 6, 2, 3)]
    loss_fn = lambda module, packed, y: ((module(packed)[1][0].sum(-1) - y) ** 2).mean()
    loss_fn(module, packed(sequences), y).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    params, own = torch_backend.trainable(module), torch_backend.module_value_and_grad(module, loss_fn)
    pure = funcga.grad(torch_backend.pure_loss(module, loss_fn))
    of_dict = funcga.grad(torch_backend.pure_loss(module, lambda m, b: loss_fn(m, b["packed"], b["y"])))
    items = [(packed(sequences[i:j]), y[i:j]) for i, j in ((0, 3), (3, 7), (7, 8))]
    dicts = [{"packed": item, "y": target} for item, target in items]
    # Padded, they are split, and packed in the loss.
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    pads = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    pack = lambda x, lengths: nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    of_padded = torch_backend.pure_loss(module, lambda m, x, lengths, y: loss_fn(m, pack(x, lengths), y))
    for grads in [
        funcga.stream(pure, weight=lambda packed, y: len(y), device="cpu")(params, items),
        funcga.stream(own, weight=lambda packed, y: len(y))(items)[1],
        funcga.stream(of_dict, weight=lambda batch: len(batch["y"]))(params, dicts),
        funcga.accumulate(funcga.grad(of_padded), 3)(params, pads, lengths, y),
    ]:
        funcga.compare(grads, expected).assert_close()
    text = (
        "an argument holds a PackedSequence, whose rows are time steps of all sequences together: they can neither be "
        "cut nor say what it weighs. Pass the padded sequences and their lengths, and pack them in loss_fn: "
        "pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False). Or stream micro-batches that are "
        "packed: stream(grad_fn, weight=lambda packed, y: len(y))."
    )
    for call in [
        lambda: funcga.accumulate(own, 2)(packed(sequences), y),
        lambda: funcga.accumulate(of_dict, 2)(params, dicts[0]),
        lambda: funcga.accumulate(pure, 2)(params, packed(sequences[:1])),  # all fields of which have as many rows
        lambda: funcga.stream(pure)(params, items),
    ]:
        assert refusal(call) == text


# -- what a model returns


def test_a_models_output_is_no_loss():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = lambda params, x: outputs.CausalLMOutput(loss=(x @ params["w"]).mean(), logits=x @ params["w"])
    text = ", and a gradient is that of a scalar, a real number: return "
    assert f"CausalLMOutput{text}" in refusal(lambda: funcga.accumulate(funcga.grad(output), 2)(W, X))
    as_dict = funcga.grad(lambda *args: dict(output(*args)))
    assert refusal(lambda: funcga.accumulate(as_dict, 2)(W, X)).startswith(f"the loss is of type dict{text}")
    text = "has_aux=True asks for a pair: return loss, aux"
    assert text in refusal(lambda: funcga.accumulate(funcga.grad(output, has_aux=True), 2)(W, X))

    pair = funcga.value_and_grad(lambda *args: (output(*args).loss, output(*args)), has_aux=True)
    fold = ((funcga.mean(), {"loss": funcga.mean(), "logits": funcga.concat()}), funcga.mean())
    (loss, aux), grads = funcga.accumulate(pair, 4, fold=fold)(W, X)
    assert type(aux) is outputs.CausalLMOutput
    torch.testing.assert_close((loss, aux.loss, aux.logits), ((X @ W["w"]).mean(),) * 2 + (X @ W["w"],))
    torch.testing.assert_close(grads["w"], X.mean(0))
