from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import MissingPackageError
from stretto.training import (
    Evaluation,
    JsonLinesLogger,
    Logging,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)


def test_json_lines_are_whole_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    logger = JsonLinesLogger(tmp_path / "metrics.jsonl")
    logger.log({"sp": 1, "loss": 0.1})
    logger.log({"sp": 2, "loss": math.nan})
    logger.flush()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"sp": 1, "loss": 0.1},
        {"sp": 2, "loss": None},
    ]
    logger.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own
def test_tensorboard_reads_what_was_logged(problem: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = problem()
    run.trainer(
        folder=tmp_path,
        log=Logging("1ep", loggers=[TensorBoardLogger()]),
        evaluate=Evaluation(run.data),
    ).fit()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss", "batch_size", "validation/loss"} <= set(events.Tags()["scalars"])
    assert [point.step for point in events.Scalars("loss")] == [60, 120]
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in logged if "loss" in line]
    assert [point.value for point in events.Scalars("loss")] == pytest.approx(losses)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_on_sqlite_has_what_was_logged(
    problem: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    problem().trainer(
        folder=tmp_path / "run",
        log=Logging("1ep", loggers=[MLflowLogger(uri, "ramps")]),
        schedules={"lr@0": 0.5},
    ).fit()
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("ramps")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "run"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert sorted(point.step for point in history) == [60, 120]
    assert client.get_metric_history(found.info.run_id, "lr/0")[-1].value == pytest.approx(0.05)


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
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"pip install 'stretto\[{extra}\]'"):
        logger()
