"""The run page: what is in it is what the files of the run say."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.batching import LinearRamp
from stretto.errors import ConfigError, DataError
from stretto.planning import plan
from stretto.planning.plan import plan_record
from stretto.report import page
from stretto.report.page.series import ALL_POINTS, Series, extremes, filled
from stretto.run_folder import event_line, json_line
from stretto.schedules import Cosine
from stretto.timing import Horizon

SIZES = [8, 8, 8, 16, 16, 16, 16, 32]
HEADER = "batch,epoch,sample,token,size,tokens,micro_batches,sec,decided_size,lr\n"

FACTS = {"model": "M", "micro_batch_size": None}


def write_run(folder: Path, *, batches: int = 8, utc: float = 1e9) -> None:
    """Write the files of a run of 128 samples an epoch, 0.5 seconds a batch."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, lines, sample = [HEADER], [], 0
    events = [event_line("start", clock(0, 0), "start", attempt=1, utc=utc, facts=FACTS)]
    for batch in range(batches):
        size = SIZES[batch % 8]
        rows.append(
            f"{batch},0,{sample},0,{size},0,{size // 8},{batch / 2},{size},{0.1 / (batch + 1)!r}\n"
        )
        sample += size
        lines.append(json_line({**clock(batch + 1, sample), **measured(batch, size)}))
        if batch == 3:
            lines.append(
                json_line(
                    {
                        **clock(batch + 1, sample),
                        "validation/loss": 1.5,
                        "validation/accuracy": 0.25,
                    }
                )
            )
            events.append(
                event_line("evaluation", clock(4, sample), "evaluation", attempt=1, utc=utc + 2.5)
            )
    (folder / "ledger.csv").write_text("".join(rows))
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "events.jsonl").write_text("".join(events))


def clock(batch: int, sample: int) -> dict[str, float]:
    return {
        "ep": sample / 128,
        "ba": batch,
        "sp": sample,
        "tok": 0,
        "dur": sample / 256,
        "sec": batch / 2,
    }


def measured(batch: int, size: int) -> dict[str, float]:
    loss = float("nan") if batch == 2 else 3 / (batch + 1)
    return {
        "loss": loss, "batch_size": size, "lr": 0.1, "samples_per_second": 2.0 * size,
        "memory_peak_bytes": 3_000_000_001 + batch, "grad_norm": 1.0 + batch,
        "noise_scale": 40.0, "noise_scale_low": 30.0, "noise_scale_high": 50.0,
    }  # fmt: skip


def array(text: Any, kind: str = "<f8") -> Any:
    if isinstance(text, dict):
        return np.frombuffer(base64.b64decode(text["f64"]), "<f8")
    return np.frombuffer(base64.b64decode(text), kind)


def decoded(run: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """Return the clock of a run and the rows and values of each series."""
    times = {
        unit: None if text is None else array(text)
        for unit, text in run["clock"].items()
        if unit != "n"
    }
    return times, {
        one["name"]: (array(one["rows"], "<u4"), array(one["values"], "<f4"))
        for one in run["series"]
    }


def test_what_is_decoded_is_what_the_files_say(tmp_path: Path) -> None:
    write_run(tmp_path)
    (run,) = page.payload([page.read(tmp_path)])["runs"]
    times, series = decoded(run)
    assert (run["name"], run["kind"]) == (tmp_path.name, "run")
    rows, values = series["loss"]
    assert times["ba"][rows].tolist() == list(range(1, 9))
    assert np.isnan(values[2])
    assert values.tolist()[3:] == pytest.approx([3 / n for n in range(4, 9)])
    assert times["sec"][rows].tolist() == [n / 2 for n in range(1, 9)]
    assert times["utc"][rows].tolist() == [1e9 + n / 2 for n in range(1, 9)]
    assert times["ep"][rows].tolist() == [sp / 128 for sp in np.cumsum(SIZES)]
    rows, values = series["batch_size"]
    assert values.tolist() == [8, 16, 32, 32]
    assert times["sp"][rows].tolist() == [0, 24, 88, 120]
    assert times["dur"][rows].tolist() == pytest.approx([0, 24 / 256, 88 / 256, 120 / 256])
    assert series["memory_peak_bytes"][1].tolist() == [3_000_000_001 + n for n in range(8)]
    panels = {one["name"]: one["panel"] for one in run["series"]}
    assert panels["validation/loss"] == panels["loss"] == "loss"
    assert panels["validation/accuracy"] == "validation/accuracy"
    assert panels["samples_per_second"] == "throughput"
    noise = next(one for one in run["series"] if one["name"] == "noise_scale")
    assert set(array(noise["low"], "<f4")) == {30}
    assert set(array(noise["high"], "<f4")) == {50}
    assert times["tok"].tolist() == [0.0] * run["clock"]["n"]
    start, evaluation = run["events"]
    assert (start["kind"], times["ba"][start["row"]]) == ("start", 0)
    assert (evaluation["kind"], times["ba"][evaluation["row"]]) == ("evaluation", 4)
    assert run["facts"] == [["model", "M"]]


def test_a_resume_sets_the_time_of_day_of_what_comes_after_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(event_line("resume", clock(4, 40), "again", attempt=2, utc=2e9))
    (run,) = page.payload([page.read(tmp_path)])["runs"]
    times, series = decoded(run)
    after = times["utc"][series["loss"][0]]
    assert after.tolist() == [1e9 + n / 2 for n in range(1, 5)] + [2e9 + n / 2 for n in range(1, 5)]


def test_the_plan_is_beside_the_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    planned = plan(
        Horizon("2ep", dataset_num_samples=128), "0sp:8 24sp:16 88sp:32", schedules={"lr": Cosine()}
    )
    (tmp_path / "plan.json").write_text(json.dumps(plan_record(planned)))
    (run,) = page.payload([page.read(tmp_path)])["runs"]
    times, series = decoded(run)
    rows, values = series["planned/batch_size"]
    assert values.tolist() == [8, 16, 32, 32]
    assert times["sp"][rows].tolist()[:3] == [0, 24, 88]
    rates = series["planned/lr"]
    expected = [planned.values_at(n)["lr"] for n in range(planned.num_batches or 0)]
    assert times["ba"][rates[0]].tolist() == list(range(len(expected)))
    assert rates[1].tolist() == pytest.approx(expected)
    assert not any(np.isnan(column).any() for column in times.values())  # the plan is longer
    assert run["stages"]["rows"][1][:3] == ["24 samples", "88 samples", "16"]
    assert {one["name"]: one["planned"] for one in run["series"]}["planned/lr"]


def test_plans_alone_are_laid_over_each_other() -> None:
    records = [plan_record(plan(Horizon("40sp"), LinearRamp(2, 9, "20sp"))) for _ in range(2)]
    found = page.payload(page.plan_data("a", record) for record in records)
    assert [(one["name"], one["kind"]) for one in found["runs"]] == [
        ("a", "plan"),
        ("a (2)", "plan"),
    ]
    assert found["runs"][0]["clock"]["sec"] is None


def without(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def append(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


def one_batch(folder: Path) -> None:
    write_run(folder, batches=1)


def none_yet(folder: Path) -> None:
    write_run(folder, batches=0)


@pytest.mark.parametrize(
    "change",
    [
        without("ledger.csv"), without("metrics.jsonl"), without("events.jsonl"),
        append("ledger.csv", "8,0,12"), append("metrics.jsonl", '{"ep": 1, "ba'),
        append("events.jsonl", '{"event": "st'), append("ledger.csv", "not a row\n"),
        append("metrics.jsonl", "null\n[1]\n"), append("events.jsonl", "{}\n"),
        lambda folder: (folder / "plan.json").write_text('{"stages": [{"size": 1e400}], "end": 3}'),
        lambda folder: (folder / "plan.json").write_text("null"),
        one_batch, none_yet,
    ],
)  # fmt: skip
def test_folders_that_are_not_whole(change: Any, tmp_path: Path) -> None:
    write_run(tmp_path)
    change(tmp_path)
    text = page.build(page.payload([page.read(tmp_path)]))
    assert '"kind":"runs"' in text


def test_names_cannot_leave_their_place(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!-- {{DATA}} /*SCRIPT*/ \u2028 é"
    folder = tmp_path / "<b>&x"
    write_run(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json_line({**clock(9, 130), "loss": 1.0, hostile: 2.0}))
    with (folder / "events.jsonl").open("a") as file:
        file.write(event_line("stop", clock(9, 130), hostile, attempt=1, utc=1e9))
    text = page.build(page.payload([page.read(folder)]))
    assert "alert(1)</script>" not in text
    data = text.partition('id="data">')[2].partition("</script>")[0]
    run = json.loads(data)["runs"][0]
    assert run["name"] == "<b>&x"
    assert hostile in {one["name"] for one in run["series"]}
    assert run["events"][-1]["text"] == hostile


def test_a_folder_without_a_run_and_a_file_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none"):
        page.read(tmp_path)
    write_run(tmp_path)
    with pytest.raises(ConfigError, match="html"):
        page.write(tmp_path / "page.png", page.payload([page.read(tmp_path)]))
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(DataError, match="timeline"):
        page.memory_payload(tmp_path / "report.json")


def test_the_memory_of_a_step(tmp_path: Path) -> None:
    timeline = {
        "title": "a step", "limit_bytes": 1 << 40, "peak_bytes": 12, "times": [0, 1, 2],
        "categories": [{"name": "weights", "bytes": [1, 1 << 40, 3]}],
        "marks": [{"at": 1, "text": "backward"}], "step": 2,
        "places": [{"name": "model.py:7", "bytes": [1, 2, 3]}],
        "others": [{"step": 1, "times": [0], "categories": [], "marks": []}],
    }  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps({"timeline": timeline}))
    found = page.memory_payload(tmp_path / "report.json")
    assert found["kind"] == "memory"
    first, second = found["memory"]["steps"]
    assert (first["step"], second["step"], found["memory"]["step"]) == (1, 2, 2)
    assert array(second["categories"][0]["bytes"]).tolist() == [1, 1 << 40, 3]
    assert array(second["places"][0]["bytes"]).tolist() == [1, 2, 3]
    assert "backward" in page.build(found)


def test_reading_needs_no_torch() -> None:
    code = "import sys, stretto.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_thinning_keeps_extremes_gaps_and_ends() -> None:
    values = np.sin(np.arange(100_000) / 500) + np.random.default_rng(0).normal(size=100_000)
    values[[500, 77_777]] = [90, -90]
    values[50_000] = np.nan
    rows = extremes(values, 400)
    assert len(rows) <= 500
    assert {0, 500, 50_000, 77_777, 99_999} <= set(rows.tolist())
    assert (np.diff(rows) > 0).all()


def test_steps_are_kept_whole() -> None:
    values = np.repeat(np.arange(3_000.0), 7)
    times = np.repeat(np.arange(len(values), dtype=float)[:, None], 7, axis=1)
    thin = Series("a", "a", "a", times, values, step=True).thinned(500)
    where = np.searchsorted(thin.clock[:, 0], times[:, 0], side="right") - 1
    assert (thin.values[where] == values).all()
    assert len(thin.values) == 3_001


def test_units_that_rows_lack_go_on_at_the_pace_of_the_rest() -> None:
    rows = np.zeros((4, 7))
    rows[:, 1] = [0, 10, 20, 40]
    rows[:, 5] = [0, np.nan, 8, np.nan]
    assert filled(rows)[:, 5].tolist() == [0, 4, 8, 16]


def write_long(folder: Path, count: int, every: int) -> None:
    """Write a run of many batches, with a line of metrics every few."""
    folder.mkdir(exist_ok=True)
    sample, draw = 0, random.Random(0).random
    with (folder / "ledger.csv").open("w") as ledger, (folder / "metrics.jsonl").open("w") as lines:
        ledger.write(HEADER)
        for n in range(count):
            size = 8 * (1 + n * 60 // count)
            ledger.write(f"{n},0,{sample},0,{size},0,{size // 8},{n / 100},{size},{draw()!r}\n")
            sample += size
            if n % every == every - 1:
                line = {name: draw() * value for name, value in measured(n, size).items()}
                lines.write(json_line({**clock(n + 1, sample), **line}))


@pytest.mark.slow  # writes and reads 130 MB
def test_a_million_batches(tmp_path: Path) -> None:
    write_long(tmp_path, 1_000_000, every=10)
    found = page.payload([page.read(tmp_path)])
    text = page.build(found)
    times, series = decoded(found["runs"][0])
    rows, values = series["batch_size"]
    assert values.tolist() == [*(8.0 * n for n in range(1, 61)), 480.0]
    assert times["ba"][rows].tolist()[:3] == [0, 16_667, 33_334]
    assert len(text) < 5_000_000
    assert found["runs"][0]["clock"]["n"] <= ALL_POINTS


def test_only_lines_of_metrics_are_work_for_python(tmp_path: Path) -> None:
    def calls(name: str, count: int, every: int) -> int:
        write_long(tmp_path / name, count, every)
        page.payload([page.read(tmp_path / name)])  # what is imported and cached at first
        counted = Counter[str]()
        sys.setprofile(lambda frame, event, _: counted.update([event]))
        try:
            page.payload([page.read(tmp_path / name)])
        finally:
            sys.setprofile(None)
        return counted["call"]

    few = calls("few", 2_000, every=10)
    assert calls("batches", 40_000, every=200) < 1.05 * few
    assert calls("lines", 4_000, every=10) < 2.05 * few
