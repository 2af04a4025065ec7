from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.checkpoint import pack_optimizer, unpack_optimizer
from stretto.checkpoint.sharding import Box, LazyTensor
from stretto.errors import CheckpointError
from stretto.runtime.sharded import is_dtensor

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9), amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_to_the_last_bit(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3, seed=1)
    state = copy.deepcopy(pack_optimizer(optimizer))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer, 3, seed=2)

    other = nn.Linear(3, 2)
    other.load_state_dict(weights)
    resumed = OPTIMIZERS[name](other.parameters())
    unpack_optimizer(resumed, state)
    train(other, resumed, 3, seed=2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert resumed.param_groups[0].keys() == optimizer.param_groups[0].keys()


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    """Torch itself would take it, and fail in the middle of the first step."""
    model = nn.Linear(3, 2)
    state = pack_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="AdamW"):
        unpack_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), state)


def test_another_optimizers_state_is_refused() -> None:
    model = nn.Linear(3, 2)
    state = pack_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(CheckpointError, match="SGD"):
        unpack_optimizer(other, state)


def test_state_of_another_shape_than_its_parameter_is_refused() -> None:
    def optimizer(*shapes: tuple[int, ...]) -> torch.optim.Optimizer:
        parameters = [torch.ones(shape, requires_grad=True) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return torch.optim.Adam(parameters)

    saved = optimizer((3, 2), (2,))
    saved.step()
    state = pack_optimizer(saved)
    with pytest.raises(CheckpointError, match="exp_avg"):
        unpack_optimizer(optimizer((2,), (3, 2)), state)


def test_the_state_of_more_parameters_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, 1, seed=1)
    state = pack_optimizer(optimizer)
    other = torch.optim.Adam([nn.Parameter(torch.zeros(2, 3))], lr=0.1)
    with pytest.raises(CheckpointError, match="parameters"):
        unpack_optimizer(other, state)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_state_is_laid_out_as_the_parameters_are(rank: int, kind: Any) -> None:
    """Saved whole, read by two ranks, each its own part."""
    model = nn.Linear(3, 5)
    optimizer = kind(model.parameters(), lr=0.1)
    train(model, optimizer, 2, seed=1)
    state = pack_optimizer(optimizer)
    asked: list[Box | None] = []

    def stored(whole: Any) -> Any:
        if not isinstance(whole, torch.Tensor):
            return whole

        def read(part: Box | None) -> torch.Tensor:
            asked.append(part)
            return whole.clone() if part is None else whole[part.slices].clone()

        return LazyTensor(tuple(whole.shape), read)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        parameters = [
            nn.Parameter(distribute_tensor(p.detach(), mesh, [Cut(0)], src_data_rank=None))
            for p in model.parameters()
        ]
        resumed = kind(parameters, lr=0.1)
        unpack_optimizer(resumed, {key: stored(one) for key, one in state.items()})
        for parameter, saved in zip(parameters, model.parameters(), strict=True):
            for name, value in resumed.state[parameter].items():
                whole = optimizer.state[saved][name]
                if whole.shape == saved.shape:
                    assert is_dtensor(value)
                    assert value.placements == (Cut(0),)
                    expected = whole.tensor_split([3])[rank]
                    assert torch.equal(value.to_local(), expected)
                elif whole.dim():
                    assert is_dtensor(value)
                    assert torch.equal(value.to_local(), whole)
                else:
                    assert not is_dtensor(value)
                    assert torch.equal(value, whole)
    finally:
        dist.destroy_process_group()
    assert any(box and (box.offset[0], box.length[0]) == ((0, 3), (3, 2))[rank] for box in asked)
