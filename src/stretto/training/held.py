"""Callbacks for whom time stands still: in short runs that branch off one moment of another run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, final

from stretto.timing import Horizon, Timer, Timestamp
from stretto.training.callback import EVENTS, Callback, overrides

if TYPE_CHECKING:
    from stretto.training.trainer import Trainer

_WITH_STEP = frozenset({"on_batch_start", "on_gradient", "on_noise", "on_batch_end"})
"""The events that are told of a step, before all else."""


def held(callback: Callback, timestamp: Timestamp, horizon: Horizon) -> Callback:
    """Return a callback that does what `callback` does, and does it at `timestamp` throughout.

    A warm-up of the sequence length, say, cuts to the length of that moment of the run: a branch of
    a few batches has a clock of its own, on which the warm-up would begin once more.

    >>> from stretto.training.algorithms import SequenceLengthWarmup
    >>> warmup = SequenceLengthWarmup(8, 64, over="50%")
    >>> still = held(warmup, Timestamp(sample=250), Horizon("1000sp"))
    >>> still.changes_tokens, "transform_batch" in vars(type(still)), "on_log" in vars(type(still))
    (True, True, False)

    Args:
        callback: what changes the training.
        timestamp: the clock of the run at that moment.
        horizon: that of the run.
    """

    def listening(name: str) -> Callable[..., Any]:
        listener = getattr(callback, name)

        def listen(_: Callback, trainer: Trainer, *details: Any) -> Any:
            if name in _WITH_STEP:
                step, *rest = details
                details = (replace(step, timestamp=timestamp), *rest)
            return listener(cast("Trainer", _Held(trainer, timestamp, horizon)), *details)

        return listen

    # Only what it overrides: noise, for one, is measured where somebody listens to it.
    methods = {name: listening(name) for name in EVENTS if overrides(callback, name)}
    kind = type(f"Held{type(callback).__name__}", (Callback,), methods)
    still = cast(Callback, kind())
    still.changes_tokens = callback.changes_tokens
    return still


@final
class _Held:
    """A trainer of which all is as it is, but for the clock and the run that it is of."""

    def __init__(self, trainer: Trainer, timestamp: Timestamp, horizon: Horizon) -> None:
        self._trainer = trainer
        self.horizon = horizon
        self.timer = Timer.at(timestamp, horizon)

    def get_elapsed_duration(self) -> float:
        """Return the fraction of the run that has passed."""
        return self.horizon.elapsed(self.timer.timestamp)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)
