"""Two ranks with a sharded model find how large a micro-batch may be, and train."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from stretto.distributed.strategy import shard_blocks
from stretto.errors import StrettoError
from stretto.training import Trainer

ROOM = (40, 11)
"""Samples for which each rank has memory; the first fails in a forward, the other in a backward."""


class Block(nn.Module):
    """Runs out of memory in its forward or its backward pass."""

    def __init__(self, room: int, *, fails_backward: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.room, self.fails_backward = room, fails_backward

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x).relu()
        if len(x) > self.room:
            if not self.fails_backward:
                raise torch.OutOfMemoryError("CUDA out of memory")
            result.register_hook(self._fail)
        return result

    def _fail(self, _gradient: Tensor) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")


class Wide(nn.Module):
    """Blocks, and a head."""

    def __init__(self, room: int, *, fails_backward: bool) -> None:
        super().__init__()
        many = 64
        rooms = (many, room, many)
        self.blocks = nn.ModuleList(Block(one, fails_backward=fails_backward) for one in rooms)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean of squares."""
    result: Tensor = model(batch[0]).square().mean()
    return result


def talking(model: nn.Module, batch: Any) -> Tensor:
    """Talk to the other ranks in the middle of a step."""
    dist.barrier()
    return loss(model, batch)


def trained(rank: int, **given: Any) -> tuple[Any, list[float]]:
    """Train a model; return the trainer and sums of its weights."""
    torch.manual_seed(0)
    model = shard_blocks(Wide(ROOM[rank], fails_backward=rank > 0), device="cpu")
    trainer = Trainer(
        model,
        TensorDataset(torch.linspace(-1, 1, 64 * 96).reshape(96, 64)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="2ep",
        clip_norm=0.1,
        device="cpu",
        **{"loss": loss, **given},
    )
    trainer.fit()
    weights = [one.full_tensor() for one in model.parameters() if isinstance(one, DTensor)]
    return trainer, [float(one.double().sum()) for one in weights]


def main() -> None:
    """Find sizes, and write what was found and trained on this rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer, weights = trained(rank, batch_size=64, micro_batch_size="auto")
    micro = trainer.run.micro_batch_size
    found = {
        "micro": micro,
        "is_same": weights == trained(rank, batch_size=64, micro_batch_size=micro)[1],
        "whole": [one.size for one in trained(rank, batch_size="auto")[0].plan.stages],
        "splits": trainer._loop.stepper.retry.splits,
    }
    try:
        trained(rank, batch_size=8, micro_batch_size="auto", loss=talking)
    except StrettoError as error:
        found["refused"] = str(error)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    # gloo of torch 2.13 sometimes aborts while the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    main()
