"""Convolutions: what oneDNN allocates for itself is bounded, so no answer exceeds the limit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.memory import predict
from stretto.memory.finding.finder import find_batch_size
from stretto.memory.measuring.real import record_step
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep


class Norm(nn.Module):
    """Layer normalisation over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return result


class Block(nn.Module):
    """A block of ConvNeXt: depthwise, normalised, two pointwise layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = Norm(width)
        self.widen, self.narrow = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.widen(self.norm(self.depthwise(x)))
        result: Tensor = x + self.narrow(functional.gelu(hidden))
        return result


def classifier(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(10))


def convnext() -> nn.Module:
    stem = (nn.Conv2d(3, 32, 4, stride=4), Norm(32))
    down = (Norm(32), nn.Conv2d(32, 64, 2, stride=2))
    return classifier(*stem, Block(32), *down, Block(64))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnext": convnext,
    "plain": lambda: classifier(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)
    ),
    "depthwise": lambda: classifier(
        nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 7, padding=3, groups=32)
    ),
    "transposed": lambda: classifier(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 2, stride=2)
    ),
    "odd": lambda: classifier(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3)),
}
ALIKE = {"plain", "odd"}
"""What these show in bf16, the others show too."""


def pictures(size: int) -> tuple[Tensor, Tensor]:
    return torch.ones(size, 3, 32, 32), torch.zeros(size, dtype=torch.long)


def step_of(name: str, precision: Any = "fp32") -> SupervisedStep:
    torch.manual_seed(0)
    model = MODELS[name]()
    model(pictures(2)[0])
    return SupervisedStep(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        precision=precision,
    )


def real_peak(step: SupervisedStep, size: int) -> int:
    WholeStep.of(step).run(pictures(2))
    WholeStep.of(step).run(pictures(size))
    return record_step(step, pictures(size), size).peak


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in MODELS), *((n, "bf16") for n in MODELS if n not in ALIKE)],
)
def test_a_prediction_is_no_less_than_the_real_peak(name: str, precision: str) -> None:
    step = step_of(name, precision)
    prediction = predict(step, pictures)
    assert prediction.certainty(16) == "estimate"
    true = real_peak(step, 16)
    # Kernels differ between CPUs, and the bound holds on all.
    assert true <= prediction.peak(16) < 2.5 * true


@pytest.mark.parametrize("method", ["auto", "predict", "probe"])
@pytest.mark.parametrize("name", ["convnext", "depthwise"])
def test_an_answer_for_stated_memory_never_needs_more(name: str, method: Any) -> None:
    step, limit = step_of(name), 16_000_000
    answer = find_batch_size(step, pictures(2), method=method, device_memory=limit, margin=0)
    true = real_peak(step, answer.size)
    assert 0.5 * limit < true <= limit
    assert answer.certainty == ("tried" if method == "probe" else "estimate")


def test_a_probe_of_what_this_machine_has_no_room_for_leaves_more_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = step_of("convnext")
    # The package has a function of the name of the module.
    probes = importlib.import_module("stretto.memory.measuring.probe")
    monkeypatch.setattr(probes.Probe, "largest_here", lambda probe: 8)
    answer = find_batch_size(step, pictures(2), method="probe", device_memory="64MB", margin=0)
    assert answer.reserve == 16_000_000
    assert answer.certainty in {"calibrated", "estimate"}
    assert any("no step of this size was taken here" in note for note in answer.notes)
