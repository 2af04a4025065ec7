"""A run's metrics, read back, and as a table."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import DataError
from stretto.report.run import read_metrics
from stretto.report.tables import MAX_ROWS, run_table
from stretto.run_folder import read_ledger

CLOCK = {"ep": 0.5, "ba": 10, "sp": 80, "tok": 0, "dur": 0.25, "sec": 75.0}


def write(folder: Path, *lines: dict[str, Any], end: str = "\n") -> None:
    text = "\n".join(json.dumps(CLOCK | line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + end)


def test_tells_training_from_evaluation(tmp_path: Path) -> None:
    write(tmp_path, {"loss": 2.0}, {"validation/loss": 1.5, "validation/accuracy": 0.5})
    metrics = read_metrics(str(tmp_path))
    assert [line["loss"] for line in metrics.training] == [2.0]
    assert metrics.measured == ("validation/loss", "validation/accuracy")
    assert metrics.references == {}, "one evaluation says nothing about what moves"


def test_a_metric_that_never_moves_is_a_reference(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"validation/loss": 2.0, "validation/entropy": 3.30000001},
        {"validation/loss": 1.0, "validation/entropy": 3.3},
    )
    assert read_metrics(tmp_path).references == {"validation/entropy": 3.3}


def test_what_is_not_finite_is_shown(tmp_path: Path) -> None:
    """A logger writes it as null."""
    write(
        tmp_path,
        {"loss": 2.0, "batch_size": 8},
        {"validation/loss": 1.5, "validation/entropy": 3.0},
        {"ba": 20, "loss": None, "batch_size": 8},
        {"ba": 20, "validation/loss": None, "validation/entropy": None},
    )
    metrics = read_metrics(tmp_path)
    assert len(metrics.training) == len(metrics.evaluations) == 2
    assert metrics.references == {}
    *_, good, bad = run_table(metrics, tmp_path).splitlines()
    assert good.split()[-3:] == ["2.0000", "1.5000", "3.0000"]
    assert bad.split()[-3:] == ["nan", "nan", "nan"]


def test_what_the_sizes_follow_is_shown(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"loss": 2.0, "batch_size": 8},
        {"ba": 20, "loss": 1.0, "batch_size": 12, "noise_scale": 41.26},
    )
    heads, one, other = run_table(read_metrics(tmp_path), tmp_path).splitlines()[2:5]
    assert "batch size  noise scale" in heads
    assert one.split()[-2:] == ["8", "2.0000"]
    assert other.split()[-3:] == ["12", "41.3", "1.0000"]


@pytest.mark.parametrize("rest", ["", '{"ep": 1, "lo', "nonsense", "[1]"])
def test_a_last_line_that_is_not_whole_is_left_out(rest: str, tmp_path: Path) -> None:
    write(tmp_path, {"loss": 2.0}, end="\n" + rest)
    assert len(read_metrics(tmp_path).training) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "it holds no line yet"),
        ('{"loss": 1}\n', "line 1 is not a line of metrics"),
        (json.dumps(CLOCK | {"sec": math.inf}) + "\n", "line 1 is not a line of metrics"),
        (json.dumps(CLOCK) + "\n", "no line of it holds a loss"),
        ("[" * 100_000 + "\n", "line 1 is not a line of metrics"),
        ("\xff\n", "it is not UTF-8 text"),
    ],
)
def test_what_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        read_metrics(tmp_path)


def test_table(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"loss": 2.5, "batch_size": 8},
        {"validation/loss": 2.0, "validation/entropy": 3.3},
        {"ba": 2000, "sp": 16000, "ep": 100.0, "sec": 3700.0, "loss": 1.25, "batch_size": 1024},
        {"ba": 2000, "sp": 16000, "ep": 100.0, "sec": 3700.0, "validation/loss": 1.0,
         "validation/entropy": 3.3},
    )  # fmt: skip
    assert run_table(read_metrics(tmp_path), Path("runs/a")) == (
        "runs/a:\n"
        "\n"
        "epoch  batches  samples     time  batch size    loss  validation/loss\n"
        "  0.5       10       80  0:01:15           8  2.5000           2.0000\n"
        "  100    2,000   16,000  1:01:40       1,024  1.2500           1.0000\n"
        "\n"
        "validation/entropy: 3.3000 throughout"
    )


def test_a_run_without_evaluations_shows_its_logs(tmp_path: Path) -> None:
    write(tmp_path, *({"ba": n, "tok": 9, "loss": 1.0, "batch_size": 8} for n in range(100)))
    lines = run_table(read_metrics(tmp_path), Path("a")).splitlines()
    assert len(lines) == MAX_ROWS + 3
    assert "tokens" in lines[2]
    assert lines[-1].split()[1] == "99"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "line"])
def test_only_plain_files_of_bounded_lines_are_read(kind: str, tmp_path: Path) -> None:
    """A pipe would never answer, and a device never end."""
    for name, read in (("metrics.jsonl", read_metrics), ("ledger.csv", read_ledger)):
        path = tmp_path / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.write_text("x" * (2 << 20))
        with pytest.raises(DataError):
            list(read(tmp_path))  # type: ignore[arg-type]
