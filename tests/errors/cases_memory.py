"""Searches for a batch size that cannot be, and amounts of memory that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stretto.memory import find_batch_size, sandbox
from stretto.memory.amounts import margin_of, parse_bytes
from stretto.memory.limits import free_memory
from stretto.memory.search import CandidateSizes
from stretto.memory.sharding import least_ranks
from stretto.runtime import SupervisedStep


def find(device: str = "cpu", **options: Any) -> object:
    model = nn.Linear(4, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = SupervisedStep(model, optimizer, lambda m, x: m(x).sum())
    return find_batch_size(step, torch.ones(2, 4), **options)


def enter(model: nn.Module, *also: object) -> None:
    with sandbox(model, *also):
        pass


CASES = [
    ("memory-unit-in-doubt", lambda: parse_bytes("80G")),
    ("memory-unit-unknown", lambda: parse_bytes("80 parsecs")),
    ("memory-unit-wrong", lambda: parse_bytes("8XB")),
    ("memory-without-unit", lambda: parse_bytes("80")),
    ("memory-no-number", lambda: parse_bytes("lots")),
    ("memory-margin-of-all", lambda: margin_of("100%", 1000)),
    ("memory-minimum", lambda: CandidateSizes(minimum=0)),
    ("memory-no-power-of-two", lambda: CandidateSizes(power_of_two=True, multiple_of=3)),
    ("memory-no-size", lambda: CandidateSizes(minimum=5, maximum=7, multiple_of=4)),
    ("memory-device", lambda: find(device_memory="1GiB")),
    ("memory-gpu", lambda: find(gpu="abacus")),
    ("memory-ranks", lambda: find(world_size=8)),
    ("memory-shard", lambda: least_ranks("zero")),
    ("memory-context", lambda: find(gpu="h100", device_memory="16MiB", context="1GiB")),
    ("memory-meta", lambda: find("meta")),
    ("memory-zero", lambda: find(device_memory="0")),
    ("memory-sandbox-lazy", lambda: enter(nn.LazyLinear(3))),
    ("memory-sandbox-other", lambda: enter(nn.Linear(1, 1), object())),
    ("memory-unknown", lambda: free_memory(torch.device("cpu"), root=Path("nowhere"))),
]
