"""One rank of a run in which a rank fails, or waits for one that does."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

from stretto.training import Callback, Evaluation, Run, Trainer

RANK = int(os.environ["RANK"])
DATA = TensorDataset(torch.randn(40, 5, generator=torch.Generator().manual_seed(1)))


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


def broken_metric(model: nn.Module, batch: Any) -> torch.Tensor:
    if RANK == 1:
        raise ValueError("a metric of rank 1 is broken")
    return square(model, batch)


class Break(Callback):
    def on_batch_end(self, run: Run, step: Any) -> None:
        if RANK == 1 and run.timer.batch == 3:
            raise ValueError("a callback of rank 1 is broken")


FAULTS: dict[str, dict[str, Any]] = {
    "metric": {"evaluate": Evaluation(DATA, "2ba", {"broken": broken_metric})},
    "callback": {"callbacks": [Break()]},
}


def main(fault: str, parallel: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, mesh = nn.Linear(5, 1), None
    if parallel == "fsdp":
        fully_shard(model)
    if parallel == "tp":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
    Trainer(
        model,
        DATA,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=square,
        max_duration="10ba",
        batch_size=8,
        device="cpu",
        mesh=mesh,
        **FAULTS[fault],
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
