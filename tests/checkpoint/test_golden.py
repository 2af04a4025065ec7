"""Checkpoints stay readable, and today's are written as pinned.

`golden/` holds one of each format. To add one, run this file with `STRETTO_UPDATE_GOLDEN=1`: it
writes those of the present format that are missing, and never touches another.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.checkpoint import Shard, describe, read_checkpoint
from stretto.checkpoint.sharding import HostCopies
from stretto.checkpoint.writing import begin_checkpoint, finish_checkpoint, write_part
from stretto.training import Checkpointing, Trainer

GOLDEN = Path(__file__).parent / "golden"
NAMES = ["format-3", "format-3-of-two-writers"]
RECORDS = {
    "clock": {"sample": 2**60 + 1},
    "loss": 0.1,
    "none": None,
    "nested": [1, [2.5, "é"]],
    "nan": math.inf,
}


def tensors() -> dict[str, dict[str, Tensor]]:
    shared = torch.arange(6, dtype=torch.float64).reshape(2, 3) / 3
    model = {
        "weight": shared,
        "tied": shared,
        "half": torch.arange(4).to(torch.bfloat16),
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 5),
        "transposed": torch.arange(6, dtype=torch.int32).reshape(2, 3).t(),
    }
    return {"model": model, "optimizer": {}}


def write(path: Path, world_size: int) -> None:
    begin_checkpoint(path)
    for rank in range(world_size):
        given: dict[str, dict[str, Any]] = tensors()
        if world_size > 1:
            for name, tensor in given["model"].items():
                if tensor.dim():
                    piece = tensor.tensor_split(world_size)[rank]
                    offset = sum(len(one) for one in tensor.tensor_split(world_size)[:rank])
                    given["model"][name] = Shard(
                        piece, tuple(tensor.shape), (offset, *[0] * (tensor.dim() - 1))
                    )
        write_part(path, HostCopies().take(given), rank=rank, world_size=world_size)
    finish_checkpoint(path, RECORDS, world_size=world_size, clock=lambda: 1.8e9)


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_every_format_is_read_to_the_last_bit(name: str) -> None:
    found, records = read_checkpoint(GOLDEN / name)
    assert records == RECORDS
    assert {group: set(named) for group, named in found.items()} == {
        group: set(named) for group, named in tensors().items()
    }
    for key, tensor in tensors()["model"].items():
        assert found["model"][key].dtype == tensor.dtype
        assert torch.equal(found["model"][key], tensor)
    assert describe(GOLDEN / name).is_whole


@pytest.mark.parametrize(("name", "world_size"), [(NAMES[0], 1), (NAMES[1], 2)])
def test_the_present_format_is_written_as_pinned(
    name: str, world_size: int, tmp_path: Path
) -> None:
    if os.environ.get("STRETTO_UPDATE_GOLDEN") and not (GOLDEN / name).exists():
        write(GOLDEN / name, world_size)
    write(tmp_path / name, world_size)
    assert content(tmp_path / name) == content(GOLDEN / name)


def make_trainer(folder: Path) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    return Trainer(
        model,
        TensorDataset(torch.randn(24, 3), torch.randn(24, 1)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=lambda m, b: (m(b[0]) - b[1]).square().mean(),
        max_duration="2ep",
        batch_size=6,
        folder=folder,
        checkpoint=Checkpointing("18sp"),
    )


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    golden = GOLDEN / "run-format-3"
    if os.environ.get("STRETTO_UPDATE_GOLDEN") and not golden.exists():
        make_trainer(tmp_path / "first").fit()
        shutil.copytree(tmp_path / "first" / "checkpoints" / "checkpoint-000000000018", golden)
    trainer = make_trainer(tmp_path)
    trainer.resume(golden)
    assert trainer.timer.timestamp.sample == 18
    saved = read_checkpoint(golden).tensors["model"]
    for key, value in trainer.model.state_dict().items():
        assert torch.equal(value, saved[key])
    trainer.fit()
    assert trainer.timer.timestamp.sample == 48
