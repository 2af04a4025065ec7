"""What a trainer of Lightning cannot do with a batch size that changes, refused by name."""

from __future__ import annotations

from collections.abc import Iterable

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)

from stretto.errors import TrainingError

_REFUSED = (BatchSizeFinder, GradientAccumulationScheduler, StochasticWeightAveraging)


def check_events(every: Iterable[str]) -> None:
    """Refuse events that a trainer does not have.

    Raises:
        TrainingError: there is one.
    """
    for name in set(every) - {"evaluate", "save"}:
        raise TrainingError.cannot(
            f"wait for {name!r}",
            why="a trainer does nothing of that name now and then",
            instead="write 'evaluate' or 'save'",
        )


def own_interval(trainer: Trainer) -> str:
    """Return how often the settings of a trainer evaluate, as a time.

    Raises:
        TrainingError: they count batches or seconds.
    """
    epochs = trainer.check_val_every_n_epoch
    interval = trainer.val_check_interval
    if not isinstance(interval, float) or (interval != 1.0 and epochs != 1):
        raise TrainingError.cannot(
            f"evaluate with val_check_interval={interval!r}",
            why="it counts micro-batches, whose number changes with the batch size",
            instead="leave it out, and pass every={'evaluate': '10%'}",
        )
    return f"{interval * (epochs or 1):g}ep"


def own_length(trainer: Trainer) -> str:
    """Return how long the settings of a trainer train, as a time.

    Raises:
        TrainingError: they name no end, or two.
    """
    steps, epochs = trainer.max_steps, trainer.max_epochs
    given = [
        f"{name}={value}"
        for name, value in (("max_epochs", epochs), ("max_steps", steps))
        if value not in (None, -1)
    ]
    if len(given) != 1 or given[0].endswith("=0"):
        raise TrainingError.cannot(
            f"train with Trainer({', '.join(given) or 'max_epochs=-1'})",
            why="a run has one length above 0",
            instead="give max_epochs or max_steps, or pass attach(..., max_duration='2ep')",
        )
    return f"{epochs}ep" if steps == -1 else f"{steps}ba"


def check_trainer(trainer: Trainer) -> None:
    """Refuse a trainer with settings or callbacks that cannot be followed.

    Raises:
        TrainingError: it has one, or it is of another version.
    """
    if not isinstance(trainer, Trainer):
        raise TrainingError.cannot(
            f"attach to a {type(trainer).__name__}",
            why="it is not a lightning.Trainer",
            instead="call attach(trainer, dataloader, batch_size, schedules)",
        )
    if trainer.fast_dev_run:
        raise TrainingError.cannot(
            "use Trainer(fast_dev_run=...)",
            why="a few micro-batches are not the first steps of the run",
            instead="leave it out, and pass attach(..., max_duration='2ba')",
        )
    settings = {
        "accumulate_grad_batches": (1, "micro-batches follow from the batch size"),
        "overfit_batches": (0.0, "a run has all batches of its length"),
        "limit_train_batches": (1.0, "a run has all batches of its length; see max_duration"),
        "reload_dataloaders_every_n_epochs": (0, "the run itself counts the batches of an epoch"),
    }
    for name, (default, why) in settings.items():
        value = getattr(trainer, name)
        if value != default or (name == "limit_train_batches" and type(value) is int):
            raise TrainingError.cannot(
                f"use Trainer({name}={value!r})", why=why, instead="leave it out"
            )
    for one in trainer.callbacks:
        if isinstance(one, _REFUSED):
            raise TrainingError.cannot(
                f"use {type(one).__name__}",
                why="it changes the batches or the accumulation, which the run decides",
                instead="leave it out",
            )
    if not lightning.__version__.startswith("2.6."):
        raise TrainingError.cannot(
            f"use Lightning {lightning.__version__}",
            why="only 2.6 was tested, and the loop of another version may differ",
            instead="install 'lightning>=2.6,<2.7'",
        )
