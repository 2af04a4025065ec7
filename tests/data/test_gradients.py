"""The gradient contract: any split over ranks and micro-batches is one big batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.policies import cycled
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from stretto.data import StepLoader
from stretto.ordering import SampleOrder

N = 37
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(N, 5, dtype=torch.float64, generator=GENERATOR)
TARGETS = torch.randn(N, 2, dtype=torch.float64, generator=GENERATOR)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def gradient(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def source(kind: str) -> Any:
    if kind == "map":
        return TensorDataset(INPUTS, TARGETS)

    class Batches:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            order = [SampleOrder(N)[p] for p in range(N)]
            for start in range(0, N, 10):
                part = order[start : start + 10]
                yield INPUTS[part], TARGETS[part]

    return Batches()


@pytest.mark.parametrize("kind", ["map", "iterable"])
@given(
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([None, 1, 2, 5]),
    st.lists(st.integers(1, 37), min_size=1, max_size=3),
)
def test_any_split_gives_the_gradient_of_the_whole_batch(
    kind: str, world: int, micro: int | None, sizes: list[int]
) -> None:
    net, order = model(), SampleOrder(N)
    loaders = [
        StepLoader(
            source(kind), cycled(sizes, planned=False), max_duration="1ep", rank=rank,
            world_size=world, micro_batch_size=micro,
        )
        for rank in range(world)
    ]  # fmt: skip
    for steps in zip(*loaders, strict=True):
        start, size = steps[0].timestamp.sample, steps[0].num_samples
        net.zero_grad()
        for step in steps:
            for one in step:
                # Data parallel training averages over ranks.
                loss = functional.mse_loss(net(one.batch[0]), one.batch[1])
                (loss * one.weight / world).backward()
        split = gradient(net)
        net.zero_grad()
        whole = [order[p] for p in range(start, start + size)]
        functional.mse_loss(net(INPUTS[whole]), TARGETS[whole]).backward()
        assert (split - gradient(net)).norm() <= 1e-12 * gradient(net).norm()
        for loader in loaders:
            loader.finish(tokens=0)


def test_a_run_without_a_ramp_is_a_plain_loop_to_the_last_bit() -> None:
    def train(batches: Iterator[tuple[Any, float]]) -> list[float]:
        net = model().float()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for batch, weight in batches:
            loss = functional.mse_loss(net(batch[0]), batch[1]) * weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    data = TensorDataset(INPUTS.float(), TARGETS.float())
    order = [SampleOrder(N, 5)[p] for p in range(2 * N)]

    def plain() -> Iterator[tuple[Any, float]]:
        for epoch in range(2):
            for start in range(epoch * N, (epoch + 1) * N, 8):
                part = order[start : min(start + 8, (epoch + 1) * N)]
                yield (INPUTS.float()[part], TARGETS.float()[part]), 1.0

    def ours(policy: str) -> Iterator[tuple[Any, float]]:
        for step in StepLoader(data, policy, max_duration="2ep", loading={"seed": 5}):
            for micro in step:
                yield micro.batch, micro.weight

    assert train(ours("8")) == train(plain())
    ramp, plan = train(ours("0sp:8 1ep:16")), train(plain())
    assert ramp[:5] == plan[:5]
    assert len(ramp) == 5 + 3
