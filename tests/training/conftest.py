from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.training import Trainer


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


class Problem:
    """A small regression that every test can afford: 60 samples, two layers, plain SGD."""

    def __init__(self, num_samples: int = 60, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(num_samples, 5, generator=generator, dtype=dtype)
        targets = torch.randn(num_samples, 2, generator=generator, dtype=dtype)
        self.data = TensorDataset(inputs, targets)
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.9
        )

    def trainer(self, **settings: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "train_data": self.data,
            "optimizer": self.optimizer,
            "loss": squared_error,
            "max_duration": "2ep",
            "batch_size": 8,
        }
        return Trainer(self.model, **{**defaults, **settings})

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()


@pytest.fixture
def problem() -> Callable[..., Problem]:
    return Problem
