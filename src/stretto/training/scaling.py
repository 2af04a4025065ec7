"""One switch for a shorter or longer run: every time in it is stretched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from stretto.batching import BatchSizePolicy
from stretto.errors import TrainingError, shown
from stretto.schedules import as_schedule
from stretto.settings import Checkpointing
from stretto.timing import Time, TimeLike, Trigger
from stretto.timing.conversion import rounded
from stretto.timing.number import exact
from stretto.timing.time import Number
from stretto.training.callback import Callback
from stretto.training.settings import Evaluation, Logging


@final
class Timed(NamedTuple):
    """What a `Trainer` is given that has times in it."""

    max_duration: TimeLike
    batch_size: BatchSizePolicy
    schedules: Mapping[str, Any]
    evaluations: Sequence[Evaluation]
    checkpoint: Checkpointing | None
    log: Logging
    callbacks: Sequence[Callback]

    def scaled(self, ratio: Number | None) -> Timed:
        """Return all of it for a run `ratio` times as long; None: as it is.

        Fractions of the run stay, since they stretch by themselves. Batches, samples and tokens
        come in whole numbers and are rounded up.

        Raises:
            TrainingError: the ratio is not above 0.
            TimeError: the ratio is not a finite number.
        """
        if ratio is None:
            return self
        factor = exact(ratio)
        if factor <= 0:
            raise TrainingError.cannot(
                f"use scale_schedule={shown(ratio)}",
                why="a run can't be stretched to nothing",
                instead="write a ratio above 0 such as 0.5",
            )

        def stretched(schedule: Any) -> Any:
            if isinstance(schedule, Sequence) and not isinstance(schedule, str):
                return [stretched(one) for one in schedule]
            return as_schedule(schedule).scaled(factor)

        run, log, checkpoint = Time(self.max_duration), self.log, self.checkpoint
        return Timed(
            rounded(run.amount * factor, run.unit),
            self.batch_size.scaled(factor),
            {name: stretched(schedule) for name, schedule in self.schedules.items()},
            [replace(one, every=one.trigger.scaled(factor)) for one in self.evaluations],
            checkpoint and replace(checkpoint, every=checkpoint.trigger.scaled(factor)),
            replace(
                log,
                every=log.trigger.scaled(factor),
                flush=log.flush_trigger.scaled(factor),
            ),
            [callback.scaled(factor) for callback in self.callbacks],
        )

    @property
    def triggers(self) -> dict[str, Trigger]:
        """What happens now and then, by the name that it has in a plan."""
        found = {one.name: one.trigger for one in self.evaluations} | {"log": self.log.trigger}
        if self.checkpoint is not None:
            found["checkpoint"] = self.checkpoint.trigger
        return found
