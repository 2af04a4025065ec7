"""The exponential moving average of the weights, against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.checkpoint import latest_good, read_checkpoint
from stretto.errors import CheckpointError, TrainingError
from stretto.training import Callback, Checkpointing, Evaluation, Logging, Run
from stretto.training.algorithms import ExponentialMovingAverage

Make = Callable[..., Any]
RAMP = "0sp:4 20sp:10"


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().double().flatten() for one in model.parameters()]).clone()


def averages(average: ExponentialMovingAverage) -> Tensor:
    return torch.cat([one.double().flatten() for one in average.state_dict()["average"].values()])


class Watch(Callback):
    """Notes the weights and the clock at the start of the run and after each batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[Run, Any, Tensor]] = []
        self.at: list[Any] = []
        self.weights: list[Tensor] = []

    def on_fit_start(self, run: Run) -> None:
        self._note(run)

    def on_batch_end(self, run: Run, step: Any) -> None:
        self._note(run)

    def _note(self, run: Run) -> None:
        self.at.append(run.timer.timestamp)
        self.weights.append(flat(run.model))


def by_hand(watch: Watch, decay_of: Callable[[Any, Any], float], *, start: int = 0) -> Tensor:
    """The average as a plain loop has it, one batch after the other."""
    average, last = watch.weights[start], watch.at[start]
    for now, weights in zip(watch.at[start + 1 :], watch.weights[start + 1 :], strict=True):
        average = average + (1 - decay_of(last, now)) * (weights - average)
        last = now
    return average


@pytest.mark.parametrize("batch_size", [8, RAMP], ids=["constant", "ramp"])
def test_a_decay_is_that_of_each_update(problem: Make, batch_size: Any) -> None:
    average, watch = ExponentialMovingAverage(0.9), Watch()
    problem().trainer(batch_size=batch_size, callbacks=[watch, average]).fit()
    expected = by_hand(watch, lambda last, now: 0.9)
    assert torch.allclose(averages(average), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("half_life", "passed"),
    [
        ("30sp", lambda last, now: Fraction(now.sample - last.sample, 30)),
        ("0.5ep", lambda last, now: Fraction(now.sample - last.sample, 30)),
        ("25%", lambda last, now: Fraction(now.sample - last.sample, 30)),
        ("3ba", lambda last, now: Fraction(now.batch - last.batch, 3)),
    ],
)
def test_a_half_life_counts_its_own_unit_whatever_the_batch_size(
    problem: Make, half_life: str, passed: Any
) -> None:
    average, watch = ExponentialMovingAverage(half_life=half_life), Watch()
    problem().trainer(batch_size=RAMP, callbacks=[watch, average]).fit()
    expected = by_hand(watch, lambda last, now: 2.0 ** -float(passed(last, now)))
    assert torch.allclose(averages(average), expected, rtol=0, atol=1e-14)


def test_a_half_life_in_samples_is_the_scaling_rule_of_decay() -> None:
    """With k times the batch, one update forgets what k updates forget."""

    def kept(batch_size: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        average = ExponentialMovingAverage(half_life="64sp")
        data = [torch.zeros(1) for _ in range(64)]
        nn.init.zeros_(model.weight)

        class Jump(Callback):
            def on_batch_start(self, run: Run, step: Any) -> None:
                nn.init.ones_(model.weight)

        make_trainer(model, data, batch_size=batch_size, callbacks=[Jump(), average]).fit()
        return float(average.state_dict()["average"]["weight"])

    assert [kept(size) for size in (4, 8, 64)] == pytest.approx([0.5, 0.5, 0.5], abs=1e-6)


def make_trainer(model: nn.Module, data: Any, **settings: Any) -> Any:
    from stretto import Trainer

    return Trainer(
        model,
        data,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss=lambda model, batch: model(batch).square().mean(),
        max_duration="1ep",
        **settings,
    )


def test_averaging_begins_and_is_updated_when_it_says(problem: Make) -> None:
    average, watch = ExponentialMovingAverage(0.5, every="4ba", start="25%"), Watch()
    problem().trainer(callbacks=[watch, average]).fit()  # 16 batches; it begins after 4
    expected = watch.weights[4]
    for batch in (8, 12, 16):
        expected = expected + 0.5 * (watch.weights[batch] - expected)
    assert torch.allclose(averages(average), expected, rtol=0, atol=1e-14)


def test_evaluations_measure_the_averages_and_training_goes_on_as_without(
    problem: Make, tmp_path: Path
) -> None:
    plain, averaged = problem(), problem()
    measured: list[tuple[float, float]] = []

    class Compare(Callback):
        def on_evaluation_end(self, run: Run, name: str, metrics: Any) -> None:
            batch = averaged.data.tensors
            with average.averaged():
                loss = nn.functional.mse_loss(run.model(batch[0]), batch[1]).item()
            measured.append((metrics["validation/loss"], loss))
            live = nn.functional.mse_loss(run.model(batch[0]), batch[1]).item()
            assert live != pytest.approx(loss, rel=1e-6)

    average = ExponentialMovingAverage(0.9)
    plain.trainer(evaluate=Evaluation(plain.data, "1ep")).fit()
    settings: dict[str, Any] = {"evaluate": Evaluation(averaged.data, "1ep")}
    averaged.trainer(callbacks=[average, Compare()], **settings).fit()
    assert torch.equal(plain.weights(), averaged.weights())
    assert [one for one, _ in measured] == pytest.approx([other for _, other in measured])
    assert len(measured) == 2


def test_before_averaging_begins_evaluations_measure_the_weights(problem: Make) -> None:
    one, other = problem(), problem()
    average = ExponentialMovingAverage(0.9, start="100%")
    plain = one.trainer(evaluate=Evaluation(one.data)).evaluate()
    assert other.trainer(evaluate=Evaluation(other.data), callbacks=[average]).evaluate() == plain


def test_an_evaluation_that_fails_leaves_the_trained_weights(problem: Make) -> None:
    run, average = problem(), ExponentialMovingAverage(0.9)
    trained: list[Tensor] = []

    def metric(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("no metric")

    class Note(Callback):
        def on_batch_end(self, run: Run, step: Any) -> None:
            trained.append(flat(run.model))

    evaluation = Evaluation(run.data, "1ep", {"broken": metric})
    with pytest.raises(ValueError, match="metric"):
        run.trainer(evaluate=evaluation, callbacks=[average, Note()]).fit()
    assert torch.equal(flat(run.model), trained[-1])


def test_a_look_that_fails_leaves_the_trained_weights(problem: Make) -> None:
    run, average, fails = problem(), ExponentialMovingAverage(0.9), [False]

    def metric(model: nn.Module, batch: Any) -> Tensor:
        if fails[0]:
            raise ValueError("no metric")
        return torch.zeros(())

    trainer = run.trainer(evaluate=Evaluation(run.data, "1ep", {"m": metric}), callbacks=[average])
    trainer.fit()
    trained, fails[0] = flat(run.model), True
    with pytest.raises(ValueError, match="metric"):
        trainer.evaluate()
    assert torch.equal(flat(run.model), trained)


def test_a_look_within_averaged_leaves_the_averages_in(problem: Make) -> None:
    run, average = problem(), ExponentialMovingAverage(0.9)
    trainer = run.trainer(evaluate=Evaluation(run.data), callbacks=[average])
    trainer.fit()
    trained = flat(run.model)
    with average.averaged():
        inside = flat(run.model)
        trainer.evaluate()
        assert torch.equal(flat(run.model), inside)
    assert torch.equal(flat(run.model), trained)


@pytest.mark.parametrize("stop_at", [1, 5, 8])
@pytest.mark.parametrize("half_life", [None, "40sp"], ids=["decay", "half-life"])
def test_averages_are_resumed_to_the_last_bit(
    problem: Make, tmp_path: Path, stop_at: int, half_life: Any
) -> None:
    def average() -> ExponentialMovingAverage:
        decay = 0.9 if half_life is None else None
        return ExponentialMovingAverage(decay, half_life=half_life, every="2ba", start="2ba")

    class Stop(Callback):
        def on_batch_end(self, run: Run, step: Any) -> None:
            if run.timer.batch == stop_at:
                run.stop("enough", is_final=False)

    settings: dict[str, Any] = {"batch_size": RAMP, "checkpoint": Checkpointing("1ep")}
    whole, cut, again = average(), average(), average()
    run = problem()
    evaluate = {"evaluate": Evaluation(run.data), "log": Logging("2ba")}
    expected = run.trainer(folder=tmp_path / "a", callbacks=[whole], **settings, **evaluate)
    expected.fit()
    problem().trainer(folder=tmp_path / "b", callbacks=[cut, Stop()], **settings, **evaluate).fit()
    trainer = problem().trainer(folder=tmp_path / "b", callbacks=[again], **settings, **evaluate)
    trainer.resume()
    trainer.fit()
    assert torch.equal(averages(again), averages(whole))
    assert trainer.evaluate() == expected.evaluate()


def test_averages_of_half_precision_weights_are_kept_in_float32(
    problem: Make, tmp_path: Path
) -> None:
    run, average, watch = problem(dtype=torch.bfloat16), ExponentialMovingAverage(0.99), Watch()
    run.trainer(folder=tmp_path, checkpoint=Checkpointing(), callbacks=[watch, average]).fit()
    kept = average.state_dict()["average"]
    assert {one.dtype for one in kept.values()} == {torch.float32}
    expected = by_hand(watch, lambda last, now: 0.99)
    assert torch.allclose(averages(average), expected, rtol=0, atol=1e-6)
    found = latest_good(tmp_path / "checkpoints")
    assert found is not None
    saved = read_checkpoint(found).tensors["callback_ExponentialMovingAverage"]
    assert torch.equal(saved["average.0.weight"], kept["0.weight"])


def test_the_model_has_the_averages_at_the_end_if_asked_for(problem: Make) -> None:
    plain, replaced = problem(), problem()
    average = ExponentialMovingAverage(0.9, replaces_weights=True)
    plain.trainer().fit()
    replaced.trainer(callbacks=[average]).fit()
    assert torch.equal(flat(replaced.model), averages(average))
    assert not torch.equal(replaced.weights(), plain.weights())


def test_the_averages_of_another_model_are_refused(problem: Make, tmp_path: Path) -> None:
    class Other(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"average": {"head": torch.ones(1)}, "updated": None}

    Other.__qualname__ = "ExponentialMovingAverage"
    problem().trainer(folder=tmp_path, checkpoint=Checkpointing(), callbacks=[Other()]).fit()
    trainer = problem().trainer(folder=tmp_path, callbacks=[ExponentialMovingAverage(0.9)])
    with pytest.raises(CheckpointError, match="averages"):
        trainer.resume()


@pytest.mark.parametrize(
    "given", [{}, {"decay": 1.0}, {"decay": -0.1}, {"decay": 0.9, "half_life": "1ep"}], ids=str
)
def test_what_is_no_average_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="given"):
        ExponentialMovingAverage(**given)
