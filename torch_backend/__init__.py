"""The torch backend of funcga: torch.func and torch tensors on any device."""

from funcga.backend import Backend
from torch_backend import arrays, gradients, loop, trees

BACKEND = Backend("torch", trees, arrays, gradients, loop)
