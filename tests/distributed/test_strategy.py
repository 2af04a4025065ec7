"""Averaging what ranks have accumulated, by a pass with nothing to learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import TensorDataset

from stretto import Trainer
from stretto.distributed import Ddp, Mesh, Single, Strategy
from stretto.distributed.strategy import adopted
from stretto.errors import TrainingError
from stretto.runtime.ranks import Ranks

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
    strategy = adopted(model, Ranks.from_environment("cpu"))
    strategy.average()  # before there is any gradient
    assert all(not p.grad.to_dense().any() for p in inner.parameters() if p.grad is not None)
    model.zero_grad()
    with model.no_sync():
        model(torch.tensor([0, 2, 2, 4])).abs().square().mean().backward()
    before = [p.grad.to_dense().clone() for p in inner.parameters() if p.grad is not None]
    mean = inner.norm.get_buffer("running_mean")
    seen = mean.clone()
    strategy.average()
    after = [p.grad.to_dense() for p in inner.parameters() if p.grad is not None]
    assert len(before) == len(after) == 4
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert torch.equal(mean, seen)
    assert model.module is inner
    model(torch.tensor([1, 3])).abs().sum().backward()  # and it goes on


class Compressed(Ddp):
    """Sends gradients in fp16."""

    def wrap(self, model: nn.Module, *, is_called: bool) -> nn.Module:
        wrapped = super().wrap(model, is_called=is_called)
        self.model.register_comm_hook(None, fp16_compress_hook)
        return wrapped


class OneOfTwo(Single):
    """The second of two ranks; nobody is the first."""

    def of(self, ranks: Ranks, mesh: Mesh | None = None) -> Self:
        """Share samples out over two."""
        ranks.share_samples(1, 2)
        return super().of(ranks, mesh)


def gradient(strategy: Strategy | None) -> tuple[Tensor, Trainer]:
    """Return the gradient of the first step of a run."""
    torch.manual_seed(0)
    model, data = nn.Linear(5, 1, bias=False), TensorDataset(torch.randn(4, 5))
    before = model.weight.detach().clone()
    trainer = Trainer(
        model,
        data,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        max_duration="1ba",
        batch_size=4,
        loading={"shuffle": False},
        strategy=strategy,
    )
    trainer.fit()
    return before - model.weight.detach(), trainer


@pytest.mark.usefixtures("group")
def test_a_strategy_of_your_own_wraps_the_model() -> None:
    exact, compressed = gradient(None)[0], gradient(Compressed())[0]
    assert not torch.equal(exact, compressed)
    torch.testing.assert_close(compressed, exact, rtol=0.01, atol=0)


def test_samples_are_those_of_the_ranks_that_have_samples_of_their_own() -> None:
    (half, trainer), (whole, _) = gradient(OneOfTwo()), gradient(None)
    assert (trainer.run.loader.rank, trainer.run.loader.world_size) == (1, 2)
    assert not torch.equal(half, whole)


@pytest.mark.usefixtures("group")
def test_a_weight_that_was_frozen_when_the_model_was_wrapped_is_not_trained_later() -> None:
    """DDP would not average its gradient, and the ranks would part without a word."""
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model,
        TensorDataset(torch.randn(16, 2), torch.randn(16, 1)),
        optimizer=optimizer,
        loss=nn.MSELoss(),
        max_duration="2ep",
        batch_size=8,
        strategy=Ddp(),
    )
    model[1].requires_grad_(False)  # frozen since: nothing is wrong with that
    model[1].requires_grad_(True)
    model[0].requires_grad_(True)
    with pytest.raises(TrainingError, match=r"0\.weight"):
        trainer.fit()


def test_a_model_without_memory_is_refused() -> None:
    model = nn.Linear(2, 1, device="meta")
    with pytest.raises(TrainingError, match="to_empty"):
        Trainer(
            model,
            [(torch.ones(2), torch.ones(1))],
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.MSELoss(),
            max_duration="1ep",
            batch_size=1,
        )
