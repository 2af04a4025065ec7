"""How a run tells how far it is: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from stretto.timing import Timestamp, TimeUnit
from stretto.training import Callback

if TYPE_CHECKING:
    from stretto.training import Trainer

REFRESH_SECONDS = 0.2
"""How often a bar moves: drawing one takes a millisecond."""
LINE_SECONDS = 5.0
"""How often a line is printed where there is no terminal."""


@final
class ProgressDisplay(Callback):
    """Shows loss, batch size, learning rate, throughput and what is left; on the first rank only.

    Args:
        console: where to show it; a bar if it is a terminal, else lines.
        clock: seconds that only ever grow.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar: Progress | None = None
        self._shown_at = -1e9
        self._began = (0.0, 0.0)
        self._record: Mapping[str, float] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin to show."""
        if not trainer.is_first_rank:
            return
        self._began = (self._clock(), trainer.get_elapsed_duration())
        if self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=24 if self._console.width >= 100 else 8),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._bar.add_task("", total=1.0)
            self._bar.start()

    def on_batch_end(self, trainer: Trainer, step: Any) -> None:
        """Move the bar, now and then."""
        del step
        if self._bar is not None and self._clock() - self._shown_at >= REFRESH_SECONDS:
            self._move_bar(trainer)

    def on_log(self, trainer: Trainer, record: Mapping[str, float]) -> None:
        """Keep what was measured; print it where there is no bar."""
        self._record = record
        is_due = self._clock() - self._shown_at >= LINE_SECONDS
        if self._bar is None and trainer.is_first_rank and is_due:
            self._shown_at = self._clock()
            done = f"{trainer.get_elapsed_duration():4.0%}"
            self._say(f"{done}  {self._describe(trainer)}")

    def on_evaluation_end(self, trainer: Trainer, name: str, metrics: Mapping[str, float]) -> None:
        """Print what was measured."""
        if trainer.is_first_rank:
            done = f"{trainer.get_elapsed_duration():4.0%}"
            self._say(f"{done}  {position(trainer)}  {name} {show_metrics(metrics)}")

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Show on the bar that time has passed."""
        del path
        if self._bar is not None:
            self._move_bar(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Take the bar away; what was printed stays."""
        del trainer
        self.close()

    def close(self) -> None:
        """Take the bar away, also where the run ended with an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _move_bar(self, trainer: Trainer) -> None:
        assert self._bar is not None, "only called while there is a bar"
        self._shown_at = self._clock()
        (task,) = self._bar.task_ids
        done = trainer.get_elapsed_duration()
        self._bar.update(task, completed=done, description=self._describe(trainer))
        self._bar.refresh()

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _describe(self, trainer: Trainer) -> str:
        """Loss, batch size, learning rate and throughput of the last log, and what is left."""
        record = self._record
        parts = []
        if record:
            parts.append(f"loss {record['loss']:.4g}")
            parts.append(f"batch {int(record['batch_size']):,}")
        if "lr" in record:
            parts.append(f"lr {record['lr']:.3g}")
        for name, unit in (("tokens_per_second", "tok"), ("samples_per_second", "sp")):
            if name in record:
                parts.append(f"{rate(record[name])} {unit}/s")
                break
        return "  ".join([*parts, *self._left(trainer)])

    def _left(self, trainer: Trainer) -> list[str]:
        """What is left of the run in its own unit, and the seconds it may take at this pace."""
        done = trainer.get_elapsed_duration()
        began, done_before = self._began
        passed = self._clock() - began
        run = trainer.horizon.max_duration
        left = [] if run.unit is TimeUnit.SECOND else [show_left(trainer)]
        if done > done_before and passed > 0:
            seconds = passed * (1 - done) / (done - done_before)
            left.append(f"{show_seconds(seconds)} left" if not left else show_seconds(seconds))
        return left


def show_left(trainer: Trainer) -> str:
    """Return what is left of a run, in the unit of its length."""
    run = trainer.horizon.max_duration
    passed = trainer.horizon.position(trainer.timer.timestamp, run.unit)
    left = max(0.0, float(run.amount - passed.amount))
    return f"{left:.2f}ep left" if run.unit is TimeUnit.EPOCH else f"{left:,.0f}{run.unit} left"


def position(trainer: Trainer) -> str:
    """Return where a run stands, in the unit of its length."""
    run = trainer.horizon.max_duration
    at: Timestamp = trainer.timer.timestamp
    if run.unit is TimeUnit.SECOND:
        return show_seconds(at.run_nanoseconds / 1e9)
    amount = float(trainer.horizon.position(at, run.unit).amount)
    return f"{amount:.4g}ep" if run.unit is TimeUnit.EPOCH else f"{amount:,.0f}{run.unit}"


def show_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics in one line.

    >>> show_metrics({"loss": 1.23456, "unigram_entropy": 3.3})
    'loss 1.2346, unigram_entropy 3.3000'
    """
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def show_seconds(seconds: float) -> str:
    """Return a length of time as a clock shows it.

    >>> [show_seconds(value) for value in (0.4, 75, 3_700, 200_000)]
    ['0:00', '1:15', '1:01:40', '2d 7:33:20']
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(per_second: float) -> str:
    """Return a throughput with three digits.

    >>> [rate(value) for value in (7.25, 950.4, 41_234.0)]
    ['7.25', '950', '41.2K']
    """
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if per_second >= limit:
            return f"{per_second / limit:.3g}{suffix}"
    return f"{per_second:.3g}"
