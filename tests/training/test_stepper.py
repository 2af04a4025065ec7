from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stretto.data import DataSpec
from stretto.errors import TrainingError
from stretto.training import Callback, Stepping
from stretto.training.algorithms import LayerFreezing

Make = Callable[..., Any]


def test_a_gradient_from_before_is_no_part_of_the_first_batch(problem: Make) -> None:
    clean, used = problem(), problem()
    for parameter in used.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clean.trainer(max_duration="1ba").fit()
    used.trainer(max_duration="1ba").fit()
    assert torch.equal(clean.weights(), used.weights())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_batch_without_a_unit_is_refused_on_one_rank_too(problem: Make, precision: Any) -> None:
    run = problem(dtype=torch.float32)
    stepping = Stepping(loss_weight=lambda batch: 0, precision=precision)
    with pytest.raises(TrainingError, match="cannot take the step at 0sp: its batch has nothing"):
        run.trainer(stepping=stepping).fit()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda model, batch: model(batch[0]).sum(1), r"its shape is \[8\]"),
        (lambda model, batch: 0.5, "it is no tensor"),
    ],
    ids=["shape", "number"],
)
def test_a_loss_must_be_a_scalar(problem: Make, loss: Any, why: str) -> None:
    with pytest.raises(TrainingError, match=f"cannot learn from a loss of type .*: {why}"):
        problem().trainer(loss=loss).fit()


def test_half_precision_goes_on_where_everything_is_frozen(problem: Make) -> None:
    """The loss scaler refuses to step without a gradient."""
    run = problem(dtype=torch.float32)
    trainer = run.trainer(
        max_duration="6ba",
        stepping=Stepping(precision="fp16", clip_norm=1.0),
        callbacks=[LayerFreezing(["0", "2"], start="1ba", end="4ba")],
    )
    trainer.fit()
    assert trainer.timer.batch == 6


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_an_optimizer_of_some_parameters_leaves_the_others_alone(
    problem: Make, clip_norm: float | None
) -> None:
    run = problem()
    run.optimizer = torch.optim.SGD(run.model[2].parameters(), lr=0.1)
    first, last = run.model[0].weight.clone(), run.model[2].weight.clone()
    run.trainer(stepping=Stepping(clip_norm=clip_norm)).fit()
    assert torch.equal(run.model[0].weight, first)
    assert not torch.equal(run.model[2].weight, last)


def test_a_transform_that_changes_no_tokens_leaves_their_count_alone(problem: Make) -> None:
    """Samples that were dropped have passed, and their tokens with them."""

    class Half(Callback):
        def transform_batch(self, trainer: Any, batch: Any) -> Any:
            return tuple(tensor[::2] for tensor in batch)

    run = problem()
    spec = DataSpec(run.data, get_num_tokens_in_batch=lambda batch: 5 * len(batch[0]))
    run.data = spec
    trainer = run.trainer(callbacks=[Half()])
    trainer.fit()
    assert trainer.timer.token == 5 * trainer.timer.sample == 600


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler uses torch.jit
def test_compiled_names_do_not_reach_a_checkpoint(problem: Make) -> None:
    run = problem()
    trainer = run.trainer(stepping=Stepping(compile=True))  # compiled at the first step, not here
    tensors, _ = trainer._state.capture()
    assert list(tensors["model"]) == [name for name, _ in run.model.named_parameters()]


def test_buffers_are_part_of_a_checkpoint(problem: Make) -> None:
    run = problem()
    run.model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    trainer = run.trainer()
    trainer.fit()
    tensors, _ = trainer._state.capture()
    assert torch.equal(tensors["model"]["0.running_mean"], run.model[0].running_mean)
    assert tensors["model"]["0.num_batches_tracked"] == 16
