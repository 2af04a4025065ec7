"""Loggers: where lines of metrics go besides the run folder."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from stretto._location import read_plain
from stretto._optional import import_optional
from stretto.errors import first_line
from stretto.run_folder import CLOCK, replace_file

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
