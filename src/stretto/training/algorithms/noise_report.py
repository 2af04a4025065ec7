"""Report without acting: the noise scale in the metrics, and a ramp that would follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from stretto.batching import NoRule, Signals, checked_size, couplings_in
from stretto.batching.following import checked_number
from stretto.data import Step
from stretto.errors import BatchSizeError, cannot
from stretto.noise import NoiseEstimator, NoiseTerms
from stretto.training.callback import Callback

if TYPE_CHECKING:
    from stretto.training.trainer import Trainer

FILE = "suggested_batch_size.yaml"
"""Where the suggestion is written in the run folder."""


@final
class NoiseReport(Callback):
    """Logs the gradient noise scale with its interval, and suggests batch sizes; changes nothing.

    Each line of metrics gets `noise_scale`, `noise_scale_low` and `noise_scale_high`, once they are
    known. At the end of the run the folder has `suggested_batch_size.yaml`: steps by powers of two
    that stay below `c` times the noise scale, in the syntax of a run file.

    >>> report = NoiseReport(c=0.5)
    >>> print(report.suggestion())
    # the noise scale is not known yet: measure more steps

    Args:
        c: which part of the noise scale a batch may be.
        window: how many measured steps are averaged.
        confidence: the probability with which the interval holds the true noise scale.
        minimum: the least size that is suggested, and the first; left out, the suggestion begins
            with the first size that was found.
        maximum: the largest; left out, any.

    Raises:
        BatchSizeError: a value cannot be, or `minimum` is above `maximum`.
    """

    in_branches = False

    def __init__(
        self,
        *,
        c: float = 1.0,
        window: int = 100,
        confidence: float = 0.9,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> None:
        self._c = checked_number(c, "the part of the noise scale that a batch may be")
        self._estimator = NoiseEstimator(window=window, confidence=confidence)
        self._minimum = None if minimum is None else checked_size(minimum, "the least batch size")
        self._maximum = None if maximum is None else checked_size(maximum, "the largest batch size")
        if maximum is not None and (minimum or 1) > maximum:
            raise BatchSizeError(
                cannot(
                    f"suggest batch sizes from {minimum} to {maximum}",
                    why="there are none",
                    instead=f"write a minimum of at most {maximum}",
                )
            )
        self._seen: list[tuple[float, float]] = []
        # The one that the learning rate is meant for, where it is one and nothing goes by it yet.
        self._size: int | None = None
        self._moves = False

    @property
    def estimator(self) -> NoiseEstimator:
        """What is known of the noise."""
        return self._estimator

    def on_fit_start(self, trainer: Trainer) -> None:
        """Look whether the learning rate goes by the batch size already."""
        schedules = trainer.hyperparameters.schedules.values()
        pairs = any(True for schedule in schedules for _ in couplings_in(schedule))
        self._moves = self._moves or pairs or not isinstance(trainer.hyperparameters.rule, NoRule)

    def on_noise(self, trainer: Trainer, step: Step, signals: Signals) -> None:
        """Take what a step measured."""
        del trainer
        self._moves = self._moves or self._size not in (None, step.batch_size)
        self._size = step.batch_size
        self._estimator.add(NoiseTerms.of(signals))

    def log_values(self, trainer: Trainer) -> Mapping[str, float]:
        """Return the noise scale and its interval, once they are known."""
        del trainer
        scale, interval = self._estimator.noise_scale, self._estimator.interval
        if scale is None or interval is None:
            return {}
        return {
            "noise_scale": scale,
            "noise_scale_low": interval.lower,
            "noise_scale_high": interval.upper,
        }

    def on_log(self, trainer: Trainer, record: Mapping[str, float]) -> None:
        """Remember what was logged, for the suggestion."""
        del trainer
        if "noise_scale" in record:
            self._seen.append((record["dur"], record["noise_scale"]))

    def on_fit_end(self, trainer: Trainer) -> None:
        """Write the suggestion to the run folder."""
        if trainer.folder is not None and trainer.is_first_rank and trainer.folder.is_dir():
            text = self.suggestion() + "\n"
            (trainer.folder / FILE).write_text(text, encoding="utf-8")

    def suggestion(self) -> str:
        """Return batch sizes for a run like this one, as they stand in a run file."""
        if not self._seen:
            return "# the noise scale is not known yet: measure more steps"
        stages = _stages(
            [(at, self._c * scale) for at, scale in self._seen], self._minimum, self._maximum
        )
        lowest = min(scale for _, scale in self._seen)
        highest = max(scale for _, scale in self._seen)
        part = "" if self._c == 1 else f"{self._c:g} of "
        steps = ", ".join(f"{at}: {size}" for at, size in stages)
        lines = [
            f"# follows {part}a noise scale of {lowest:.3g} to {highest:.3g} samples",
            f"batch_size: {{{steps}}}",
        ]
        if self._size is not None and not self._moves:
            lines += [
                f"# the learning rate was that of batches of {self._size} (with SGD: linear)",
                f"learning_rate_rule: {{sqrt: {self._size}}}",
            ]
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and what was logged so far."""
        return {
            "estimator": self._estimator.state_dict(),
            "seen": [list(one) for one in self._seen],
            "size": self._size,
            "moves": self._moves,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved averages."""
        self._estimator.load_state_dict(state["estimator"])
        self._seen = [(at, scale) for at, scale in state["seen"]]
        self._size, self._moves = state.get("size"), state.get("moves", False)

    def __repr__(self) -> str:
        return f"NoiseReport(c={self._c})"


def _stages(
    seen: Sequence[tuple[float, float]], first: int | None, maximum: int | None
) -> list[tuple[str, int]]:
    """Steps by powers of two of `first` that never again come to lie above what is wanted.

    A size is taken from where all that comes later wants at least as much, so that a passing peak
    is no reason to grow. Without a first size, the first that is wanted holds from the beginning:
    before it nothing was known.
    """
    minimum = first or 1
    least, grown = float("inf"), []
    for at, wanted in reversed(seen):
        least = min(least, wanted if maximum is None else min(wanted, maximum))
        doublings = max(0, int(least // minimum).bit_length() - 1)
        grown.append((f"{100 * at:.3g}%", minimum << doublings))
    stages = {"0%": minimum if first else grown[-1][1]}
    for text, size in reversed(grown):
        if size > max(stages.values()):
            stages[text] = size
    return list(stages.items())
