"""The command line in this process, and a small project for it to train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stretto.cli import main

PROJECT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Points(TensorDataset):
    def __init__(self, count=40, split="train"):
        inputs = torch.arange(count * 2, dtype=torch.float32).reshape(count, 2) / count
        super().__init__(inputs, inputs.sum(1, keepdim=True))


class Stream:
    # Data of unknown length: an epoch has nine samples.
    def __init__(self, split="train"):
        self.inputs = torch.ones(9, 2)

    def __iter__(self):
        yield self.inputs, self.inputs.sum(1, keepdim=True)


class Line(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    @staticmethod
    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def entropy(model, batch):
    return torch.tensor(3.25)
"""
RUN = """\
max_duration: 2ep
model: {target: cli_project:Line}
data: {target: cli_project:Points}
optimizer: {target: torch.optim:SGD, lr: 0.01}
schedules: {lr: {Cosine: {warmup: 10%}}}
batch_size: {DoublingRamp: {start: 4, end: 16, over: 50%}}
evaluate: {every: 1ep, metrics: {entropy: {target: cli_project:entropy}}}
checkpoint: {every: 1ep}
log: {every: 10sp, loggers: []}
"""


class Said(NamedTuple):
    """What a command printed, and the code it ended with."""

    code: int
    out: str
    err: str


Stretto = Callable[..., Said]


@pytest.fixture
def stretto(capsys: pytest.CaptureFixture[str]) -> Stretto:
    """Run a command in this process."""

    def run(*arguments: object) -> Said:
        before = list(sys.path)
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        sys.path[:] = before
        code = ended.value.code
        said = capsys.readouterr()
        # A busy machine may show progress at any time.
        lines = [line for line in said.err.splitlines(True) if not line.endswith(" s) ...\n")]
        return Said(0 if code is None else int(code), said.out, "".join(lines))

    return run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a run file and the module it names, that commands are started in."""
    (tmp_path / "cli_project.py").write_text(PROJECT)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    yield tmp_path
    sys.modules.pop("cli_project", None)
