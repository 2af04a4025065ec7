"""The state of an optimizer is there before the first step, and nothing comes out otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training.conftest import squared_error
from torch import Tensor, nn

from stretto.errors import TrainingError
from stretto.training.stepping.allocation import allocate_state

Make = Callable[..., Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "SGD": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
}
LATE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD plain": torch.optim.SGD,
    "SGD dampening": lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


def model() -> nn.Sequential:
    torch.manual_seed(2)
    # A layer whose gradient has zeros of both signs, and one that is never used.
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        list(net.parameters())[1][:3] = -100.0
    return net


def train(make: Callable[[Any], torch.optim.Optimizer], *, early: bool) -> list[Tensor]:
    net = model()
    optimizer = make(net.parameters())
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        if early and step == 0:
            before = [p.grad for p in net.parameters()]
            allocate_state(optimizer)
            assert [p.grad for p in net.parameters()] == before
        inputs = torch.randn(6, 5, generator=generator)
        targets = torch.randn(6, 2, generator=generator)
        squared_error(net, (inputs, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    found = [p.detach() for p in net.parameters()]
    for number in sorted(state):
        found += [torch.as_tensor(state[number][name]) for name in sorted(state[number])]
    return found


@pytest.mark.parametrize("name", [*OPTIMIZERS, *LATE])
def test_training_is_the_same_to_the_last_bit(name: str) -> None:
    make = {**OPTIMIZERS, **LATE}[name]
    late, early = train(make, early=False), train(make, early=True)
    assert len(late) == len(early)
    for one, other in zip(late, early, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()  # the sign of zero, too


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_update_allocates_no_more(name: str) -> None:
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    allocate_state(optimizer)
    tensors = {
        id(tensor)
        for entry in optimizer.state.values()
        for tensor in entry.values()
        if isinstance(tensor, Tensor)
    }
    squared_error(net, (torch.randn(6, 5), torch.randn(6, 2))).backward()
    optimizer.step()
    after = [t for entry in optimizer.state.values() for t in entry.values()]
    assert after
    assert all(id(tensor) in tensors for tensor in after if isinstance(tensor, Tensor))


def test_a_run_has_the_state_before_its_first_forward_pass(problem: Make) -> None:
    run = problem()
    run.model[0].bias.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(run.model.parameters())
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(len(optimizer.state))
        return squared_error(model, batch)

    run.trainer(optimizer=optimizer, loss=loss, max_duration="2ba").fit()
    assert seen == [3, 3]  # nothing for what is frozen


def test_a_class_of_ones_own_is_left_alone() -> None:
    """Its first step may look for a state that is not there yet."""

    class Own(torch.optim.Adam):
        pass

    weight = nn.Parameter(torch.ones(2))
    optimizer = Own([weight])
    allocate_state(optimizer)
    assert not optimizer.state


def test_a_lazy_module_trains(problem: Make) -> None:
    """Its weights have no shape before the first forward pass."""
    run = problem()
    run.model = nn.Sequential(nn.LazyLinear(7), nn.Linear(7, 2)).double()
    optimizer = torch.optim.AdamW(run.model.parameters())
    run.trainer(optimizer=optimizer, max_duration="2ba").fit()
    assert len(optimizer.state) == 4


def test_sparse_gradients_keep_sparse_state() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    allocate_state(optimizer, leave_out={id(table.weight)})
    assert not optimizer.state


def test_a_state_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])

    def short(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.optim.AdamW, "_init_group", short)
    with pytest.raises(TrainingError, match=r"allocate the state of AdamW.*less state"):
        allocate_state(optimizer)
    assert weight.grad is None
