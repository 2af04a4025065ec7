"""`stretto step-cost`: seconds by batch size of a run file, measured like those of its run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Stretto = Callable[..., Any]

SLOW = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Vectors(TensorDataset):
    def __init__(self):
        super().__init__(torch.randn(64, 4))


class Slow(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    @staticmethod
    def loss(model, batch):
        time.sleep(1e-4 * len(batch[0]))
        return model(batch[0]).square().mean()


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(4e-3)
        return super().step(closure)
"""
RUN = """\
max_duration: 2ep
model: {target: cli_slow:Slow}
data: {target: cli_slow:Vectors}
optimizer: {target: cli_slow:Optimizer, lr: 0.01}
checkpoint: {every: 1ep}
batch_size: {NoiseScale: {start: 4, maximum: 64, c: time}}
rule: {linear: 4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli_slow.py").write_text(SLOW)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_slow", raising=False)
    return tmp_path


def test_it_prints_seconds_and_leaves_no_run(folder: Path, stretto: Stretto) -> None:
    before = sorted(folder.iterdir())
    code, out, _ = stretto("step-cost", "run.yaml", "--json")
    assert code == 0
    found = json.loads(out)
    assert [row["size"] for row in found["sizes"]] == [4, 8, 16, 32, 64][: len(found["sizes"])]
    assert all(row["seconds"] >= row["fastest"] > 4e-3 for row in found["sizes"])
    assert {*before, folder / "__pycache__"} == {*folder.iterdir(), folder / "__pycache__"}
    code, out, _ = stretto("step-cost", "run.yaml", "--sizes", "8,64")
    assert code == 0
    assert "samples/s" in out
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["8", "64"]


def test_sizes_that_are_none_are_refused(folder: Path, stretto: Stretto) -> None:
    del folder
    code, _, said = stretto("step-cost", "run.yaml", "--sizes", "8,none")
    assert code == 2
    assert "write 64 or 8,16,64" in said
