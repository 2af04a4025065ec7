"""What a run measures for its policy and its callbacks: right, and only where it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.batching import BatchSizePolicy, Bound, NoiseScale, PolicyState, Signals
from stretto.data import DataSpec
from stretto.errors import ConfigError, TrainingError
from stretto.noise import NoiseSums
from stretto.timing import Horizon, Timestamp
from stretto.training import Callback, Checkpointing, Evaluation, Stepping

Make = Callable[..., Any]


class Listener(Callback):
    """Keeps what was measured, and the batches it was measured on."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Signals]] = []
        self.batches: list[list[Any]] = []
        self.states: list[dict[str, Tensor]] = []

    def on_batch_start(self, run: Any, step: Any) -> None:
        self.batches.append([(micro.num_samples, micro.batch) for micro in step])
        self.states.append({k: v.clone() for k, v in run.model.state_dict().items()})

    def on_noise(self, run: Any, step: Any, signals: Signals) -> None:
        self.heard.append((step.timestamp.batch, signals))


class Reads(BatchSizePolicy):
    """Keeps to a size, and what it was told."""

    def __init__(self, *reads: str) -> None:
        self.reads = frozenset(reads)
        self.seen: list[Signals] = []

    def bind(self, horizon: Horizon) -> Bound:
        return Bound(decide=self.decide, reads=self.reads)

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        self.seen.append(signals)
        return 24, state


def gradient(model: nn.Module, batch: Any) -> Tensor:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])


def terms_of(model: nn.Module, parts: list[tuple[int, Any]]) -> tuple[float, float, float]:
    """The terms from gradients of micro-batches, each computed by itself; and |G|^2."""
    gradients = [gradient(model, batch) for _, batch in parts]
    sizes = [size for size, _ in parts]
    pairs = zip(sizes, gradients, strict=True)
    whole = sum((size * one for size, one in pairs), torch.zeros(())) / sum(sizes)
    square = float(whole.square().sum())
    sums = NoiseSums.of([float(g.square().sum()) for g in gradients], sizes, square)
    return (*found_in(sums.signals())[:2], square)


def found_in(signals: Signals) -> tuple[float, float, float]:
    """The terms that were measured, and the |G|^2 that they come from."""
    variance, square = signals.noise_numerator, signals.noise_denominator
    assert variance is not None
    assert square is not None
    assert signals.num_samples is not None
    return variance, square, square + variance / signals.num_samples


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("micro", [8, 7, 1], ids=["even", "uneven", "single samples"])
def test_the_terms_are_those_of_the_micro_batches(
    problem: Make, micro: int, reduction: Any
) -> None:
    def total(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return loss * len(batch[0]) if reduction == "sum" else loss

    run, listener = problem(), Listener()
    run.trainer(
        max_duration="3ba",
        batch_size=24,
        micro_batch_size=micro,
        loss=total,
        stepping=Stepping(loss_reduction=reduction),
        callbacks=[listener],
    ).fit()
    # The last batch of the epoch has 12 samples: other sizes than those of the first two.
    assert [batch for batch, _ in listener.heard] == [0, 1, 2]
    for (_, signals), parts, state in zip(
        listener.heard, listener.batches, listener.states, strict=True
    ):
        run.model.load_state_dict(state)
        expected = terms_of(run.model, parts)
        assert found_in(signals) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("micro", [None, 6, 1])
def test_measuring_leaves_the_run_as_it_is(problem: Make, micro: int | None) -> None:
    plain, heard = problem(), problem()
    settings = {"max_duration": "48sp", "batch_size": 24}
    # A single pass is cut into two, so that there is something to compare.
    plain.trainer(**settings, micro_batch_size=micro or 12).fit()
    heard.trainer(**settings, micro_batch_size=micro, callbacks=[Listener()]).fit()
    assert torch.equal(plain.weights(), heard.weights())


def test_a_single_pass_is_cut_in_two(problem: Make) -> None:
    run, listener = problem(), Listener()
    run.trainer(max_duration="1ba", batch_size=9, callbacks=[listener]).fit()
    inputs, targets = listener.batches[0][0][1]
    halves = [(5, (inputs[:5], targets[:5])), (4, (inputs[5:], targets[5:]))]
    run.model.load_state_dict(listener.states[0])
    expected = terms_of(run.model, halves)
    assert listener.heard[0][1].noise_numerator == pytest.approx(expected[0])
    assert listener.heard[0][1].noise_denominator == pytest.approx(expected[1])


def test_one_sample_tells_nothing(problem: Make) -> None:
    listener = Listener()
    problem().trainer(max_duration="3ba", batch_size=1, callbacks=[listener]).fit()
    assert listener.heard == []


def test_noise_is_measured_as_often_as_one_wishes(problem: Make) -> None:
    listener = Listener()
    problem().trainer(
        max_duration="7ba", stepping=Stepping(measure_noise=3), callbacks=[listener]
    ).fit()
    assert [batch for batch, _ in listener.heard] == [0, 3, 6]


def test_loss_scaling_changes_nothing(problem: Make) -> None:
    seen = []
    for precision in ("fp32", "fp16"):
        run, listener = problem(dtype=torch.float32), Listener()
        run.trainer(
            max_duration="1ba",
            batch_size=24,
            micro_batch_size=6,
            precision=precision,
            clip_norm=0.1,
            callbacks=[listener],
        ).fit()
        signals = listener.heard[0][1]
        seen.append(found_in(signals))
    assert seen[1] == pytest.approx(seen[0], rel=0.05)


def test_an_overflow_is_no_measurement(problem: Make) -> None:
    listener = Listener()
    problem().trainer(
        max_duration="2ba",
        loss=lambda model, batch: model(batch[0]).square().mean() * torch.inf,
        stepping=Stepping(non_finite="skip"),
        callbacks=[listener],
    ).fit()
    assert listener.heard == []


def test_the_norms_say_what_is_finite_and_where_they_overflow_it_is_looked_up(
    problem: Make,
) -> None:
    """Whoever measures need not read the gradient again, and has the same steps left out."""
    for listeners in ([], [Listener()]):
        for loss, moves in ((_nan_gradient, False), (_large_gradient, True)):
            run = problem()
            before = run.weights()
            run.trainer(
                max_duration="1ba",
                loss=loss,
                stepping=Stepping(non_finite="skip"),
                callbacks=listeners,
            ).fit()
            assert torch.equal(run.weights(), before) != moves


def test_a_step_that_ended_the_run_says_nothing_of_the_next_one(
    problem: Make, tmp_path: Path
) -> None:
    """Its norm was finite; and the gradient of a step that is not measured is not."""
    calls: list[str] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append("one")
        if len(calls) > 9:
            return _nan_gradient(model, batch)
        plain: Tensor = model(batch[0]).square().mean()
        return plain + math.nan if len(calls) > 7 else plain

    # Two passes in a step that is measured, which are batches 0, 2 and 4.
    run = problem()
    trainer = run.trainer(
        loss=loss,
        stepping=Stepping(measure_noise=2),
        checkpoint=Checkpointing("3ba"),
        callbacks=[Listener()],
        folder=tmp_path,
    )
    with pytest.raises(TrainingError, match="weights"):
        trainer.fit()
    assert (trainer.timer.batch, len(calls)) == (4, 8)
    calls += ["resumed"] * 9
    trainer.resume()
    assert trainer.timer.batch == 3
    with pytest.raises(TrainingError, match="weights"):
        trainer.fit()
    assert trainer.timer.batch == 3
    assert run.weights().isfinite().all()


def test_squares_beyond_float64_are_no_error(problem: Make) -> None:
    run, listener = problem(), Listener()
    run.trainer(
        max_duration="1ba",
        loss=lambda model, batch: model(batch[0]).mean() * 1e154,
        callbacks=[listener],
    ).fit()
    assert listener.heard == []


def _nan_gradient(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    return (output - output.detach()).abs().sqrt().mean()


def _large_gradient(model: nn.Module, batch: Any) -> Tensor:
    """Finite, and its squares are not."""
    return model(batch[0]).mean() * 1e200


def test_by_tokens_the_terms_are_still_those_of_a_sample(problem: Make) -> None:
    """Here each sample has three tokens that are alike, so the unit must not matter."""
    seen = []
    for weight in ("samples", lambda batch: 3 * len(batch[0])):
        run, listener = problem(), Listener()
        run.trainer(
            max_duration="1ba",
            batch_size=20,
            micro_batch_size=6,
            stepping=Stepping(loss_weight=weight),
            callbacks=[listener],
        ).fit()
        signals = listener.heard[0][1]
        seen.append(found_in(signals))
    assert seen[1] == pytest.approx(seen[0], rel=1e-9)


def test_the_policy_is_told_what_it_reads_before_the_next_batch(problem: Make) -> None:
    run, policy = problem(), Reads("noise", "loss", "validation/loss")
    trainer = run.trainer(
        batch_size=policy, max_duration="5ba", evaluate=Evaluation(run.data, "2ba")
    )
    trainer.fit()
    seen = policy.seen[-5:]
    assert seen[0] == Signals()
    assert all(signals.noise_numerator is not None for signals in seen[1:])
    assert all(signals.loss is not None and signals.loss > 0 for signals in seen[1:])
    assert [signals.metric is not None for signals in seen] == [False, False, True, False, True]


def test_nothing_is_measured_that_nobody_reads(problem: Make) -> None:
    policy = Reads()
    trainer = problem().trainer(batch_size=policy, max_duration="3ba")
    trainer.fit()
    assert set(policy.seen) == {Signals()}
    assert trainer._loop.stepper.meter is None


@pytest.mark.parametrize(
    ("reads", "settings", "message"),
    [
        (
            ["noise"],
            {"stepping": Stepping(measure_noise=None)},
            "measure_noise",
        ),
        (["test/loss"], {}, "cannot follow 'test/loss': no evaluation"),
        (["a/b", "c/d"], {}, "cannot follow 'a/b' and 'c/d': a run follows one"),
    ],
    ids=["off", "no such metric", "two metrics"],
)
def test_what_cannot_be_measured_is_refused(
    problem: Make, reads: list[str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        problem().trainer(batch_size=Reads(*reads), **settings)


@pytest.mark.parametrize("steps", [0, 1.5, True, "often"])
def test_steps_that_cannot_be(steps: Any) -> None:
    with pytest.raises(ConfigError, match="gradient"):
        Stepping(measure_noise=steps)


def test_batches_are_cut_as_the_data_say(problem: Make) -> None:
    cuts = []

    def cut(batch: Any, part: slice) -> Any:
        cuts.append(part)
        return tuple(tensor[part] for tensor in batch)

    run = problem()
    spec = DataSpec(run.data, split_batch=cut)
    settings = {"optimizer": run.optimizer, "loss": lambda m, b: m(b[0]).square().mean()}
    from stretto.training import Trainer

    Trainer(
        run.model, spec, max_duration="1ba", batch_size=8, callbacks=[Listener()], **settings
    ).fit()
    assert slice(0, 4) in cuts


def test_a_resumed_run_that_measures_now_and_then_is_not_warned(
    problem: Make, tmp_path: Path
) -> None:
    """Between two steps that are measured no noise is missing."""
    settings = {
        "batch_size": NoiseScale(4, 8),
        "stepping": Stepping(measure_noise=50),
        "folder": tmp_path,
        "checkpoint": Checkpointing("5ba"),
    }
    problem().trainer(**settings, max_duration="5ba").fit()
    again = problem().trainer(**settings, max_duration="40ba")
    again.resume()
    again.fit()  # a warning would be an error
    assert again.timer.batch == 40
