from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training.conftest import squared_error
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.errors import BatchSizeError, TrainingError
from stretto.training import Callback, Evaluation, Loading, Stepping

Make = Callable[..., Any]


def test_each_module_is_back_in_its_own_mode(problem: Make) -> None:
    class FreezeStatistics(Callback):
        def __init__(self) -> None:
            self.modes: list[tuple[bool, bool]] = []

        def on_fit_start(self, run: Any) -> None:
            run.model[0].eval()

        def on_batch_end(self, run: Any, step: Any) -> None:
            self.modes.append((run.model.training, run.model[0].training))

    run, watch = problem(), FreezeStatistics()
    run.trainer(max_duration="4ba", evaluate=Evaluation(run.data, "1ba"), callbacks=[watch]).fit()
    assert watch.modes == [(True, False)] * 4


def test_a_loss_in_double_precision_stays_one(problem: Make) -> None:
    run = problem()
    trainer = run.trainer(evaluate=Evaluation(run.data, batch_size=60))
    with torch.no_grad():
        loss = nn.functional.mse_loss(run.model(run.data.tensors[0]), run.data.tensors[1])
    assert trainer.evaluate() == {"validation/loss": loss.item()}


def test_a_metric_may_be_a_number(problem: Make) -> None:
    run = problem()
    metric = Evaluation(run.data, metrics={"size": lambda m, b: len(b[0])}, batch_size=40)  # type: ignore[dict-item,return-value]
    measured = run.trainer(evaluate=metric).evaluate()
    assert measured["validation/size"] == (40 * 40 + 20 * 20) / 60


def test_a_metric_that_is_no_scalar_is_refused(problem: Make) -> None:
    run = problem()
    metric = Evaluation(run.data, metrics={"each": lambda m, b: m(b[0])})
    with pytest.raises(TrainingError, match="average"):
        run.trainer(evaluate=metric).evaluate()


def test_plain_samples_are_collated_as_in_training(problem: Make) -> None:
    def doubled(samples: list[Any]) -> Any:
        inputs, targets = zip(*samples, strict=True)
        return 2 * torch.stack(inputs), torch.stack(targets)

    plain, collated = problem(), problem()
    inputs, targets = plain.data.tensors
    twice = TensorDataset(2 * inputs, targets)
    expected = plain.trainer(evaluate=Evaluation(twice)).evaluate()
    trainer = collated.trainer(
        loading=Loading(collate_fn=doubled), evaluate=Evaluation(collated.data)
    )
    assert trainer.evaluate() == expected


@pytest.mark.parametrize("micro_batch_size", [None, 7])
def test_a_sum_loss_by_units_is_the_mean_over_all_units(
    problem: Make, micro_batch_size: int | None
) -> None:
    def units(batch: Any) -> int:
        return int((batch[0][:, 0] > 0).sum())

    def summed(model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) - batch[1]).square().mean(1)[batch[0][:, 0] > 0].sum()

    run = problem()
    trainer = run.trainer(
        loss=summed,
        micro_batch_size=micro_batch_size,
        stepping=Stepping(loss_weight=units, loss_reduction="sum"),
        evaluate=Evaluation(run.data),
    )
    with torch.no_grad():
        expected = summed(run.model, run.data.tensors).item() / units(run.data.tensors)
    assert trainer.evaluate()["validation/loss"] == pytest.approx(expected, rel=1e-12)


def test_batches_can_be_evaluated_on_again_and_again(problem: Make) -> None:
    run = problem()
    inputs, targets = run.data.tensors
    batches = [(inputs[:25], targets[:25]), (inputs[25:], targets[25:])]

    class Batches:
        def __iter__(self) -> Any:
            return iter(batches)

    trainer = run.trainer(
        evaluate=[
            Evaluation(Batches(), name="batches", batch_size=30),
            Evaluation(run.data, name="samples"),
        ]
    )
    for _ in range(2):
        measured = trainer.evaluate()
        assert measured["batches/loss"] == pytest.approx(measured["samples/loss"], rel=1e-12)


def test_settings_that_would_be_taken_for_others_are_refused(problem: Make) -> None:
    run = problem()
    with pytest.raises(BatchSizeError, match="batch"):
        Evaluation(run.data, batch_size=0)
    with pytest.raises(TrainingError, match="loss"):
        Evaluation(run.data, metrics={"loss": lambda m, b: m(b[0]).mean()})
    two = [Evaluation(run.data), Evaluation(run.data)]
    with pytest.raises(TrainingError, match="validation"):
        run.trainer(evaluate=two)


def test_what_does_not_fit_is_measured_in_pieces(problem: Make) -> None:
    """The sums are the same; a piece that did not fit once is not tried again."""
    run, sizes = problem(), []

    def scarce(model: Any, batch: Any) -> Any:
        sizes.append(len(batch[0]))
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squared_error(model, batch)

    expected = run.trainer(evaluate=Evaluation(run.data, batch_size=20)).evaluate()
    trainer = run.trainer(evaluate=Evaluation(run.data, batch_size=20, loss=scarce))
    assert trainer.evaluate() == pytest.approx(expected, rel=1e-12)
    assert [size for size in sizes if size > 4] == [20, 10, 5]
    with pytest.raises(TrainingError, match="memory"):
        run.trainer(evaluate=Evaluation(run.data, loss=lambda m, b: torch.empty(2**60))).evaluate()


def test_batches_are_measured_in_the_way_that_the_refusal_of_an_iterator_names(
    problem: Make,
) -> None:
    run = problem()
    inputs, targets = run.data.tensors
    batches = [(inputs[:10], targets[:10]), (inputs[10:], targets[10:])]
    with pytest.raises(TrainingError, match="batch_size"):
        Evaluation(iter(batches))
    trainer = run.trainer(evaluate=Evaluation(DataLoader(batches, batch_size=None), batch_size=7))  # type: ignore[arg-type]
    with torch.no_grad():
        expected = nn.functional.mse_loss(run.model(inputs), targets).item()
    for _ in range(2):
        assert trainer.evaluate() == {"validation/loss": pytest.approx(expected, rel=1e-6)}


def test_every_sample_is_measured_where_training_drops_some(problem: Make) -> None:
    run = problem()
    given: Any = DataLoader(run.data, batch_size=7, drop_last=True)
    trainer = run.trainer(train_data=given, batch_size=7, evaluate=Evaluation(given))
    assert trainer.run.horizon.last_batch == "drop"
    with torch.no_grad():
        expected = nn.functional.mse_loss(run.model(run.data.tensors[0]), run.data.tensors[1])
    assert trainer.evaluate() == {"validation/loss": pytest.approx(expected.item(), rel=1e-6)}
