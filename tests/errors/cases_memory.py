"""Searches for a batch size that cannot be, and amounts of memory that are none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.memory import find_batch_size
from stretto.runtime import SupervisedStep


def find(device: str = "cpu", **options: Any) -> object:
    model = nn.Linear(4, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = SupervisedStep(model, optimizer, lambda m, x: m(x).sum())
    return find_batch_size(step, torch.ones(2, 4), **options)


CASES = [
    ("memory-context", lambda: find(gpu="h100", device_memory="16MiB", context="1GiB")),
    ("memory-zero", lambda: find(device_memory="0GiB")),
]
