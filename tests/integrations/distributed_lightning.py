"""Trainers of Lightning on two ranks, that a test starts; rank 0 writes what all saw."""

from __future__ import annotations

import json
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from tests.integrations.lightning_toys import Module, make_trainer, train
from tests.integrations.toys import RANK, WORLD, flat, rows
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from stretto.integrations.lightning import attach


class Sharded(Module):
    """The module under FSDP2."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in [*self.net.children(), self.net]:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)


def gathered(values: Any) -> list[Any]:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, values)
    return found


def weights(module: Module) -> list[float]:
    full = [
        one.full_tensor() if hasattr(one, "full_tensor") else one for one in module.parameters()
    ]
    return [number for one in full for number in one.detach().flatten().tolist()]


class Prepares(LightningDataModule):
    """Takes a while to write what its `setup` reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.file = folder / "data"

    def prepare_data(self) -> None:
        time.sleep(1)
        self.file.write_text("here")

    def setup(self, stage: str) -> None:
        assert self.file.read_text() == "here"

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), 8)


def main(out: Path, settings: dict[str, Any]) -> None:
    is_sharded = settings.pop("is_sharded", False)
    if not is_sharded:  # before any trainer has connected the ranks
        attach(make_trainer(), 8, data=Prepares(out))
    save = ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = ModelParallelStrategy(WORLD, tensor_parallel_size=1) if is_sharded else "ddp"
    module = Sharded() if is_sharded else Module()
    trainer, module, run = train(save, module=module, strategy=strategy, **settings)
    steps = gathered(module.steps)
    result = {
        "ids": [sorted(chain(*parts)) for parts in zip(*steps, strict=True)],
        "rates": module.rates,
        "weights": weights(module) if is_sharded else flat(module.net).tolist(),
        "global_step": trainer.global_step,
        "clock": [run.timer.batch, run.timer.epoch, run.timer.sample],
        "validated": module.validated,
    }
    if RANK == 0:
        (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
