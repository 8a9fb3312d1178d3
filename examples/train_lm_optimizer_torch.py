"""Train a causal language model on real text, with a module, optimizer.step() and a scheduler, as torch users do.

    python examples/train_lm_optimizer_torch.py
    python examples/train_lm_optimizer_torch.py --plot loss.png --checkpoint lm.pt --stop-after 90

Micro-batches have different numbers of tokens and the last window of an epoch is shorter, yet all tokens of a window
count the same. `(loss / n).backward()` gets both wrong, and the .grads are in no state_dict(), so that who stops in the
middle of a window loses it. Here the window is a tree, saved like the rest: with `--resume` in place of `--stop-after
90` the training ends as it would have, bit for bit. If checkpoints can wait for the end of a window, `funcga.stream` is
faster (`multi_steps_torch.py`).
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
    params = torch_backend.trainable(module)  # its own, which the optimizer updates
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.updates)
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, mean_loss))
    mean = funcga.Accumulator(funcga.mean())

    trained, window, curve, start = (module, optimizer, scheduler), mean.init((torch.zeros(()), params)), [], 0
    if args.resume:
        saved, window, curve, start = load(args, torch.load)
        for each, state in zip(trained, saved, strict=True):
            each.load_state_dict(state)
    steps = order(len(texts), rows=8, n=4, updates=args.updates)[: args.stop_after]
    for done, (indices, is_last) in enumerate(progress(steps, start), start + 1):
        tokens = texts[indices]
        window = mean.update(window, gradient(params, tokens), weight=(tokens[:, 1:] != PAD).sum())
        if is_last:
            loss, grads = mean.finalize(window)
            torch_backend.assign_grads(module, grads)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            curve, window = [*curve, loss.item()], mean.init((loss, params))
        if args.checkpoint and (done % 25 == 0 or done == len(steps)):
            with saving(args) as file:
                torch.save(([each.state_dict() for each in trained], window, curve, done), file)
    report(curve, args.plot)


if __name__ == "__main__":
    main()
