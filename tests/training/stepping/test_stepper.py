from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stretto.data import DataSpec
from stretto.errors import ConfigError, PlanWarning, TrainingError
from stretto.training import Callback, Stepping, Trainer
from stretto.training.algorithms import LayerFreezing

Make = Callable[..., Any]


def test_a_gradient_from_before_is_no_part_of_the_first_batch(problem: Make) -> None:
    clean, used = problem(), problem()
    for parameter in used.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clean.trainer(max_duration="1ba").fit()
    used.trainer(max_duration="1ba").fit()
    assert torch.equal(clean.weights(), used.weights())


def test_losses_that_wait_for_the_log_take_no_memory(problem: Make) -> None:
    """`mse_loss` returns a scalar in memory as large as the output of the model."""

    class Keep(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            losses = trainer._loop.recorder.pending[-1].losses
            kept.extend(one.loss.untyped_storage().nbytes() for one in losses)

    kept: list[int] = []
    trainer = problem().trainer(max_duration="3ba", micro_batch_size=4, callbacks=[Keep()])
    trainer.fit()
    assert kept == [8] * 6  # one number of float64 for each micro-batch


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_batch_without_a_unit_is_refused_on_one_rank_too(problem: Make, precision: Any) -> None:
    run = problem(dtype=torch.float32)
    stepping = Stepping(loss_weight=lambda batch: 0)
    with pytest.raises(TrainingError, match="batch"):
        run.trainer(precision=precision, stepping=stepping).fit()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda model, batch: model(batch[0]).sum(1), r"its shape is \[8\]"),
        (lambda model, batch: 0.5, "it is no tensor"),
    ],
    ids=["shape", "number"],
)
def test_a_loss_must_be_a_scalar(problem: Make, loss: Any, why: str) -> None:
    with pytest.raises(TrainingError, match=why):
        problem().trainer(loss=loss).fit()


def test_half_precision_goes_on_where_everything_is_frozen(problem: Make) -> None:
    """The loss scaler refuses to step without a gradient."""
    run = problem(dtype=torch.float32)
    trainer = run.trainer(
        max_duration="6ba",
        precision="fp16",
        clip_norm=1.0,
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
    with pytest.warns(PlanWarning, match=r"no optimizer has 0\.weight, 0\.bias"):
        run.trainer(clip_norm=clip_norm).fit()
    assert torch.equal(run.model[0].weight, first)
    assert not torch.equal(run.model[2].weight, last)


def test_a_transform_that_changes_no_tokens_leaves_their_count_alone(problem: Make) -> None:
    """Samples that were dropped have passed, and their tokens with them."""

    class Half(Callback):
        def transform_batch(self, run: Any, batch: Any) -> Any:
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
    trainer = run.trainer(compile=True)  # compiled at the first step, not here
    tensors = trainer.parts["model"].state_dict()
    assert list(tensors) == [name for name, _ in run.model.named_parameters()]


def test_buffers_are_part_of_a_checkpoint(problem: Make) -> None:
    run = problem()
    run.model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    trainer = run.trainer()
    trainer.fit()
    tensors = trainer.parts["model"].state_dict()
    assert torch.equal(tensors["0.running_mean"], run.model[0].running_mean)
    assert tensors["0.num_batches_tracked"] == 16


class Causal(nn.Module):
    """A language model; `shifts` as Hugging Face's do."""

    def __init__(self, *, shifts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
        self.shifts = shifts

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, labels = self.net(batch["input_ids"]), batch["labels"]
        if self.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels)


def rows(kind: str) -> list[dict[str, torch.Tensor]]:
    """Sequences with labels, of which some are left out, the first of some among them."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(12):
        whole = torch.randint(0, 9, (7,), generator=generator)
        classes = torch.randint(0, 9, (6,), generator=generator)
        labels = {"inputs": whole[:-1], "shifted": whole[1:], "classes": classes}[kind].clone()
        labels[torch.rand(6, generator=generator) < 0.1 * (number % 5)] = -100
        made.append({"input_ids": whole[:-1], "labels": labels})
    return made


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("kind", ["inputs", "shifted", "classes"])
def test_the_gradient_is_that_of_the_mean_over_all_targets_whoever_shifts_them(
    kind: str, stated: bool
) -> None:
    """Uneven micro-batches give what one batch gives: each target counts once, and no other."""
    shifts = kind == "inputs"
    weights = []
    for micro_batch_size in (1, None):
        model = Causal(shifts=shifts)
        Trainer(
            model,
            rows(kind),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            loss=lambda model, batch: model(batch),
            max_duration="3ba",
            batch_size=12,
            micro_batch_size=micro_batch_size,
            stepping=Stepping(loss_weight="tokens", shifts_labels=shifts if stated else None),
        ).fit()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(weights[0], weights[1], rtol=0, atol=1e-14)


def test_a_shift_is_refused_where_no_targets_are_counted() -> None:
    with pytest.raises(ConfigError, match="weighed"):
        Stepping(shifts_labels=True)
