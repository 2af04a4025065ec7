"""What a new user types first: a trainer takes it, or says what to write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.checkpoint import load_weights
from stretto.errors import CheckpointError, ConfigError, StrettoError, TrainingError
from stretto.runtime import TrainStep
from stretto.training import (
    Callback,
    Checkpointing,
    Evaluation,
    Logging,
    Stepping,
    Trainer,
)
from stretto.training.algorithms import EarlyStopping, ExponentialMovingAverage
from stretto.training.criterion import as_loss

Make = Callable[..., Any]


class Learned(nn.Module):
    """A criterion with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale * nn.functional.mse_loss(output, target)


def trained(problem: Make, **settings: Any) -> torch.Tensor:
    run = problem()
    run.trainer(max_duration="6ba", **settings).fit()
    weights: torch.Tensor = run.weights()
    return weights


def own(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction - target).square().mean()


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), nn.functional.mse_loss, own, lambda output, y: (output - y).square().mean()],
    ids=["module", "torch", "own", "lambda"],
)
def test_a_criterion_is_a_loss(loss: Any, problem: Make) -> None:
    settings = {"micro_batch_size": 3}
    found, expected = trained(problem, loss=loss, **settings), trained(problem, **settings)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, x, y: nn.functional.mse_loss(model(x), y), "loss"),
        (nn.MSELoss, "loss"),
        (nn.MSELoss(reduction="none"), "reduction"),
        (nn.MSELoss(reduction="sum"), "reduction"),
        (partial(nn.functional.mse_loss, reduction="sum"), "reduction"),
        (Learned(), "parameters"),
    ],
    ids=["three", "class", "none", "sum", "bound", "parameters"],
)
def test_other_losses_are_refused(loss: Any, said: str, problem: Make) -> None:
    with pytest.raises(TrainingError, match=said):
        problem().trainer(loss=loss)


def test_a_mean_loss_is_no_sum(problem: Make) -> None:
    with pytest.raises(TrainingError, match="reduction"):
        problem().trainer(loss=nn.MSELoss(), stepping={"loss_reduction": "sum"})


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])),
        partial(nn.functional.cross_entropy, ignore_index=0),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]), ignore_index=2),
    ],
    ids=["ignored", "weights", "function", "both"],
)
def test_a_mean_over_targets_is_that_of_the_batch(criterion: Any, problem: Make) -> None:
    inputs = problem().data.tensors[0].float()
    data = TensorDataset(inputs, torch.arange(len(inputs)) ** 2 % 7 % 3)

    def run(**settings: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        trainer = Trainer(
            model, data, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=criterion,
            max_duration="9ba", batch_size=12, evaluate=data, **settings,
        )  # fmt: skip
        trainer.fit()
        found = trainer.evaluate()["validation/loss"]
        assert found == pytest.approx(criterion(model(inputs), data.tensors[1]).item())
        return model.weight.detach()

    assert torch.allclose(run(), run(micro_batch_size=5), rtol=0, atol=1e-6)


def test_an_evaluation_has_the_mean_of_its_own_criterion(problem: Make) -> None:
    run = problem()
    inputs, targets = run.data.tensors
    labels = (targets[:, 0] > 0).long()
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0], dtype=torch.float64))
    evaluation = Evaluation(TensorDataset(inputs, labels), loss=criterion, batch_size=7)
    found = run.trainer(evaluate=evaluation).evaluate()["validation/loss"]
    assert found == pytest.approx(criterion(run.model(inputs), labels).item())


def test_an_error_of_a_loss_says_how_it_is_called(problem: Make) -> None:
    with pytest.raises(TypeError) as raised:
        problem().trainer(loss=lambda a, b: (a - b).square().mean()).fit()
    assert "loss(model, batch)" in raised.value.__notes__[0]


def test_a_criterion_needs_pairs(problem: Make) -> None:
    inputs = problem().data.tensors[0]
    with pytest.raises(TrainingError, match="targets"):
        problem().trainer(train_data=inputs, loss=nn.MSELoss()).fit()


def test_settings_may_be_texts_and_mappings(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "checkpoint": "3ba",
        "log": "2ba",
        "loading": {"seed": 3},
        "stepping": {"non_finite": "skip"},
        "evaluate": problem().data,
        "folder": tmp_path,
    }
    trainer = problem().trainer(max_duration="6ba", **settings)
    trainer.fit()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    evaluate = {"data": problem().data, "name": "test"}
    assert list(problem().trainer(evaluate=[evaluate]).evaluate()) == ["test/loss"]
    for wrong in ({"loading": {"sed": 3}}, {"checkpoint": 5}, {"stepping": "fast"}, {"log": None}):
        with pytest.raises(ConfigError):
            problem().trainer(**wrong)


def test_precision_and_clipping_are_arguments(problem: Make) -> None:
    top = trained(problem, clip_norm=0.1, device="cpu")
    assert not torch.equal(top, trained(problem, device="cpu"))
    with pytest.raises(ConfigError, match="clip_norm"):
        problem().trainer(stepping={"clip_norm": 0.2})
    with pytest.raises(ValueError, match="clip_norm"):
        problem().trainer(clip_norm=-1)


def test_a_missing_batch_size_is_that_of_the_dataloader(problem: Make) -> None:
    data = DataLoader(problem().data, batch_size=12)
    with pytest.raises(TrainingError, match="batch_size=12"):
        problem().trainer(train_data=data, batch_size=None)


def test_the_best_evaluation_is_known_by_its_name(problem: Make, tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Watch(Callback):
        def on_evaluation_end(self, run: Any, name: str, metrics: Any) -> None:
            seen.append(dict(metrics))

    run = problem()
    trainer = run.trainer(
        evaluate=Evaluation(run.data, "1ba"),
        checkpoint=Checkpointing(monitor="validation/loss"),
        folder=tmp_path,
        callbacks=[Watch()],
    )
    assert trainer.best is None
    trainer.fit()
    assert all(list(metrics) == ["validation/loss"] for metrics in seen)
    best: Any = trainer.best
    assert best.value == min(metrics["validation/loss"] for metrics in seen)
    assert best.path.exists()
    again = problem()
    load_weights(again.model, best.path)
    inputs, targets = run.data.tensors
    loss = nn.functional.mse_loss(again.model(inputs), targets).item()
    assert loss == pytest.approx(best.value)


def test_a_run_stops_early(problem: Make, tmp_path: Path) -> None:
    run = problem()
    settings: dict[str, Any] = {"evaluate": Evaluation(run.data, "2ba"), "max_duration": "40ba"}
    stopping = EarlyStopping("validation/loss", patience="40sp", min_delta=1e9)
    trainer = run.trainer(callbacks=[stopping], **settings)
    trainer.fit()
    # The first value is the best; 40 samples later, an evaluation finds none that is better.
    assert trainer.timer.batch == 8
    assert "validation/loss" in (trainer.stop_reason or "")
    for name in ("validation/los", "validatoin/loss"):
        with pytest.raises(TrainingError, match="validation/loss"):
            run.trainer(callbacks=[EarlyStopping(name, patience="1ep")], **settings)


class OwnStep(TrainStep):
    """A step with a fault of a kind."""

    def __init__(self, fault: str) -> None:
        self.model = nn.Linear(5, 1).double()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizers = optimizer if fault == "optimizers" else [optimizer]  # type: ignore[assignment]
        self.fault, self.updates = fault, 0

    def forward_backward(self, batch: Any, weight: float) -> torch.Tensor:
        loss = self.model(batch[0]).square().mean()
        if self.fault not in ("gradient", "in place", "skips"):
            (loss * weight).backward()
        return loss

    def update(self) -> Any:
        self.updates += 1
        if self.fault in ("in place", "skips"):
            if self.updates == 1 and self.fault == "skips":
                return self.SKIPPED
            with torch.no_grad():
                next(self.model.parameters()).mul_(0.9)
            return self.SKIPPED if self.updates == 2 and self.fault == "in place" else {}
        self.optimizers[0].step()
        return None if self.fault == "none" else {}

    def state_dict(self) -> dict[str, Any]:
        return {"state": {1, 2}} if self.fault == "state" else {}


def own_step(problem: Make, fault: str) -> Trainer:
    return Trainer(OwnStep(fault), problem().data, max_duration="30ba", batch_size=2)


def test_an_update_may_return_nothing(problem: Make) -> None:
    trainer = own_step(problem, "none")
    trainer.fit()
    assert trainer.run.skipped_steps == 0


@pytest.mark.parametrize("fault", ["in place", "skips"])
def test_a_step_may_do_without_gradients(fault: str, problem: Make) -> None:
    trainer = own_step(problem, fault)
    trainer.fit()
    assert trainer.run.skipped_steps == 1


@pytest.mark.parametrize("fault", ["optimizers", "state", "gradient"])
def test_faults_of_a_step_are_named(fault: str, problem: Make) -> None:
    with pytest.raises(TrainingError, match=fault):
        own_step(problem, fault).fit()


@pytest.mark.parametrize("folder", ["", "runs/\0"])
def test_a_folder_has_a_name(folder: str, problem: Make) -> None:
    with pytest.raises(StrettoError, match="runs/name"):
        problem().trainer(folder=folder)


@pytest.mark.parametrize("weight", [None, "one", -1, float("nan")])
def test_a_weight_is_a_count(weight: Any, problem: Make) -> None:
    stepping = Stepping(loss_weight=lambda batch: weight)
    with pytest.raises(TrainingError, match="loss_weight"):
        problem().trainer(stepping=stepping).fit()


def test_the_state_of_a_callback_is_a_tree(problem: Make) -> None:
    class Cycle(Callback):
        def state_dict(self) -> dict[str, Any]:
            state: dict[str, Any] = {}
            state["self"] = state
            return state

    with pytest.raises(TrainingError, match="itself"):
        problem().trainer(callbacks=[Cycle()])


def test_training_is_not_begun_inside_of_training(problem: Make) -> None:
    class Again(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            trainer.fit()

    trainer = problem().trainer(callbacks=[Again()], log=Logging("9ba", console=False))
    with pytest.raises(TrainingError, match="callback"):
        trainer.fit()


def test_averaged_weights_are_loaded_for_inference(problem: Make, tmp_path: Path) -> None:
    run, average = problem(), ExponentialMovingAverage(half_life="20sp")
    run.trainer(folder=tmp_path, checkpoint="1ep", callbacks=[average]).fit()
    path = sorted((tmp_path / "checkpoints").iterdir())[-1]
    with average.averaged():
        expected = run.weights()
    again = problem()
    load_weights(again.model, path, averaged=True)
    assert torch.equal(again.weights(), expected)
    load_weights(again.model, path)
    assert torch.equal(again.weights(), run.weights())
    other = tmp_path / "other"
    problem().trainer(folder=other, checkpoint="1ep").fit()
    with pytest.raises(CheckpointError, match="average"):
        load_weights(again.model, sorted((other / "checkpoints").iterdir())[-1], averaged=True)


class OverAll(nn.Module):
    """A mean over all targets; those that it ignores are zeros in it."""

    ignore_index = 1

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(output, target, reduction="none")
        return (losses * (target != self.ignore_index)).mean()


def test_a_criterion_with_an_ignore_index_of_its_own_must_say_what_it_is_a_mean_over() -> None:
    with pytest.raises(TrainingError, match="loss_weight"):
        as_loss(OverAll(), "mean")
