"""Two ranks with a sharded model find how large a micro-batch may be, and train."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.distributed.strategy import shard_blocks
from stretto.errors import TrainingError
from stretto.training import Trainer


class Wide(nn.Module):
    """Blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        result: Tensor = self.head(x)
        return result


def main() -> None:
    """Ask for a search, and write why it is refused on this rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = shard_blocks(Wide(), device="cpu")
    try:
        Trainer(
            model,
            TensorDataset(torch.ones(512, 64)),
            optimizer=torch.optim.AdamW(model.parameters()),
            loss=lambda model, batch: model(batch[0]).square().mean(),
            max_duration="1ep",
            batch_size=64,
            micro_batch_size="auto",
            device="cpu",
        )
    except TrainingError as error:
        Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(str(error)))
    dist.destroy_process_group()
    # gloo of torch 2.13 sometimes aborts while the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    main()
