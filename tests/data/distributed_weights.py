"""A loop of its own on 2 or 4 ranks: DDP, FSDP2 and HSDP have the gradient of one big batch."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tests.data.texts import LOSSES, Causal, Text, gradient, pad, texts, whole_gradient
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stretto import prepare
from stretto.batching import Tokens
from stretto.data import DataSpec
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


class Chunks:
    """A stream of padded batches, the same on every rank."""

    def __init__(self, rows: Sequence[Text], sizes: Sequence[int]) -> None:
        self.rows, self.sizes = rows, sizes

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        start = number = 0
        while start < len(self.rows):
            size = self.sizes[number % len(self.sizes)]
            yield pad(self.rows[start : start + size])
            start, number = start + size, number + 1


def drawn_run(cut: str, chance: random.Random) -> tuple[list[Text], dict[str, Any]]:
    """Return texts in the order of a run, and how it reads and cuts them."""
    number = chance.randint(40, 60)
    rows = texts(number, seed=chance.randint(0, 99))
    order = [rows[place] for place in map(SampleOrder(number, 5).__getitem__, range(number))]
    lengths = [len(row["input_ids"]) for row in rows]
    # Every rank begins with a target: it has nothing else to put in the place of a dummy.
    sizes = [chance.randint(12 if not at else 7, 19) for at in range(3)]
    said: dict[str, Any] = {"loading": {"collate_fn": pad, "seed": 5}}
    if cut == "samples":
        said |= {"data": rows, "micro_batch_size": chance.randint(1, 7)}
    elif cut == "lengths":
        said |= {"data": DataSpec(rows, lengths=lengths), "micro_batch_size": drawn_budget(chance)}
    else:
        chunks = Chunks(rows, [chance.randint(1, 9) for _ in range(4)])
        said = {"data": chunks, "micro_batch_size": drawn_budget(chance)}
        order, sizes = rows, [60, 40, 50]
    unit = "tok" if cut == "stream" else ""
    said["batch_size"] = " ".join(f"{at}ba:{size}{unit}" for at, size in enumerate(sizes))
    return order, said


def drawn_budget(chance: random.Random) -> Tokens:
    """Return a budget that the longest text fits into."""
    return Tokens(chance.randint(9, 40))


def check(kind: str, unit: Any, cut: str, chance: random.Random) -> None:
    """Compare the gradient of each step of a run whose sizes are drawn."""
    model, more = wrapped(kind)
    order, said = drawn_run(cut, chance)
    run = prepare(
        max_duration="3ba",
        loss_weight=unit,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        idle_ranks=True,
        **said,
        **more,
    )
    for step in run:
        for place, micro in enumerate(step):
            is_last = place == len(step) - 1
            apart = isinstance(model, nn.parallel.DistributedDataParallel) and not is_last
            with model.no_sync() if apart else nullcontext():  # type: ignore[operator]
                (micro.weight * LOSSES[unit](model, micro.batch)).backward()
        start = step.timestamp.sample
        whole = whole_gradient(order[start : start + step.num_samples], unit)
        difference = (gradient(model) - whole).norm()
        assert difference <= 1e-12 * whole.norm(), (kind, unit, cut, step.timestamp)
        run.optimizers[0].step()
        model.zero_grad()
        run.finish(tokens=0, seconds=0.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    drawn = random.Random(int(os.environ.get("SEED", "0")))
    for kind in ("ddp", "fsdp2", "hsdp"):
        for cut in ("samples", "lengths", "stream"):
            for unit in ("tokens", "samples"):
                check(kind, unit, cut, drawn)
    dist.destroy_process_group()
