"""Loggers: where lines of metrics go besides the run folder, the console among them."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final, runtime_checkable

from stretto._location import read_plain
from stretto._optional import import_optional
from stretto.errors import first_line
from stretto.run_folder import CLOCK, replace_file
from stretto.timing import Time, TimeUnit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

REFRESH_SECONDS = 0.2
"""Time between updates of the bar; drawing takes a millisecond."""
LINE_SECONDS = 5.0
"""Time between printed lines without a terminal."""
Record: TypeAlias = Mapping[str, float]
"""One line of metrics: the clock in every unit (`ep ba sp tok dur sec`) and what was measured."""


@runtime_checkable
class Logger(Protocol):
    """Receives every line of metrics; any object with these three methods is one.

    A logger is called on the first rank only. If it raises an exception, the run warns and goes on.
    A logger that buffers lines can also have a method `flush()`, which is called at the times of
    `Logging.flush` and before each checkpoint.

    >>> class Printer:
    ...     def start(self, config, sample):
    ...         print(f"lr {config['optimizer.lr']}, from sample {sample}")
    ...
    ...     def log(self, record):
    ...         print(f"{record['sp']} samples: loss {record['loss']}")
    ...
    ...     def close(self): ...
    >>> isinstance(Printer(), Logger)
    True
    """

    def start(self, config: Mapping[str, Any], sample: int) -> None:
        """Begin to log, each time that training starts or continues.

        Args:
            config: the settings of the run as plain values, such as those of the run file.
                `config["folder"]` is the run folder, or None.
            sample: the position from which the run goes on; 0 for a new run. Lines with a larger
                `sp` from an earlier attempt come again, so drop those that you have.
        """

    def log(self, record: Record) -> None:
        """Take one line: the clock (`ep ba sp tok dur sec`) and what was measured."""

    def close(self) -> None:
        """Stop logging; training has ended or was stopped."""


@final
class Guarded:
    """Calls a logger; turns what it raises into one warning, so that training continues."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._has_warned = False

    def call(self, method: str, *arguments: Any) -> bool:
        """Call a method if the logger has it; return whether it succeeded."""
        try:
            if hasattr(self._logger, method):
                getattr(self._logger, method)(*arguments)
        except Exception as error:  # noqa: BLE001  a logger may raise anything
            if not self._has_warned:
                self._has_warned = True
                rest = "without it" if method == "start" else "and its other failures are ignored"
                warnings.warn(
                    f"{type(self._logger).__name__}.{method} failed: {first_line(error)}; training "
                    f"continues {rest}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return False
        return True


@final
class TensorBoardLogger:
    """Writes scalars for TensorBoard, with the sample as the step: it means the same in any ramp.

    When a run is resumed, TensorBoard drops what an earlier attempt wrote beyond the checkpoint.

    Args:
        folder: where event files of this run go; None: `tensorboard/` in the run folder.

    Raises:
        MissingPackageError: TensorBoard is not installed.

    >>> from stretto import Logging
    >>> settings = Logging(every="4096sp", loggers=[TensorBoardLogger()])  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        import_optional("tensorboard", "tensorboard")
        self._folder = folder
        self._writer: Any = None

    def start(self, config: Mapping[str, Any], sample: int) -> None:
        """Create an event file that holds the configuration as text."""
        from torch.utils.tensorboard import SummaryWriter

        run_folder = config.get("folder")
        place = self._folder or (Path(run_folder) / "tensorboard" if run_folder else None)
        # TensorBoard drops everything from `purge_step` on. A line at the checkpoint stays.
        self._writer = SummaryWriter(place, purge_step=sample + 1 if sample else 0)
        lines = (f"    {name}: {value}" for name, value in flattened(config))
        self._writer.add_text("config", "\n".join(lines), sample)

    def log(self, record: Record) -> None:
        """Write every measured value of the line at its sample."""
        for key, value in record.items():
            if key not in CLOCK:
                self._writer.add_scalar(key, value, int(record["sp"]))

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


@final
class WandbLogger:
    """Sends lines to Weights & Biases, with the sample as the step.

    The id of the W&B run is kept in the run folder, so that a resumed run continues it. W&B cannot
    delete lines: those that an earlier attempt sent beyond the checkpoint stay, and are not sent
    again.

    Args:
        **init: keyword arguments of `wandb.init`.

    Raises:
        MissingPackageError: wandb is not installed.

    >>> from stretto import Logging
    >>> settings = Logging(every="1%", loggers=[WandbLogger(project="ramps")])  # doctest: +SKIP
    """

    def __init__(self, **init: Any) -> None:
        self._wandb = import_optional("wandb", "wandb")
        self._init = init
        self._run: Any = None

    def start(self, config: Mapping[str, Any], sample: int) -> None:
        """Begin a W&B run, or continue that of the run folder."""
        settings: dict[str, Any] = {"dir": config.get("folder"), "config": dict(config)}
        file = _id_file(config, "wandb")
        if sample and file is not None and file.is_file():
            # Settings may have changed since the checkpoint.
            known = read_plain(file).decode().strip()
            settings |= {"id": known, "resume": "allow", "allow_val_change": True}
        self._run = self._wandb.init(**settings | self._init)
        self._run.define_metric("*", step_metric="sp")
        if file is not None:
            replace_file(file, f"{self._run.id}\n")

    def log(self, record: Record) -> None:
        """Send the line, unless an earlier attempt has sent a later one."""
        step = int(record["sp"])
        if step >= self._run.step:
            self._run.log(dict(record), step=step)

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


@final
class MLflowLogger:
    """Sends lines to MLflow, with the sample as the step.

    The id of the MLflow run is kept in the run folder, so that a resumed run continues it. MLflow
    cannot delete values: those that an earlier attempt sent beyond the checkpoint stay, and are not
    sent again.

    Args:
        tracking_uri: where to; None: MLflow's own choice.
        experiment: the experiment's name.

    Raises:
        MissingPackageError: mlflow is not installed.

    >>> from stretto import Logging
    >>> settings = Logging(loggers=[MLflowLogger(experiment="ramps")])  # doctest: +SKIP
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "stretto") -> None:
        self._mlflow = import_optional("mlflow", "mlflow")
        self._uri, self._experiment = tracking_uri, experiment
        self._sent: dict[str, int] = {}

    def start(self, config: Mapping[str, Any], sample: int) -> None:
        """Begin an MLflow run named like the run folder, or continue the one that is kept there."""
        if self._uri is not None:
            self._mlflow.set_tracking_uri(self._uri)
        self._mlflow.set_experiment(self._experiment)
        self._sent = {}
        file = _id_file(config, "mlflow")
        if sample and file is not None and file.is_file():
            known = read_plain(file).decode().strip()
            self._sent = self._last_steps(self._mlflow.start_run(run_id=known))
            return
        run = self._mlflow.start_run(run_name=None if file is None else file.parent.name)
        if file is not None:
            replace_file(file, f"{run.info.run_id}\n")
        self._mlflow.log_params({_mlflow_name(name): value for name, value in flattened(config)})

    def log(self, record: Record) -> None:
        """Send every measured value of the line at its sample; `lr@group` is called `lr/group`."""
        step = int(record["sp"])
        named = ((_mlflow_name(key), one) for key, one in record.items() if key not in CLOCK)
        measured = {name: value for name, value in named if step > self._sent.get(name, -1)}
        if measured:
            self._mlflow.log_metrics(measured, step=step)

    def close(self) -> None:
        """End the MLflow run."""
        self._mlflow.end_run()

    def _last_steps(self, run: Any) -> dict[str, int]:
        """The last step of each metric that an earlier attempt has sent."""
        history: Callable[..., Any] = self._mlflow.MlflowClient().get_metric_history
        return {
            name: max(point.step for point in history(run.info.run_id, name))
            for name in run.data.metrics
        }


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested settings, each by its path.

    >>> dict(flattened({"seed": 7, "optimizer": {"lr": 0.1}}))
    {'seed': 7, 'optimizer.lr': 0.1}
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow takes: it groups names by what is before the '/'.

    >>> _mlflow_name("lr@head"), _mlflow_name("batch_size.10%")
    ('lr/head', 'batch_size.10_')
    """
    return re.sub(r"[^\w.\- :/]", "_", name.replace("@", "/"))


def _id_file(config: Mapping[str, Any], service: str) -> Path | None:
    """Return the file that keeps the id under which a service knows the run."""
    folder = config.get("folder")
    return Path(folder) / f"{service}-run-id.txt" if folder else None


# ------------------------------------------------------------------------------------ the console


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
            parts.append(f"batch {record['batch_size']:,}")
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
