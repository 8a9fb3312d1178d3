"""A bi-encoder with in-batch negatives, a BERT of transformers with dropout: exact in micro-batches.

    python examples/bi_encoder_torch.py

The loss of sentence embeddings ("multiple negatives ranking loss"): of all second halves in the batch, which one goes
on with this first half? The more there are, the better the embeddings, so batches are large. `funcga.coupled` encodes
the batch in micro-batches, twice: the embeddings of the first pass give the loss, and its gradient is pulled back in
the second, with the same dropout as in the first. This is the gradient cache of Gao, Zhang, Han and Callan (2021).

Plain accumulation has only the negatives of a micro-batch, 3 in place of 31 here, which is another loss.
"""

import torch
from by_hand import apart
from torch.nn.functional import cross_entropy, normalize
from training import PAD, paragraphs
from transformers import BertConfig, BertModel

import funcga
import torch_backend

ROWS, N = 32, 8


def bert():
    """A tiny model, with random weights and the usual dropout, for bytes."""
    return BertModel(
        BertConfig(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
        ),
        add_pooling_layer=False,
    )


def encode(model, tokens):
    """The mean of the last hidden states over the tokens that are there, of length 1: [rows, 64]."""
    mask = (tokens != PAD).long()
    hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return normalize((hidden * mask[..., None]).sum(1))


def embed(model, queries, answers):
    """The summary of a micro-batch: its embeddings."""
    return {"queries": encode(model, queries), "answers": encode(model, answers)}


def ranking_loss(model, s):
    """The cross entropy of the cosine similarities, times 20, as sentence-transformers has it."""
    scores = 20 * s["queries"] @ s["answers"].T
    return cross_entropy(scores, torch.arange(len(scores)))


def halves(rows):
    """The beginnings and the ends of paragraphs, as bytes: two of [rows, 28], padded at the end."""
    texts = paragraphs(longest=56)
    texts = torch.from_numpy(texts[(texts != PAD).sum(1) > 32][:rows]).long()
    return texts[:, :28], texts[:, 28:]


def one_graph(model, queries, answers):
    """What is differentiated: the loss of a loop over micro-batches whose graphs are all kept."""
    summaries = [embed(model, *rows) for rows in zip(queries.chunk(N), answers.chunk(N), strict=True)]
    loss = ranking_loss(model, {name: torch.cat([s[name] for s in summaries]) for name in summaries[0]})
    params = torch_backend.trainable(model)
    return dict(zip(params, torch.autograd.grad(loss, params.values()), strict=True))


def main():
    """A few updates; then the gradient with some dropout, in two passes and plainly."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, (queries, answers) = bert(), halves(6 * ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = funcga.coupled(torch_backend.module_value_and_grad(model, embed), ranking_loss, N)
    for update in range(6):
        rows = slice(update * ROWS, (update + 1) * ROWS)
        loss, grads = step(queries[rows], answers[rows])
        torch_backend.assign_grads(model, grads)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"update {update + 1}: loss {loss:.3f}")

    of_rows = lambda model, *rows: ranking_loss(model, embed(model, *rows))
    plainly = funcga.accumulate(torch_backend.module_value_and_grad(model, of_rows), N)
    found = []
    for gradient in (one_graph, lambda model, *batch: step(*batch)[1], lambda model, *batch: plainly(*batch)[1]):
        torch.manual_seed(1)  # the same dropout in each
        found.append(gradient(model, queries[:ROWS], answers[:ROWS]))
    whole, exact, plain = found
    print(f"{N} micro-batches: {apart(exact, whole):.0e} off in two passes, {apart(plain, whole):.0%} off plainly")


if __name__ == "__main__":
    main()
