"""What the how-to pages say of Trainer, Accelerate, Lightning and peft, against autograd of whole batches in float64."""

import copy
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import funcga
import torch_backend
from tests.kits import LIMITS
from tests.processes import launched
from tests.test_docs import blocks

# What the frameworks warn of: changes of their own, and how fast a loader could be.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


class Recording(torch.optim.SGD):
    """An optimizer that changes nothing, and remembers the gradients of each update."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        self.updates = []

    def step(self, closure=None):
        if closure is not None:
            closure()
        self.updates.append([p.grad.clone() for group in self.param_groups for p in group["params"]])


def whole_gradient(loss_fn, module, *batch):
    """In float64, in the order of the parameters."""
    module = copy.deepcopy(module).double()
    trained = [p for p in module.parameters() if p.requires_grad]
    batch = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in batch]
    return torch.autograd.grad(loss_fn(module, *batch), trained)


def off_by(grads, whole):
    """The largest difference, relative to the largest element."""
    largest = max(w.abs().max() for w in whole)
    return float(max((g - w).abs().max() for g, w in zip(grads, whole, strict=True)) / largest)


def length_along(grads, whole):
    """How much of the true gradient there is in this one: 1 for the same, 0.5 for the half of it."""
    return float(sum((g * w).sum() for g, w in zip(grads, whole, strict=True)) / sum((w * w).sum() for w in whole))


def names_of(page, count=1):
    """What the first blocks of a page define."""
    names = {"__name__": "__main__"}
    for block in blocks(page)[:count]:
        exec(compile(block, page, "exec"), names)
    return names


# --- Hugging Face


def language_model(kind="GPT2"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    if kind == "GPT2":
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, **rates, n_positions=32, bos_token_id=0, eos_token_id=0)
        )
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=32))


def sentences():
    """Twelve rows of 32 tokens and fewer, as the page on Trainer has it."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([32, 32, 30, 28, 8, 7, 6, 5, 4, 4, 3, 2])
    tokens = torch.randint(1, 32, (12, 32), generator=generator)
    labels = tokens.masked_fill(torch.arange(32) >= lengths[:, None], -100)
    return {"input_ids": tokens, "labels": labels}


def model_loss(model, batch):
    return model(**batch).loss


def test_labels_are_shifted_and_the_first_does_not_count():
    model, batch = language_model(), sentences()
    gradient = torch_backend.module_value_and_grad(model, model_loss)
    whole = whole_gradient(model_loss, model, batch)

    def off(count):
        _, grads = funcga.accumulate(gradient, n=4, weight=count)(batch)
        return off_by(grads.values(), whole)

    assert off(lambda batch: (batch["labels"][:, 1:] != -100).sum()) < LIMITS["float32"]
    assert 0.03 < off(lambda batch: (batch["labels"] != -100).sum()) < 0.3
    assert off(None) > 1  # rows, and so a loop that divides by n


def trained(trainer_class, kind, collate=None, **options):
    """The gradient of one update by such a Trainer, and the true one."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    model, batch = language_model(kind), sentences()
    optimizer = Recording(model.parameters())
    arguments = transformers.TrainingArguments(
        output_dir="unused", max_steps=1, max_grad_norm=0, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, **options,
    )  # fmt: skip
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    in_order = type("InOrder", (trainer_class,), {"_get_train_sampler": lambda self, *_: range(len(rows))})
    optimizers = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)
    in_order(model, arguments, data_collator=collate, train_dataset=rows, optimizers=optimizers).train()
    (grads,) = optimizer.updates
    return grads, whole_gradient(model_loss, model, batch)


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_the_trainer_of_the_page_is_exact(kind):
    pytest.importorskip("transformers")
    exact_trainer = names_of("howto/trainer.md")["ExactTrainer"]
    assert off_by(*trained(exact_trainer, kind, per_device_train_batch_size=12)) < LIMITS["float32"]


def test_the_trainer_that_streams_is_exact():
    pytest.importorskip("transformers")
    names = names_of("howto/trainer.md", count=3)
    options = {"per_device_train_batch_size": 12, "remove_unused_columns": False}
    assert off_by(*trained(names["StreamingTrainer"], "Llama", names["collate"], **options)) < LIMITS["float32"]


def test_what_trainer_itself_computes():
    transformers = pytest.importorskip("transformers")
    in_four = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    assert off_by(*trained(transformers.Trainer, "Llama", **in_four)) < LIMITS["float32"]
    # GPT-2 has no loss_type: all labels are counted, the first of each row too.
    counted = (sentences()["labels"] != -100).sum()
    assert length_along(*trained(transformers.Trainer, "GPT2", **in_four)) == pytest.approx(float(1 - 12 / counted))
    assert 12 / counted == pytest.approx(0.07, abs=0.01)

    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    assert 3 < length_along(*trained(OwnLoss, "Llama", **in_four)) < 5  # n times too large
    OwnLoss.loss_is_scaled_for_ga = False
    grads, whole = trained(OwnLoss, "Llama", **in_four)
    assert 0.75 < length_along(grads, whole) < 1.25
    assert off_by(grads, whole) > 0.5


# --- LoRA


def module_loss(module, x, y):
    return mse_loss(module(x), y)


def test_peft_is_exact():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, r=4, init_lora_weights=False
    )
    model, batch = peft.get_peft_model(language_model(), config), sentences()
    gradient = torch_backend.module_value_and_grad(model, model_loss)
    count = lambda batch: (batch["labels"][:, 1:] != -100).sum()
    for _ in range(2):  # the second with checkpoints
        _, grads = funcga.accumulate(gradient, n=4, weight=count)(batch)
        assert len(grads) == 2
        assert off_by(grads.values(), whole_gradient(model_loss, model, batch)) < LIMITS["float32"]
        model.train()
        model.activation_checkpointing_enable()


# --- rows in windows: 20 rows in micro-batches of 4


def rows():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    return module, torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)


def accelerator(**options):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True, **options)


def test_accelerate_divides_a_short_window_by_n():
    module, x, y = rows()
    ours = accelerator()
    prepared, loader = ours.prepare(module, DataLoader(TensorDataset(x, y), batch_size=4))
    step = funcga.stream(torch_backend.module_value_and_grad(prepared, module_loss), weight=lambda x, y: len(x))
    last = whole_gradient(module_loss, module, x[16:], y[16:])
    *_, window = funcga.windows(loader, 4)
    assert off_by(step(window)[1].values(), last) < LIMITS["float64"]

    theirs = accelerator(gradient_accumulation_steps=4)
    prepared, loader = theirs.prepare(module, DataLoader(TensorDataset(x, y), batch_size=4))
    for batch in loader:
        with theirs.accumulate(prepared):
            theirs.backward(module_loss(prepared, *batch))
            grads = [p.grad.clone() for p in module.parameters()]
            if theirs.sync_gradients:
                module.zero_grad()
    assert length_along(grads, last) == pytest.approx(0.25)


def lightning_trainer(**options):
    lightning = pytest.importorskip("lightning")
    return lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def lightning_model(kind, module, **methods):
    """A model of the page, whose optimizer only records."""
    optimizer = Recording(module.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    methods = {
        "configure_optimizers": lambda self: ([optimizer], [schedule]),
        "clip_gradients": lambda self, *_, **__: None,
        **methods,
    }
    return type("Recorded", (kind,), methods)(module, n=4), optimizer


def test_the_models_of_the_page_on_lightning_are_exact(capfd):
    pytest.importorskip("lightning")
    names = names_of("howto/lightning.md", count=2)
    module, x, y = rows()
    data = TensorDataset(x, y)
    for kind, loader, ends in (
        (names["Model"], DataLoader(data, batch_size=14), [0, 14, 20]),
        (names["Windowed"], DataLoader(data, batch_size=3), [0, 12, 20]),  # 3, 3, 3, 3 | 3, 3, 2
    ):
        model, optimizer = lightning_model(kind, module)
        lightning_trainer().fit(model, loader)
        expected = [
            whole_gradient(module_loss, module, x[start:end], y[start:end]) for start, end in itertools.pairwise(ends)
        ]
        assert len(optimizer.updates) == len(expected)
        for grads, whole in zip(optimizer.updates, expected, strict=True):
            assert off_by(grads, whole) < LIMITS["float64"]


# --- two processes


def in_two_processes():
    """Prints, for each framework, how far the gradient of two replicas is from that of the whole batch."""
    import warnings

    warnings.simplefilter("ignore")
    from accelerate.utils import DataLoaderConfiguration

    module, x, y = rows()
    whole, data = whole_gradient(module_loss, module, x, y), TensorDataset(x, y)
    for even in (True, False):
        ours = accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even))
        prepared, loader = ours.prepare(copy.deepcopy(module), DataLoader(data, batch_size=4))  # 5 on two replicas
        step = funcga.stream(torch_backend.module_value_and_grad(prepared, module_loss), weight=lambda x, y: len(x))
        _, grads = step(loader)
        print(f"accelerate, even={even}: {off_by(grads.values(), whole):.1e}", flush=True)

    exact_trainer = names_of("howto/trainer.md")["ExactTrainer"]
    grads, expected = trained(exact_trainer, "Llama", per_device_train_batch_size=6, ddp_find_unused_parameters=False)
    print(f"trainer: {off_by(grads, expected):.1e}", flush=True)

    def on_fit_start(self):
        gradient = torch_backend.module_value_and_grad(self.net, module_loss)
        self.step = funcga.accumulate(gradient, n=2, across=dist.group.WORLD)

    model, optimizer = lightning_model(names_of("howto/lightning.md")["Model"], module, on_fit_start=on_fit_start)
    lightning_trainer(devices=2, strategy="ddp").fit(model, DataLoader(data, batch_size=10))
    (grads,) = optimizer.updates
    print(f"lightning: {off_by(grads, whole):.1e}", flush=True)
    dist.destroy_process_group()


def test_the_frameworks_on_two_replicas():
    for framework in ("accelerate", "transformers", "lightning"):
        pytest.importorskip(framework)
    printed = launched(in_two_processes, count=2)
    offs = {}
    for name, off in re.findall(r"^([^\n]*): (\d\.\de[+-]\d+)$", printed, re.MULTILINE):
        offs.setdefault(name, set()).add(float(off))
    assert offs.keys() == {"accelerate, even=True", "accelerate, even=False", "trainer", "lightning"}, printed
    assert max(offs["accelerate, even=False"]) < LIMITS["float64"]
    assert max(offs["trainer"]) < LIMITS["float32"]
    assert max(offs["lightning"]) < LIMITS["float64"]
    assert min(offs["accelerate, even=True"]) > 0.1  # four rows count twice
