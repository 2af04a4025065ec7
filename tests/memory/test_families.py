"""Every family: predicted and probed, against what the real allocator says."""

from __future__ import annotations

import pytest
import torch
from tests.families.memory import FAMILIES

from stretto.errors import FitError
from stretto.memory import predict, probe
from stretto.memory.measuring.real import record_step

NEEDS_TRANSFORMERS = {name for name in FAMILIES if "transformers" in name}
PROBED = {
    "ResNet, BatchNorm": "kernels allocate for themselves",
    "U-Net": "kernels allocate for themselves",
    "ViT": "kernels allocate for themselves",
    "branch on a value": "values are read",
}
UNROLLED = {"GRU"}  # one operation a position: seconds


def real_peak(name: str, size: int) -> int:
    torch.manual_seed(0)
    step, make_batch = FAMILIES[name]()
    step.run(make_batch(2))
    step.run(make_batch(size))
    return record_step(step, make_batch(size), size).peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(FAMILIES.keys() - NEEDS_TRANSFORMERS - UNROLLED - {"LSTM", "mixture of experts"})
)
def test_predicted(name: str) -> None:
    step, make_batch = FAMILIES[name]()
    prediction = predict(step, make_batch)
    if name in PROBED:
        assert prediction.certainty_if_verified == "estimate"
        assert PROBED[name] in prediction.reason
    else:
        assert prediction.certainty_if_verified == "exact"
        assert prediction.peak(8) == pytest.approx(real_peak(name, 8), rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ResNet, BatchNorm", "U-Net", "LSTM", "mixture of experts", "branch on a value"]
)
def test_probed(name: str) -> None:
    torch.manual_seed(0)
    step, make_batch = FAMILIES[name]()
    found = probe(step, make_batch)
    found.calibrate(5)
    assert found.certainty_if_verified == "calibrated"
    assert found.peak(12) == pytest.approx(real_peak(name, 12), rel=0.01)


def test_lstms_are_refused() -> None:
    with pytest.raises(FitError, match="workspace"):
        predict(*FAMILIES["LSTM"]())


def test_routing_is_bounded_from_above() -> None:
    prediction = predict(*FAMILIES["mixture of experts"]())
    assert prediction.certainty_if_verified == "upper bound"
    assert prediction.peak(4) >= real_peak("mixture of experts", 4)
