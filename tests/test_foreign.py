"""Words of other libraries are answered by what to write here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from stretto.batching import Seesaw, as_policy
from stretto.config import parse_run_file
from stretto.errors import BatchSizeError, ConfigError, ScheduleError, StrettoError
from stretto.schedules import Cosine, Linear, as_schedule
from stretto.training import Trainer, prepare

DATA = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


def trainer(**settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"max_duration": "2ep", "batch_size": 8, "loss": nn.MSELoss()}
    return Trainer(model, DATA, optimizer=optimizer, **given | settings)


@pytest.mark.parametrize(
    ("call", "write"),
    [
        (lambda: trainer(max_epochs=3), "max_duration"),
        (lambda: trainer(gradient_clip_val=1.0), "clip_norm"),
        (lambda: trainer(stepping={"max_grad_norm": 1.0}), "clip_norm"),
        (lambda: trainer(validate_frequency=2), "evaluate"),
        (lambda: trainer(batch_increase_function=len), "IncreaseFunction"),
        (lambda: trainer(get_factor=len), "schedules="),
        (lambda: Cosine(T_max=100), "over"),  # type: ignore[call-arg]
        (lambda: Linear(warmup_ratio=0.1), "warmup"),  # type: ignore[call-arg]
        (lambda: prepare(DATA, 8, epochs=3), "max_duration"),  # type: ignore[call-arg]
        (lambda: parse_run_file("epochs: 3\nbatch_size: 8\ndata: {target: 'a:b'}"), "max_duration"),
    ],
)
def test_words_of_others_are_answered(call: Callable[[], Any], write: str) -> None:
    with pytest.raises(ConfigError, match=write):
        call()


def test_a_scheduler_of_torch_is_answered() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ScheduleError, match="from_torch"):
        as_schedule(torch.optim.lr_scheduler.StepLR(optimizer, 3))


def test_auto_is_no_batch_size() -> None:
    with pytest.raises(BatchSizeError, match="micro_batch_size='auto'"):
        as_policy("auto")


def test_a_pair_sets_sizes_and_schedule() -> None:
    pair = Seesaw(Cosine(), 8, maximum=32)
    both = trainer(batch_size=pair)
    schedules = {"lr": pair.schedule}
    apart = trainer(batch_size=pair.policy, schedules=schedules, rule=pair.rule)
    assert both.plan is not None
    assert apart.plan is not None
    assert list(both.plan.batches()) == list(apart.plan.batches())
    assert both.run.hyperparameters.schedules == apart.run.hyperparameters.schedules
    assert both.run.hyperparameters.rule == apart.run.hyperparameters.rule == pair.rule
    run = prepare(DATA, pair, max_duration="2ep")
    assert run.prepared.schedules == schedules
    assert run.prepared.rule == pair.rule
    for wrong in (
        {"batch_size": pair, "schedules": {"lr": Cosine()}},
        {"batch_size": pair, "rule": pair.rule},
    ):
        with pytest.raises(StrettoError):
            trainer(**wrong)
