"""Averaging what ranks have accumulated, by a pass with nothing to learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from stretto.training.distributed.ranks import Ranks

DataParallel = Callable[[nn.Module], nn.parallel.DistributedDataParallel]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one: what is averaged there stays as it is."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Mixed(nn.Module):
    """Dense, sparse and frozen parameters, a buffer, and parameters of another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.norm = nn.BatchNorm1d(3)
        self.turn = nn.Parameter(torch.randn(3, dtype=dtype))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.frozen(self.norm(self.table(rows))) * self.turn
        return out


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_a_pass_with_nothing_to_learn_leaves_gradients_as_they_are(
    dtype: torch.dtype, data_parallel: DataParallel
) -> None:
    torch.manual_seed(3)
    inner = Mixed(dtype)
    model = data_parallel(inner)
    ranks = Ranks.from_environment("cpu")
    ranks.average(model)  # before there is any gradient
    assert all(not p.grad.to_dense().any() for p in inner.parameters() if p.grad is not None)
    model.zero_grad()
    with model.no_sync():
        model(torch.tensor([0, 2, 2, 4])).abs().square().mean().backward()
    before = [p.grad.to_dense().clone() for p in inner.parameters() if p.grad is not None]
    mean = inner.norm.get_buffer("running_mean")
    seen = mean.clone()
    ranks.average(model)
    after = [p.grad.to_dense() for p in inner.parameters() if p.grad is not None]
    assert len(before) == len(after) == 4
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert torch.equal(mean, seen)
    assert model.module is inner
    model(torch.tensor([1, 3])).abs().sum().backward()  # and it goes on
