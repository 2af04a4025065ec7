"""What a run shows on the console."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from stretto.timing import Horizon, Time, Timer, TimeUnit
from stretto.training import Evaluation, Logging
from stretto.training.logs.loggers import (
    LINE_SECONDS,
    ConsoleLogger,
    show_metrics,
    show_position,
    show_rate,
    show_seconds,
)

MEASURED = {"loss": 2.34567, "batch_size": 1024, "lr": 3e-4, "samples_per_second": 1234.5}


class Shown:
    """A console logger of a run of 100 samples an epoch, its clock, and what it has printed."""

    def __init__(self, max_duration: str = "2ep", *, terminal: bool = False, at: int = 0) -> None:
        self.now = 100.0
        self._out = io.StringIO()
        console = Console(file=self._out, force_terminal=terminal, width=120, color_system=None)
        horizon = Horizon(max_duration, dataset_num_samples=100)
        self._timer = Timer(horizon)
        self.logger = ConsoleLogger(Time(max_duration), console=console, clock=lambda: self.now)
        if at:
            self._timer.update(at, seconds=1.0)
        self.logger.start({}, at)
        self.logger.show(self.clock)

    @property
    def clock(self) -> dict[str, float]:
        at = self._timer.timestamp
        return {
            "ep": at.sample / 100,
            "ba": at.batch,
            "sp": at.sample,
            "tok": at.token,
            "dur": self._timer.get_elapsed_duration(),
            "sec": at.run_nanoseconds / 1e9,
        }

    @property
    def text(self) -> str:
        return self._out.getvalue()

    def train(self, samples: int, seconds: float) -> None:
        self._timer.update(samples, seconds=seconds)
        self.now += seconds

    def log(self, **measured: float) -> None:
        self.logger.log({**self.clock, **(measured or MEASURED)})


def test_lines_say_how_far_it_is() -> None:
    shown = Shown()
    shown.train(50, 10.0)
    shown.log()
    assert shown.text == " 25%  loss 2.346  batch 1,024  lr 0.0003  1.23K sp/s  1.50ep left  0:30\n"


def test_lines_do_not_come_too_often() -> None:
    shown = Shown()
    for _ in range(10):
        shown.train(1, LINE_SECONDS / 4)
        shown.log()
    assert len(shown.text.splitlines()) == 3


def test_tokens_are_the_throughput_if_they_are_counted() -> None:
    shown = Shown()
    shown.log(**MEASURED, tokens_per_second=41_234.0)
    assert "41.2K tok/s" in shown.text


def test_a_run_by_the_clock_says_its_time_left_once() -> None:
    shown = Shown("100s")
    shown.train(50, 25.0)
    shown.log()
    assert "1:15 left" in shown.text
    assert "sec left" not in shown.text


def test_the_pace_of_a_resumed_run_is_measured_from_where_it_went_on() -> None:
    shown = Shown(at=100)
    shown.train(50, 10.0)
    shown.log()
    assert "0.50ep left  0:10" in shown.text


def test_every_evaluation_is_printed() -> None:
    shown = Shown()
    shown.train(50, 5.0)
    shown.logger.log({**shown.clock, "validation/loss": 1.5, "validation/accuracy": 0.25})
    assert shown.text == " 25%  0.5ep  validation loss 1.5000, accuracy 0.2500\n"


def test_what_is_counted_is_shown_whole() -> None:
    shown = Shown("20_000sp")
    shown.train(12_345, LINE_SECONDS)
    shown.logger.log({**shown.clock, "validation/loss": 1.5})
    shown.log()
    shown.train(7_655, LINE_SECONDS)
    shown.log()
    assert "  12,345sp  validation" in shown.text
    assert "  7,655sp left" in shown.text
    assert "  0sp left" in shown.text


def test_a_bar_on_a_terminal_moves_between_two_lines_of_metrics() -> None:
    shown = Shown(terminal=True)
    shown.log()
    moved = 0
    for _ in range(40):
        shown.train(5, 0.125)
        if shown.logger.is_due:
            moved += 1
            shown.logger.show(shown.clock)
    shown.logger.close()
    shown.logger.close()
    assert moved == 20
    assert "50%" in shown.text
    assert "1.00ep left" in shown.text
    assert "loss 2.346" in shown.text
    assert "\x1b[" in shown.text
    assert not shown.logger.is_due


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fit_into(
    out: io.StringIO,
    problem: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> str:
    """Return what a run prints if `out` is standard output."""
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    run = problem()
    run.trainer(evaluate=Evaluation(run.data), log=Logging("4ba", **settings)).fit()
    return out.getvalue()


def test_a_trainer_shows_its_progress_on_a_terminal(
    problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = fit_into(Terminal(), problem, monkeypatch)
    assert "\x1b[" in said
    assert "100%  2ep  validation loss" in said


@pytest.mark.parametrize(
    ("out", "console"), [(io.StringIO, None), (io.StringIO, False), (Terminal, False)]
)
def test_a_trainer_is_quiet_in_a_pipe_or_if_the_console_is_off(
    out: type[io.StringIO],
    console: bool | None,
    problem: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fit_into(out(), problem, monkeypatch, console=console) == ""


def test_a_trainer_prints_lines_into_a_pipe_if_the_console_is_on(
    problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = fit_into(io.StringIO(), problem, monkeypatch, console=True)
    assert "\x1b[" not in said
    assert " 50%  1ep  validation loss" in said
    assert "loss" in said.splitlines()[0]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (show_seconds(59.6), "1:00"),
        (show_seconds(0), "0:00"),
        (show_seconds(86_400), "1d 0:00:00"),
        (show_rate(0.001234), "0.00123"),
        (show_rate(2.5e9), "2.5B"),
        (show_metrics({}), ""),
        (show_position(1.5, TimeUnit.EPOCH), "1.5ep"),
    ],
)
def test_formats(said: str, expected: str) -> None:
    assert said == expected
