"""Gradient accumulation as guides to it have it, in plain PyTorch: what the recipes are held against, right or wrong."""

import contextlib
import math

import torch
from torch.nn.utils import clip_grad_norm_


class Recorded:
    """An optimizer that changes nothing: `gradients` has what each step would have used."""

    def __init__(self, model):
        self.parameters, self.gradients = list(model.parameters()), []

    def step(self):
        self.gradients.append([p.grad.clone() for p in self.parameters])

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


def every_few(model, criterion, optimizer, loader, steps, epochs=1):
    """An update after every few micro-batches; the count goes on over the epochs, what is left is never used."""
    count = 0
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets) / steps
            loss.backward()
            count += 1
            if count % steps == 0:
                optimizer.step()
                optimizer.zero_grad()


def to_the_end(model, criterion, optimizer, loader, steps):
    """The same, and an update at the end of the loader."""
    for i, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets) / steps
        loss.backward()
        if (i + 1) % steps == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


class GradientAccumulator:
    """An update at the end of each epoch, after which the count of micro-batches goes on."""

    def __init__(self, model, criterion, optimizer, steps):
        self.model, self.criterion, self.optimizer, self.steps = model, criterion, optimizer, steps
        self.step_count = 0

    def train_step(self, inputs, targets):
        loss = self.criterion(self.model(inputs), targets) / self.steps
        loss.backward()
        self.step_count += 1
        if self.step_count % self.steps == 0:
            self.update()

    def train_epoch(self, loader):
        for inputs, targets in loader:
            self.train_step(inputs, targets)
        if self.step_count % self.steps != 0:
            self.update()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def fetched_ahead(model, criterion, optimizer, loader, steps):
    """The criterion is a sum over tokens, which are counted before the first backward pass of a window."""
    iterator, updates = iter(loader), math.ceil(len(loader) / steps)
    for update in range(updates):
        last = update == updates - 1
        window = [next(iterator) for _ in range((len(loader) % steps or steps) if last else steps)]
        items = sum((labels != -100).sum() for _, labels in window)
        for inputs, labels in window:
            loss = criterion(model(inputs), labels) / items
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def in_replicas(model, criterion, optimizer, window, items=None, max_norm=None):
    """One update of DDP or FSDP: synchronised once, averaged over the replicas, or by the tokens of all of them."""
    for i, (inputs, targets) in enumerate(window):
        last, context = i == len(window) - 1, contextlib.nullcontext()
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        elif not last:
            context = model.no_sync()
        with context:
            loss = criterion(model(inputs), targets)
            loss = loss / len(window) if items is None else loss * torch.distributed.get_world_size() / items
            loss.backward()
    if max_norm is not None:
        clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def clipped(model, criterion, optimizer, loader, steps, max_norm, *, each):
    """The norms; clipped is once an update, or after each backward pass."""
    norms = []
    for i, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets) / steps
        loss.backward()
        if each or (i + 1) % steps == 0:
            norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
        if (i + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return norms


def scheduled(model, criterion, optimizer, scheduler, loader, steps, epochs, *, after):
    """The learning rate of every update; the scheduler is stepped after each "update", "microbatch" or "epoch"."""
    rates = []
    for _ in range(epochs):
        for i, (inputs, targets) in enumerate(loader):
            loss = criterion(model(inputs), targets) / steps
            loss.backward()
            updates = (i + 1) % steps == 0 or i + 1 == len(loader)
            if updates:
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
            if after == "microbatch" or (after == "update" and updates):
                scheduler.step()
        if after == "epoch":
            scheduler.step()
    return rates


def accumulation_steps(target_batch_size, mini_batch_size):
    """How many micro-batches are to make a batch of the size that is wanted."""
    steps = target_batch_size // mini_batch_size
    return max(1, steps)


def adaptive(model, criterion, optimizer, loader):
    """The steps it ends with: twice as many after every batch that did not fit."""
    steps = 1
    for i, (inputs, targets) in enumerate(loader):
        try:
            criterion(model, inputs, targets).backward()
            if i % steps == steps - 1:
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            optimizer.zero_grad()
            steps *= 2
    return steps


def in_chunks(model, criterion, inputs, targets, size):
    """The loss and the outputs of a batch; the gradients are in `.grad`."""
    total, outputs = 0.0, []
    for start in range(0, len(inputs), size):
        chunk = model(inputs[start : start + size])
        loss = criterion(chunk, targets[start : start + size])
        (loss * len(chunk) / len(inputs)).backward()
        total += loss.item() * len(chunk)
        outputs.append(chunk.detach())
    return total / len(inputs), torch.cat(outputs)


class Metrics:
    """(loss, accuracy) at every few micro-batches, else None."""

    def __init__(self, steps):
        self.steps, self.count = steps, 0
        self.loss = self.correct = self.total = 0

    def update(self, loss, correct, total):
        self.loss, self.correct, self.total = self.loss + loss, self.correct + correct, self.total + total
        self.count += 1
        if self.count % self.steps:
            return None
        found = self.loss / self.steps, self.correct / self.total
        self.loss = self.correct = self.total = 0
        return found


def difference(model, criterion, large, small):
    """The largest difference of the gradients of one large batch and of small ones."""
    gradients = []
    for batches in ([large], small):
        model.zero_grad()
        for inputs, targets in batches:
            loss = criterion(model(inputs), targets) / len(batches)
            loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))


def mixed(model, criterion, optimizer, scaler, loader, steps, max_norm, scheduler=None, *, unscale=True, guard=False):
    """float16 with a GradScaler, and what is left at the end: the norms, of which one forgets that they are scaled.

    The scheduler is stepped in every window, or, with a guard, after updates.
    """
    norms, rates = [], []

    def update():
        scale = scaler.get_scale()
        if unscale:
            scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        rates.append(optimizer.param_groups[0]["lr"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler and not (guard and scaler.get_scale() < scale):
            scheduler.step()

    step_count = 0
    for inputs, targets in loader:
        with torch.autocast("cpu", torch.float16):
            loss = criterion(model(inputs), targets) / steps
        scaler.scale(loss).backward()
        step_count += 1
        if step_count % steps == 0:
            update()
    if step_count % steps != 0:
        update()
    return norms, rates


def adjusted_lr(base_lr, base_batch_size, batch_size, steps):
    """The linear rule, for a batch that is always full."""
    return base_lr * (batch_size * steps) / base_batch_size
