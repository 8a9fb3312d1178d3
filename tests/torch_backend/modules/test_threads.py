"""One module in several threads: each result is right, or the call is refused; and the module stays as it was."""

import sys
import threading

import pytest
import torch
from torch import nn

import funcga
from torch_backend import module_value_and_grad, pure_loss, trainable

X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_fn(module, x):
    return module(x).square().mean()


def of_module(module, loss_fn=loss_fn):
    return funcga.accumulate(module_value_and_grad(module, loss_fn), 2)


def of_pure_loss(module, loss_fn=loss_fn):
    step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss_fn)), 2)
    params = {name: p.detach() for name, p in trainable(module).items()}
    return lambda x: step(params, x)


PAIRS = [(of_module, of_pure_loss), (of_pure_loss, module_value_and_grad)]


def by_hand(scale):
    module = net()
    loss_fn(module, scale * X).backward()
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.fixture
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_all(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_no_result_is_mixed(switching_often):
    module, right, refused = net(), [], []

    def run(make, scale, expected):
        step = make(module)
        for _ in range(30):
            try:
                _, grads = step(scale * X)
            except funcga.FuncgaError as error:
                refused.append(str(error))
                continue
            right.append(all(torch.allclose(grads[name], expected[name], rtol=1e-10) for name in expected))

    jobs = [(of_module, 1.0, by_hand(1.0)), (of_pure_loss, 10.0, by_hand(10.0))]  # each draws the same numbers
    threads = [threading.Thread(target=run, args=job) for job in jobs]
    run_all(threads)
    assert len(right) + len(refused) == 60
    assert all(right)
    assert {"copy.deepcopy(module)" in text for text in refused} <= {True}
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_second_thread_is_refused_at_once(first, second):
    """While the loss of the first one runs; that one goes on as if nothing had happened."""
    module, errors = net(), []
    for p in module.parameters():
        p.grad = torch.full_like(p, 3.0)

    def other():
        with pytest.raises(
            funcga.FuncgaError, match=r"two threads use one module .* copy\.deepcopy\(module\)"
        ) as caught:
            second(module, loss_fn)(X)
        errors.append(caught.value)

    def waits(module, x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return loss_fn(module, x)

    _, grads = first(module, waits)(X)
    expected = by_hand(1.0)
    assert len(errors) >= 1
    assert all(torch.allclose(grads[name], expected[name], rtol=1e-10) for name in expected)
    assert all(p.grad.eq(3.0).all() for p in module.parameters())


def test_modules_in_two_threads_may_share_what_has_no_state(switching_often):
    torch.manual_seed(0)
    activation, results = nn.Tanh(), []
    modules = [nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 1)).double() for _ in range(2)]
    expected = [of_pure_loss(module)(X)[0] for module in modules]
    run = lambda index: results.extend((index, of_pure_loss(modules[index])(X)[0]) for _ in range(20))
    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    run_all(threads)
    assert len(results) == 40
    assert all(torch.equal(value, expected[index]) for index, value in results)
