"""What a step needs, predicted, against what the real allocator says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.errors import FitError
from stretto.examples.tiny_gpt import TinyGPT
from stretto.memory import find_batch_size, predict
from stretto.memory.measuring.real import record_step
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep


def gpt_step(**options: Any) -> WholeStep:
    names = {"accumulation", "measures_noise"} & options.keys()
    whole = {name: options.pop(name) for name in names}
    model = TinyGPT(layers=2, width=32, context=16)
    step = SupervisedStep(model, torch.optim.AdamW(model.parameters()), gpt_loss, **options)
    return WholeStep.of(step, **whole)


def gpt_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens(size: int) -> Tensor:
    return torch.randint(0, 256, (size, 16))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 1.0},
        {"accumulation": 2},
        {"accumulation": 2, "measures_noise": True, "clip_norm": 1.0},
        {"precision": "bf16"},
        {"loss_reduction": "sum"},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_peak_is_the_real_one(options: dict[str, Any]) -> None:
    step = gpt_step(**options)
    prediction = predict(step, tokens)
    record_step(step, tokens(2), 2)
    assert prediction.certainty_if_verified == "exact"
    for size in (2, 3, 8):
        assert record_step(step, tokens(size), size).peak == prediction.peak(size)


def test_measuring_the_noise_keeps_one_more_gradient() -> None:
    """But for one layer's: the second micro-batch's exists before it is added, in any case."""
    layers = 10
    model = nn.Sequential(*[nn.Linear(300, 300, bias=False) for _ in range(layers)])
    peaks = [
        predict(
            SupervisedStep(
                model,
                torch.optim.SGD(model.parameters()),
                lambda model, batch: model(batch).mean(),
            ),
            lambda size: torch.ones(size, 300),
            accumulation=2,
            measures_noise=measures,
        ).peak(2)
        for measures in (False, True)
    ]
    assert peaks[1] - peaks[0] == pytest.approx((layers - 1) * 4 * 300 * 300, rel=0.02)


def test_nothing_of_the_step_is_touched() -> None:
    step = gpt_step(clip_norm=1.0)
    before = [p.clone() for p in step.model.parameters()]
    assert predict(step, tokens).verify(100)
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert all(p.grad is None for p in step.model.parameters())
    assert not step.optimizers[0].state


def test_largest_is_verified_and_fits() -> None:
    answer = find_batch_size(gpt_step(), tokens, method="predict", device_memory=10**8, margin=0)
    prediction = answer.estimator
    assert prediction.peak(answer.size) <= 10**8 < prediction.peak(answer.size + 1)
    assert prediction.num_steps == 4


def test_not_even_one_sample_fits() -> None:
    with pytest.raises(FitError, match="sample"):
        find_batch_size(gpt_step(), tokens, method="predict", device_memory=1000)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(*[nn.Linear(40_000, 40_000) for _ in range(4)])
    step = SupervisedStep(huge, torch.optim.SGD(huge.parameters()), lambda m, x: m(x).sum())
    prediction = predict(step, lambda size: torch.ones(size, 40_000))
    assert prediction.peak(2) > 2 * 4 * 4 * 40_000**2
