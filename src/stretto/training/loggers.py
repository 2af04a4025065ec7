"""Where metrics go: a file of JSON lines, TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, final

from stretto._optional import import_optional
from stretto.training.appending import Appender

Record: TypeAlias = Mapping[str, float]
"""One line of metrics: the clock in every unit (`ep ba sp tok dur sec`) and what was measured."""

CLOCK_KEYS = ("ep", "ba", "sp", "tok", "dur", "sec")


class MetricLogger(ABC):
    """Receives every line of metrics on rank 0.

    >>> class Printer(MetricLogger):
    ...     def log(self, record):
    ...         print(f"{record['sp']} samples: loss {record['loss']}")
    ...
    ...     def flush(self): ...
    ...     def close(self): ...
    >>> Printer().log({"sp": 4096, "loss": 2.5})
    4096 samples: loss 2.5
    """

    def open(self, folder: Path | None) -> None:  # noqa: B027  most loggers have nothing to open
        """Begin; `folder` is the run folder, where there is one."""

    @abstractmethod
    def log(self, record: Record) -> None:
        """Take one line of metrics."""

    @abstractmethod
    def flush(self) -> None:
        """Put what was taken where a crash cannot reach it."""

    @abstractmethod
    def close(self) -> None:
        """End; nothing is logged afterwards."""


@final
class JsonLinesLogger(MetricLogger):
    """Appends each line to a file as one JSON object; what is not finite becomes null.

    >>> logger = JsonLinesLogger(Path("metrics.jsonl"))
    >>> logger.log({"sp": 4096, "loss": float("nan")})
    >>> logger.close()
    >>> print(Path("metrics.jsonl").read_text(), end="")
    {"sp": 4096, "loss": null}
    """

    def __init__(self, path: Path) -> None:
        self._lines = Appender(path)

    def log(self, record: Record) -> None:
        """Append one line."""
        clean = {key: value if math.isfinite(value) else None for key, value in record.items()}
        self._lines.add(json.dumps(clean) + "\n")

    def flush(self) -> None:
        """Hand the lines to the operating system."""
        self._lines.flush()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    @property
    def is_waiting(self) -> bool:
        """Whether lines are not written yet."""
        return self._lines.is_waiting


@final
class TensorBoardLogger(MetricLogger):
    """Writes scalars for TensorBoard, with the sample as the step: it means the same in any ramp.

    Args:
        folder: where event files go; None: `tensorboard/` in the run folder.

    Raises:
        MissingPackageError: TensorBoard is not installed.

    >>> from stretto import Logging
    >>> settings = Logging(every="4096sp", loggers=[TensorBoardLogger()])  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        import_optional("tensorboard", "tensorboard")
        self._folder = folder
        self._writer: Any = None

    def open(self, folder: Path | None) -> None:
        """Create the event file."""
        from torch.utils.tensorboard import SummaryWriter

        place = self._folder or (folder / "tensorboard" if folder else None)
        self._writer = SummaryWriter(place)

    def log(self, record: Record) -> None:
        """Write every measured value of the line at its sample."""
        for key, value in record.items():
            if key not in CLOCK_KEYS:
                self._writer.add_scalar(key, value, int(record["sp"]))

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


@final
class WandbLogger(MetricLogger):
    """Sends lines to Weights & Biases; keyword arguments go to `wandb.init`.

    Raises:
        MissingPackageError: wandb is not installed.

    >>> from stretto import Logging
    >>> settings = Logging(every="1%", loggers=[WandbLogger(project="ramps")])  # doctest: +SKIP
    """

    def __init__(self, **init: Any) -> None:
        self._wandb = import_optional("wandb", "wandb")
        self._init = init
        self._run: Any = None

    def open(self, folder: Path | None) -> None:
        """Begin a run; every chart is over samples."""
        self._run = self._wandb.init(dir=folder, **self._init)
        self._run.define_metric("*", step_metric="sp")

    def log(self, record: Record) -> None:
        """Send the line."""
        self._run.log(dict(record))

    def flush(self) -> None:
        """Nothing to do: wandb sends in the background."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()


@final
class MLflowLogger(MetricLogger):
    """Sends lines to MLflow, with the sample as the step.

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

    def open(self, folder: Path | None) -> None:
        """Begin a run named like the run folder."""
        if self._uri is not None:
            self._mlflow.set_tracking_uri(self._uri)
        self._mlflow.set_experiment(self._experiment)
        self._mlflow.start_run(run_name=folder.name if folder else None)

    def log(self, record: Record) -> None:
        """Send every measured value of the line at its sample; `lr@group` is called `lr/group`."""
        # The names that MLflow takes have no '@'; it shows those with one beginning together.
        measured = {
            key.replace("@", "/"): value for key, value in record.items() if key not in CLOCK_KEYS
        }
        self._mlflow.log_metrics(measured, step=int(record["sp"]))

    def flush(self) -> None:
        """Nothing to do: MLflow writes at once."""

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()
