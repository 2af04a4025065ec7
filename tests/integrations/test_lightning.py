"""stretto in the trainer of Lightning, against the real package."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs stretto[lightning]: make test-adapters")

import lightning
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner import Tuner
from tests.integrations import lightning_toys, toys
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from stretto import prepare
from stretto.batching import NoiseScale, Plateau
from stretto.errors import CheckpointError, StrettoError, TrainingError
from stretto.integrations.counts import micro_batches_in_epoch
from stretto.integrations.lightning import attach
from stretto.optim import from_torch
from stretto.planning import plan
from stretto.settings import Loading
from stretto.timing import Horizon

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = toys.planned_ids()
EPOCH = 13
"""Steps of the first epoch."""


def ids_of(module: lightning_toys.Module) -> list[list[int]]:
    return [sorted(step) for step in module.steps]


def close(module: torch.nn.Module, weights: Tensor) -> None:
    torch.testing.assert_close(toys.flat(module), weights, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def big_batches() -> Tensor:
    return toys.one_big_batch()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, lightning_toys.Module, Any, Path]:
    """A run that nothing interrupts, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("whole")
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    return *lightning_toys.train(save), folder


@pytest.mark.small
def test_a_trainer_follows_the_plan(whole: Any, big_batches: Tensor) -> None:
    _, module, _, _ = whole
    assert ids_of(module) == IDS
    assert module.rates == toys.planned_rates()
    close(module.net, big_batches)


@pytest.mark.small
def test_its_counters_agree_with_the_clock(whole: Any) -> None:
    trainer, module, run, _ = whole
    assert (trainer.global_step, trainer.current_epoch) == (len(IDS), 2)
    assert (run.timer.batch, run.timer.epoch, run.timer.sample) == (len(IDS), 2, 2 * toys.N)
    assert module.validated == [(EPOCH, 0), (len(IDS), 1)]


# In the first and the second epoch, and where one ends.
@pytest.mark.parametrize("at", [1, 9, EPOCH, EPOCH + 1, 16])
@pytest.mark.parametrize("size", [8, 5])
def test_a_run_resumes_exactly(whole: Any, big_batches: Tensor, at: int, size: int) -> None:
    first, _, _, folder = whole
    trainer, module, run = lightning_toys.train(resume=folder / f"step={at}.ckpt", size=size)
    assert ids_of(module) == IDS[at:]
    close(module.net, big_batches)
    assert (trainer.global_step, trainer.current_epoch) == (len(IDS), 2)
    assert run.timer.batch == len(IDS)
    assert module.validated == [(EPOCH, 0), (len(IDS), 1)][at >= EPOCH :]
    steps = [one.fit_loop.epoch_loop._batches_that_stepped for one in (trainer, first)]
    assert steps[0] == steps[1]  # the x axis of loggers


class Fails(lightning_toys.Module):
    """Fails inside a step, after a micro-batch of it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(self.steps) == self.at and self.seen:
            raise KeyError("a sample")
        return super().training_step(batch, batch_idx)


@pytest.mark.small
@pytest.mark.parametrize("at", [9, 12, EPOCH])
def test_an_open_step_is_trained_anew(at: int, tmp_path: Path, big_batches: Tensor) -> None:
    with pytest.raises(KeyError):
        lightning_toys.train(OnExceptionCheckpoint(tmp_path), module=Fails(at))
    trainer, module, _ = lightning_toys.train(resume=tmp_path / "on_exception.ckpt")
    assert ids_of(module) == IDS[at:]
    close(module.net, big_batches)
    assert trainer.global_step == len(IDS)


def test_evaluations_and_checkpoints_in_times(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path)
    _, module, _ = lightning_toys.train(save, every={"evaluate": "0.3ep", "save": "100sp"})
    assert [step for step, _ in module.validated] == [6, 10, 13, 14, 16, 17]
    saved = {path.name for path in tmp_path.glob("sample=*.ckpt")}
    ends = [sum(map(len, IDS[: count + 1])) for count in range(len(IDS))]
    due = {next(end for end in ends if end >= at) for at in (100, 200, 300)}
    assert saved == {f"sample={end}.ckpt" for end in due}


class Stops(Callback):
    """Sets `trainer.should_stop` after a micro-batch, as `EarlyStopping` and `Timer` do."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop |= trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.at


SAVES: dict[str, dict[str, Any]] = {
    "after the epoch": {"save_on_train_epoch_end": True},
    "after the evaluation": {"save_on_train_epoch_end": False},
    "after each step": {"every_n_train_steps": 1},
}


# In both epochs; inside a step and after one; the last micro-batch of the first epoch is the 22nd.
@pytest.mark.parametrize("stop", [1, 7, 15, 21, 22, 23, 30, 37])
@pytest.mark.parametrize("saves", SAVES)
def test_a_run_that_is_stopped_resumes_to_its_end(
    saves: str, stop: int, tmp_path: Path, big_batches: Tensor
) -> None:
    save = ModelCheckpoint(tmp_path, save_last=True, **SAVES[saves])
    first, before, run = lightning_toys.train(Stops(stop), save)
    assert not run.is_done
    saved, at = tmp_path / "last.ckpt", first.global_step
    if not saved.exists():  # stopped inside the first step
        assert at == 0
        return
    for size in (8, 5):
        trainer, module, run = lightning_toys.train(resume=saved, size=size)
        assert ids_of(before)[:at] + ids_of(module) == IDS
        close(module.net, big_batches)
        assert run.is_done
        assert (trainer.global_step, trainer.current_epoch) == (len(IDS), 2)
        assert module.validated[-1] == (len(IDS), 1)
        assert trainer.fit_loop.epoch_loop._batches_that_stepped == len(IDS)  # x axis of loggers


@pytest.mark.small
@pytest.mark.parametrize("stop", [7, 22, 30])
def test_a_second_fit_of_a_stopped_trainer_goes_on(stop: int) -> None:
    trainer, module = lightning_toys.make_trainer(Stops(stop)), lightning_toys.Module()
    batches, validation = lightning_toys.follow(trainer), DataLoader(toys.rows(), 50)
    trainer.fit(module, batches, validation)  # no warning: the trainer was asked to stop
    module.seen.clear()  # those of the step that comes anew
    trainer.fit(module, batches, validation)
    assert ids_of(module) == IDS
    assert batches.run.is_done
    assert (trainer.global_step, trainer.current_epoch) == (len(IDS), 2)


def test_early_stopping_sees_each_evaluation() -> None:
    stop = EarlyStopping("validation/loss", patience=1, mode="max")
    _, module, run = lightning_toys.train(stop, every={"evaluate": "0.2ep"})
    assert len(module.validated) == 2
    assert run.timer.batch == module.validated[-1][0] < EPOCH


def test_the_learning_rate_monitor_shows_the_rates_of_its_step(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    lightning_toys.train(LearningRateMonitor("step"), logger=logger)
    with Path(logger.log_dir, "metrics.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["lr-AdamW"]]
    shown = {int(line["step"]): float(line["lr-AdamW"]) for line in lines}
    assert [shown[step] for step in range(len(IDS))] == pytest.approx(toys.planned_rates())


def test_the_progress_bar_has_the_length_of_each_epoch() -> None:
    class Totals(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            self.seen.append((trainer.num_training_batches, progress.completed))

    totals = Totals()
    _, _, run = lightning_toys.train(totals, TQDMProgressBar(), enable_progress_bar=True)
    lengths = [micro_batches_in_epoch(run, epoch) for epoch in range(2)]
    assert totals.seen == [(length, length) for length in lengths]
    assert lengths[0] != lengths[1]


def test_a_run_may_end_inside_an_epoch() -> None:
    _, module, run = lightning_toys.train(max_duration="250sp")
    assert sum(map(len, module.steps)) == run.timer.sample == 250


def test_schedulers_of_the_module_stay_and_know_the_number_of_steps() -> None:
    class Scheduled(lightning_toys.Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            total = self.trainer.estimated_stepping_batches
            curve = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, int(total))
            return [optimizer], [{"scheduler": curve, "interval": "step"}]

    _, module, _ = lightning_toys.train(module=Scheduled(), schedules=None)
    assert ids_of(module) == IDS
    assert module.rates == pytest.approx([1 - step / len(IDS) for step in range(len(IDS))])
    with pytest.raises(TrainingError, match="schedules"):
        lightning_toys.train(module=Scheduled())


def test_epoch_schedulers_step_if_the_length_of_an_epoch_is_not_known() -> None:
    class Scheduled(lightning_toys.Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    _, module, _ = lightning_toys.train(
        module=Scheduled(), schedules=None, policy=NoiseScale(8, 32)
    )
    assert module.rates[0] == 1e-3
    assert module.rates[-1] == 5e-4


def test_sizes_follow_the_noise() -> None:
    trainer, module, run = lightning_toys.train(policy=NoiseScale(8, 32, c=3), schedules=None)
    assert max(map(len, module.steps)) > 8
    assert sorted(chain(*module.steps)) == sorted([*range(toys.N)] * 2)
    assert (trainer.current_epoch, run.timer.epoch) == (2, 2)
    assert trainer.global_step == run.timer.batch


def test_sizes_follow_a_metric() -> None:
    policy = Plateau("validation/loss", start=8, maximum=64, patience=1, mode="max")
    _, module, _ = lightning_toys.train(policy=policy, schedules=None, every={"evaluate": "0.2ep"})
    assert max(map(len, module.steps)) == 64


def test_a_rate_follows_a_metric() -> None:
    plateau = partial(ReduceLROnPlateau, mode="max", patience=0, factor=0.5)
    schedules = {"lr": from_torch(plateau, monitor="validation/loss")}
    trainer, _, _ = lightning_toys.train(schedules=schedules, every={"evaluate": "0.2ep"})
    assert trainer.optimizers[0].param_groups[0]["lr"] < toys.RATE


def test_manual_optimization_with_two_optimizers(big_batches: Tensor) -> None:
    class Manual(lightning_toys.Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            batches, optimizers = self.trainer.train_dataloader, self.optimizers()
            self.seen += batch[2].tolist()
            self.manual_backward(batches.weight * self.mean_loss(batch))
            if batches.is_last:
                self.steps.append(self.seen)
                self.seen = []
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.AdamW(one.parameters(), lr=toys.RATE)
                for one in (self.net[0], self.net[2])
            ]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    _, module, run = lightning_toys.train(module=Manual())
    assert ids_of(module) == IDS
    close(module.net, big_batches)
    assert run.timer.batch == len(IDS)


@pytest.mark.small
def test_manual_optimization_as_it_was_is_refused() -> None:
    class Stock(lightning_toys.Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.mean_loss(batch))
            optimizer.step()

    with pytest.raises(TrainingError, match="is_last"):
        lightning_toys.train(module=Stock())


class Sums(lightning_toys.Module):
    def mean_loss(self, batch: Any) -> Tensor:
        return super().mean_loss(batch) * len(batch[0])


class Compares(lightning_toys.Module):
    def mean_loss(self, batch: Any) -> Tensor:
        found = self.net(batch[0])
        return torch.cdist(found, found).mean() + super().mean_loss(batch)


class Weighted(lightning_toys.Module):
    def mean_loss(self, batch: Any) -> Tensor:
        weights = 1.0 + batch[2][:, None] % 3
        return (weights * (self.net(batch[0]) - batch[1]).square()).sum() / weights.sum()


class WeightedInTraining(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.training:
            return super().training_step(batch, batch_idx)
        return lightning_toys.Module.training_step(self, batch, batch_idx)


class Divides(lightning_toys.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.trainer.accumulate_grad_batches


class Draws(lightning_toys.Module):
    """Random in any mode, as the loss of a variational autoencoder."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        return (output + torch.randn_like(output) - batch[1]).square().mean()


class Recurs(lightning_toys.Module):
    """Random in training mode, by the dropout inside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.LSTM(1, 1, 2, dropout=0.5).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.layers(self.net(batch[0])[None])[0][0]
        return (output - batch[1]).square().mean()


class RareWeights(lightning_toys.Module):
    """Weights that differ in one sample of the fourth step of several micro-batches."""

    def mean_loss(self, batch: Any) -> Tensor:
        rare = [at for at in [one for one in IDS if len(one) > 8][3] if at % 2]
        weights = 1.0 + 30 * torch.isin(batch[2], torch.tensor(rare))[:, None]
        return (weights * (self.net(batch[0]) - batch[1]).square()).sum() / weights.sum()


class Manual(lightning_toys.Module):
    """Manual optimization without the weight, or with gradients cleared before each pass."""

    def __init__(self, *, is_weighted: bool, clears: bool = False, sums: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_weighted, self.clears, self.sums = is_weighted, clears, sums

    def mean_loss(self, batch: Any) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square()
        return loss.sum() if self.sums else loss.mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        batches: Any = self.trainer.train_dataloader
        optimizer: Any = self.optimizers()
        if self.clears:
            optimizer.zero_grad()
        weight = batches.weight if self.is_weighted else 1.0
        self.manual_backward(weight * self.mean_loss(batch))
        if batches.is_last:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.small
@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Sums(), "is not the mean over samples"),
        (Compares(), "is not the mean over samples"),
        (Weighted(), "is not the mean over samples"),
        (WeightedInTraining(), "is not the mean over samples"),
        (Divides(), "is not the mean over samples"),
        (Draws(), "units="),
        (Manual(is_weighted=False), "dataloader.weight"),
        (Manual(is_weighted=True, clears=True), "zero_grad"),
        (Manual(is_weighted=True, sums=True), "a sum"),
        (RareWeights(), "is not the mean over samples"),
    ],
    ids=[
        "a sum",
        "compares",
        "weighted",
        "in training",
        "divided",
        "random",
        "no weight",
        "cleared",
        "a sum by hand",
        "rare weight",
    ],
)
def test_common_mistakes_are_refused_in_the_first_step_of_several(module: Any, why: str) -> None:
    with pytest.raises(TrainingError, match=why):
        lightning_toys.train(module=module)


READS: dict[str, Callable[[Any], Any]] = {
    "trainer": lambda module: module.trainer.is_last_batch,
    "optimizers": lambda module: module.optimizers().param_groups[0]["lr"],
    "schedulers": lambda module: module.lr_schedulers(),
    "logger": lambda module: module.logger.experiment.add_image("image", 1),
    "metrics": lambda module: module.logger.log_metrics({"own": 1.0}),
    "all metrics": lambda module: module.trainer.callback_metrics.get("loss"),
    "stop": lambda module: setattr(module.trainer, "own", 1),
    "print": lambda module: module.print("own"),
    "loop": lambda module: (module.global_step, module.current_epoch, module.device),
}


class Images(DummyLogger):
    """Notes what a module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    @property
    def experiment(self) -> Any:
        return self

    def add_image(self, name: str, _: Any) -> None:
        self.notes.append(name)

    def log_metrics(self, metrics: Any, *_: Any, **__: Any) -> None:
        self.notes += [name for name in metrics if name == "own"]


@pytest.mark.small
@pytest.mark.parametrize("name", READS)
def test_a_module_may_read_what_it_belongs_to(name: str) -> None:
    class Reads(lightning_toys.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            READS[name](self)
            return super().training_step(batch, batch_idx)

    logger = Images()
    trainer, module, run = lightning_toys.train(module=Reads(), logger=logger, max_duration="150sp")
    assert run.is_done
    assert sum(map(len, ids_of(module))) == 150
    passes = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    assert len(logger.notes) == (passes if name in ("logger", "metrics") else 0)


class Noting(lightning_toys.Module):
    """Notes what it computes, changes its batch in place, and draws random numbers."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails, self.count, self.all_sizes = fails, 0, list[int]()
        self.norm = torch.nn.BatchNorm1d(6).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and not torch.is_grad_enabled():
            raise RuntimeError("needs a gradient")
        self.count += 1
        self.all_sizes.append(len(batch[0]))
        self.norm(batch[0].add_(torch.rand(())))
        loss = super().training_step(batch, batch_idx)
        batch.pop()
        return loss


@pytest.mark.small
@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_measuring_the_loss_leaves_no_trace() -> None:
    torch.manual_seed(5)
    _, module, _ = lightning_toys.train(module=Noting())
    assert ids_of(module) == IDS
    assert module.count == len(module.all_sizes) == int(module.norm.num_batches_tracked)
    torch.manual_seed(5)
    with pytest.warns(RuntimeWarning, match="mean over.*needs a gradient") as found:
        _, other, _ = lightning_toys.train(module=Noting(fails=True))
    assert len([one for one in found if "mean over" in str(one.message)]) == 1
    assert torch.equal(toys.flat(other.net), toys.flat(module.net))
    assert module.count == other.count


@pytest.mark.parametrize(("kind", "units"), [(Recurs, None), (Draws, "samples")])
def test_a_random_loss_is_no_reason_to_refuse(kind: Any, units: Any) -> None:
    trainer = lightning_toys.make_trainer()
    module = kind()
    trainer.fit(module, lightning_toys.follow(trainer, units=units))
    assert ids_of(module) == [[]] * len(IDS)


@pytest.mark.small
def test_a_module_that_cannot_be_copied_is_trained() -> None:
    class Locked(lightning_toys.Module):
        def __deepcopy__(self, _: Any) -> Any:
            raise TypeError("has a lock")

    with pytest.warns(RuntimeWarning, match="has a lock"):
        _, module, _ = lightning_toys.train(module=Locked(), max_duration="150sp")
    assert sum(map(len, ids_of(module))) == 150


@pytest.mark.small
def test_the_plan_is_known_before_the_fit() -> None:
    batches = lightning_toys.follow(lightning_toys.make_trainer())
    assert batches.run.plan is not None
    assert [one.size for one in batches.run.plan.batches()] == list(map(len, IDS))


def test_what_a_module_notes_is_not_measured() -> None:
    module = Weighted()
    trainer = lightning_toys.make_trainer()

    def weights(batch: Any) -> int:
        return int((1 + batch[2] % 3).sum())

    trainer.fit(module, lightning_toys.follow(trainer, units=weights))
    assert ids_of(module) == IDS


class Data(LightningDataModule):
    """Splits its rows anew whenever it is set up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.rows = toys.rows()

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=50)


@pytest.mark.small
def test_a_data_module_is_followed(big_batches: Tensor) -> None:
    for _ in range(2):  # as a notebook cell that is run again
        module, data = lightning_toys.Module(), Data()
        trainer = lightning_toys.make_trainer()
        loading = Loading(seed=toys.SEED)
        attach(trainer, 8, data=data)
        with pytest.warns(RuntimeWarning, match="replaces the run"):
            attach(trainer, toys.SIZES, toys.SCHEDULES, data=data, loading=loading)
        trainer.fit(module, datamodule=data)
        assert data.calls.count("fit") == 2, "Lightning has not set it up again"
        assert ids_of(module) == IDS
        close(module.net, big_batches)
        assert module.validated == [(EPOCH, 0), (len(IDS), 1)]


@pytest.mark.small
def test_a_data_module_may_read_its_trainer_and_has_one_dataloader() -> None:
    class Reads(Data):
        def train_dataloader(self) -> Any:
            assert self.trainer is not None
            return DataLoader(self.rows, batch_size=self.trainer.world_size * 8)

    class Several(Data):
        def train_dataloader(self) -> Any:
            return [DataLoader(self.rows, batch_size=8)] * 2

    trainer = lightning_toys.make_trainer()
    attach(trainer, 16, data=Reads(), max_duration="32sp")
    for several in (Several(), [DataLoader(toys.rows(), 8)] * 2):
        trainer = lightning_toys.make_trainer()
        with pytest.raises(StrettoError, match="one DataLoader"):
            attach(trainer, 16, data=several, max_duration="32sp")


def test_a_tuner_is_told_what_the_user_did() -> None:
    trainer = lightning_toys.make_trainer()
    batches = lightning_toys.follow(trainer)
    module = lightning_toys.Module()
    module.lr = 1e-3
    with pytest.raises(TrainingError, match="lr_find"):
        Tuner(trainer).lr_find(module, batches, num_training=3)


def test_losses_whose_value_is_kept_for_backward_are_weighted() -> None:
    class Root(lightning_toys.Module):
        def mean_loss(self, batch: Any) -> Tensor:
            return super().mean_loss(batch).exp().log()

    _, module, _ = lightning_toys.train(module=Root())
    assert ids_of(module) == IDS


def test_callbacks_act_after_epochs_without_validation(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{epoch}-{step}")
    stop = EarlyStopping("loss", patience=1, mode="max")
    trainer = lightning_toys.make_trainer(save, stop)
    batches = lightning_toys.follow(trainer, max_duration="6ep")
    trainer.fit(lightning_toys.Module(), batches)
    last = f"epoch={trainer.current_epoch - 1}-step={trainer.global_step}.ckpt"
    assert [path.name for path in tmp_path.iterdir()] == [last]
    assert trainer.current_epoch < 6
    assert trainer.check_val_every_n_epoch == 1


def test_a_second_fit_goes_on_where_its_checkpoint_was_written(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = lightning_toys.make_trainer(save)
    batches = lightning_toys.follow(trainer)
    validation = DataLoader(toys.rows(), 50)
    trainer.fit(lightning_toys.Module(), batches, validation)
    module = lightning_toys.Module()
    trainer.fit(module, batches, validation, ckpt_path=tmp_path / "step=9.ckpt")
    assert ids_of(module) == IDS[9:]
    assert (trainer.global_step, batches.run.timer.batch) == (len(IDS), len(IDS))


def test_a_checkpoint_that_is_validated_does_not_move_the_run(whole: Any) -> None:
    trainer = lightning_toys.make_trainer()
    batches, module = lightning_toys.follow(trainer), lightning_toys.Module()
    validation = DataLoader(toys.rows(), 50)
    trainer.validate(module, validation, ckpt_path=whole[3] / "step=9.ckpt")
    module.validated.clear()
    trainer.fit(module, batches, validation)
    assert ids_of(module) == IDS


@pytest.mark.parametrize("policy", [9, "0sp:8 125sp:31"])
def test_samples_may_be_dropped_at_the_end_of_an_epoch(policy: Any) -> None:
    trainer = lightning_toys.make_trainer()
    loading = Loading(seed=toys.SEED, last_batch="drop")
    batches = lightning_toys.follow(trainer, policy=policy, loading=loading)
    module = lightning_toys.Module()
    trainer.fit(module, batches, DataLoader(toys.rows(), 50))
    planned = plan(Horizon("2ep", dataset_num_samples=toys.N, last_batch="drop"), policy)
    assert [len(step) for step in module.steps] == [one.size for one in planned.batches()]
    assert len(module.validated) == 2


def test_epoch_schedulers_step_over_data_of_unknown_length() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter([toys.rows()[start : start + 30] for start in range(0, toys.N, 30)])

    class Scheduled(lightning_toys.Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    trainer, module = lightning_toys.make_trainer(), Scheduled()
    trainer.fit(module, attach(trainer, 8, data=Stream()))
    assert sorted(set(module.rates)) == [5e-4, 1e-3]


def test_another_dataloader_or_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    stock = lightning_toys.make_trainer()
    stock.fit(lightning_toys.Module(), DataLoader(toys.rows(), 50))
    stock.save_checkpoint(tmp_path / "stock.ckpt")
    trainer = lightning_toys.make_trainer()
    batches = lightning_toys.follow(trainer)
    with pytest.raises(TrainingError, match="dataloader"):
        trainer.fit(lightning_toys.Module(), DataLoader(toys.rows(), 8))
    with pytest.raises(CheckpointError, match="without"):
        trainer.fit(lightning_toys.Module(), batches, ckpt_path=tmp_path / "stock.ckpt")


def test_a_trainer_may_be_attached_again() -> None:
    trainer, module, _ = lightning_toys.train(max_duration="1ep")
    batches = lightning_toys.follow(trainer, policy=16)
    trainer.fit(module, batches, DataLoader(toys.rows(), 50))
    assert len(module.steps[-2]) == 16


@pytest.mark.parametrize(
    ("settings", "callbacks", "why"),
    [
        ({"accumulate_grad_batches": 2}, [], "accumulate_grad_batches=2"),
        ({"limit_train_batches": 10}, [], "limit_train_batches"),
        ({"overfit_batches": 2}, [], "overfit_batches"),
        ({"val_check_interval": 5}, [], "val_check_interval=5"),
        ({"val_check_interval": "00:00:10:00"}, [], "val_check_interval as a time"),
        ({"val_check_interval": timedelta(minutes=1)}, [], "val_check_interval as a time"),
        ({"limit_train_batches": 1}, [], "limit_train_batches=1"),
        ({"fast_dev_run": True}, [], "fast_dev_run"),
        ({"max_steps": 100}, [], "max_steps=100"),
        ({}, [GradientAccumulationScheduler({1: 2})], "GradientAccumulationScheduler"),
        ({}, [StochasticWeightAveraging(1e-2)], "StochasticWeightAveraging"),
    ],
    ids=lambda one: next(iter(one), "callback") if isinstance(one, dict) else None,
)
def test_what_cannot_work_is_refused(settings: Any, callbacks: Any, why: str) -> None:
    for every in (None, {"evaluate": "10%"}) if "time" in why else (None,):
        trainer = lightning_toys.make_trainer(*callbacks, **settings)
        with pytest.raises(StrettoError, match=why):
            lightning_toys.follow(trainer, every=every)


def test_a_callback_that_accumulates_is_noticed() -> None:
    class Accumulates(Callback):
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            trainer.accumulate_grad_batches = 4

    with pytest.raises(TrainingError, match="accumulate_grad_batches"):
        lightning_toys.train(Accumulates())


def test_unknown_events_and_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="evaluate"):
        lightning_toys.follow(lightning_toys.make_trainer(), every={"log": "1ep"})
    monkeypatch.setattr("lightning.__version__", "3.0.0")
    with pytest.raises(TrainingError, match="Lightning"):
        lightning_toys.follow(lightning_toys.make_trainer())


def test_the_hooks_that_lightning_does_not_document_exist() -> None:
    """If this fails, the adapter must be checked against the new version of Lightning."""
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            loop = trainer.fit_loop.epoch_loop
            progress = loop.batch_progress
            seen["names"] = [
                progress.current.ready,
                progress.current.started,
                progress.current.processed,
                progress.current.completed,
                progress.is_last_batch,
                loop.restarting,
                loop.restarted_on_train_batch_end,
                trainer.val_check_batch,
                trainer.distributed_sampler_kwargs,
            ]

    trainer = lightning_toys.make_trainer(Look())
    module = lightning_toys.Module()
    trainer.fit(module, DataLoader(toys.rows(), 50))
    assert len(seen["names"]) == 9
    # A batch that is in the middle of an epoch is no step: Lightning asks `ready % it`.
    trainer = lightning_toys.make_trainer()
    batches = attach(trainer, 24, data=DataLoader(toys.rows(), 8), max_duration="1ep")
    module = lightning_toys.Module()
    trainer.fit(module, batches)
    assert [len(step) for step in module.steps] == [24] * 6 + [6]
    assert trainer.accumulate_grad_batches == 1


@pytest.mark.parametrize("is_sharded", [False, True], ids=["DDP", "FSDP2"])
def test_two_ranks(
    is_sharded: bool, launch_ranks: Callable[..., Any], tmp_path: Path, big_batches: Tensor
) -> None:
    script = Path(__file__).with_name("distributed_lightning.py")
    launch_ranks(script, tmp_path, json.dumps({"is_sharded": is_sharded}))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ids"] == IDS
    assert result["rates"] == toys.planned_rates()
    weights = torch.tensor(result["weights"], dtype=torch.float64)
    torch.testing.assert_close(weights, big_batches, rtol=0, atol=1e-12)
    assert (result["global_step"], result["clock"]) == (len(IDS), [len(IDS), 2, 2 * toys.N])
    assert result["validated"] == [[EPOCH, 0], [len(IDS), 1]]
    if not is_sharded:  # with one rank instead of two, and other micro-batches
        _, module, _ = lightning_toys.train(resume=tmp_path / "saved" / "step=11.ckpt", size=5)
        assert ids_of(module) == IDS[11:]
        close(module.net, big_batches)


@pytest.mark.small
def test_fabric_needs_no_adapter(big_batches: Tensor, tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net = toys.network()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=toys.RATE))
    run = prepare(
        toys.rows(),
        toys.SIZES,
        max_duration="2ep",
        schedules=toys.SCHEDULES,
        micro_batch_size=8,
        loading=Loading(seed=toys.SEED),
    )
    run.bind(optimizer, rank=fabric.global_rank, world_size=fabric.world_size)
    while not run.is_done:
        for micro in run.micro_batches():
            with fabric.no_backward_sync(model, enabled=not micro.is_last):
                fabric.backward(micro.weight * toys.mean_loss(model, micro.batch))
            if micro.is_last:
                optimizer.step()
                optimizer.zero_grad()
                run.finish()
    close(net, big_batches)
    fabric.save(tmp_path / "last.ckpt", {"run": run})
    assert fabric.load(tmp_path / "last.ckpt")["run"] == run.state_dict()


@pytest.mark.small
def test_batches_in_tokens_are_resumed(tmp_path: Path) -> None:
    lengths = [3, 5, 2, 7] * 12
    data: Any = [torch.ones(length, dtype=torch.float64) for length in lengths]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1).double()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch.sum(1, keepdim=True)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def fit(path: Any = None) -> int:
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        loader: DataLoader[Tensor] = DataLoader(data, batch_size=4, collate_fn=pad)
        save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = lightning_toys.make_trainer(save)
        settings: dict[str, Any] = {"micro_batch_size": "14tok", "lengths": lengths}
        batches = attach(trainer, "40tok", {"lr": 1.0}, data=loader, **settings)
        trainer.fit(Module(), batches, ckpt_path=path)
        return int(trainer.global_step)

    steps = fit()
    assert fit(tmp_path / "step=3.ckpt") == steps
