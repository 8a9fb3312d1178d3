"""Gradients of large weights that are added in the backward pass: right in every case, and nothing of a weight's size is
made in between where they are.

The oracle is autograd's gradient of the whole batch, in float64 where the case is.
"""

import gc
import sys
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend
from tests.processes import processes
from tests.torch_backend.wrapped.test_wrapped import ddp, ddp_views, fsdp1

LARGE = 2**19  # elements
VOCABULARY, WIDTH = 4200, 128  # a table that is large enough
N = 3
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")  # which torch itself uses, in rules for tangents


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Where something was compiled in the process nothing is fused."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    torch.manual_seed(0)


class Conv1D(nn.Module):
    """As that of transformers: a weight the other way round."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 10), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Model(nn.Module):
    def __init__(self, tied=False, head=nn.Linear, run=lambda part, x: part(x), vocabulary=VOCABULARY):
        super().__init__()
        self.vocabulary = vocabulary
        self.table = nn.Embedding(vocabulary, WIDTH, padding_idx=3)
        self.hidden, self.head, self.run = nn.Linear(WIDTH, WIDTH), self._head(head), run
        if tied:
            self.head.weight = self.table.weight

    def _head(self, head):
        return head(WIDTH, self.vocabulary) if head is nn.Linear else head(self.vocabulary, WIDTH)

    def forward(self, tokens):
        return self.run(self.head, torch.tanh(self.hidden(self.run(self.table, tokens))))


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def total_of(model, tokens, targets):
    return loss_of(model, tokens, targets) * targets.numel()


def batch(rows=7, length=5):
    tokens, targets = torch.randint(0, VOCABULARY, (2, rows, length))
    tokens[:, 0] = 3
    return tokens, targets


class Made(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the tensors with the elements of a large weight that operators make; what is added in place is not new."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        output = op(*args, **(kwargs or {}))
        is_new = not op.is_view and not op._schema.is_mutable and op.overloadpacket.__name__ != "detach"
        if is_new and isinstance(output, torch.Tensor) and output.ndim == 2 and output.numel() >= self.size:
            self.count += 1
        return output


def made(call, size=LARGE):
    with Made(size) as counts:
        call()
    return counts.count


def made_without(step, args):
    with torch_backend.fused_gradients(False):
        return made(partial(step, *args))


def gradients(loss, model, *args):
    params = torch_backend.trainable(model)
    found = torch.autograd.grad(loss(model, *args), [*params.values()], materialize_grads=True)
    return dict(zip(params, found, strict=True))


def mean_gradients(loss, model, args):
    """The mean of the gradients of micro-batches of equal size."""
    each = [gradients(loss, model, *part) for part in zip(*(arg.tensor_split(N) for arg in args), strict=True)]
    return {name: sum(part[name] for part in each) / N for name in each[0]}


def check(got, wanted, limit=1e-12):
    assert got.keys() == wanted.keys()
    for name, right in wanted.items():
        assert got[name].dtype == right.dtype or limit > 1e-6
        assert (got[name].double() - right.double()).abs().max() <= limit * right.double().abs().max(), name


def of_module(model, loss, **options):
    step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss), N, in_axes=0, **options)
    return lambda *args: step(*args)[1]


def of_params(model, loss, **options):
    step = funcga.accumulate(funcga.value_and_grad(torch_backend.pure_loss(model, loss)), N, **options)
    return lambda *args: step(torch_backend.trainable(model), *args)[1]


def of_functional(model, loss, **options):
    gradient = funcga.value_and_grad(
        lambda params, *args: loss(lambda *inputs: functional_call(model, params, inputs), *args)
    )
    step = funcga.accumulate(gradient, N, **options)
    return lambda *args: step(torch_backend.trainable(model), *args)[1]


def of_stream(model, loss, **options):
    step = funcga.stream(funcga.value_and_grad(torch_backend.pure_loss(model, loss)), **options)
    return lambda *args: step(torch_backend.trainable(model), zip(*(arg.split(2) for arg in args), strict=True))[1]


WAYS = {"module": of_module, "pure_loss": of_params, "functional_call": of_functional, "stream": of_stream}
MODELS = {
    "untied": Model,
    "tied": lambda: Model(tied=True),
    "Conv1D": lambda: Model(head=Conv1D),
    "checkpoint": lambda: Model(tied=True, run=lambda part, x: checkpoint(part, x, use_reentrant=False)),
}


@pytest.mark.parametrize(("way", "model"), [*zip(WAYS, MODELS, strict=True), ("module", "tied"), ("stream", "untied")])
def test_gradients_are_those_of_the_whole_batch(way, model):
    is_packed = model == "checkpoint"  # its rows, so that they are left to autograd
    model, args = MODELS[model]().double(), batch()
    step = WAYS[way](model, loss_of)
    for _ in range(2):
        check(step(*args), gradients(loss_of, model, *args))
    assert all(parameter.grad is None for parameter in model.parameters())
    # Two tables, or one that is tied. What remains is what the sums begin with, and a gradient of no micro-batch after.
    tables = 1 if model.head.weight is model.table.weight else 2
    with torch_backend.fused_gradients(False):
        plain = made(lambda: step(*args))
    if not is_packed:
        assert made(lambda: step(*args)) <= tables + 1 < plain


FOLDS = {
    "unequal weights": (loss_of, {"weight": lambda tokens, targets: (tokens != 3).sum().item()}),
    "weights of a device": (loss_of, {"weight": lambda tokens, targets: (tokens != 3).sum()}),
    "per_weight": (total_of, {"fold": funcga.per_weight(), "weight": lambda tokens, targets: targets.numel()}),
    "sum": (total_of, {"fold": funcga.sum()}),
    "max of the loss": (loss_of, {"fold": (funcga.max(), funcga.mean())}),
    "reproducible": (loss_of, {"fold": funcga.reproducible(funcga.mean())}),
    "drop": (loss_of, {"drop": "microbatch"}),
}


@pytest.mark.parametrize(
    ("fold", "way"), [(fold, (of_module, of_params)[index % 2]) for index, fold in enumerate(FOLDS)]
)
def test_every_fold(way, fold):
    loss, options = FOLDS[fold]
    model, (tokens, targets) = Model(tied=True).double(), batch()
    tokens[2:, 1:3] = 3  # micro-batches of other weights
    step = way(model, loss, **options)
    parts = [*zip(tokens.tensor_split(N), targets.tensor_split(N), strict=True)]
    weights = [float(options["weight"](*part)) if "weight" in options else len(part[0]) for part in parts]
    each = [gradients(loss, model, *part) for part in parts]
    total = {"per_weight": targets.numel(), "sum": 1}.get(fold, sum(weights))
    weights = [1] * N if fold in ("per_weight", "sum") else weights
    wanted = {name: sum(w * part[name] for w, part in zip(weights, each, strict=True)) / total for name in each[0]}
    for _ in range(2):
        check(step(tokens, targets), wanted)


def test_observers_see_each_gradient():
    model, args = Model(tied=True).double(), batch(6)
    gradient = torch_backend.module_value_and_grad(model, loss_of)
    step = funcga.accumulate(gradient, N, in_axes=0, observe=funcga.gradient_norms())
    for _ in range(2):
        (_, grads), norms = step(*args)
    parts = zip(*(arg.tensor_split(N) for arg in args), strict=True)
    each = [gradients(loss_of, model, *part).values() for part in parts]
    squares = [sum(leaf.square().sum() for leaf in leaves) for leaves in each]
    assert torch.allclose(norms.microbatches.double().square(), torch.stack(squares), rtol=1e-5)
    check(grads, gradients(loss_of, model, *args))


# --- losses that do more than call the module


def penalty(model, tokens, targets):
    """A gradient inside of the loss, which goes through the weights twice."""
    inputs = model.table(tokens)
    inner = F.cross_entropy(model.head(torch.tanh(model.hidden(inputs))).flatten(0, 1), targets.flatten())
    (gradient,) = torch.autograd.grad(inner, inputs, create_graph=True)
    return inner + gradient.square().sum()


def decay(model, tokens, targets):
    """A weight that is used as such, too."""
    return loss_of(model, tokens, targets) + 0.1 * model.head.weight.square().mean()


def twice(model, tokens, targets):
    return loss_of(model, tokens, targets) + loss_of(model, tokens.flip(0), targets)


def of_weights(model, tokens, targets):
    """An inner gradient by the weights themselves, of what is fused."""
    inner = loss_of(model, tokens, targets)
    gradients = torch.autograd.grad(inner, [model.head.weight, model.table.weight], create_graph=True)
    return inner + sum(gradient.square().sum() for gradient in gradients)


def under_transforms(model, tokens, targets):
    """The module in a vmap of torch.func, and with tangents."""
    inputs = model.table(tokens)
    outputs = torch.func.vmap(model.head)(inputs)
    _, tangents = torch.func.jvp(model.head, (inputs,), (torch.ones_like(inputs),))
    return outputs.square().mean() + tangents.square().mean()


def of_rows(model, tokens, targets):
    """Calls with a vector, and with keywords."""
    rows = F.embedding(input=tokens[:, 1], weight=model.table.weight)
    outputs = [F.linear(input=row, weight=model.head.weight, bias=model.head.bias) for row in rows]
    return torch.stack(outputs).square().mean()


def in_place(model, tokens, targets):
    """What a layer returns is written to."""
    hidden = F.relu(model.hidden(model.table(tokens)), inplace=True)
    outputs = model.head(hidden)
    outputs += 1
    return F.cross_entropy(outputs.mul_(2).flatten(0, 1), targets.flatten())


def with_a_pass_in_a_hook(model, tokens, targets):
    """A hook that runs another pass by the same weight, while the window runs its own."""
    hidden = model.hidden(model.table(tokens))
    other = model.head(hidden.detach()).square().mean()
    hidden.register_hook(lambda gradient: gradient + 0 * torch.autograd.grad(other, model.head.weight)[0].sum())
    return F.cross_entropy(model.head(torch.tanh(hidden)).flatten(0, 1), targets.flatten())


def in_a_hook_of_the_loss(model, tokens, targets):
    """A hook of the loss that runs another pass from the loss on, before the window's own goes on."""
    loss, began = loss_of(model, tokens, targets), []

    def hook(gradient):
        if not began:
            began.append(True)
            (found,) = torch.autograd.grad(loss, model.head.weight, torch.ones(()).to(loss), retain_graph=True)
            return gradient * (1 + found.abs().sum())
        return None

    loss.register_hook(hook)
    return loss


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is F.linear else result


def under_a_mode(model, tokens, targets):
    """What a mode makes of F.linear is differentiated."""
    with Doubled():
        return loss_of(model, tokens, targets)


class Coded(torch.Tensor):
    """A table that says by itself how rows are taken from it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (F.embedding, F.linear):
            plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, cls) else arg for arg in args]
            return 3 * function(*plain, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})


CODED = torch.randn(VOCABULARY, 2, dtype=torch.float64).as_subclass(Coded)


def with_a_subclass(model, tokens, targets):
    rows = F.embedding(tokens, CODED)
    return loss_of(model, tokens, targets) * (rows.as_subclass(torch.Tensor).square().mean() + 1)


def of_sparse_rows(model, tokens, targets):
    """A bag of words."""
    rows = torch.zeros(len(tokens), WIDTH, dtype=torch.float64)
    rows[:, :3] = tokens[:, :3] / VOCABULARY
    return F.linear(rows.to_sparse(), model.head.weight).square().mean() + loss_of(model, tokens, targets)


def scaled(model, tokens, targets):
    """A product that is multiplied by a number."""
    outputs = torch.addmm(model.head.bias, model.table(tokens).flatten(0, 1), model.head.weight.t(), beta=3, alpha=0.25)
    return F.cross_entropy(outputs, targets.flatten())


def of_frequent_rows(model, tokens, targets):
    """Whose gradient is divided by how often each is looked up."""
    rows = F.embedding(tokens % 7, model.table.weight, scale_grad_by_freq=True)
    return F.cross_entropy(model.head(rows).flatten(0, 1), targets.flatten())


LOSSES = [scaled, penalty, decay, twice, of_weights, under_transforms, of_rows, in_place, with_a_pass_in_a_hook]
LOSSES += [in_a_hook_of_the_loss, under_a_mode, with_a_subclass, of_sparse_rows, of_frequent_rows]


@pytest.mark.parametrize("loss", LOSSES)
def test_what_losses_do(loss):
    for tied in (False, True):
        model, args = Model(tied).double(), batch(6)
        wanted = mean_gradients(loss, model, args)
        for way in (of_module, of_params):
            step = way(model, loss)
            for _ in range(2):
                check(step(*args), wanted)


def test_checkpoints_are_recomputed_once():
    """Their rows are packed by hooks, so that they are left to autograd."""
    runs = []
    run = lambda part, x: checkpoint(lambda x: (runs.append(1), part(x))[1], x, use_reentrant=False)
    model, args = Model(run=run), batch(6)
    step = of_module(model, loss_of)
    for _ in range(2):
        runs.clear()
        step(*args)
        assert len(runs) == 4 * N  # table and head, forwards and again


class Mark:
    pass


@pytest.mark.parametrize("raises", [False, True])
def test_no_node_lives_on(raises):
    """Nor what it has saved; also after an error in the backward pass, without the collector of cycles."""
    model, args, saved = Model(), batch(6), []

    def loss(model, tokens, targets):
        rows = torch.tanh(model.hidden(model.table(tokens)))
        rows.grad_fn.metadata["mark"] = mark = Mark()  # which lives as long as the node
        saved.append(weakref.ref(mark))
        if raises:
            rows.register_hook(lambda _: 1 / 0)
        return F.cross_entropy(model.head(rows).flatten(0, 1), targets.flatten())

    step = of_module(model, loss)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) if raises else nullcontext():
                step(*args)
        assert len(saved) == 2 * (1 if raises else N)
        assert [each() for each in saved] == [None] * len(saved)
    finally:
        gc.enable()


def test_reentrant_checkpoints():
    run = lambda part, x: checkpoint(part, x, use_reentrant=True) if x.is_floating_point() else part(x)
    model, plain, args = Model(tied=True, run=run).double(), Model(tied=True).double(), batch()
    plain.load_state_dict(model.state_dict())
    wanted = gradients(loss_of, plain, *args)
    for way in (of_module, of_params):
        step = way(model, loss_of)
        for _ in range(2):
            check(step(*args), wanted)


def test_hooks_on_parameters_are_called():
    model, args = Model().double(), batch()
    seen = []
    model.head.weight.register_hook(lambda gradient: seen.append(gradient.shape) or 2 * gradient)
    wanted = gradients(loss_of, model, *args)
    seen.clear()
    for way in (of_module, of_params):
        check(way(model, loss_of)(*args), wanted)
    assert seen == [model.head.weight.shape] * 2 * N


def test_hooks_of_the_loss_are_called():
    """They are put on the leaf inside of the loss: it is an attribute of the module then."""
    model, args = Model().double(), batch(6)
    seen = []

    def loss(model, *args):
        handles.append(model.head.weight.register_hook(lambda gradient: seen.append(gradient.shape)))
        return loss_of(model, *args)

    handles = []
    step = of_params(model, loss)
    for _ in range(2):
        check(step(*args), gradients(loss_of, model, *args))
    assert len(seen) == N * (N + 1)  # a leaf lasts for the window, and the hooks with it


def test_frozen_weights_get_no_gradient():
    """As in LoRA."""
    model, args = Model(tied=True).double(), batch()
    model.table.weight.requires_grad_(False)
    for way in (of_module, of_params):
        step = way(model, loss_of)
        for _ in range(2):
            check(step(*args), gradients(loss_of, model, *args))


def test_16_bits_are_added_in_float32():
    model, args = Model().bfloat16(), batch()
    plain = Model().double()
    plain.load_state_dict(model.state_dict())
    wanted = gradients(loss_of, plain, *args)
    for way in (of_module, of_params):
        step = way(model, loss_of, fold=(funcga.mean(), funcga.mean(out_dtype=torch.float32)))
        for _ in range(2):
            check(step(*args), wanted, limit=2e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_device(dtype):
    """Products of 16-bit matrices are added in float32 there, and are no tensors of a weight's size.

    A module's own parameters of 16 bits have no wider `.grad`: there are the two gradients of each micro-batch, too.
    """
    model, args = Model(vocabulary=2**16).to(dtype), batch()
    plain = Model(vocabulary=2**16).double()
    plain.load_state_dict(model.state_dict())
    wanted = gradients(loss_of, plain, *args)
    model, args = model.to("cuda"), [arg.to("cuda") for arg in args]
    for way, gradients_beside in ((of_module, 2 * N if dtype is torch.bfloat16 else 0), (of_params, 0)):
        step = way(model, loss_of, fold=(funcga.mean(), funcga.mean(out_dtype=torch.float32)))
        for _ in range(2):
            got = {name: leaf.cpu() for name, leaf in step(*args).items()}
            check(got, wanted, limit=2e-2 if dtype is torch.bfloat16 else 1e-5)
        assert made(partial(step, *args), model.head.weight.numel()) == 2 + gradients_beside  # the sums


@pytest.mark.parametrize("loss", [loss_of, penalty, of_weights, twice])
@pytest.mark.parametrize("model", ["tied", "checkpoint", "Conv1D"])
def test_under_autocast(model, loss):
    """The product of a micro-batch is rounded to 16 bits, as it is without; and not once more."""
    is_packed = model == "checkpoint"
    model, args = MODELS[model](), batch(6)

    def cast(model, *args):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, *args)

    wanted = mean_gradients(cast, model, args)
    for way in (of_module, of_params):
        step = way(model, cast)
        with torch_backend.fused_gradients(False):
            plain = step(*args)
        check(plain, wanted, limit=1e-6)
        check(step(*args), plain, limit=1e-2)
    if loss is loss_of and not is_packed:
        assert made(partial(step, *args)) < made_without(step, args)


@pytest.mark.parametrize("way", [of_module, of_params])
def test_windows_in_windows(way):
    """A pass of one window goes through the weights of another that is open: in a stream's generator, in a loss."""
    model, other, (tokens, targets) = Model().double(), nn.Embedding(VOCABULARY, WIDTH).double(), batch(6)
    inner = of_module(other, lambda other, x, y: F.cross_entropy(model.head(other(x)).flatten(0, 1), y.flatten()))

    def batches():
        yield from zip(tokens.split(2), targets.split(2), strict=True)
        inner(tokens, targets)

    def loss(model, *args):
        with torch.no_grad():
            inner(tokens, targets)
        return loss_of(model, *args)

    wanted = gradients(loss_of, model, tokens, targets)
    stream = funcga.stream(torch_backend.module_value_and_grad(model, loss_of), in_axes=0)
    for _ in range(2):
        check(stream(batches())[1], wanted)
        check(way(model, loss)(tokens, targets), wanted)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_complex_weights(is_transposed):
    params = {"w": torch.randn(LARGE // 512, 512, dtype=torch.complex128)}
    x = torch.randn(6, LARGE // 512 if not is_transposed else 512, dtype=torch.complex128)
    loss = lambda params, x: (x @ (params["w"].t() if is_transposed else params["w"])).abs().square().mean()
    leaf = params["w"].clone().requires_grad_()
    loss({"w": leaf}, x).backward()
    step = funcga.accumulate(funcga.value_and_grad(loss), N)
    found = step(params, x)[1]["w"]
    assert (found - leaf.grad).abs().max() <= 1e-12 * leaf.grad.abs().max()
    assert made(partial(step, params, x)) < made_without(step, (params, x))


def test_a_gradient_of_another_dtype_is_left_to_autograd():
    model, args = Model(), batch(6)
    model.head.weight.grad_dtype = torch.float64
    step = of_module(model, loss_of)
    with torch_backend.fused_gradients(False):
        plain = step(*args)
    check(step(*args), plain, limit=1e-6)


def test_nothing_of_torch_stays_replaced():
    before = F.linear, F.embedding, torch.addmm
    model, args = Model(), batch()

    def fails(model, *args):
        raise ZeroDivisionError

    of_params(model, loss_of)(*args)
    with pytest.raises(ZeroDivisionError):
        of_params(model, fails)(*args)
    assert before == (F.linear, F.embedding, torch.addmm)


def test_small_weights_are_left_to_autograd():
    model, x = nn.Linear(8, 8), torch.randn(6, 8)
    used = []
    step = of_module(model, lambda model, x: used.append(F.linear) or model(x).square().mean())
    own = F.linear
    step(x)
    assert set(used) == {own}


def test_it_can_be_switched_off_to_the_bit():
    model, (tokens, targets) = Model(tied=True), batch(6)
    step = of_module(model, loss_of)
    for part in zip(tokens.split(2), targets.split(2), strict=True):
        loss_of(model, *part).backward()
    loop = {name: parameter.grad / N for name, parameter in model.named_parameters()}
    with torch_backend.fused_gradients(False):
        assert all(torch.equal(leaf, loop[name]) for name, leaf in step(tokens, targets).items())
    assert made(lambda: step(tokens, targets)) <= 2
    torch_backend.fused_gradients(False)
    assert made(lambda: step(tokens, targets)) > 2
    torch_backend.fused_gradients(True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of Dynamo itself
def test_compiled_losses_compile_once():
    """What torch.compile has made is compiled again where a function of torch is another one."""
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounter()
    model, args = Model().double(), batch(6)
    compiled = torch.compile(model.head, backend=counter)
    loss = lambda model, tokens, targets: F.cross_entropy(
        compiled(torch.tanh(model.hidden(model.table(tokens)))).flatten(0, 1), targets.flatten()
    )
    loss(model, *[arg[:2] for arg in args])
    step = of_module(model, loss)
    for _ in range(2):
        check(step(*args), gradients(loss_of, model, *args))
    assert counter.frame_count == 1


def test_a_plan_knows_of_it():
    """A head of the vocabulary that is tied: no table in between, where autograd has two at once."""
    model, args = Model(tied=True), batch(16, 1)
    gradient = torch_backend.module_value_and_grad(model, loss_of)
    size = model.table.weight.nbytes
    with torch_backend.fused_gradients(False):
        plain = funcga.plan(gradient, *args, memory=size).peak_bytes
    fused = funcga.plan(gradient, *args, memory=size).peak_bytes
    assert size < plain - fused < 3 * size


def test_a_loss_that_reaches_no_weight_is_an_error():
    model, args = Model(tied=True), batch()
    for way in (of_module, of_params):
        with pytest.raises(funcga.FuncgaError, match="does not depend"):
            way(model, lambda model, *args: loss_of(model, *args).detach().requires_grad_())(*args)
        way(model, lambda model, *args: model.head.weight.square().mean())(*args)


def test_other_leaves_are_left_alone():
    """A pass is restricted to the leaves of the window, also where it has functions of the library."""
    model, args = Model(tied=True), batch(6)
    other = torch.zeros(WIDTH, requires_grad=True)
    seen = []
    other.register_hook(seen.append)

    def loss(model, tokens, targets):
        return F.cross_entropy(model.head(model.table(tokens) + other).flatten(0, 1), targets.flatten())

    for way in (of_module, of_params):
        way(model, loss)(*args)
    assert seen == []
    assert other.grad is None


# --- replicas


def sharded(group, model):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(model.table, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {
    "DDP": ddp,
    "DDP, views": ddp_views,
    "FSDP2": sharded,
    "FSDP1": lambda group, model: fsdp1(group, model, auto_wrap_policy=None),
    "across": None,
}


def replicas(group, wrapper, tied):
    """How far two windows are off on this rank, and how many tensors of a weight's size a window makes, fused or not."""
    torch.manual_seed(0)
    plain, args = Model(tied).double(), [arg.flatten() for arg in batch(8)]
    loss = lambda model, tokens, targets: F.cross_entropy(model(tokens), targets)
    wanted = gradients(loss, plain, *args)
    torch.manual_seed(0)
    model = Model(tied).double()
    gradient = torch_backend.module_value_and_grad(
        model if WRAPPERS[wrapper] is None else WRAPPERS[wrapper](group, model), loss
    )
    step = funcga.accumulate(gradient, N, in_axes=0, across=group if WRAPPERS[wrapper] is None else None)
    rows = slice(0, 26) if group.rank() == 0 else slice(26, 40)
    call = lambda: step(*(arg[rows] for arg in args))[1]
    worst = 0.0
    for _ in range(2):
        for name, leaf in call().items():
            whole = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
            right = wanted[name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")]
            if whole.shape == right.shape:  # FSDP1's are flat shards
                worst = max(worst, ((whole - right).abs().max() / right.abs().max()).item())
    with torch_backend.fused_gradients(False):
        unfused = made(call)
    return worst, made(call), unfused


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_replicas(wrapper):
    ties = [False] if wrapper in ("FSDP2", "FSDP1") else [False, True]
    for tied in ties:
        for worst, fused, unfused in processes(2).run(replicas, wrapper, tied):
            assert worst < 1e-12
            # What FSDP runs is no pass that a weight could be left out of.
            assert fused < unfused if not wrapper.startswith("FSDP") else fused == unfused
