"""Report without acting: the noise scale in the metrics, and a ramp that would follow it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, final

from torch.optim import SGD

from stretto.batching import NoiseScale, PolicyState, Signals, checked_size, couplings_in
from stretto.batching.noise_scale import RatioAverage
from stretto.data import Step
from stretto.noise import NoiseEstimator, NoiseTerms
from stretto.training.callback import Callback
from stretto.training.run import Run

FILE = "suggested_batch_size.yaml"
"""Where the suggestion is written in the run folder."""
_GROWTH = 64
"""Without a maximum, so many times the first batch is the largest."""
_LEAST = 2
"""A single sample has no noise to measure."""


@final
class NoiseReport(Callback):
    """Logs the gradient noise scale with its interval, and suggests batch sizes; changes nothing.

    Lines of metrics get `noise_scale`, `noise_scale_low` and `noise_scale_high` where they are
    known. At the end of the run the folder has `suggested_batch_size.yaml`: the sizes that
    `NoiseScale` would have decided from what the run has measured, as steps by powers of two, in
    the syntax of a run file.

    >>> report = NoiseReport(c=0.5)
    >>> print(report.suggestion())
    # no noise was measured: it takes batches of two samples or more

    Args:
        c: which part of the noise scale a batch is to be; with a `power`, of that power of it.
        power: the power of the noise scale that a batch is to follow, as `NoiseScale` has it.
        window: how many measured steps are averaged.
        confidence: the probability with which the interval holds the true noise scale.
        minimum: the least size that is suggested, and the first, 2 or more; left out, 2, and it
            begins with the run's own, or a half or quarter of it where that was too large.
        maximum: the largest; left out, 64 times the first batch of the run.

    Raises:
        BatchSizeError: a value cannot be, or `minimum` is above `maximum`.
    """

    result_file = ("batch sizes for a run like this", FILE)

    def __init__(
        self,
        *,
        c: float = 1.0,
        power: float = 1.0,
        window: int = 100,
        confidence: float = 0.9,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> None:
        self._c, self._power, self._window, self._confidence = c, power, window, confidence
        self._minimum, self._maximum = minimum, maximum
        # Raises what is wrong with them.
        self._policy(_LEAST if minimum is None else checked_size(minimum))
        self._estimator = NoiseEstimator(window=window, confidence=confidence)
        # What `NoiseScale` would have decided, and from which part of the run on.
        self._decided: list[tuple[float, int]] = []
        self._state: PolicyState = {}
        # Between what the noise scale was, wherever it was known.
        self._range: tuple[float, float] | None = None
        # The one that the learning rate is meant for, where it is one and nothing goes by it yet.
        self._size: int | None = None
        self._moves = False
        self._rule = "sqrt"

    @property
    def estimator(self) -> NoiseEstimator:
        """What is known of the noise."""
        return self._estimator

    def on_fit_start(self, run: Run) -> None:
        """Look whether the learning rate goes by the batch size already, and which way it would."""
        schedules = run.hyperparameters.schedules.values()
        pairs = any(True for schedule in schedules for _ in couplings_in(schedule))
        has_rule = run.hyperparameters.rule is not None
        self._moves = self._moves or pairs or has_rule
        self._rule = "linear" if all(isinstance(one, SGD) for one in run.optimizers) else "sqrt"

    def on_noise(self, run: Run, step: Step, signals: Signals) -> None:
        """Record what a step measured."""
        self._moves = self._moves or self._size not in (None, step.batch_size)
        self._size = step.batch_size
        self._estimator.add(NoiseTerms.of(signals), signals.num_samples)
        scale = self._estimator.noise_scale
        if scale is not None:
            lowest, highest = self._range or (scale, scale)
            self._range = min(lowest, scale), max(highest, scale)
        if not self._decided:
            self._decided = [(0.0, self._bounded(self._minimum or step.batch_size))]
        policy = self._policy(self._decided[0][1]).bind(run.horizon)
        timestamp = run.timer.timestamp
        size, self._state = policy.decide(timestamp, self._state or policy.start, signals)
        if size != self._decided[-1][1]:
            self._decided.append((run.timer.get_elapsed_duration(), size))

    def on_batch_end(self, run: Run, step: Step) -> None:
        """Log the noise scale and its interval, once they are known."""
        del step
        scale, interval = self._estimator.noise_scale, self._estimator.interval
        if scale is not None and interval is not None:
            run.log("noise_scale", scale, reduce="last")
            run.log("noise_scale_low", interval.lower, reduce="last")
            run.log("noise_scale_high", interval.upper, reduce="last")

    def on_fit_end(self, run: Run) -> None:
        """Write the suggestion to the run folder."""
        if run.folder is None or not run.is_first_rank or not run.folder.is_dir():
            return
        text, unfinished = self.suggestion() + "\n", run.folder / f"{FILE}.tmp"
        try:
            # Beside it first: a full disk must not cost the one that is there.
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(run.folder / FILE)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            why = (error.strerror or str(error)).lower()
            warnings.warn(
                f"cannot write {FILE}: {why}; it would say:\n{text}", RuntimeWarning, stacklevel=2
            )

    def suggestion(self) -> str:
        """Return batch sizes for a run like this one, as they stand in a run file."""
        if not self._decided:
            return "# no noise was measured: it takes batches of two samples or more"
        if len(self._decided) == 1 and self._range is None:
            return (
                f"# the noise scale is not known after {self._estimator.steps:,} measured steps: "
                "measure more of them,\n# cut batches into more micro-batches (micro_batch_size), "
                f"or write a window above {self._window}"
            )
        part = "" if self._c == 1 else f"{self._c:g} of "
        if self._power != 1:
            part = f"{self._c:g} times the power {self._power:g} of "
        steps = ", ".join(f"{at}: {size}" for at, size in _stages(self._decided))
        known = "the noise scale, of which no more than an end of its interval was known"
        if self._range is not None:
            lowest, highest = self._range
            known = f"a noise scale of {lowest:.3g} to {highest:.3g} samples, where it was known"
        lines = [f"# follows {part}{known}", f"batch_size: {{{steps}}}"]
        if self._size is not None and not self._moves:
            lines += [
                f"# the learning rate was that of batches of {self._size}",
                f"rule: {{{self._rule}: {self._size}}}",
            ]
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, and what would have been decided so far."""
        return {
            "estimator": self._estimator.state_dict(),
            "decided": [list(one) for one in self._decided],
            "policy": dict(self._state),
            "range": None if self._range is None else list(self._range),
            "size": self._size,
            "moves": self._moves,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved averages."""
        self._estimator.load_state_dict(state["estimator"])
        self._decided = [(at, self._bounded(size)) for at, size in state["decided"]]
        self._state = dict(state["policy"])
        if self._state:
            int(self._state["size"])
            for one in fields(RatioAverage):
                float(self._state[one.name])
        self._range = None if state["range"] is None else tuple(state["range"])
        self._size, self._moves = state["size"], state["moves"]

    def _bounded(self, size: int) -> int:
        """A size within the bounds of this run; it may be resumed with others."""
        size = max(size, self._minimum or _LEAST)
        return size if self._maximum is None else min(size, self._maximum)

    def _policy(self, first: int) -> NoiseScale:
        return NoiseScale(
            first,
            _GROWTH * first if self._maximum is None else self._maximum,
            c=self._c,
            power=self._power,
            minimum=self._minimum or _LEAST,
            window=self._window,
            confidence=self._confidence,
        )

    def __repr__(self) -> str:
        power = "" if self._power == 1 else f", power={self._power}"
        return f"NoiseReport(c={self._c}{power})"


def _stages(decided: Sequence[tuple[float, int]]) -> list[tuple[str, int]]:
    """Steps by powers of two that never again come to lie above what was decided.

    They are multiples of the first size, or parts of it. A size is taken from where all that comes
    later is at least as much, so that a passing peak is no reason to grow.
    """
    unit = decided[0][1]
    # What was decided at the very end was for no batch.
    stages = [(f"{100 * at:.3g}%", size) for at, size in decided]
    stages = [(text, size) for text, size in stages if text != "100%"]
    least, grown = stages[-1][1], []
    for text, size in reversed(stages):
        least = min(least, size)
        step = unit << max(0, (least // unit).bit_length() - 1)
        while step > least and step > _LEAST:
            step = max(step // 2, _LEAST)
        grown.append((text, step))
    steps = dict([grown.pop()])
    for text, size in reversed(grown):
        if size > max(steps.values()):
            steps[text] = size
    return list(steps.items())
