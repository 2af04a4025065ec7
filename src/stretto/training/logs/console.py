"""The console: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

from stretto.run_folder import CLOCK
from stretto.timing import Time, TimeUnit
from stretto.training.logs.loggers import Record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

REFRESH_SECONDS = 0.2
"""Time between updates of the bar; drawing takes a millisecond."""
LINE_SECONDS = 5.0
"""Time between printed lines without a terminal."""


@final
class ConsoleLogger:
    """Shows loss, batch size, learning rate, throughput and remaining time.

    Args:
        max_duration: the length of the run.
        console: where to print; None: standard output. A terminal gets a bar, anything else lines.
        clock: returns seconds that only grow.
    """

    def __init__(
        self,
        max_duration: Time,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if console is None:
            from rich.console import Console

            console = Console(highlight=False)
        self._max_duration = max_duration
        self._console = console
        self._clock = clock
        self._bar: Progress | None = None
        self._shown_at = -1e9
        self._began: tuple[float, float] | None = None
        self._record: Record = {}

    @property
    def is_due(self) -> bool:
        """Whether the bar is due for an update."""
        return self._bar is not None and self._clock() - self._shown_at >= REFRESH_SECONDS

    def start(self, config: Mapping[str, Any], sample: int) -> None:
        """Draw the bar."""
        del config, sample
        self._began = None
        if not self._console.is_terminal:
            return
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

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

    def show(self, at: Record) -> None:
        """Move the bar to `at`, the clock in every unit; the first call starts the run."""
        if self._began is None:
            self._began = (self._clock(), at["dur"])
        if self._bar is not None:
            self._shown_at = self._clock()
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=at["dur"], description=self._describe(at))
            self._bar.refresh()

    def log(self, record: Record) -> None:
        """Print an evaluation; show a line of training in the bar, or print it at intervals."""
        done = f"{record['dur']:4.0%}"
        if "loss" not in record:
            position = show_position(record[self._unit], self._max_duration.unit)
            for name, metrics in _by_evaluation(record).items():
                self._print(f"{done}  {position}  {name} {show_metrics(metrics)}")
            return
        self._record = record
        if self._bar is None and self._clock() - self._shown_at >= LINE_SECONDS:
            self._shown_at = self._clock()
            self._print(f"{done}  {self._describe(record)}")

    def close(self) -> None:
        """Remove the bar; printed lines stay."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def _unit(self) -> str:
        return self._max_duration.unit.value

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _describe(self, at: Record) -> str:
        """Return the last line of training and the remaining time."""
        record = self._record
        parts = []
        if record:
            parts.append(f"loss {record['loss']:.4g}")
            parts.append(f"batch {int(record['batch_size']):,}")
        if "lr" in record:
            parts.append(f"lr {record['lr']:.3g}")
        for name, unit in (("tokens_per_second", "tok"), ("samples_per_second", "sp")):
            if name in record:
                parts.append(f"{show_rate(record[name])} {unit}/s")
                break
        return "  ".join([*parts, *self._left(at)])

    def _left(self, at: Record) -> list[str]:
        """Return the remaining part of the run in its unit, and the estimated seconds."""
        unit = self._max_duration.unit
        left = []
        if unit is not TimeUnit.SECOND:
            amount = max(0.0, float(self._max_duration.amount) - at[self._unit])
            is_epochs = unit is TimeUnit.EPOCH
            left.append(f"{amount:.2f}ep left" if is_epochs else f"{amount:,.0f}{unit} left")
        began, done_before = self._began or (self._clock(), at["dur"])
        passed, done = self._clock() - began, at["dur"]
        if done > done_before and passed > 0:
            seconds = passed * (1 - done) / (done - done_before)
            left.append(show_seconds(seconds) if left else f"{show_seconds(seconds)} left")
        return left


def has_terminal() -> bool:
    """Return whether standard output is a terminal; a notebook is not."""
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    from rich.console import Console

    return Console().is_terminal


def _by_evaluation(record: Record) -> dict[str, dict[str, float]]:
    """The metrics of a line by the name of their evaluation."""
    found: dict[str, dict[str, float]] = {}
    for key, value in record.items():
        if key not in CLOCK:
            name, _, metric = key.partition("/")
            found.setdefault(name, {})[metric] = value
    return found


def show_position(amount: float, unit: TimeUnit) -> str:
    """Return a position in a run as text.

    >>> show_position(12_345, TimeUnit.SAMPLE), show_position(75, TimeUnit.SECOND)
    ('12,345sp', '1:15')
    """
    if unit is TimeUnit.SECOND:
        return show_seconds(amount)
    return f"{amount:.4g}ep" if unit is TimeUnit.EPOCH else f"{amount:,.0f}{unit}"


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


def show_rate(per_second: float) -> str:
    """Return a throughput with three digits.

    >>> [show_rate(value) for value in (7.25, 950.4, 41_234.0)]
    ['7.25', '950', '41.2K']
    """
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if per_second >= limit:
            return f"{per_second / limit:.3g}{suffix}"
    return f"{per_second:.3g}"
