"""Pairs of sequences and the loss that compares each with all the others: what micro-batches alone cannot compute."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256


class Pairs(nn.Module):
    """A transformer that embeds both sides of a pair, and the logarithm of the scale of their similarities, learned.

    A batch is of tokens [rows, 2, length]. `tile` is how many rows of similarities the loss may have at once; None
    means all.
    """

    def __init__(self, width: int, layers: int, embedding: int, dropout: float = 0.0, tile: int | None = None) -> None:
        super().__init__()
        self.tile = tile
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=dropout, batch_first=True, norm_first=True)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.projection = nn.Linear(width, embedding)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings [rows, embedding], of norm 1, of sequences [rows, length]."""
        hidden = self.encoder(self.tokens(tokens))
        return nn.functional.normalize(self.projection(hidden.mean(1)), dim=-1)

    def forward(self, batch: Tensor) -> Tensor:
        """The embeddings [rows, 2, embedding] of both sides, computed in one go."""
        return self.embed(batch.flatten(0, 1)).unflatten(0, batch.shape[:2])


def contrastive(left: Tensor, right: Tensor, logit_scale: Tensor, tile: int | None) -> Tensor:
    """CLIP's loss (Radford et al. 2021) of the embeddings [rows, embedding] of both sides.

    Each side is to find its other half among all: the cross entropy, averaged over the two sides. With tiles,
    similarities are computed again in the backward pass, and never kept.
    """
    if tile is None:
        logits = logit_scale.exp() * left @ right.T
        other_half = torch.arange(len(left), device=left.device)
        return (nn.functional.cross_entropy(logits, other_half) + nn.functional.cross_entropy(logits.T, other_half)) / 2
    scale = logit_scale.exp()
    found = [checkpoint(_log_sums, scale, left, right_tile, use_reentrant=False) for right_tile in right.split(tile)]
    of_tiles, of_right = zip(*found, strict=True)
    of_left = torch.stack(of_tiles).logsumexp(0)
    return ((of_left + torch.cat(of_right)) / 2 - scale * (left * right).sum(1)).mean()


def _log_sums(scale: Tensor, left: Tensor, right_tile: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the logarithm of the sum of exp(similarity) to the rows of the other side."""
    logits = scale * (left @ right_tile.T)
    return logits.logsumexp(1), logits.logsumexp(0)


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    """The loss of these rows alone, by a Pairs."""
    return contrastive(*module(batch).unbind(1), module.logit_scale, module.tile)
