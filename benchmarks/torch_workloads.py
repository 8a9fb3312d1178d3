"""The workloads in torch: each makes, from a seed, a module, a batch and the loss of a micro-batch.

Each is a function of (n, value, device): n micro-batches, and the value along the axis for those that grow.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.torch_pairs import Pairs, loss_of


class Workload(NamedTuple):
    """`loss(module, rows)` is the mean over the rows of a micro-batch, of which each has `size`."""

    module: nn.Module
    batch: torch.Tensor
    size: int
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]


def tiny(n: int, value: int, device: str) -> Workload:
    """Twelve layers of Linear(64) and tanh, 8 rows a micro-batch: bound by dispatch."""
    return Workload(_mlp(12, 64, device, bias=True), torch.randn(8 * n, 64, device=device), 8, _mean_square)


def wide(n: int, value: int, device: str, dtype: torch.dtype = torch.float32) -> Workload:
    """Eight layers of width 512, 8 rows a micro-batch: bound by memory's bandwidth. 8 MB of parameters in float32."""
    module = _mlp(8, 512, device).to(dtype)
    return Workload(module, torch.randn(8 * n, 512, device=device, dtype=dtype), 8, _mean_square)


def wide_bfloat16(n: int, value: int, device: str) -> Workload:
    """The same with parameters and gradients in bfloat16."""
    return wide(n, value, device, torch.bfloat16)


def _mlp(layers: int, width: int, device: str, bias: bool = False) -> nn.Module:
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=bias), nn.Tanh())]
    return nn.Sequential(*parts).to(device)


def _mean_square(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (module(rows) ** 2).mean()


def transformer(n: int, value: int, device: str, width: int = 128, size: int = 4) -> Workload:
    """Four layers of width 128, 64 tokens, 4 rows a micro-batch: a mean over tokens."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    module = nn.Sequential(nn.Embedding(256, width), encoder, nn.Linear(width, 256)).to(device)

    def loss(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = module(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(module, torch.randint(0, 256, (size * n, 65), device=device), size, loss)


def large_transformer(n: int, value: int, device: str) -> Workload:
    """Four layers of width 512, 64 tokens, one row a micro-batch: weights of a million elements."""
    return transformer(n, value, device, 512, 1)


def pairs(n: int, value: int, device: str) -> Workload:
    """Pairs of 32 tokens, embedded by four layers of width 128, 8 pairs a micro-batch: a loss over the whole batch."""
    return Workload(Pairs(128, 4, 64).to(device), torch.randint(0, 256, (8 * n, 2, 32), device=device), 8, loss_of)


def many_pairs(n: int, value: int, device: str) -> Workload:
    """Pairs of 8 tokens, embedded by two layers of width 64, 128 pairs a micro-batch: many similarities."""
    module = Pairs(64, 2, 128, tile=64).to(device)
    return Workload(module, torch.randint(0, 256, (128 * n, 2, 8), device=device), 128, loss_of)


def tiny_pairs(n: int, value: int, device: str) -> Workload:
    """The same, of 8 tokens, by one layer of width 16, 2 pairs a micro-batch."""
    return Workload(Pairs(16, 1, 8).to(device), torch.randint(0, 256, (2 * n, 2, 8), device=device), 2, loss_of)


def gpt2(n: int, value: int, device: str, rows: int = 2, **options: Any) -> Workload:
    """Hugging Face's GPT-2: on a GPU 124M parameters in bfloat16, 512 tokens; else 3 layers of width 192, 64 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    large = device != "cpu"
    size = {} if large else {"n_layer": 3, "n_head": 4, "n_embd": 192, "vocab_size": 1024, "n_positions": 64}
    size |= options
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    module = GPT2LMHeadModel(GPT2Config(**rates, **size, bos_token_id=None, eos_token_id=None))
    module.loss_type = "ForCausalLM"  # which it takes anyway, and warns
    module = module.to(device, torch.bfloat16 if large else torch.float32)
    tokens = torch.randint(0, 1024, (rows * n, 512 if large else 64), device=device)
    return Workload(module, tokens, rows, lambda module, tokens: module(input_ids=tokens, labels=tokens).loss)


def vocabulary(n: int, value: int, device: str) -> Workload:
    """The same with its own vocabulary of 50,257, which is a table and the head; one row a micro-batch."""
    return gpt2(n, value, device, 1, vocab_size=50_257)


def untied(n: int, value: int, device: str) -> Workload:
    """The same with a head of its own."""
    return gpt2(n, value, device, 1, vocab_size=50_257, tie_word_embeddings=False)


def rows(n: int, value: int, device: str) -> Workload:
    """The tiny layers, and `value` micro-batches of 8 rows."""
    return tiny(value, value, device)


class _Product(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(1 + 0.01 * torch.randn(16)) for _ in range(count)])

    def forward(self, x: Any) -> Any:
        for factor in self.factors:
            x = x * factor
        return x


def leaves(n: int, value: int, device: str) -> Workload:
    """`value` parameters of 16 elements, one multiplication each."""
    return Workload(_Product(value).to(device), torch.randn(4 * n, 16, device=device), 4, _mean_square)


def parameters(n: int, value: int, device: str) -> Workload:
    """Four equal layers without biases that have about `value` parameters, 8 rows a micro-batch."""
    width = round((value / 4) ** 0.5)
    return Workload(_mlp(4, width, device), torch.randn(8 * n, width, device=device), 8, _mean_square)
