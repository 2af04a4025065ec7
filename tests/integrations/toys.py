"""Data, a model and a plan, with which the tests of several trainers compare what they saw."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.ordering import SampleOrder
from stretto.planning import Plan, plan
from stretto.schedules import Cosine
from stretto.timing import Horizon

torch.set_num_threads(1)

N, SEED, RATE = 150, 3, 1e-2
SIZES = "0sp:8 65sp:18 125sp:31 200sp:64"  # grows inside epochs; 18 and 31 split unevenly
SCHEDULES = {"lr": Cosine(end=0.1, warmup="60sp", warmup_start=0.05)}
WORLD, RANK = (
    int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0))
)


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(N, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(N))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def mean_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return loss


def the_plan(policy: Any = SIZES) -> Plan:
    return plan(
        Horizon("2ep", dataset_num_samples=N), policy, schedules=SCHEDULES, base={"lr": RATE}
    )


def planned_ids(policy: Any = SIZES) -> list[list[int]]:
    order = SampleOrder(N, seed=SEED)
    found = []
    for batch in the_plan(policy).batches():
        start = batch.timestamp.sample
        found.append(sorted(order[at] for at in range(start, start + batch.size)))
    return found


def planned_rates() -> list[float]:
    return [batch.values["lr"] for batch in the_plan().batches()]


def one_big_batch() -> Tensor:
    """Return the weights of a loop of torch alone, a batch of the plan at a time."""
    model, data = network(), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for ids, rate in zip(planned_ids(), planned_rates(), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        inputs, targets, _ = data[ids]
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten().cpu() for one in model.parameters()])
