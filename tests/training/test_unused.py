"""Settings that would be ignored are refused or warned about."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stretto.data.weights import TargetTokens
from stretto.errors import TrainingError
from stretto.training import Evaluation, Logging


def test_predict_without_a_metric_object() -> None:
    with pytest.raises(TrainingError) as caught:
        Evaluation([torch.ones(2)], predict=lambda model, batch: (model(batch), batch))
    assert "predict" in str(caught.value)


def test_a_logger_without_log() -> None:
    class Half:
        def start(self, config: Any, sample: int) -> None: ...

    half: Any = Half()
    with pytest.raises(TrainingError):
        Logging(loggers=[half])


def test_labels_that_contradict_the_stated_shift() -> None:
    labels = torch.tensor([[5, 6, 7]])
    with pytest.warns(RuntimeWarning, match="copy"):
        TargetTokens(shifts_labels=False)({"input_ids": labels, "labels": labels})
