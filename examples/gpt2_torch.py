"""GPT-2 of Hugging Face's transformers, made from a small configuration: accumulated, and as its own loss has it.

    python examples/gpt2_torch.py

The rows are of different lengths, so the micro-batches hold different numbers of tokens. Accumulated are the summed
loss and its gradients, divided once by all tokens; that must be what transformers itself computes of the whole batch:
its mean over tokens, and `.backward()`. `assign_grads(module, grads)` would put them where an optimizer looks.
"""

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import funcga
import torch_backend

PADDING = -100


def rows(count, longest, vocabulary):
    """Token ids of texts that get shorter, and as labels the same, but for the padding."""
    tokens = torch.randint(vocabulary, (count, longest))
    lengths = torch.linspace(longest, 2, count).long()
    return tokens, tokens.where(torch.arange(longest) < lengths[:, None], PADDING)


def summed_loss(module, tokens, labels):
    """The sum, over the tokens that are to be predicted, of how badly they are."""
    logits = module(tokens).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=PADDING, reduction="sum")


def count_tokens(tokens, labels):
    """How many are to be predicted."""
    return (labels[:, 1:] != PADDING).sum()


def main():
    """Both, compared parameter by parameter."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    module = GPT2LMHeadModel(config).eval()  # no dropout, which no two runs share
    tokens, labels = rows(12, 32, 64)

    loss_fn = torch_backend.pure_loss(module, summed_loss)
    step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=5, fold=funcga.per_weight(), weight=count_tokens)
    loss, grads = step(torch_backend.trainable(module), tokens, labels)

    whole = module(tokens, labels=labels).loss
    whole.backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    names = ("accumulated", "transformers")
    report = funcga.compare({"loss": loss, **grads}, {"loss": whole, **expected}, names=names)
    report.assert_close()
    print(report)


if __name__ == "__main__":
    main()
