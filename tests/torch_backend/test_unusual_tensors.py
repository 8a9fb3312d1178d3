"""Tensors, modules and transforms that torch has and a fold cannot take: told in words that say what to write."""

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


def steps_of(gradient):
    return {
        "accumulate": funcga.accumulate(gradient, 2),
        "one micro-batch": funcga.accumulate(gradient, 1),
        "stream": lambda params, *batch: funcga.stream(gradient)(params, [batch, batch]),
    }


def refusal(call):
    with pytest.raises(funcga.FuncgaError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "layout"),
    [("accumulate", torch.sparse_coo), ("one micro-batch", torch.sparse_csr), ("stream", torch.sparse_coo)],
)
def test_sparse_parameters(way, layout):
    params = {"w": torch.eye(3).to_sparse(layout=layout)}
    gradient = funcga.value_and_grad(lambda p, x: (p["w"] @ x.T).sum())
    assert refusal(lambda: steps_of(gradient)[way](params, X)) == (
        "`p['w']` is a sparse tensor float32[3, 3], and sums of gradients are dense, as parameters have to be. Let the "
        "values be the parameter, and make the sparse tensor of them in loss_fn: torch.sparse_coo_tensor(indices, "
        "values, shape)."
    )


def test_sparse_parameters_the_other_way():
    """What the refusal says works."""
    indices = torch.tensor([[0, 1, 2], [0, 1, 2]])
    loss = lambda p, x: torch.sparse.mm(
        torch.sparse_coo_tensor(indices, p["w"], (3, 3), check_invariants=True), x.T
    ).mean()
    got = funcga.accumulate(funcga.grad(loss), 2)(W, X)
    torch.testing.assert_close(got["w"], X.mean(0) / 3)


BATCHES = {
    "a sparse tensor, float32[6, 3]": lambda: X.to_sparse(),
    "a sparse tensor, float32[6, 3] ": lambda: X.to_sparse_csr(),
    "a nested tensor": lambda: torch.nested.nested_tensor([X[:2], X[2:]], layout=torch.jagged),
}


def of_rows(params, x):
    rows = x.unbind() if x.is_nested else [x.to_dense()]
    return sum((part @ params["w"]).sum() for part in rows)


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_without_rows_to_cut(kind):
    batch = BATCHES[kind]()
    for gradient in (funcga.grad(of_rows), torch.func.grad(of_rows)):
        message = refusal(lambda gradient=gradient: funcga.accumulate(gradient, 2)(W, batch))
        assert message.startswith(f"`x` is {kind.strip()}")
        assert message.endswith(
            "of which rows cannot be cut. Give it dense and padded; or cut it yourself, and stream the micro-batches: "
            "funcga.stream(grad_fn)(params, microbatches)."
        )
    streamed = funcga.stream(funcga.grad(of_rows))(W, [batch, batch])
    torch.testing.assert_close(streamed["w"], X.sum(0))


def test_a_batch_without_a_shape():
    batch = torch.nested.nested_tensor([X[:2], X[2:]])
    expected = (
        "`x` is float32[?], a tensor without a shape, so its rows cannot be counted. Give it dense and padded; or stream "
        "micro-batches, with layout=torch.jagged or with weight=."
    )
    assert refusal(lambda: funcga.accumulate(funcga.grad(of_rows), 2)(W, batch)) == expected
    assert refusal(lambda: funcga.stream(funcga.grad(of_rows))(W, [batch])) == expected
    streamed = funcga.stream(funcga.grad(of_rows), weight=lambda x: 2)(W, [batch])
    torch.testing.assert_close(streamed["w"], X.sum(0))


@pytest.mark.parametrize("make", [lambda: X.to_sparse_csr(), lambda: torch.nested.nested_tensor([X[:2], X[2:]])])
def test_what_torch_func_does_not_take(make):
    torch.testing.assert_close(funcga.grad(of_rows)(W, make())["w"], X.sum(0))
    recorded = {"w": W["w"].clone().requires_grad_()}
    assert refusal(lambda: funcga.grad(of_rows)(recorded, make())) == (
        "an argument is a compressed sparse or a nested tensor, which torch.func does not take. Give it dense, as "
        "x.to_sparse_coo(), or with layout=torch.jagged. As a micro-batch funcga.stream(grad_fn, weight=...) takes it "
        "as it is."
    )


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, X)])
def test_modules_of_torchscript(make):
    module = make(nn.Linear(3, 1))
    rest = (
        "is one of TorchScript, whose parameters cannot be replaced by others for a pure loss. Use the module that it "
        "was made of; or torch_backend.module_value_and_grad(module, loss_fn), which runs on the module's own "
        "parameters."
    )
    loss = lambda m, x: m(x).mean()
    assert refusal(lambda: torch_backend.pure_loss(module, loss)) == f"the module {rest}"
    inside = nn.Sequential(nn.Tanh(), module)
    assert refusal(lambda: torch_backend.pure_loss(inside, loss)) == f"the part `1` of the module {rest}"
    _, grads = funcga.accumulate(torch_backend.module_value_and_grad(module, loss), 2)(X)
    torch.testing.assert_close(grads["weight"][0], X.mean(0))
    _, grads = funcga.accumulate(torch_backend.module_value_and_grad(nn.Sequential(module), loss), 2)(X)
    torch.testing.assert_close(grads["0.weight"][0], X.mean(0))


def test_lazy_modules():
    module = nn.Sequential(nn.LazyLinear(1))
    params, loss = dict(module.named_parameters()), torch_backend.pure_loss(module, lambda m, x: m(x).mean())
    tx = torch_backend.from_optimizer(torch.optim.SGD, lr=0.1)
    for call in (
        lambda: funcga.accumulate(funcga.grad(loss), 2)(params, X),
        lambda: funcga.stream(funcga.grad(loss))(params, [X]),
        lambda: funcga.grad(loss)(params, X),
        lambda: tx.init(params),
        lambda: funcga.multi_steps(tx, 2).init(params),
    ):
        assert refusal(call) == (
            "`params['0.weight']` has no shape yet: it belongs to a lazy module, which makes its parameters when it "
            "first runs. Run it once before: with torch.no_grad(): module(x)."
        )
    with torch.no_grad():
        module(X)
    got = funcga.accumulate(funcga.grad(loss), 2)(dict(module.named_parameters()), X)
    torch.testing.assert_close(got["0.weight"][0], X.mean(0))


def freezes(params, x):
    params["w"].requires_grad_(False)
    return (x @ params["w"]).sum() + params["b"].sum()


def freezes_in_a_module(module, x):
    module.requires_grad_(False)
    return module(x).sum()


@pytest.mark.parametrize(
    ("way", "kind"),
    [("accumulate", "arguments"), ("one micro-batch", "module"), ("stream", "module"), ("alone", "arguments"),
     ("alone", "module"), ("inside", "arguments")],
)  # fmt: skip
def test_requires_grad_inside_of_a_loss(way, kind):
    module = nn.Linear(3, 1)
    params = {**W, "b": torch.ones(1)} if kind == "arguments" else dict(module.named_parameters())
    loss = freezes if kind == "arguments" else torch_backend.pure_loss(module, freezes_in_a_module)
    gradient = funcga.grad(loss)
    inside = funcga.accumulate(funcga.grad(lambda p, x: sum(g.sum() for g in gradient(p, x).values())), 1)
    step = {**steps_of(gradient), "alone": gradient, "inside": inside}[way]
    if way == "alone" and kind == "module":  # parameters that require grad
        assert refusal(lambda: step(params, X)) == UNKNOWN_TO_FUNC
        params = {name: p.detach() for name, p in params.items()}
    assert refusal(lambda: step(params, X)) == (
        "loss_fn calls requires_grad_() on a parameter that it is given, whose gradient is being taken. Leave what is "
        "frozen out of the parameters, as a pure_loss allows; or use p.detach() in loss_fn."
    )
    assert module.weight.requires_grad


UNKNOWN_TO_FUNC = (
    "loss_fn does what torch.func does not take, which a gradient function runs on where an argument, or a tensor that "
    "loss_fn closes over, requires grad, so that what it returns has a graph. Without one it runs on autograd, which "
    "takes checkpoints, saved-tensor hooks and the like: call it under torch.no_grad(), or give it {name: p.detach() "
    "for name, p in params.items()}."
)


def of_checkpoint(module, x):
    return checkpoint(module, x, use_reentrant=False).square().mean()


def of_reentrant_checkpoint(module, x):
    return checkpoint(module, x.clone().requires_grad_(), use_reentrant=True).square().mean()


def of_offloaded(module, x):
    with torch.autograd.graph.save_on_cpu():
        return module(x).square().mean()


def of_numpy(module, x):
    return module(x).mean() * float(module(x).detach().numpy().mean())


@pytest.mark.parametrize("loss_fn", [of_checkpoint, of_reentrant_checkpoint, of_offloaded, of_numpy])
def test_a_gradient_alone_takes_what_torch_func_does_not(loss_fn):
    module = nn.Linear(3, 2).double()
    x, params = torch.randn(4, 3, dtype=torch.float64), dict(module.named_parameters())
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn))
    assert refusal(lambda: gradient(params, x)) == UNKNOWN_TO_FUNC
    with torch.no_grad():
        under_no_grad = gradient(params, x)
    detached = {name: p.detach() for name, p in params.items()}
    of_detached = under_no_grad
    if loss_fn is of_reentrant_checkpoint:  # a tensor of its own requires grad: it might have second-order terms
        assert refusal(lambda: gradient(detached, x)) == UNKNOWN_TO_FUNC
    else:
        of_detached = gradient(detached, x)
    assert all(p.grad is None for p in module.parameters())
    loss = loss_fn(module, x)
    loss.backward()
    expected = loss.detach(), {name: p.grad for name, p in module.named_parameters()}
    for got in (under_no_grad, of_detached, funcga.accumulate(gradient, n=1)(params, x)):
        torch.testing.assert_close(got, expected)


class OfTorchOpt:
    """A transform whose update takes its parameters by name, and writes to the gradients unless it is told not to."""

    def init(self, params):
        return ()

    def update(self, updates, state, *, params=None, inplace=True):
        for update in updates.values():
            update.mul_(-1) if inplace else None
        return updates if inplace else {key: -update for key, update in updates.items()}, state


def test_transforms_that_are_called_in_another_way():
    tx = OfTorchOpt()
    assert refusal(lambda: funcga.multi_steps(tx, 2)) == (
        "tx.update is not called as update(grads, state, params): too many positional arguments. Adapt it: (tx.init, "
        "lambda grads, state, params: tx.update(grads, state, params=params, inplace=False))."
    )
    adapted = (tx.init, lambda grads, state, params: tx.update(grads, state, params=params, inplace=False))
    multi = funcga.multi_steps(adapted, 1)
    updates, _ = multi.update(W, multi.init(W), W)
    assert updates["w"].tolist() == [-1, -2, -3]


def test_sparse_adam_takes_no_dense_sums():
    assert refusal(lambda: torch_backend.from_optimizer(torch.optim.SparseAdam, lr=0.1)) == (
        "SparseAdam takes sparse gradients alone, and what funcga sums, in accumulate, stream and multi_steps, is dense. "
        "Use torch.optim.Adam; or call the step of SparseAdam, with the sparse gradients of a .backward()."
    )


# --- sequences of several lengths


def recurrent():
    """A loss over packed sequences, the sequences and their targets."""
    torch.manual_seed(0)
    module = nn.GRU(3, 4, batch_first=True)
    sequences = [torch.randn(length, 3) for length in (5, 2, 4, 3, 1, 6, 2, 3)]
    loss_fn = lambda module, packed, y: ((module(packed)[1][0].sum(-1) - y) ** 2).mean()
    return module, loss_fn, sequences, torch.randn(8)


def packed(sequences):
    return nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)


def test_packed_sequences():
    module, loss_fn, sequences, y = recurrent()
    loss_fn(module, packed(sequences), y).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    params, own = torch_backend.trainable(module), torch_backend.module_value_and_grad(module, loss_fn)
    pure = funcga.grad(torch_backend.pure_loss(module, loss_fn))
    of_dict = funcga.grad(torch_backend.pure_loss(module, lambda m, b: loss_fn(m, b["packed"], b["y"])))
    items = [(packed(sequences[i:j]), y[i:j]) for i, j in ((0, 3), (3, 7), (7, 8))]
    dicts = [{"packed": item, "y": target} for item, target in items]
    weight = lambda packed, y: len(y)
    for grads in [
        funcga.stream(pure, weight=weight)(params, items),
        funcga.stream(pure, weight=weight, device="cpu")(params, items),
        funcga.stream(own, weight=weight)(items)[1],
        funcga.stream(of_dict, weight=lambda batch: len(batch["y"]))(params, dicts),
    ]:
        funcga.compare(grads, expected).assert_close()
    # Padded, they are split, and packed in the loss.
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    pads = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    of_padded = torch_backend.pure_loss(
        module,
        lambda m, x, lengths, y: loss_fn(
            m, nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False), y
        ),
    )
    grads = funcga.accumulate(funcga.grad(of_padded), 3)(params, pads, lengths, y)
    funcga.compare(grads, expected).assert_close()
    text = (
        "an argument holds a PackedSequence, whose rows are time steps of all sequences together: they can neither be "
        "cut nor say what it weighs. Pass the padded sequences and their lengths, and pack them in loss_fn: "
        "pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False). Or stream micro-batches that are "
        "packed: stream(grad_fn, weight=lambda packed, y: len(y))."
    )
    one = packed(sequences[:1])  # all fields of which have as many rows
    for call in [
        lambda: funcga.accumulate(pure, 2)(params, packed(sequences), y),
        lambda: funcga.accumulate(own, 2)(packed(sequences), y),
        lambda: funcga.accumulate(of_dict, 2)(params, {"packed": packed(sequences), "y": y}),
        lambda: funcga.accumulate(pure, 2)(params, one),
        lambda: funcga.stream(pure)(params, items),
        lambda: funcga.stream(of_dict)(params, dicts),
    ]:
        assert refusal(call) == text


# --- what a model returns


def test_a_models_output_is_no_loss():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = lambda params, x: outputs.CausalLMOutput(loss=(x @ params["w"]).mean(), logits=x @ params["w"])
    text = (
        'which holds the loss among other outputs. Return it alone, output.loss or output["loss"]; with has_aux=True '
        "also return output.loss, aux."
    )
    assert refusal(lambda: funcga.accumulate(funcga.grad(output), 2)(W, X)).endswith(f"CausalLMOutput, {text}")
    as_dict = funcga.grad(lambda *args: dict(output(*args)))
    assert refusal(lambda: funcga.accumulate(as_dict, 2)(W, X)) == f"loss_fn returned of type dict, {text}"
    text = "asks for a pair: return output.loss, output."
    assert refusal(lambda: funcga.accumulate(funcga.grad(output, has_aux=True), 2)(W, X)).endswith(text)

    pair = funcga.value_and_grad(lambda *args: (output(*args).loss, output(*args)), has_aux=True)
    fold = ((funcga.mean(), {"loss": funcga.mean(), "logits": funcga.concat()}), funcga.mean())
    (loss, aux), grads = funcga.accumulate(pair, 4, fold=fold)(W, X)
    assert type(aux) is outputs.CausalLMOutput
    torch.testing.assert_close((loss, aux.loss, aux.logits), ((X @ W["w"]).mean(),) * 2 + (X @ W["w"],))
    torch.testing.assert_close(grads["w"], X.mean(0))
