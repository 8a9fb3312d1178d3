"""Train a causal language model on real text, with an optimizer of torch as a function of parameters and state.

    python examples/train_lm_torch.py
    python examples/train_lm_torch.py --plot loss.png --checkpoint lm.pt --stop-after 90

Micro-batches have different numbers of tokens and the last window of an epoch is shorter, yet all tokens of a window
count the same. Loops that divide by n get both wrong, and who stops them in the middle of a window loses its gradients.
Here these are in the optimizer's state: with `--resume` in place of `--stop-after 90` the training ends as it would
have, bit for bit.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training import PAD, load, options, order, paragraphs, progress, report, saving

import funcga
import torch_backend


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, length, width=48):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.output = nn.Linear(width, 256)

    def forward(self, tokens):
        """The logits, [rows, length, 256]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.output(self.block(x, mask, is_causal=True))


def mean_loss(module, tokens):
    """The mean over the tokens that are to be predicted."""
    return cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)


def main(arguments=None):
    """Trains, and says how the loss went."""
    args, texts = options(__file__, arguments, updates=40), torch.from_numpy(paragraphs()).long()
    torch.manual_seed(0)
    module = Transformer(texts.shape[1])
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, mean_loss))
    adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=lambda update: 1e-2 * (1 - update / args.updates))
    tx = funcga.multi_steps(torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw), 4)
    mean = funcga.Accumulator(funcga.mean())

    params = torch_backend.trainable(module)
    state, total, curve, start = tx.init(params), mean.init(torch.zeros(())), [], 0
    if args.resume:
        params, state, total, curve, start = load(args, torch.load)
    steps = order(len(texts), rows=8, n=4, updates=args.updates)[: args.stop_after]
    for done, (indices, is_last) in enumerate(progress(steps, start), start + 1):
        tokens = texts[indices]
        count = (tokens[:, 1:] != PAD).sum()
        loss, grads = gradient(params, tokens)
        state, total = tx.accumulate(grads, state, weight=count), mean.update(total, loss, weight=count)
        if is_last:
            updates, state = tx.flush(state, params)
            params = torch_backend.apply_updates(params, updates)
            curve, total = [*curve, mean.finalize(total).item()], mean.init(loss)
        if args.checkpoint and (done % 25 == 0 or done == len(steps)):
            with saving(args) as file:
                torch.save((params, state, total, curve, done), file)
    report(curve, args.plot)


if __name__ == "__main__":
    main()
