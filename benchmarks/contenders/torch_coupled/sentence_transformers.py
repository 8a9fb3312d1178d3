"""CachedMultipleNegativesRankingLoss of sentence-transformers."""

from typing import Any

import torch
from sentence_transformers import SentenceTransformer, losses, util
from torch import nn

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "sentence-transformers, `CachedMultipleNegativesRankingLoss`", "funcga"
SOURCE = "https://sbert.net/docs/package_reference/sentence_transformer/losses.html#cachedmultiplenegativesrankingloss"


class _Features(nn.Module):
    """The module as one of sentence-transformers: a dict of features in and out, and nothing else."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return features | {"sentence_embedding": self.module.embed(features["input_ids"])}


def make(problem: Problem) -> Step:
    """Both directions, one softmax each, which is CLIP's loss; embeddings have norm 1 already.

    It takes one side at a time: in mini-batches of twice the rows, so that there are as many sequences at once.
    `scale` is documented as a number. A parameter in its place gets its gradient, of which logit_scale's is a multiple.
    """
    module = problem.module
    model = SentenceTransformer(modules=[_Features(module)], device=str(problem.device))
    loss_fn = losses.CachedMultipleNegativesRankingLoss(
        model,
        similarity_fct=util.dot_score,
        mini_batch_size=2 * problem.size,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )

    def step(batch: torch.Tensor) -> Any:
        scale = nn.Parameter(module.logit_scale.detach().exp())
        loss_fn.scale = scale
        loss = loss_fn([{"input_ids": tokens} for tokens in batch.unbind(1)], None)
        loss.backward()
        module.logit_scale.grad = scale.grad * scale.detach()
        return loss.detach(), problem.taken()

    return step
