from __future__ import annotations

import csv
import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stretto.data import DataSpec
from stretto.errors import TrainingError
from stretto.run_folder import Appender
from stretto.training import Callback, Checkpointing, Evaluation, Loading, Logging

Make = Callable[..., Any]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def samples(folder: Path) -> list[int]:
    with (folder / "ledger.csv").open() as file:
        return [int(row["sample"]) for row in csv.DictReader(file)]


class Kept:
    """Notes what is asked of it; refuses lines while it is not open."""

    def __init__(self) -> None:
        self.is_open, self.lines, self.opened = False, 0, 0

    def start(self, config: Any, sample: int) -> None:
        self.is_open, self.opened = True, self.opened + 1

    def log(self, record: Any) -> None:
        assert self.is_open
        self.lines += 1

    def close(self) -> None:
        self.is_open = False


def test_loggers_are_open_while_fit_runs_and_again_when_it_goes_on(problem: Make) -> None:
    run, logger = problem(), Kept()
    trainer = run.trainer(
        log=Logging("1ep", loggers=[logger]),
        evaluate=Evaluation(run.data),
        callbacks=[StopAt(3)],
    )
    trainer.evaluate()  # logged nowhere: nothing is open yet
    assert (logger.lines, logger.opened) == (0, 0)
    trainer.fit()
    assert (logger.is_open, logger.opened) == (False, 1)
    trainer.fit()
    assert (logger.is_open, logger.opened) == (False, 2)
    # Logged when it stopped; then a line and an evaluation at each of two epochs.
    assert logger.lines == 1 + 2 * 2


class StopAt(Callback):
    def __init__(self, batch: int, reason: str = "enough") -> None:
        self.batch, self.reason = batch, reason

    def on_batch_end(self, run: Any, step: Any) -> None:
        if run.timer.batch == self.batch:
            run.stop(self.reason, is_final=False)


class FailAt(StopAt):
    def on_batch_end(self, run: Any, step: Any) -> None:
        if run.timer.batch == self.batch:
            raise ZeroDivisionError


def test_what_was_recorded_before_an_error_is_on_the_disk(problem: Make, tmp_path: Path) -> None:
    before, logger = signal.getsignal(signal.SIGINT), Kept()
    trainer = problem().trainer(
        folder=tmp_path, log=Logging("2ba", "1h", loggers=[logger]), callbacks=[FailAt(5)]
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert samples(tmp_path) == [0, 8, 16, 24, 32]
    assert [line["ba"] for line in metrics(tmp_path)] == [2, 4]
    assert not logger.is_open
    assert signal.getsignal(signal.SIGINT) is before


def test_a_folder_belongs_to_one_run(problem: Make, tmp_path: Path) -> None:
    problem().trainer(folder=tmp_path).fit()
    with pytest.raises(TrainingError, match="already"):
        problem().trainer(folder=tmp_path).fit()
    assert len(samples(tmp_path)) == 16


def test_a_run_that_died_before_its_first_checkpoint_is_done_once_more(
    problem: Make, tmp_path: Path
) -> None:
    settings = {"folder": tmp_path, "checkpoint": Checkpointing("1ep"), "log": Logging("2ba")}
    with pytest.raises(ZeroDivisionError):
        problem().trainer(callbacks=[FailAt(5)], **settings).fit()
    again = problem().trainer(**settings)
    assert again.resume("auto") is None
    before = (tmp_path / "ledger.csv").read_text()
    again.fit()
    assert (tmp_path / "ledger.csv.old1").read_text() == before
    assert samples(tmp_path) == [step.timestamp.sample for step in again.plan.batches()]
    assert [line["ba"] for line in metrics(tmp_path)] == list(range(2, 17, 2))


def test_a_checkpoint_of_another_folder_leaves_the_files_here_alone(
    problem: Make, tmp_path: Path
) -> None:
    settings = {"checkpoint": Checkpointing("2ba", keep=9), "log": Logging("1ba")}
    problem().trainer(folder=tmp_path / "a", **settings).fit()
    problem().trainer(folder=tmp_path / "b", **settings).fit()
    early = sorted((tmp_path / "a" / "checkpoints").iterdir())[0]
    here = problem().trainer(folder=tmp_path / "b", **settings)
    here.resume(early)
    assert len(samples(tmp_path / "b")) == 16
    with pytest.raises(TrainingError, match="already"):
        here.fit()
    elsewhere = problem().trainer(folder=tmp_path / "c", **settings)
    elsewhere.resume(early)
    elsewhere.fit()
    assert samples(tmp_path / "c") == samples(tmp_path / "a")[2:]
    assert len(samples(tmp_path / "a")) == 16


def test_a_folder_that_is_a_file_is_refused(problem: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="exists"):
        problem().trainer(folder=tmp_path / "file").fit()


def cut_run(problem: Make, folder: Path) -> Any:
    """A run that was stopped behind its tenth batch, and one that will go on with it."""
    settings = {"folder": folder, "checkpoint": Checkpointing("100ep"), "log": Logging("2ba")}
    problem().trainer(callbacks=[StopAt(10)], **settings).fit()
    return problem().trainer(**settings)


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.csv"])
def test_a_file_that_is_gone_when_the_run_goes_on_is_told(
    name: str, problem: Make, tmp_path: Path
) -> None:
    again = cut_run(problem, tmp_path)
    size = (tmp_path / name).stat().st_size
    (tmp_path / name).unlink()
    again.resume()
    with pytest.warns(RuntimeWarning) as told:
        again.fit()
    (said,) = (str(one.message) for one in told)
    assert f"{tmp_path / name} lacks {size:,} of the {size:,} bytes it had" in said
    assert "batch 10" in said
    lines, rows = (5, 0) if name == "metrics.jsonl" else (0, 10)
    assert [line["ba"] for line in metrics(tmp_path)] == list(range(2, 17, 2))[lines:]
    assert samples(tmp_path) == [*range(0, 60, 8), *range(60, 120, 8)][rows:]


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.csv"])
@pytest.mark.parametrize("end", ["in a line", "between lines", "in the first line"])
def test_a_file_that_is_shorter_than_its_checkpoint_says_is_told_and_stays_readable(
    name: str, end: str, problem: Make, tmp_path: Path
) -> None:
    again = cut_run(problem, tmp_path)
    text = (tmp_path / name).read_text()
    lines = text.splitlines(keepends=True)
    left = {
        "in a line": text[:-9],
        "between lines": "".join(lines[:-2]),
        "in the first line": text[:5],
    }[end]
    (tmp_path / name).write_text(left)
    again.resume()
    with pytest.warns(RuntimeWarning, match=f"{len(text):,}"):
        again.fit()
    written = (tmp_path / name).read_text().splitlines(keepends=True)
    whole = left.splitlines(keepends=True)
    whole = whole if end == "between lines" else whole[:-1]
    assert written[: len(whole)] == whole
    assert len(metrics(tmp_path)) == 8 if name == "ledger.csv" else len(whole) + 3
    assert len(samples(tmp_path)) == 16 if name == "metrics.jsonl" else max(len(whole) - 1, 0) + 6


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.csv"])
def test_no_line_is_glued_to_half_of_one_that_another_program_left(
    name: str, problem: Make, tmp_path: Path
) -> None:
    """As long as the checkpoint says, and yet cut inside a line there."""
    again = cut_run(problem, tmp_path)
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text("x" + text)
    again.resume()
    with pytest.warns(RuntimeWarning, match=name):
        again.fit()
    written = (tmp_path / name).read_text().splitlines()
    assert written[1:-6] == text.splitlines()[1 : len(written) - 6]


def test_half_a_line_that_a_full_disk_left_is_cut_off_when_fit_is_called_again(
    problem: Make, tmp_path: Path
) -> None:
    trainer = problem().trainer(folder=tmp_path, log=Logging("2ba"), callbacks=[StopAt(4)])
    trainer.fit()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"ep": 1')
    with pytest.warns(RuntimeWarning, match="metrics"):
        trainer.fit()
    assert [line["ba"] for line in metrics(tmp_path)] == list(range(2, 17, 2))


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.lock"])
def test_what_cannot_be_written_to_is_named(name: str, problem: Make, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(TrainingError, match="directory"):
        problem().trainer(folder=tmp_path).fit()


def test_a_file_that_cannot_be_synchronized_is_named(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronize = os.fsync

    def fail(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().name == "ledger.csv":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synchronize(file)

    monkeypatch.setattr(os, "fsync", fail)
    trainer = problem().trainer(folder=tmp_path, checkpoint=Checkpointing("2ep"))
    with pytest.warns(RuntimeWarning, match="ledger"):
        trainer.fit()
    assert "ledger.csv" in str(trainer.unsaved)


def test_lines_are_kept_while_the_disk_is_full(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full, flush = [False], Appender.flush

    def full(self: Appender) -> None:
        if is_full[0] and self.waiting:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(self)

    monkeypatch.setattr(Appender, "flush", full)

    class Fill(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            is_full[0] = 3 <= run.timer.batch < 12

    trainer = problem().trainer(
        folder=tmp_path,
        checkpoint=Checkpointing("5ba"),
        log=Logging("2ba", flush="1ba"),
        callbacks=[Fill()],
    )
    with pytest.warns(RuntimeWarning) as told:
        trainer.fit()
    said = [str(one.message) for one in told]
    assert len([one for one in said if "they are kept and training continues" in one]) == 1
    assert len([one for one in said if "cannot write a checkpoint of" in one]) == 2
    assert samples(tmp_path) == [step.timestamp.sample for step in trainer.plan.batches()]
    assert [line["ba"] for line in metrics(tmp_path)] == list(range(2, 17, 2))
    assert trainer.unsaved is None


def test_lines_that_are_lost_are_told(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = Appender.flush

    def full(self: Appender) -> None:
        if b'"loss"' in self.waiting:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(self)

    monkeypatch.setattr(Appender, "flush", full)
    trainer = problem().trainer(folder=tmp_path, log=Logging("5ba"))
    with pytest.warns(RuntimeWarning, match="device"):
        trainer.fit()
    assert len(samples(tmp_path)) == 16


def test_what_was_written_in_part_is_written_to_its_end(tmp_path: Path) -> None:
    class Slow:
        """A file that takes three bytes at a time, and now and then none."""

        def __init__(self) -> None:
            self.content = b""
            self.calls = 0

        def write(self, content: bytes) -> int:
            self.calls += 1
            if self.calls % 3 == 0:
                raise OSError(errno.ENOSPC, "full")
            self.content += bytes(content[:3])
            return len(content[:3])

    lines, file = Appender(tmp_path / "lines"), Slow()
    lines._file.close()
    lines._file = file  # type: ignore[assignment]
    for text in ("one ", "two ", "three "):
        lines.add(text)
        for _ in range(9):
            with suppress(OSError):
                lines.flush()
    assert file.content == b"one two three "
    assert not lines.waiting


class Unsized:
    """Batches of five that do not say how many they are."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self._data, 5))


@pytest.mark.parametrize("is_sized", [True, False])
def test_the_throughput_is_that_of_what_was_trained_on(problem: Make, is_sized: bool) -> None:
    """Not of what `drop` passes over: 28 of 60 samples."""

    class Throughput(Kept):
        samples = tokens = 0.0

        def log(self, record: Any) -> None:
            passed = record["sec"] - self.seconds
            self.seconds = record["sec"]
            self.samples += record["samples_per_second"] * passed
            self.tokens += record["tokens_per_second"] * passed

        seconds = 0.0

    run, logger = problem(), Throughput()
    data = run.data if is_sized else Unsized(run.data)
    run.data = DataSpec(
        data,
        tokens_per_sample=3 if is_sized else None,
        get_num_tokens_in_batch=None if is_sized else lambda batch: 3 * len(batch[0]),
    )
    trainer = run.trainer(
        loading=Loading(last_batch="drop"), batch_size=32, log=Logging("1ep", loggers=[logger])
    )
    trainer.fit()
    assert (trainer.timer.batch, trainer.timer.sample) == (2, 120)
    assert logger.samples == pytest.approx(64)
    assert logger.tokens == pytest.approx(3 * 64)


def test_an_evaluation_behind_the_last_batch_is_none_of_its_time(problem: Make) -> None:
    """It begins after the clock that the last line of metrics is measured up to."""

    class Lines(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.rates: list[float] = []

        def log(self, record: Any) -> None:
            if "samples_per_second" in record:
                self.rates.append(record["samples_per_second"] * record["sec"])

    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.2)
        return torch.zeros(())

    run, lines = problem(), Lines()
    trainer = run.trainer(
        max_duration="1ep",
        batch_size=20,
        evaluate=Evaluation(run.data, "1ep", metrics={"slow": slow}),
        log=Logging("100ba", loggers=[lines]),
    )
    trainer.fit()
    assert lines.rates == [pytest.approx(60)]


def test_the_last_line_is_written_where_only_dropped_samples_were_left(
    problem: Make, tmp_path: Path
) -> None:
    """Nothing is left to train after the last but one checkpoint, and the line is not there yet."""

    def trainer(folder: Path, *callbacks: Callback) -> Any:
        run = problem()
        run.data = Unsized(run.data)
        return run.trainer(
            folder=folder,
            max_duration="1ep",
            batch_size=16,
            loading=Loading(last_batch="drop"),
            checkpoint=Checkpointing("1ba"),
            log=Logging("1ep"),
            callbacks=callbacks,
        )

    class FailAtTheEnd(Callback):
        def on_epoch_end(self, run: Any) -> None:
            raise ZeroDivisionError

    trainer(tmp_path / "whole").fit()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path / "cut", FailAtTheEnd()).fit()
    assert metrics(tmp_path / "cut") == []
    rest = trainer(tmp_path / "cut")
    rest.resume()
    rest.fit()
    (line,), (whole,) = metrics(tmp_path / "cut"), metrics(tmp_path / "whole")
    same = ("ep", "ba", "sp", "dur", "loss", "batch_size")
    assert [line[name] for name in same] == [whole[name] for name in same]


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_ledger_has_every_scheduled_value_also_where_none_moves(
    problem: Make, tmp_path: Path, factor: float
) -> None:
    problem().trainer(schedules={"lr": 1.0, "momentum": factor}, folder=tmp_path).fit()
    with (tmp_path / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["momentum"] for row in rows} == {f"{0.9 * factor:g}"}
