from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.ada_scale import AdaScale, gain
from torch import Tensor, nn

from stretto import Callback, Checkpointing, Logging, Run, Seesaw, Stepping, Trainer
from stretto.batching import LinearRule, Signals
from stretto.errors import BatchSizeError, TrainingError
from stretto.noise import GradientNoise
from stretto.schedules import Cosine


def known(*callbacks: Callback, loss: Any = None, **settings: Any) -> Trainer:
    """Gradients are drawn with |mu|^2 = 1 and tr(Sigma) = 40, whatever the weights are."""
    draws = torch.randn(4000, 10, generator=torch.Generator().manual_seed(6)) * 2.0
    draws[:, 0] += 1.0
    torch.manual_seed(0)
    model = nn.Linear(10, 1, bias=False)

    def mean(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).mean()
        return value

    given = {"max_duration": "4000sp", "batch_size": 40, "micro_batch_size": 5, **settings}
    model = given.pop("model", model)
    given.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    given.setdefault("log", Logging("1000ba", console=False))
    return Trainer(model, draws, loss=loss or mean, callbacks=callbacks, **given)


def test_the_learning_rate_is_multiplied_once_in_each_step() -> None:
    rates: list[float] = []

    class Watch(Callback):
        def on_batch_end(self, run: Run, step: Any) -> None:
            rates.append(run.optimizers[0].param_groups[0]["lr"])

    ada = AdaScale(10)
    known(ada, Watch()).fit()
    # 40 samples instead of 10, at a noise scale of 40: a gain of 2.5.
    assert rates[:20] == [0.1] * 20
    assert rates[-1] == pytest.approx(0.25, rel=0.1)
    assert ada.gained == pytest.approx(sum(rates) / 0.1)


def test_the_gain_is_not_part_of_the_base_of_another_run() -> None:
    trainer = known(AdaScale(10))
    trainer.fit()
    other = known(model=trainer.model, optimizer=trainer.optimizer)
    assert other.run.hyperparameters.base == {"lr": 0.1}


def test_a_skipped_step_has_no_gain() -> None:
    factors, ada = iter([1.0, 1.0, 1.0, math.nan, *[1.0] * 99]), AdaScale(4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).mean() * next(factors)
        return value

    stepping = Stepping(non_finite="skip", measure_noise=99)
    trainer = known(
        ada, loss=loss, stepping=stepping, batch_size=4, micro_batch_size=4, max_duration="8ba"
    )
    trainer.fit()
    assert (ada.gained, trainer.run.skipped_steps) == (7, 1)


def test_a_resumed_run_ends_equal(tmp_path: Path) -> None:
    whole = AdaScale(10, window=10)
    trainer = known(whole)
    trainer.fit()

    class Stop(Callback):
        def on_batch_end(self, run: Run, step: Any) -> None:
            if run.timer.batch == 50:
                run.stop("cut", is_final=False)

    keep: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("50ba")}
    known(AdaScale(10, window=10), Stop(), **keep).fit()
    rest = AdaScale(10, window=10)
    again = known(rest, **keep)
    again.resume()
    again.fit()
    assert rest.state_dict() == whole.state_dict()
    assert again.model.state_dict()["weight"].equal(trainer.model.state_dict()["weight"])


@pytest.mark.parametrize("case", ["rule", "seesaw", "twice"])
def test_other_things_that_scale_the_learning_rate_are_refused(case: str) -> None:
    pair = Seesaw(Cosine(), 8, maximum=32)
    cases: dict[str, dict[str, Any]] = {
        "rule": {"rule": LinearRule(10)},
        "seesaw": {"batch_size": pair},
        "twice": {},
    }
    callbacks = [AdaScale(10), *([AdaScale(10)] if case == "twice" else [])]
    with pytest.raises(TrainingError, match="AdaScale"):
        known(*callbacks, **cases[case]).fit()


def test_a_reference_is_a_batch_size() -> None:
    with pytest.raises(BatchSizeError):
        AdaScale(0)


def terms(numerator: float, denominator: float, num_samples: int | None = None) -> Signals:
    """What a step measured."""
    return Signals(
        noise_numerator=numerator, noise_denominator=denominator, num_samples=num_samples
    )


def test_the_gain_is_that_of_the_noise() -> None:
    noise = GradientNoise()
    assert gain(noise, 64, 8) == 1.0
    for step in range(60):
        noise = noise.after(terms(64.0 + (-1) ** step, 1.0))
    scale = noise.scale
    assert scale is not None
    for size in (8, 16, 64, 4096):
        expected = (scale / 8 + 1) / (scale / size + 1)
        assert gain(noise, size, 8) == pytest.approx(expected)
        assert 1 <= gain(noise, size, 8) <= size / 8
    assert gain(noise, 8, 8) == 1.0


def test_the_gain_stays_where_a_batch_jumps() -> None:
    noise = GradientNoise(window=30)
    for size in (*[64] * 300, *[1024] * 5):
        noise = noise.after(terms(1000.0, 1.0, size))
        if noise.steps > 30:
            assert gain(noise, size, 64) == pytest.approx((1000 / 64 + 1) / (1000 / size + 1))


def test_the_gain_is_all_or_nothing_where_there_is_only_noise_or_none() -> None:
    noise = still = GradientNoise()
    for _ in range(40):
        noise = noise.after(terms(50.0, -0.1))
        still = still.after(terms(-0.1, 2.0))
    assert gain(noise, 64, 8) == 8.0
    assert gain(still, 64, 8) == 1.0


@pytest.mark.parametrize(
    ("measured", "expected"),
    [((8.0, 1.0), 1.5), ((8e99, 1e99), 1.5), ((8e-300, 1e-300), 1.5), ((5e-324, 0.0), 2.0)],
    ids=str,
)
def test_the_gain_does_not_go_by_how_large_gradients_are(
    measured: tuple[float, float], expected: float
) -> None:
    noise = GradientNoise()
    for _ in range(40):
        noise = noise.after(terms(*measured))
    assert gain(noise, 8, 4) == pytest.approx(expected)
