"""A loop of its own on 2 or 4 ranks: DDP, FSDP2 and HSDP have the gradient of one big batch."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tests.data.texts import LOSSES, Causal, gradient, pad, texts, whole_gradient
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stretto import prepare
from stretto.ordering import SampleOrder

WORLD = int(os.environ["WORLD_SIZE"])


def wrapped(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model as it is wrapped, and what `prepare` gets beside it."""
    model = Causal()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), {}
    if kind == "fsdp2":
        fully_shard(model.hidden)
        fully_shard(model)
        return model, {}
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh)
    return model, {"mesh": mesh}


def check(kind: str, unit: Any, chance: random.Random) -> None:
    """Compare the gradient of each step of a run whose sizes are drawn."""
    model, more = wrapped(kind)
    number = chance.randint(20, 40)
    data, order = texts(number, seed=chance.randint(0, 99)), SampleOrder(number, 5)
    # Every rank begins with a target: it has nothing else to put in the place of a dummy.
    sizes = " ".join(f"{at}ba:{chance.randint(12 if not at else 7, 19)}" for at in range(3))
    run = prepare(
        data,
        sizes,
        max_duration="3ba",
        loss_weight=unit,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        idle_ranks=True,
        micro_batch_size=chance.randint(1, 7),
        loading={"collate_fn": pad, "seed": 5, "last_batch": "carry"},
        **more,
    )
    for step in run:
        for place, micro in enumerate(step):
            is_last = place == len(step) - 1
            apart = isinstance(model, nn.parallel.DistributedDataParallel) and not is_last
            with model.no_sync() if apart else nullcontext():  # type: ignore[operator]
                (micro.weight * LOSSES[unit](model, micro.batch)).backward()
        start = step.timestamp.sample
        rows = [data[order[place]] for place in range(start, start + step.num_samples)]
        whole, found = whole_gradient(rows, unit), gradient(model)
        assert (found - whole).norm() <= 1e-12 * whole.norm(), (kind, unit, found, whole)
        run.optimizers[0].step()
        model.zero_grad()
        run.finish(tokens=0, seconds=0.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    drawn = random.Random(int(os.environ.get("SEED", "0")))
    for case in range(4):
        for kind in ("ddp", "fsdp2", "hsdp"):
            check(kind, ("tokens", "samples")[case % 4 == 3], drawn)
    dist.destroy_process_group()
