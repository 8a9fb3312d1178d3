"""Which line of a program a cause is about: the user's own, through whatever lies between it and torch."""

import json
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import funcga

WINDOWS = [[torch.full((rows, 6), 1.0 + i) for i in range(4)] for rows in (3, 5)]


class Run:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(6, 16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def loss(self, x, n=4):
        return self.model(x).square().mean() / n


def not_divided(run):
    for window in WINDOWS:
        for x in window:
            run.loss(x, 1).backward()  # here
        run.optimizer.step()
        run.optimizer.zero_grad()


def backward_of_many(run):
    for window in WINDOWS:
        for x in window:
            torch.autograd.backward([run.loss(x, 1)])  # here
        run.optimizer.step()
        run.optimizer.zero_grad()


def in_a_function(run):
    def backward(loss):
        loss.backward()  # here

    for window in WINDOWS:
        for x in window:
            backward(run.loss(x, 1))
        run.optimizer.step()
        run.optimizer.zero_grad()


def scaled(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for window in WINDOWS:
        for x in window:
            scaler.scale(run.loss(x, 1)).backward()  # here
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


def never_unscaled(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for window in WINDOWS:
        for x in window:
            scaler.scale(run.loss(x)).backward()
        run.optimizer.step()  # here
        run.optimizer.zero_grad()


def clipped_before_unscaling(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for window in WINDOWS:
        for x in window:
            scaler.scale(run.loss(x)).backward()
        clip_grad_norm_(run.model.parameters(), 0.01)  # here
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


def in_a_closure(run):
    for window in WINDOWS:

        def closure(window=window):
            run.optimizer.zero_grad()
            for x in window:
                loss = run.loss(x, 1)
                loss.backward()  # here
            return loss

        run.optimizer.step(closure)


def erased(run):
    for window in WINDOWS:
        for x in window:
            run.optimizer.zero_grad()  # here
            run.loss(x).backward()
        run.optimizer.step()
        run.model.zero_grad()


def erased_by_the_model(run):
    for window in WINDOWS:
        run.optimizer.zero_grad()
        for x in window:
            run.model.zero_grad()  # here
            run.loss(x).backward()
        run.optimizer.step()


def left_over(run):
    for window in WINDOWS:
        for x in window:
            run.loss(x).backward()
        run.optimizer.step()  # here


def clipped_inside(run):
    for window in WINDOWS:
        for x in window:
            run.loss(x).backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)  # here
        clip_grad_norm_(run.model.parameters(), 0.001)
        run.optimizer.step()
        run.optimizer.zero_grad()


def values_clipped_inside(run):
    for window in WINDOWS:
        for x in window:
            run.loss(x).backward()
            torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.01)  # here
        run.optimizer.step()
        run.optimizer.zero_grad()


def never_stepped(run):
    for i, x in enumerate(WINDOWS[0] + WINDOWS[1][:2]):
        run.loss(x).backward()  # here
        if i == 3:
            run.optimizer.step()
            run.optimizer.zero_grad()


def stepped_too_often(run):
    for x in WINDOWS[0]:
        run.loss(x).backward()
        run.optimizer.step()  # here
        run.optimizer.zero_grad()


def two_optimizers(run):
    """Of the second one the micro-batches are erased, and of the first one nothing."""
    other = torch.nn.Linear(6, 16)
    of_other = torch.optim.Adam(other.parameters(), lr=0.0)
    for window in WINDOWS:
        for x in window:
            run.loss(x).backward()
            of_other.zero_grad()  # here
            (other(x).square().mean() / 4).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        of_other.step()


def gan(run):
    """The step of the discriminator, whose gradients are never erased."""
    maker = torch.nn.Linear(3, 6)
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.0)
    for x in WINDOWS[0]:
        F.softplus(run.model(x)).mean().backward()
        F.softplus(-run.model(maker(x[:, :3]).detach())).mean().backward()
        run.optimizer.step()  # here
        of_maker.zero_grad()
        F.softplus(run.model(maker(x[:, :3]))).mean().backward()
        of_maker.step()


def accelerated(run):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.GradientState._reset_state()  # of an earlier test of this process
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = accelerator.prepare(run.model, run.optimizer)
    for window in WINDOWS:
        for x in window:
            with accelerator.accumulate(model):
                accelerator.backward(run.loss(x))  # here
                optimizer.step()
                optimizer.zero_grad()


LOOPS = {
    not_divided: "not divided", backward_of_many: "not divided", in_a_function: "not divided", scaled: "not divided",
    in_a_closure: "not divided", never_unscaled: "never unscaled", clipped_before_unscaling: "clipped before unscaling",
    erased: "erased", erased_by_the_model: "erased", left_over: "left over", clipped_inside: "clipped inside the window",
    values_clipped_inside: "clipped inside the window", never_stepped: "never stepped", stepped_too_often: "stepped too often",
    two_optimizers: "erased", gan: "left over", accelerated: "divided twice",
}  # fmt: skip


def marked(loop):
    """The line that ends with "here"."""
    first = loop.__code__.co_firstlineno
    with open(__file__) as file:
        lines = file.read().split("\n")
    number = next(i for i in range(first, len(lines)) if lines[i - 1].endswith("# here"))
    return f"{os.path.relpath(__file__)}:{number}  {lines[number - 1].strip()}"


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_cause_names_the_line(loop):
    run = Run()
    with funcga.watch() as watched:
        loop(run)
    found = {cause.name: cause for cause in watched.causes}
    cause = found[LOOPS[loop]]
    assert cause.line == marked(loop), watched
    assert f"   At {cause.line}\n   Fix: {cause.fix[:20]}" in str(watched)
    assert "nan" not in cause.evidence
    [as_json] = [each for each in json.loads(watched.to_json())["causes"] if each["name"] == cause.name]
    assert (as_json["line"], as_json["fix"]) == (cause.line, cause.fix)


def test_a_program_that_is_installed_has_lines_too():
    source = "def train(loss, optimizer):\n    for _ in range(4):\n        loss().backward()\n    optimizer.step()\n"
    names = {"__name__": "mine.train"}
    exec(compile(source, "/lib/site-packages/mine/train.py", "exec"), names)
    run = Run()
    with funcga.watch() as watched:
        # In a thread, so that it is called by nothing of this file.
        loss = lambda: run.loss(WINDOWS[0][0], 1)
        thread = threading.Thread(target=names["train"], args=(loss, run.optimizer))
        thread.start()
        thread.join()
    [cause] = watched.causes
    assert cause.line.startswith("/lib/site-packages/mine/train.py:3")
