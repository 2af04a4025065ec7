"""A module and data that show which samples each step of a Lightning trainer saw."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.integrations.lightning import MicroBatches, attach
from stretto.ordering import SampleOrder
from stretto.planning import Plan, plan
from stretto.schedules import Cosine
from stretto.settings import Loading
from stretto.timing import Horizon

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
torch.set_num_threads(1)

N, SEED, RATE = 150, 3, 1e-2
SIZES = "0sp:8 65sp:18 125sp:31 200sp:64"  # grows inside epochs; 18 and 31 split unevenly
SCHEDULES = {"lr": Cosine(end=0.1, warmup="60sp", warmup_start=0.05)}
WORLD, RANK = (
    int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0))
)


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(N, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(N))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def mean_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return loss


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
) -> MicroBatches:
    loader = DataLoader(rows(), size, shuffle=True)
    settings = {"schedules": SCHEDULES, "loading": Loading(seed=SEED), **settings}
    return attach(trainer, loader, policy, **settings)


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


def the_plan(policy: Any = SIZES) -> Plan:
    return plan(
        Horizon("2ep", dataset_num_samples=N), policy, schedules=SCHEDULES, base={"lr": RATE}
    )


def planned_ids(policy: Any = SIZES) -> list[list[int]]:
    order = SampleOrder(N, seed=SEED)
    found = []
    for batch in the_plan(policy).batches():
        start = batch.timestamp.sample
        found.append(sorted(order[at] for at in range(start, start + batch.size)))
    return found


def planned_rates() -> list[float]:
    return [batch.values["lr"] for batch in the_plan().batches()]


def one_big_batch() -> Tensor:
    """Return the weights of a loop of torch alone, a batch of the plan at a time."""
    model, data = network(), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for ids, rate in zip(planned_ids(), planned_rates(), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        inputs, targets, _ = data[ids]
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten().cpu() for one in model.parameters()])
