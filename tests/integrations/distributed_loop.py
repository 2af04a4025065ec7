"""A loop of one rank, with DDP, that a test starts; writes what it saw to a folder."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stretto.batching import BatchSizePolicy, Bound, as_policy
from stretto.data import DataSpec
from stretto.data.weights import units_of
from stretto.integrations import StepMeter
from stretto.schedules import Linear
from stretto.settings import Loading
from stretto.timing import Horizon
from stretto.training import prepare

N = 41
ROWS = torch.arange(N)
LABELS = torch.where((ROWS[:, None] + torch.arange(6)) % (2 + ROWS[:, None] % 3) > 0, 1, -100)
DATA = [{"x": torch.sin(i + torch.arange(6.0)).double(), "labels": LABELS[i], "i": i} for i in ROWS]


def targets(batch: dict[str, Any]) -> int:
    return int((batch["labels"] != -100).sum())


def mean_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    outputs = model(batch["x"][..., None])[..., 0]
    counted = batch["labels"] != -100
    return ((outputs - 1) ** 2 * counted).sum() / counted.sum().clamp(min=1)


class Listens(BatchSizePolicy):
    """Planned sizes, of a policy that reads the noise."""

    def bind(self, horizon: Horizon) -> Bound:
        bound = as_policy("0sp:5 13sp:9 50sp:12").bind(horizon)
        return replace(bound, is_static=False, reads=frozenset({"noise"}))


def train(out: Path, resume: Path | None, *, micro_batch_size: int, stop: int | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = prepare(
        DATA,
        Listens(),
        max_duration="2ep",
        micro_batch_size=micro_batch_size,
        schedules={"lr": Linear(1, 0.1)},
        loading=Loading(seed=4),
        loss_weight=targets,
    ).bind(optimizer)
    if resume is not None:
        state = json.loads((resume / "run.json").read_text())
        run.load_state_dict(state)
        model.load_state_dict(torch.load(resume / "model.pt"))
    parallel = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    meter = StepMeter(run, parallel)
    seen: list[dict[str, Any]] = []
    while not run.is_done and run.timer.batch != stop:
        for step in run.steps():
            if step.timestamp.batch == stop:
                break
            weights = [each.weight for each in step]
            passes = meter.passes(step)
            assert len(weights) != len(passes) or weights == [each.weight for each in passes]
            for each in passes:
                is_joined = each.is_last or parallel is model
                apart = nullcontext() if is_joined else parallel.no_sync()  # type: ignore[operator]
                with apart, each.watch:
                    (each.weight * mean_loss(parallel, each.batch)).backward()
            _, total = units_of(step, run.loss_weights.count, run.loader.ranks)
            signals = meter.signals()
            optimizer.step()
            optimizer.zero_grad()
            run.finish(signals)
            ids = [int(i) for micro in step for i in micro.batch["i"][: micro.num_samples]]
            seen.append({"ids": ids, "units": total, "noise": signals.noise_numerator})
    trained = torch.cat([one.detach().flatten() for one in model.parameters()])
    state = run.state_dict()
    (out / f"{rank}.json").write_text(json.dumps({"seen": seen, "weights": trained.tolist()}))
    if rank == 0:
        (out / "run.json").write_text(json.dumps(state))
        torch.save(model.state_dict(), out / "model.pt")


class Share:
    """The samples of one rank, batched."""

    def __init__(self, rank: int) -> None:
        self.rows = torch.arange(rank, N, 2).split(3)

    def __iter__(self) -> Any:
        return iter(self.rows)


def read_shards(out: Path) -> None:
    """Read a stream of each rank."""
    rank = dist.get_rank()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    data = DataSpec(Share(rank), sharded=True, num_samples=N)
    run = prepare(data, 8, max_duration="1ep", micro_batch_size=3).bind(optimizer)
    seen, weights = [], []
    for step in run.steps():
        seen += [int(i) for micro in step for i in micro.batch[: micro.num_samples]]
        weights.append(sum(micro.weight for micro in step))
        run.finish()
    (out / f"shard{rank}.json").write_text(json.dumps([seen, weights]))


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    folder = Path(sys.argv[2])
    resume = settings.pop("resume")
    train(folder, resume and Path(resume), **settings)
    read_shards(folder)
    dist.destroy_process_group()
