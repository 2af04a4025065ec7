"""Two real processes with a loop of their own, without a trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from stretto.batching import NoiseScale, Signals
from stretto.data import StepLoader
from stretto.errors import DataError
from stretto.ordering import SampleOrder

N = 11


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.full((1 + i % 4,), i),
            "x": torch.randn(3, dtype=torch.float64, generator=generator),
        }
        for i in range(N)
    ]


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] + 1 for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {
        "input_ids": padded,
        "attention_mask": (padded > 0).long(),
        "x": torch.stack([row["x"] for row in rows]),
    }


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    parallel = DistributedDataParallel(model)
    loader = StepLoader(
        samples(),
        "0sp:3 9sp:5",
        max_duration="39tok",
        loading={"collate_fn": pad, "seed": 2},
        micro_batch_size=2,
    )
    assert (loader.rank, loader.world_size) == (rank, 2)
    record: list[Any] = []
    for step in loader:
        seen: list[int] = []
        for micro in step:
            x = micro.batch["x"]
            loss = functional.mse_loss(parallel(x), torch.zeros_like(x[:, :1]))
            (loss * micro.weight).backward()
            seen += (micro.batch["input_ids"][: micro.num_samples, 0] - 1).tolist()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        after = loader.finish(step)
        record.append([after.sample, after.token, len(step), seen, gradient.tolist()])
    Path(folder, f"{rank}-apart.json").write_text(json.dumps(follow_apart(rank)), encoding="utf-8")
    Path(folder, f"{rank}.json").write_text(json.dumps(record), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo sometimes aborts at interpreter exit


def follow_apart(rank: int) -> list[Any]:
    """Sizes that follow the noise: while ranks bring the same, given by one alone, and apart."""
    said: list[Any] = []
    loader = StepLoader(
        [*range(200)], NoiseScale(4, 16), max_duration="1ep", loading={"shuffle": False}
    )
    for number, step in enumerate(loader):
        own = 30.0 if number < 6 else 30.0 + rank
        try:
            loader.finish(step, signals=Signals(noise_numerator=own, noise_denominator=1.0))
        except DataError as error:
            said += [number, str(error)]
            break
    # Three share a batch, and these two are others: nothing can be compared.
    three = StepLoader([*range(99)], NoiseScale(4, 16), max_duration="2ba", rank=0, world_size=3)
    for step in three:
        three.finish(step, signals=Signals(noise_numerator=float(rank), noise_denominator=1.0))
    given = StepLoader([*range(200)], NoiseScale(4, 16), max_duration="2ba")
    for step in given:  # as a trainer does, which has made them agree
        signals = Signals(noise_numerator=30.0 + rank, noise_denominator=1.0)
        given.finish(step, tokens=0, seconds=0.0, signals=signals)
    return said


@pytest.mark.distributed
@pytest.mark.usefixtures("fork_server")
def test_two_processes_take_one_batch_and_keep_one_clock(tmp_path: Path) -> None:
    multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        train, (str(tmp_path),), nprocs=2, start_method="forkserver"
    )
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    order, rows = SampleOrder(N, 2), samples()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    position = tokens = 0
    for mine, theirs in zip(one, other, strict=True):
        sample, token, micros, seen, gradient = mine
        assert theirs[:3] == [sample, token, micros]
        assert theirs[4] == gradient
        batch = [order[p] for p in range(position, sample)]
        assert sorted(seen + theirs[3]) == sorted(batch)
        position, tokens = sample, tokens + sum(len(rows[i]["input_ids"]) for i in batch)
        assert token == tokens
        whole = torch.stack([rows[i]["x"] for i in batch])
        model.zero_grad()
        functional.mse_loss(model(whole), torch.zeros_like(whole[:, :1])).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert gradient == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-15)
    assert tokens >= 39
    for rank in (0, 1):
        number, said = json.loads((tmp_path / f"{rank}-apart.json").read_text())
        assert number == 6
        assert said.startswith("cannot follow signals that are not the same on every rank")
