"""The parts of docs/how-to/extend-*.md, used as a reader would: Python in mine.py, run files."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from stretto.config import RunConfig, build_plan, build_trainer, dump_run_file, parse_run_file
from stretto.config.training import resolved
from stretto.errors import ConfigError
from stretto.run_folder import read_ledger
from stretto.training import Checkpointing, Trainer

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGE = "\n".join(path.read_text() for path in sorted(HOW_TO.glob("extend-*.md")))
BASE = {
    "max_duration": "2ep",
    "model": {"target": "base:Line"},
    "data": {"target": "base:Points", "num_samples": 40},
    "optimizer": {"target": "torch.optim:SGD", "lr": 0.1},
    "batch_size": 8,
    "checkpoint": {"every": "1ep"},
    "log": {"loggers": []},
}
SHORT = (
    *("A batch size policy", "A schedule", "A learning rate rule"),
    *("A callback", "Data", "A metric", "A logger"),
)
"""The parts that fifteen lines of Python and one block of a run file are enough for."""
PROJECT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Points(TensorDataset):
    def __init__(self, split="train"):
        inputs = torch.arange(80, dtype=torch.float32).reshape(40, 2) / 40
        super().__init__(inputs, inputs.sum(1, keepdim=True))


class Line(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    @staticmethod
    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def blocks(language: str, text: str = PAGE) -> list[str]:
    """The blocks of code in a text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    """The text of a section of the page."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^##? |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return str(text)


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine.py").write_text("\n".join(blocks("python")))
    (tmp_path / "base.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("mine", "base"):
        sys.modules.pop(name, None)


def written(title: str, **more: Any) -> RunConfig:
    """The run file that a section shows, as it is read."""
    (lines,) = blocks("yaml", section(title))
    return parse_run_file(yaml.safe_dump({**BASE, **yaml.safe_load(lines), **more}))


def trainer(title: str, **more: Any) -> Trainer:
    """The trainer of the run file that a section shows."""
    run_file = written(title, **more)
    return build_trainer(run_file, folder=Path("run"))


def policy() -> dict[str, Any]:
    """The batch size of the section on policies."""
    (lines,) = blocks("yaml", section("A batch size policy"))
    found: dict[str, Any] = yaml.safe_load(lines)["batch_size"]
    return found


def ledger(column: str) -> list[str]:
    """What a run has noted of each batch."""
    with Path("run/ledger.csv").open() as file:
        return [row[column] for row in csv.DictReader(file)]


def rates(run_file: RunConfig) -> list[float]:
    """The learning rate of each batch in the plan of a run file."""
    plan = build_plan(run_file)
    return [batch.values["lr"] for batch in plan.batches()]


def test_each_part_takes_at_most_fifteen_lines() -> None:
    lengths = {
        title: max(sum(1 for line in block.splitlines() if line) for block in parts)
        for title in SHORT
        if (parts := blocks("python", section(title)))
    }
    assert {title: many for title, many in lengths.items() if many > 15} == {}


def test_a_logger_has_every_line_once_after_a_resume() -> None:
    stopped = trainer("A logger")
    stopped.fit()
    rows = Path("run/losses.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows] == [16, 32, 48, 64, 80]
    again = trainer("A logger")
    again.resume(min(Path("run/checkpoints").iterdir()))
    again.fit()
    assert Path("run/losses.csv").read_text().splitlines() == rows
    assert build_plan(written("A logger")).num_batches == again.timer.batch


def test_a_batch_size_policy_follows_the_loss_and_resumes_with_its_state() -> None:
    whole = trainer("A batch size policy")
    whole.fit()
    sizes = ledger("size")
    assert sizes[0] == "4"
    assert "8" in sizes
    Path("run").rename("whole")
    stopped = trainer("A batch size policy", max_duration="4ep", checkpoint={"every": "1ep"})
    assert stopped.plan is None
    again = trainer("A batch size policy")
    again.resume(min(Path("whole/checkpoints").iterdir()))
    again.fit()
    assert ledger("size") == sizes[-len(ledger("size")) :]


@pytest.mark.parametrize("title", SHORT)
def test_the_run_file_that_a_run_keeps_builds_the_same_run(title: str) -> None:
    config = written(title)
    first = build_trainer(config, folder=Path("run"))
    again = build_trainer(parse_run_file(dump_run_file(resolved(config, first))))
    again.fit()
    repeated = build_trainer(config, folder=Path("repeated"))
    repeated.fit()
    assert list(read_ledger(Path("run"))) == list(read_ledger(Path("repeated")))


def test_a_policy_gets_every_key_beside_its_target() -> None:
    own = policy()["MultipleOf"]["policy"]
    with pytest.raises(ConfigError, match="DoubleWhenLossHalves"):
        trainer("A batch size policy", batch_size={**own, "every": "1ep"})
    with pytest.raises(ConfigError, match="larges"):
        trainer("A batch size policy", batch_size={"target": own["target"], "larges": 3})
    small = trainer("A batch size policy", batch_size={"AtMost": {"policy": policy(), "size": 8}})
    small.fit()
    assert max(map(int, ledger("size"))) == 8


def logged(column: str) -> list[Any]:
    """What the lines of metrics of a run have under a name."""
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    return [line[column] for line in lines if column in line]


def test_a_callback() -> None:
    stopping = trainer("A callback", max_duration="20ep")
    stopping.fit()
    assert stopping.stop_reason == "the loss is below 0.01"
    assert logged("moved")[-1] > 0


def test_a_callback_keeps_its_tensors_over_a_resume() -> None:
    endless = [{"target": "mine:Moved", "loss": 0.0}]
    trainer("A callback", callbacks=endless).fit()
    whole = logged("moved")[-1]
    again = trainer("A callback", callbacks=endless)
    again.resume(min(Path("run/checkpoints").iterdir()))
    again.fit()
    assert logged("moved")[-1] == whole


def test_data_of_ones_own() -> None:
    made = trainer("Data")
    made.fit()
    assert (made.timer.sample, made.timer.epoch) == (80, 2)


def test_a_step_with_two_optimizers_trains_and_is_resumed() -> None:
    mine, base = importlib.import_module("mine"), importlib.import_module("base")

    def trained(resume_from: Path | None = None) -> Trainer:
        torch.manual_seed(0)
        step = mine.MuonAndAdamW(base.Line(), base.Line.loss, 0.02)
        checkpoint = None if resume_from else Checkpointing("1ep")
        folder = None if resume_from else "run"
        made = Trainer(
            step,
            base.Points(),
            max_duration="2ep",
            batch_size=8,
            checkpoint=checkpoint,
            folder=folder,
        )
        if resume_from:
            made.resume(resume_from)
        made.fit()
        return made

    whole = trained()
    again = trained(min(Path("run/checkpoints").iterdir()))
    assert again.timer.batch == 10
    for ours, theirs in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_from_a_run_file() -> None:
    found = trainer("A step")
    found.fit()
    assert len(found.step.optimizers) == 2
    again = trainer("A step", max_duration="3ep")
    again.resume()
    again.fit()
    assert again.timer.batch == 15


def test_a_metric() -> None:
    measured = trainer("A metric").evaluate()
    assert set(measured) == {"validation/loss", "validation/error"}
    assert measured["validation/error"] == pytest.approx(measured["validation/loss"])


def test_a_schedule() -> None:
    expected = [0.1] * 5 + [0.075] * 5
    assert rates(written("A schedule")) == pytest.approx(expected)
    trainer("A schedule").fit()
    assert [float(rate) for rate in ledger("lr")] == pytest.approx(expected)


def test_a_rule() -> None:
    expected = [0.1] * 10 + [0.3] * 3
    assert rates(written("A learning rate rule")) == pytest.approx(expected)
    trainer("A learning rate rule").fit()
    assert [float(rate) for rate in ledger("lr")] == pytest.approx(expected)


def test_a_store_gives_a_run_back_whose_folder_is_gone() -> None:
    kept = trainer("A store")
    kept.fit()
    names = sorted(path.name for path in Path("copies").iterdir())
    assert names[-1].startswith("checkpoint-000000000080")
    shutil.rmtree("run")
    again = trainer("A store", max_duration="3ep")
    with pytest.warns(RuntimeWarning, match="lacks"):
        again.fit(resume="auto")
    assert again.timer.batch == 15
