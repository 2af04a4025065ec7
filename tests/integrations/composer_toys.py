"""A model and data that show which samples each step of a Composer trainer saw."""

from __future__ import annotations

import logging
from typing import Any

import tests.integrations.torchvision_operators  # noqa: F401

# isort: split
import torch
from composer import Callback, ComposerModel, Trainer
from composer.utils import dist
from tests.integrations.toys import (
    RATE,
    SCHEDULES,
    SEED,
    SIZES,
    network,
    rows,
)
from torch import Tensor
from torch.utils.data import DataLoader

from stretto.integrations.composer import attach
from stretto.settings import Loading

logging.disable(logging.WARNING)


class Model(ComposerModel):
    """A model as users write it; it records what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.seen: list[int] = []
        self.micro_sizes: list[int] = []

    def forward(self, batch: Any) -> Tensor:
        if self.training:
            self.seen += batch[2].tolist()
            self.micro_sizes.append(len(batch[0]))
        return self.net(batch[0])

    def loss(self, outputs: Tensor, batch: Any, *_: Any, **__: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self.forward(batch) if outputs is None else outputs


class Watch(Callback):
    """Records each step, and the clock of Composer."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.rates: list[float] = []
        self.evaluated: list[tuple[int, int]] = []
        self.epochs: list[tuple[int, int]] = []

    def before_train_batch(self, state: Any, logger: Any) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])

    def batch_end(self, state: Any, logger: Any) -> None:
        model = getattr(state.model, "module", state.model)
        self.steps.append(model.seen)
        model.seen = []

    def epoch_end(self, state: Any, logger: Any) -> None:
        self.epochs.append((int(state.timestamp.epoch), int(state.timestamp.batch)))

    def eval_start(self, state: Any, logger: Any) -> None:
        self.evaluated.append((int(state.timestamp.batch), int(state.timestamp.epoch)))


class Trained:
    """A run of a trainer: its parts after `fit`."""

    def __init__(
        self,
        *callbacks: Any,
        policy: Any = SIZES,
        schedules: Any = SCHEDULES,
        rule: Any = None,
        loading: Loading | None = None,
        size: int = 8,
        dataloader: Any = None,
        model: Any = None,
        fit: dict[str, Any] | None = None,
        callback: Any = attach,
        **settings: Any,
    ) -> None:
        self.model, self.watch = model or Model(), Watch()
        loading = loading or Loading(seed=SEED)
        self.stretto = callback(policy, schedules, rule=rule, loading=loading)
        if dataloader is None:
            sampler = dist.get_sampler(rows(), shuffle=True)
            dataloader = DataLoader(rows(), size, sampler=sampler)
        self.trainer = Trainer(
            model=self.model,
            train_dataloader=dataloader,
            eval_dataloader=DataLoader(rows(), 50, sampler=dist.get_sampler(rows())),
            callbacks=[self.stretto, self.watch, *callbacks],
            **{
                "optimizers": torch.optim.AdamW(self.model.parameters(), lr=RATE),
                "max_duration": "2ep",
                "device": "cpu",
                "progress_bar": False,
                "seed": 1,
                "eval_interval": "1ep",
            }
            | settings,
        )
        self.trainer.fit(**fit or {})
        self.run = self.stretto.run

    @property
    def ids(self) -> list[list[int]]:
        return [sorted(step) for step in self.watch.steps]

    @property
    def clocks(self) -> list[tuple[int, int, int, int]]:
        """Epoch, batch, sample and batch in the epoch: of Composer, and of the run."""
        theirs, ours = self.trainer.state.timestamp, self.run.timer.timestamp
        return [
            (int(one.epoch), int(one.batch), int(one.sample), int(one.batch_in_epoch))
            for one in (theirs, ours)
        ]
