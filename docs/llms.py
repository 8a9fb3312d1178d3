"""The site's llms.txt (llmstxt.org): what funcga is, in a few lines, and every page with its first sentence.

`python docs/llms.py` prints it; the build writes it beside the pages.
"""

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)

HEAD = """\
# funcga

> Gradient accumulation as a pure fold over micro-batches, for PyTorch and JAX: the gradient of the whole batch, for any
> weights, on any replicas.

- `step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=8)` has the signature and the output of what it wraps:
  `loss, grads = step(params, batch)`. In torch and in JAX.
- A torch module: `gradient = torch_backend.module_value_and_grad(model, loss_fn)`, then
  `loss, grads = funcga.accumulate(gradient, n=8)(*batch)` and `torch_backend.assign_grads(model, grads)`.
- A mean over tokens: `weight=lambda batch: (batch["labels"] != -100).sum()`. A sum: the same, and
  `fold=funcga.per_weight()`.
- A loader: `for window in funcga.windows(loader, 8): loss, grads = funcga.stream(gradient)(params, window)`.
- An optimizer: `tx = funcga.multi_steps(optax.adamw(1e-3), 8)`; in torch of
  `torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)`.
- Replicas: `across=process_group`, or `across="data"` in `jax_backend.replicated(step, mesh)`. Never divide by
  n or by world_size.
- Is it exact for this loss? `funcga.verify(gradient, params, batch, n=4).assert_exact()`.
  In torch: `python -m funcga doctor train.py`.
"""


def pages(toctree: str, folder: Path = Path()) -> Iterator[Path]:
    """The pages of a table of contents, in order, those of an index behind it."""
    for line in toctree.splitlines():
        if line and not line.startswith(":"):
            page = folder / f"{line.strip()}.md"
            yield page
            for inner in TOCTREE.findall((DOCS / page).read_text()):
                yield from pages(inner, page.parent)


def title_and_sentence(page: Path) -> tuple[str, str]:
    """The title of a page, and the first sentence below it, in plain text.

    What comes after a colon is left out, if that is not nearly all of it.
    """
    text = re.sub(
        r"<!--.*?-->|^```.*?^```",
        "",
        (DOCS / page).read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )
    title, body = re.search(r"^# (.+?)\n(.*)", text, re.MULTILINE | re.DOTALL).groups()
    paragraphs = (" ".join(block.split()) for block in body.split("\n\n"))
    prose = next(
        (
            block
            for block in paragraphs
            if block and not block.startswith(("#", "|", "-", "!"))
        ),
        "",
    )
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose).replace("**", "")
    sentence = re.match(r".+?[.?](?=\s|$)", prose)
    sentence = sentence[0] if sentence else prose
    return title, re.split(r"(?<=.{40}): ", sentence)[0].rstrip(":.")


def text() -> str:
    """The file."""
    sections = [HEAD]
    for toctree in TOCTREE.findall((DOCS / "index.md").read_text()):
        caption = re.search(r":caption: (.*)", toctree)[1]
        lines = [
            f"- [{title}]({page.with_suffix('.html').as_posix()})"
            + (f": {sentence}" if sentence else "")
            for page in pages(toctree)
            for title, sentence in [title_and_sentence(page)]
        ]
        sections.append("\n".join([f"## {caption}", "", *lines, ""]))
    return "\n".join(sections)


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201
