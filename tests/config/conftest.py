"""A project of a user's own, whose modules run files name as targets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = '''
"""What a run file may name: data, a model, functions."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto import DataSpec


class Points(TensorDataset):
    def __init__(self, count=40, *, split="train", tokens_per_sample=None):
        inputs = torch.arange(count * 2, dtype=torch.float32).reshape(count, 2) / count
        super().__init__(inputs, inputs.sum(1, keepdim=True))
        self.split = split
        if tokens_per_sample is not None:
            self.tokens_per_sample = tokens_per_sample


def plain_points(count=8):
    return Points(count)


class Batches:
    def __iter__(self):
        return iter(zip(*(one.split(3) for one in Points(8).tensors)))


def dropping():
    return DataLoader(Points(8), batch_size=3, drop_last=True)


def plain_batches():
    return Batches()


def spec_of_batches():
    return DataSpec(Batches(), tokens_per_sample=3)


class Line(nn.Module):
    def __init__(self, width=1):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.last = nn.Linear(width, 1)

    def forward(self, inputs):
        return self.last(self.first(inputs))

    @staticmethod
    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class NoLoss(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)


def absolute_loss(model, batch, *, scale=1.0):
    return scale * (model(batch[0]) - batch[1]).abs().mean()


def predict(model, batch):
    return model(batch[0]), batch[1]


def halve_each_epoch(timer, *, base=0.5):
    return base ** timer.epoch


def grow(timestamp, current, *, step=4):
    return (current or 4) + step


def grow_each_epoch(epoch, current):
    return current


def follow(size):
    return size / 8


def count(batch):
    return len(batch[0])


class Kept:
    made = []

    def __init__(self, note=""):
        self.note, self.lines = note, []
        self.made.append(self)

    def start(self, config, sample):
        self.config = config

    def log(self, record):
        self.lines.append(record)

    def close(self):
        pass


def broken(*_):
    raise RuntimeError("the disk is gone")


NUMBER = 3
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module with targets, importable during the test."""
    (tmp_path / "my_project.py").write_text(PROJECT)
    (tmp_path / "my_broken.py").write_text("raise ValueError('bad start')")
    (tmp_path / "my_needy.py").write_text("import not_a_real_package_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_project"
    for name in ("my_project", "my_broken", "my_needy"):
        sys.modules.pop(name, None)
