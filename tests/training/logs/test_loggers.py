from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stretto import LinearRule
from stretto.checkpoint import latest_good
from stretto.errors import MissingPackageError, TrainingError
from stretto.training import (
    Callback,
    Checkpointing,
    Evaluation,
    Logger,
    Logging,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)

Make = Callable[..., Any]
BATCHES = [8, 16, 24, 32, 40, 48, 56, 60, 68, 76, 84, 92, 100, 108, 116, 120]
"""The samples at which the batches of a run end."""


class EndAt(Callback):
    """Ends a run at a batch, by an error or as a kill does."""

    def __init__(self, batch: int, *, kill: bool = False) -> None:
        self.batch, self.kill = batch, kill

    def on_batch_end(self, run: Any, step: Any) -> None:
        if run.timer.batch == self.batch:
            if self.kill:
                while latest_good(run.folder / "checkpoints") is None:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError


def settings(folder: Path | None, logger: Logger) -> dict[str, Any]:
    """Settings of a run that logs every batch and keeps a checkpoint of every fourth."""
    return {
        "folder": folder,
        "checkpoint": Checkpointing("4ba"),
        "log": Logging("1ba", loggers=[logger]),
    }


def cut_at_seven(problem: Make, folder: Path, make: Callable[[], Logger]) -> None:
    """Train to an error in batch 7, resume from the checkpoint at batch 4 and train to the end."""
    with pytest.raises(ZeroDivisionError):
        problem().trainer(**settings(folder, make()), callbacks=[EndAt(7)]).fit()
    again = problem().trainer(**settings(folder, make()))
    again.resume()
    assert again.timer.batch == 4
    again.fit()


def scalars(folder: Path, name: str = "loss") -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    points: list[Any] = events.Scalars(name)
    return points


def losses(folder: Path) -> list[float]:
    """The losses in metrics.jsonl, which is cut back when a run is resumed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


class Table:
    """A logger of a user: a file with a line for each loss, cut back on a resume."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, [""]

    def start(self, config: Mapping[str, Any], sample: int) -> None:
        old = self.path.read_text().splitlines() if sample else []
        self.rows = [row for row in old if int(row.split()[0]) <= sample]

    def log(self, record: Mapping[str, float]) -> None:
        self.rows.append(f"{record['sp']} {record['loss']}")
        self.path.write_text("\n".join(self.rows))

    def close(self) -> None: ...


def test_a_logger_of_ones_own_has_every_batch_once_after_a_resume(
    problem: Make, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    cut_at_seven(problem, tmp_path / "run", lambda: Table(table))
    rows = [row.split() for row in table.read_text().splitlines()]
    assert [int(sample) for sample, _ in rows] == BATCHES
    assert [float(loss) for _, loss in rows] == losses(tmp_path / "run")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own
def test_tensorboard_reads_what_was_logged(problem: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = problem()
    run.trainer(
        folder=tmp_path,
        log=Logging("1ep", loggers=[TensorBoardLogger()]),
        evaluate=Evaluation(run.data),
    ).fit()
    points = scalars(tmp_path / "tensorboard")
    assert [point.step for point in points] == [60, 120]
    assert [point.value for point in points] == pytest.approx(losses(tmp_path))
    assert [point.step for point in scalars(tmp_path / "tensorboard", "validation/loss")] == [
        60,
        120,
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_every_batch_once_after_a_resume(problem: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    cut_at_seven(problem, tmp_path, TensorBoardLogger)
    points = scalars(tmp_path / "tensorboard")
    assert [point.step for point in points] == BATCHES
    assert [point.value for point in points] == pytest.approx(losses(tmp_path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_every_batch_once_after_a_kill(problem: Make, tmp_path: Path) -> None:
    """What was logged before the checkpoint is on the disk, whatever TensorBoard buffers."""
    pytest.importorskip("tensorboard")

    child = os.fork()
    if child == 0:
        try:
            killed = settings(tmp_path, TensorBoardLogger())
            problem().trainer(**killed, callbacks=[EndAt(7, kill=True)]).fit()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    time.sleep(1 - time.time() % 1)  # TensorBoard orders files by whole seconds, then by process
    again = problem().trainer(**settings(tmp_path, TensorBoardLogger()))
    again.resume()
    again.fit()
    assert [point.step for point in scalars(tmp_path / "tensorboard")] == BATCHES


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_forgets_a_run_that_died_before_its_first_checkpoint(
    problem: Make, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(ZeroDivisionError):
        problem().trainer(**settings(tmp_path, TensorBoardLogger()), callbacks=[EndAt(3)]).fit()
    again = problem().trainer(**settings(tmp_path, TensorBoardLogger()))
    assert again.resume("auto") is None
    again.fit()
    assert [point.step for point in scalars(tmp_path / "tensorboard")] == BATCHES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_on_sqlite_has_every_batch_once_after_a_resume(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    folder = tmp_path / "run"

    def trainer(**more: Any) -> Any:
        given = settings(folder, MLflowLogger(uri, "ramps"))
        config = {"optimizer": {"lr": 0.1}, "batch_size": {"0ep": 8, "50%": 8}}
        given["log"] = replace(given["log"], config=config)
        return problem().trainer(**given, schedules={"lr@0": 0.5}, **more)

    with pytest.raises(ZeroDivisionError):
        trainer(callbacks=[EndAt(7)]).fit()
    again = trainer()
    again.resume()
    again.fit()
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("ramps")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "run"
    assert found.data.params["optimizer.lr"] == "0.1"
    assert found.data.params["batch_size.50_"] == "8"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [point.step for point in history] == BATCHES
    assert [point.value for point in history] == pytest.approx(losses(folder))
    assert client.get_metric_history(found.info.run_id, "lr/0")[-1].value == pytest.approx(0.05)


class FakeWandb:
    """A wandb whose server keeps its runs: a line of an earlier step is refused, as there."""

    def __init__(self) -> None:
        self.server: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.settings: list[dict[str, Any]] = []

    def init(self, **settings: Any) -> Any:
        self.settings.append(settings)
        name = settings.get("id") or f"run{len(self.server)}"
        lines = self.server.setdefault(name, [])
        run = SimpleNamespace(id=name, step=lines[-1][0] + 1 if lines else 0)

        def log(record: dict[str, float], *, step: int) -> None:
            assert step >= run.step
            run.step = step
            lines.append((step, record))

        run.log, run.finish, run.define_metric = log, lambda: None, lambda *_, **__: None
        return run


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_has_every_batch_once_after_a_resume(
    problem: Make, tmp_path: Path, wandb: FakeWandb
) -> None:
    cut_at_seven(problem, tmp_path, lambda: WandbLogger(project="ramps"))
    ((_, lines),) = wandb.server.items()
    assert [step for step, _ in lines] == BATCHES
    assert [line["loss"] for _, line in lines] == losses(tmp_path)
    first, second = wandb.settings
    assert first["config"]["optimizer.lr"] == 0.1
    assert first["project"] == "ramps"
    assert (second["id"], second["resume"]) == ("run0", "allow")


def test_wandb_begins_a_run_of_its_own_for_a_run_that_begins_anew(
    problem: Make, tmp_path: Path, wandb: FakeWandb
) -> None:
    with pytest.raises(ZeroDivisionError):
        problem().trainer(**settings(tmp_path, WandbLogger()), callbacks=[EndAt(3)]).fit()
    again = problem().trainer(**settings(tmp_path, WandbLogger()))
    assert again.resume("auto") is None
    again.fit()
    assert [step for step, _ in wandb.server["run1"]] == BATCHES


class Kept:
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.config: Mapping[str, Any] = {}
        self.starts: list[int] = []
        self.lines: list[Mapping[str, float]] = []

    def start(self, config: Mapping[str, Any], sample: int) -> None:
        self.config = config
        self.starts.append(sample)

    def log(self, record: Mapping[str, float]) -> None:
        self.lines.append(record)

    def close(self) -> None: ...


def test_a_logger_gets_the_settings_of_the_run_as_plain_values(
    problem: Make, tmp_path: Path
) -> None:
    logger = Kept()
    problem().trainer(
        **settings(tmp_path, logger), schedules={"lr": 0.5}, batch_size="0ep:8 1ep:16"
    ).fit()
    expected = {
        "max_duration": "2ep",
        "batch_size": "PiecewiseConstant('0ep:8 1ep:16')",
        "schedules.lr": "Constant(value=0.5)",
        "optimizer": "torch.optim.sgd.SGD",
        "optimizer.lr": 0.1,
        "optimizer.momentum": 0.9,
        "seed": 0,
        "precision": "fp32",
        "checkpoint.every": "Every('4ba')",
        "model": "torch.nn.modules.container.Sequential",
        "model.parameters": 66,
        "data.num_samples": 60,
        "world_size": 1,
        "folder": str(tmp_path),
    }
    assert {name: logger.config[name] for name in expected} == expected
    json.dumps(logger.config)


def test_a_logger_gets_the_configuration_that_is_given(problem: Make) -> None:
    logger = Kept()
    problem().trainer(
        log=Logging(loggers=[logger], config={"note": "one", "model": {"a": 1}})
    ).fit()
    assert logger.config == {"note": "one", "model": {"a": 1}, "folder": None}


def test_a_logger_knows_the_sample_from_which_a_run_continues(
    problem: Make, tmp_path: Path
) -> None:
    made: list[Kept] = []

    def make() -> Kept:
        made.append(Kept())
        return made[-1]

    cut_at_seven(problem, tmp_path, make)
    assert [one.starts for one in made] == [[0], [32]]


class Failing(Kept):
    """A logger in which one method fails."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def __getattribute__(self, name: str) -> Any:
        if name == super().__getattribute__("__dict__").get("method"):

            def fail(*_: Any) -> None:
                raise ConnectionError("no server")

            return fail
        return super().__getattribute__(name)


@pytest.mark.parametrize("method", ["start", "log", "close", "flush"])
def test_a_logger_that_fails_is_a_warning_and_no_end(
    method: str, problem: Make, tmp_path: Path
) -> None:
    failing, other = Failing(method), Kept()
    trainer = problem().trainer(folder=tmp_path, log=Logging("1ba", "1ba", [failing, other]))
    with pytest.warns(RuntimeWarning) as warned:
        trainer.fit()
    (said,) = [str(one.message) for one in warned]
    assert said.startswith(
        f"Failing.{method} failed: ConnectionError: no server; training continues"
    )
    assert len(other.lines) == len(losses(tmp_path)) == len(BATCHES)
    assert len(failing.lines) == (0 if method in ("start", "log") else len(BATCHES))


@pytest.mark.parametrize(
    "given", ["wandb", LinearRule(8), Kept], ids=["a name", "something else", "a class"]
)
def test_what_is_no_logger_is_refused(given: Any) -> None:
    with pytest.raises(TrainingError, match="logger"):
        Logging(loggers=[given])


@pytest.mark.parametrize(
    ("module", "logger", "extra"),
    [
        ("tensorboard", TensorBoardLogger, "tensorboard"),
        ("wandb", WandbLogger, "wandb"),
        ("mlflow", MLflowLogger, "mlflow"),
    ],
)
def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, logger: Callable[[], Any], extra: str
) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"\.\[{extra}\]"):
        logger()
