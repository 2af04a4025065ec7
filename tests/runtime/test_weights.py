"""What is learnt is looked at now and then, in own loops, adapters and trainers alike."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto import Run, Step, Trainer, prepare
from stretto.errors import TrainingError

DATA = TensorDataset(torch.randn(96, 3), torch.randn(96, 1))
Loss = Callable[[nn.Module, Any], Tensor]


def mean(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def from_step(number: int, factor: float) -> Loss:
    """A loss that is multiplied from a step on."""
    seen = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen[0] += 1
        return mean(model, batch) * (factor if seen[0] > number else 1.0)

    return loss


def epochs(run: Run) -> Iterator[Step]:
    """Take the steps of a run as an adapter does, which asks for none after the last."""
    while not run.is_done:
        yield from run.steps()


def in_loop(loss: Loss, optimizer: Any, model: nn.Module, *, binds: bool, **given: Any) -> None:
    run = prepare(DATA, 8, optimizer=None if binds else optimizer, model=model, **given)
    run = run.bind(optimizer) if binds else run  # as an adapter does
    for step in epochs(run) if binds else run:
        for micro in step:
            (loss(model, micro.batch) * micro.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.finish()


def said(face: str, loss: Loss, kind: Any = torch.optim.SGD, **given: Any) -> list[str]:
    """Train on a face; return what was warned of."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = kind(model.parameters(), **{"lr": 0.01} | given.pop("values", {}))
    given = {"max_duration": "2ep"} | given
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if face == "trainer":
            Trainer(model, DATA, optimizer=optimizer, loss=loss, batch_size=8, **given).fit()
        else:
            in_loop(loss, optimizer, model, binds=face == "adapter", **given)
    return [str(one.message) for one in found]


FACES = pytest.mark.parametrize("face", ["loop", "adapter", "trainer"])


@FACES
@pytest.mark.parametrize("number", [0, 5, 15])
def test_weights_that_are_not_finite_end_the_run(face: str, number: int) -> None:
    with pytest.raises(TrainingError, match="finite"):
        said(face, from_step(number, float("nan")))


def test_the_trainer_leaves_them_if_it_is_told_so() -> None:
    assert said("trainer", from_step(0, float("nan")), stepping={"non_finite": "ignore"}) == []


@FACES
@pytest.mark.parametrize("length", ["2ep", "3ba"])
@pytest.mark.parametrize(
    ("kind", "values"),
    [(torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})],
)
def test_gradients_that_are_always_zero_are_said_once(
    face: str, length: str, kind: Any, values: dict[str, float]
) -> None:
    """Weight decay moves weights all the same."""
    (only,) = said(face, from_step(0, 0.0), kind, values=values, max_duration=length)
    assert "every gradient was zero" in only


@FACES
@pytest.mark.parametrize(
    ("loss", "kind", "values"),
    [
        (mean, torch.optim.SGD, {}),
        (mean, torch.optim.AdamW, {"lr": 1e-7}),
        (mean, torch.optim.SGD, {"lr": 1e-7, "momentum": 0.9}),
        (mean, torch.optim.SGD, {"lr": 0.0}),
        ("to the end no more", torch.optim.SGD, {}),
    ],
)
def test_what_learns_hears_nothing(
    face: str, loss: Loss | str, kind: Any, values: dict[str, float]
) -> None:
    loss = from_step(3, 0.0) if isinstance(loss, str) else loss
    assert said(face, loss, kind, values=values) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_and_half_weights_can_be_looked_at(dtype: torch.dtype) -> None:
    made = nn.LazyLinear(1, dtype=dtype)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    run = prepare(DATA, 8, max_duration="2ep", optimizer=optimizer)
    for step in run:
        for micro in step:
            (made(micro.batch[0].to(dtype)).square().mean() * micro.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.finish()
    assert run.timer.batch == 24


def test_a_run_that_ends_where_it_began_has_learnt() -> None:
    """As one does that repeats another to the bit from where that has converged."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = copy.deepcopy(model.state_dict())
    run = prepare(DATA, 8, max_duration="20ba", optimizer=optimizer)
    for step in run:
        for micro in step:
            (mean(model, micro.batch) * micro.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.timestamp.batch == 19:
            model.load_state_dict(start)
        run.finish()
    assert run.is_done
