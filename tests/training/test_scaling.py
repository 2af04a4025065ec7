"""A run made shorter or longer as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stretto.batching import DoublingRamp, Seesaw
from stretto.errors import TrainingError
from stretto.schedules import Cosine, StepDecay
from stretto.timing import At, Every, Time
from stretto.training import Callback, Checkpointing, Evaluation, Logging, Run
from stretto.training.algorithms import LayerFreezing
from stretto.training.settings import scale

Make = Callable[..., Any]


class Frozen(Callback):
    """Notes how many layers are frozen in each batch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_batch_end(self, run: Run, step: Any) -> None:
        freezing = next(one for one in run.callbacks if isinstance(one, LayerFreezing))
        self.seen.append(freezing.num_frozen)


def test_one_switch_scales_every_time_of_a_run(problem: Make, tmp_path: Any) -> None:
    run, watch = problem(), Frozen()
    freezing = LayerFreezing(["0", "2"], start="2ep", end="4ep")
    trainer = run.trainer(
        max_duration="4ep",
        batch_size="0ep:10 2ep:20",
        schedules={"lr": [StepDecay("2ep", 0.1), 0.5], "momentum": Cosine(warmup="1ep")},
        evaluate=Evaluation(run.data, every=Every("2ep") | At("60sp")),
        checkpoint=Checkpointing("2ep"),
        log=Logging("8ba", flush="1m"),
        callbacks=[freezing, watch],
        folder=tmp_path,
        scale_schedule=0.5,
    )
    assert trainer.run.horizon.max_duration == Time("2ep")
    assert [(stage.size, stage.batches) for stage in trainer.run.plan.sizes.stages] == [
        (10, 6),
        (20, 3),
    ]
    assert [trainer.plan.values_at(batch)["lr"] for batch in (5, 6)] == pytest.approx([0.05, 0.005])
    assert trainer.run.hyperparameters.schedules["momentum"] == Cosine(warmup="0.5ep")
    events = {event.name: event.count for event in trainer.plan.events}
    assert events == {"validation": 3, "checkpoint": 2, "log": 2}
    trainer.fit()
    assert watch.seen == [0] * 8 + [1]
    assert freezing.num_frozen == 0, "what was given is not touched"


def test_the_callback_freezes_as_in_a_run_of_that_length(problem: Make) -> None:
    seen = []
    for run, start, end, ratio in (("4ep", "2ep", "4ep", 0.5), ("2ep", "1ep", "2ep", None)):
        watch = Frozen()
        callbacks = [LayerFreezing(["0"], start=start, end=end), watch]
        problem().trainer(
            max_duration=run, batch_size=2, callbacks=callbacks, scale_schedule=ratio
        ).fit()
        seen.append(watch.seen)
    assert seen[0] == seen[1]


def test_a_callback_of_yours_is_scaled_by_its_times_triggers_and_schedules() -> None:
    class Mine(Callback):
        def __init__(self) -> None:
            self.start = Time("3ep")
            self.share = Time("30%")
            self.when = Every("10ba")
            self.factor = StepDecay("2ep")
            self.count = 7

    mine = Mine()
    half = mine.scaled(0.5)
    assert (half.start, half.share) == (Time("1.5ep"), Time("30%"))
    assert (half.when, half.factor, half.count) == (Every("5ba"), StepDecay("1ep"), 7)
    assert mine.start == Time("3ep")
    timeless = Callback()
    assert timeless.scaled(0.5) is timeless


def test_a_pair_stays_a_pair(problem: Make) -> None:
    pair = Seesaw(Cosine(), DoublingRamp(4, 8, "2ep"), maximum=16)
    trainer = problem().trainer(batch_size=pair, max_duration="4ep", scale_schedule=0.5)
    half = Seesaw(Cosine(), DoublingRamp(4, 8, "1ep"), maximum=16)
    assert trainer.run.loader.prepared.policy == half.policy


def test_flushes_are_scaled_too() -> None:
    assert scale(Logging("8ba", flush="1m"), 0.5) == Logging(Every("4ba"), Every("30s"))


@pytest.mark.parametrize("ratio", [0, -1])
def test_a_ratio_that_is_not_above_0_is_refused(problem: Make, ratio: float) -> None:
    with pytest.raises(TrainingError, match="scale_schedule"):
        problem().trainer(scale_schedule=ratio)
