"""What belongs to an update: done after each micro-batch it is a note, done as it should be it is none."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import funcga

N, STEPS = 4, 4
SCHEDULE, AVERAGE, NORM = (
    "schedule goes on after each",
    "average of the parameters (EMA) is updated after each",
    "BatchNorm normalises each",
)


class Run:
    def __init__(self, norm=None):
        torch.manual_seed(0)
        norm = norm or torch.nn.Identity()
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), norm, torch.nn.Tanh(), torch.nn.Linear(32, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, n=N, micro=(), before=(), step=(), epoch=(), rows=3 * N + 1):
        """A right loop. Schedules step after each micro-batch, before and after a step, and after some rows."""
        call = lambda schedules: [schedule.step() for schedule in schedules]
        for i in range(n * STEPS):
            x, y = torch.randn(8, 16), torch.randint(5, (8,))
            (F.cross_entropy(self.model(x), y) / n).backward()
            if (i + 1) % n == 0:
                call(before)
                self.optimizer.step()
                self.optimizer.zero_grad()
                call(step)
            call(micro)
            if (i + 1) % rows == 0:
                call(epoch)


class Calling:
    """A function in the place of a schedule."""

    def __init__(self, function):
        self.step = function


def found_in(watched):
    """Which of the notes there are."""
    return sorted(word for note in watched.notes for word in (SCHEDULE, AVERAGE, NORM) if word in note)


def notes(run, **schedules):
    """Those of the right loop of a run; it is exact, and there are no others."""
    with funcga.watch(run.model) as watched:
        run.train(**schedules)
    assert watched.ok, watched
    found = found_in(watched)
    assert len(found) == len(watched.notes), watched
    return found


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 20)


SCHEDULES = {
    "cosine": cosine,
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.ConstantLR(optimizer)], [3]
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "of an average": lambda optimizer: SWALR(optimizer, 0.01),
}  # fmt: skip
RIGHT_TIMES = ("step", "before", "epoch")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule(name):
    for when in RIGHT_TIMES:
        run = Run()
        assert notes(run, **{when: [SCHEDULES[name](run.optimizer)]}) == []
    run = Run()
    assert notes(run, micro=[SCHEDULES[name](run.optimizer)]) == [SCHEDULE]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedules_in_their_own_time():
    # By fractions of an epoch, as torch documents it; once before the first step; several times a step, as Accelerate
    # does for several processes; after each micro-batch that is a step; in epochs of less than two windows; by a loss.
    run, numbers = Run(), iter(range(100))
    by_fraction = lr_scheduler.CosineAnnealingWarmRestarts(run.optimizer, 5)
    assert notes(run, micro=[Calling(lambda: by_fraction.step(next(numbers) / 16))]) == []
    run = Run()
    schedule = cosine(run.optimizer)
    schedule.step()
    assert notes(run, step=[schedule] * N) == []
    run = Run()
    assert notes(run, n=1, micro=[cosine(run.optimizer)]) == []
    for n, rows in ((2, 3), (4, 5), (4, 3), (4, 1 + N // 2)):
        run = Run()
        assert notes(run, n=n, epoch=[cosine(run.optimizer)], rows=rows) == []
    run = Run()
    by_loss = lr_scheduler.ReduceLROnPlateau(run.optimizer)
    assert notes(run, epoch=[Calling(lambda: by_loss.step(1.0))]) == []


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_two_schedules_are_told_apart():
    run = Run()
    one, other = cosine(run.optimizer), SCHEDULES["function"](run.optimizer)
    assert notes(run, step=[one], epoch=[other]) == []
    run = Run()
    one, other = cosine(run.optimizer), SCHEDULES["function"](run.optimizer)
    assert notes(run, step=[one], micro=[other]) == [SCHEDULE]


def test_the_schedule_of_another_optimizer():
    """That of a second model, which steps in each micro-batch of the first."""
    run, other = Run(), Run()
    schedule, average = cosine(other.optimizer), AveragedModel(other.model)

    def step():
        F.cross_entropy(other.model(torch.randn(8, 16)), torch.randint(5, (8,))).backward()
        other.optimizer.step()
        schedule.step()
        average.update_parameters(other.model)
        other.optimizer.zero_grad()

    with funcga.watch() as watched:
        run.train(micro=[Calling(step)])
    assert watched.ok
    assert watched.notes == ()


def test_an_average():
    for when in (*RIGHT_TIMES, "micro"):
        run = Run()
        average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        update = lambda run=run, average=average: average.update_parameters(run.model)
        with funcga.watch(run.model) as watched:
            run.train(**{when: [Calling(update)]})
        assert found_in(watched) == ([AVERAGE] if when == "micro" else [])
        # The lines are the user's: that of the update, and that of the step.
        assert all("update = lambda" in note and "self.optimizer.step()" in note for note in watched.notes)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_run_is_the_same_to_the_bit():
    def state(watching):
        run = Run(torch.nn.BatchNorm1d(32))
        schedule, average = cosine(run.optimizer), AveragedModel(run.model)
        with watching(run.model):
            run.train(micro=[schedule, Calling(lambda: average.update_parameters(run.model))])
        return [*run.model.state_dict().values(), *average.state_dict().values(), torch.tensor(schedule.get_last_lr())]

    plain = state(lambda _: contextlib.nullcontext())
    assert all(map(torch.equal, plain, state(funcga.watch)))


def test_batch_norm():
    assert notes(Run(torch.nn.BatchNorm1d(32))) == [NORM]
    assert notes(Run(torch.nn.GroupNorm(4, 32))) == []
    assert notes(Run(torch.nn.BatchNorm1d(32, track_running_stats=False))) == []
    assert notes(Run(torch.nn.BatchNorm1d(32)), n=1) == []
    frozen = Run(torch.nn.BatchNorm1d(32))
    frozen.model[1].num_batches_tracked += 100
    frozen.model[1].eval()
    assert notes(frozen) == []


def test_batch_norm_of_a_model_that_is_made_while_the_watch_is_open():
    """As the command sees it; what another optimizer trains has none."""
    with funcga.watch() as watched:
        run = Run(torch.nn.BatchNorm1d(32))
        Run()
        run.train()
    assert watched.ok
    assert found_in(watched) == [NORM]


def test_batch_norm_under_several_losses():
    """One forward, and a backward for each task."""
    run = Run(torch.nn.BatchNorm1d(32))
    with funcga.watch(run.model) as watched:
        for _ in range(STEPS):
            losses = run.model(torch.randn(8, 16)).square().mean(0)
            for loss in losses:
                loss.backward(retain_graph=True)
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert found_in(watched) == []


@pytest.mark.parametrize("is_one_loss", [False, True])
def test_a_gan_does_everything_once_a_step(is_one_loss):
    torch.manual_seed(0)
    critic = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
    maker = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 16))
    models = critic, maker
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    schedules, averages = [cosine(each) for each in optimizers], [AveragedModel(model) for model in models]
    with funcga.watch(torch.nn.ModuleList(models)) as watched:
        for _ in range(6):
            critic.zero_grad()
            fake = maker(torch.randn(8, 8))
            losses = F.softplus(critic(torch.randn(8, 16))).mean(), F.softplus(-critic(fake.detach())).mean()
            for loss in [sum(losses)] if is_one_loss else ():
                loss.backward()
            if not is_one_loss:
                losses[0].backward()
                losses[1].backward()
            optimizers[0].step()
            maker.zero_grad()
            F.softplus(critic(fake)).mean().backward()
            optimizers[1].step()
            for schedule, average, model in zip(schedules, averages, models, strict=True):
                schedule.step()
                average.update_parameters(model)
    assert found_in(watched) == []


@pytest.mark.parametrize("is_prepared", [True, False])
def test_accelerate(is_prepared):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.GradientState._reset_state()  # of an earlier test of this process
    accelerator, run = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=N), Run()
    model, optimizer = accelerator.prepare(run.model, run.optimizer)
    schedule = cosine(run.optimizer)
    schedule = accelerator.prepare(schedule) if is_prepared else schedule
    expected = contextlib.nullcontext() if is_prepared else pytest.warns(UserWarning, match="lr_scheduler")
    with expected, funcga.watch() as watched:
        for _ in range(N * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(torch.randn(8, 16)), torch.randint(5, (8,))))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert watched.ok
    assert found_in(watched) == ([] if is_prepared else [SCHEDULE])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * N * STEPS

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        return {"x": torch.randn(16, generator=draw), "labels": torch.randint(5, (), generator=draw)}


def test_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Run().model

        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.net(x), labels)}

    model = Model()
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=N, num_train_epochs=2, warmup_steps=3,
        save_strategy="no", report_to="none", use_cpu=True,
    )  # fmt: skip
    with funcga.watch(model) as watched:
        transformers.Trainer(model, arguments, train_dataset=Rows()).train()
    assert watched.ok
    assert watched.notes == ()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_lightning(interval):
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Run().model

        def training_step(self, batch, number):
            return F.cross_entropy(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = {"scheduler": SCHEDULES["warm-up"](optimizer), "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    model = Model()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=2, accumulate_grad_batches=N, accelerator="cpu", **quiet)
    with funcga.watch(model) as watched:
        trainer.fit(model, torch.utils.data.DataLoader(Rows(), batch_size=8))
    assert watched.ok
    assert watched.notes == ()
