"""Gradient accumulation as guides to it have it, in plain PyTorch: what the recipes are held against."""

import contextlib

import torch
from torch.nn.utils import clip_grad_norm_


def in_replicas(model, criterion, optimizer, window, items, max_norm):
    """One update of DDP or FSDP: synchronised once, and divided by the tokens of all replicas."""
    for i, (inputs, targets) in enumerate(window):
        last, context = i == len(window) - 1, contextlib.nullcontext()
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        elif not last:
            context = model.no_sync()
        with context:
            loss = criterion(model(inputs), targets) * torch.distributed.get_world_size() / items
            loss.backward()
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def scheduled(model, criterion, optimizer, scheduler, loader, steps, epochs, *, after):
    """The learning rate of every update; the scheduler is stepped after each "update" or "epoch"."""
    rates = []
    for _ in range(epochs):
        for i, (inputs, targets) in enumerate(loader):
            loss = criterion(model(inputs), targets) / steps
            loss.backward()
            if (i + 1) % steps == 0 or i + 1 == len(loader):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
                if after == "update":
                    scheduler.step()
        if after == "epoch":
            scheduler.step()
    return rates


def mixed(model, criterion, optimizer, scaler, loader, steps, max_norm, scheduler):
    """float16 with a GradScaler, and what is left at the end: the norms. The scheduler is stepped after updates."""
    norms = []
    for count, (inputs, targets) in enumerate(loader, 1):
        with torch.autocast("cpu", torch.float16):
            loss = criterion(model(inputs), targets) / steps
        scaler.scale(loss).backward()
        if count % steps == 0 or count == len(loader):
            scale = scaler.get_scale()
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= scale:
                scheduler.step()
    return norms
