"""A module and data that show which samples each step of a Lightning trainer saw."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.integrations.toys import RATE, SCHEDULES, SEED, SIZES, WORLD, mean_loss, network, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stretto.integrations.lightning import LightningLoader, attach
from stretto.settings import Loading

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Module(LightningModule):
    """A module as users write it; it records what it sees."""

    net: nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.seen: list[int] = []
        self.steps: list[list[int]] = []
        self.rates: list[float] = []
        self.validated: list[tuple[int, int]] = []

    def mean_loss(self, batch: Sequence[Tensor]) -> Tensor:
        return mean_loss(self.net, batch)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.seen += batch[2].tolist()
        loss = self.mean_loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("validation/loss", self.mean_loss(batch))
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append((self.trainer.global_step, self.trainer.current_epoch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=RATE)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps.append(self.seen)
        self.seen = []
        self.rates.append(optimizer.param_groups[0]["lr"])


def make_trainer(*callbacks: Callback, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=WORLD,
        max_epochs=2,
        callbacks=list(callbacks),
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        **{
            "strategy": "ddp" if WORLD > 1 else "auto",
            "logger": False,
            "enable_progress_bar": False,
        }
        | settings,
    )


def follow(
    trainer: Trainer, *, size: int = 8, policy: Any = SIZES, **settings: Any
) -> LightningLoader:
    loader = DataLoader(rows(), size, shuffle=True)
    settings = {"schedules": SCHEDULES, "loading": Loading(seed=SEED), **settings}
    return attach(trainer, policy, data=loader, **settings)


def train(*callbacks: Callback, module: Any = None, resume: Any = None, **settings: Any) -> Any:
    own = {
        key: settings.pop(key)
        for key in ("every", "policy", "size", "schedules", "max_duration")
        if key in settings
    }
    trainer = make_trainer(*callbacks, **settings)
    batches = follow(trainer, **own)
    module = module or Module()
    trainer.fit(module, batches, DataLoader(rows(), 50), ckpt_path=resume)
    return trainer, module, batches.run
