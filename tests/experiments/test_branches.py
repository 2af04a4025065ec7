from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stretto.experiments.branches import _changes_training, frozen
from stretto.timing import Horizon, Timestamp
from stretto.training import Callback, Logging
from stretto.training.algorithms import (
    AdaScale,
    LayerFreezing,
    NoiseReport,
    SelectiveBackprop,
    SequenceLengthWarmup,
    StochasticDepth,
)
from stretto.training.callback import EVENTS, overrides

Make = Callable[..., Any]
AT = Timestamp(epoch=1, sample=750, sample_in_epoch=150)
RUN = Horizon("1000sp", dataset_num_samples=600)


class Watch(Callback):
    """Notes the time it is told, everywhere."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, Timestamp, str]] = set()
        self.sizes: list[int] = []

    def _note(self, name: str, trainer: Any, timestamp: Timestamp) -> None:
        assert trainer.timer.timestamp == timestamp
        assert trainer.timer.get_elapsed_duration() == 0.75
        self.seen.add((name, timestamp, str(trainer.horizon.max_duration)))

    def on_fit_start(self, run: Any) -> None:
        self._note("start", run, AT)
        assert isinstance(run.model, torch.nn.Module)

    def on_batch_start(self, run: Any, step: Any) -> None:
        self._note("batch", run, step.timestamp)
        self.sizes.append(step.num_samples)

    def on_noise(self, run: Any, step: Any, signals: Any) -> None:
        self._note("noise", run, step.timestamp)
        assert signals.noise_numerator is not None

    def on_fit_end(self, run: Any) -> None:
        self._note("end", run, AT)


def test_a_frozen_callback_sees_the_clock_of_the_checkpoint(problem: Make) -> None:
    watch = Watch()
    problem().trainer(
        max_duration="40sp", micro_batch_size=4, callbacks=[frozen(watch, AT, RUN)]
    ).fit()
    assert watch.seen == {(name, AT, "1000sp") for name in ("start", "batch", "noise", "end")}
    assert watch.sizes == [8] * 5


def test_it_listens_to_nothing_else() -> None:
    still = frozen(Watch(), AT, RUN)
    assert {name for name in EVENTS if overrides(still, name)} == {
        "on_fit_start", "on_batch_start", "on_noise", "on_fit_end",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("callback", "is_kept"),
    [
        (LayerFreezing(["embed"]), True),
        (SequenceLengthWarmup(8, 64, over="50%"), True),
        (SelectiveBackprop(lambda model, batch: model(batch)), True),
        (StochasticDepth(["blocks.0"]), True),
        (AdaScale(8), False),
        (NoiseReport(), False),
        (Callback(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_branches_keep_the_callbacks_that_change_the_training(
    callback: Callback, is_kept: bool
) -> None:
    assert _changes_training(callback) == is_kept


@pytest.mark.parametrize(("sample", "length"), [(0, 1), (250, 3), (900, 5)])
def test_what_is_cut_is_cut_as_at_that_moment(problem: Make, sample: int, length: int) -> None:
    lengths = []

    class Lengths(Callback):
        def transform_batch(self, run: Any, batch: Any) -> Any:
            lengths.append(batch[0].shape[1])
            return (torch.nn.functional.pad(batch[0], (0, 5 - lengths[-1])), batch[1])

    warmup = SequenceLengthWarmup(1, 5, over="50%", multiple_of=1)
    run = problem()
    still = frozen(warmup, Timestamp(sample=sample), Horizon("1000sp"))
    run.trainer(
        max_duration="40sp", log=Logging("1ep"), callbacks=[still, Lengths()], loss=padded
    ).fit()
    assert lengths == [length] * 5


def padded(model: Any, batch: Any) -> Any:
    targets = torch.nn.functional.pad(batch[1], (0, 2 - batch[1].shape[1]))
    return torch.nn.functional.mse_loss(model(batch[0]), targets)
