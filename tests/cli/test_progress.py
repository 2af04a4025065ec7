"""What is shown while a run goes on."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from stretto.cli.progress import LINE_SECONDS, ProgressDisplay, rate, show_metrics, show_seconds
from stretto.timing import Horizon, Timer

RECORD = {"loss": 2.34567, "batch_size": 1024, "lr": 3e-4, "samples_per_second": 1234.5}


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_trainer(max_duration: str = "2ep", *, first: bool = True) -> Any:
    horizon = Horizon(max_duration, dataset_num_samples=100)
    timer = Timer(horizon)
    return SimpleNamespace(
        horizon=horizon,
        timer=timer,
        is_first_rank=first,
        get_elapsed_duration=timer.get_elapsed_duration,
    )


def make_display(*, terminal: bool = False) -> tuple[ProgressDisplay, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    return ProgressDisplay(console, clock=clock), out, clock


def test_lines_say_how_far_it_is() -> None:
    display, out, clock = make_display()
    trainer = make_trainer()
    display.on_fit_start(trainer)
    trainer.timer.update(samples=50, seconds=5.0)
    clock.now += 10
    display.on_log(trainer, RECORD)
    assert out.getvalue() == (
        " 25%  loss 2.346  batch 1,024  lr 0.0003  1.23K sp/s  1.50ep left  0:30\n"
    )


def test_lines_do_not_come_too_often() -> None:
    display, out, clock = make_display()
    trainer = make_trainer()
    display.on_fit_start(trainer)
    for _ in range(10):
        trainer.timer.update(samples=1, seconds=1.0)
        clock.now += LINE_SECONDS / 4
        display.on_log(trainer, RECORD)
    assert len(out.getvalue().splitlines()) == 3


def test_tokens_are_the_throughput_where_they_are_counted() -> None:
    display, out, _ = make_display()
    trainer = make_trainer()
    display.on_fit_start(trainer)
    display.on_log(trainer, {**RECORD, "tokens_per_second": 41_234.0})
    assert "41.2K tok/s" in out.getvalue()


def test_a_run_by_the_clock_says_its_time_left_once() -> None:
    display, out, clock = make_display()
    trainer = make_trainer("100s")
    display.on_fit_start(trainer)
    trainer.timer.update(samples=50, seconds=25.0)
    clock.now += 25
    display.on_log(trainer, RECORD)
    assert "1:15 left" in out.getvalue()
    assert "sec left" not in out.getvalue()


def test_a_resumed_run_is_measured_from_where_it_went_on() -> None:
    display, out, clock = make_display()
    trainer = make_trainer()
    trainer.timer.update(samples=100, seconds=1.0)
    display.on_fit_start(trainer)
    trainer.timer.update(samples=50, seconds=10.0)
    clock.now += 10
    display.on_log(trainer, RECORD)
    assert "0.50ep left  0:10" in out.getvalue()


def test_evaluations_are_always_said() -> None:
    display, out, _ = make_display()
    trainer = make_trainer()
    trainer.timer.update(samples=50, seconds=5.0)
    display.on_evaluation_end(trainer, "validation", {"loss": 1.5, "accuracy": 0.25})
    assert out.getvalue() == " 25%  0.5ep  validation loss 1.5000, accuracy 0.2500\n"


def test_what_is_counted_is_shown_whole() -> None:
    display, out, clock = make_display()
    trainer = make_trainer("20_000sp")
    display.on_fit_start(trainer)
    trainer.timer.update(samples=12_345, seconds=5.0)
    clock.now += LINE_SECONDS
    display.on_evaluation_end(trainer, "validation", {"loss": 1.5})
    display.on_log(trainer, RECORD)
    trainer.timer.update(samples=7_655, seconds=5.0)
    clock.now += LINE_SECONDS
    display.on_log(trainer, RECORD)
    assert "  12,345sp  validation" in out.getvalue()
    assert "  7,655sp left" in out.getvalue()
    assert "  0sp left" in out.getvalue()


def test_a_bar_on_a_terminal() -> None:
    display, out, clock = make_display(terminal=True)
    trainer = make_trainer()
    display.on_fit_start(trainer)
    display.on_log(trainer, RECORD)
    for _ in range(4):
        trainer.timer.update(samples=25, seconds=1.0)
        clock.now += 1
        display.on_batch_end(trainer, None)
    display.on_checkpoint(trainer, Path("x"))
    display.on_fit_end(trainer)
    display.close()
    assert "50%" in out.getvalue()
    assert "1.00ep left" in out.getvalue()
    assert "\x1b[" in out.getvalue()


def test_other_ranks_are_silent() -> None:
    for terminal in (False, True):
        display, out, _ = make_display(terminal=terminal)
        trainer = make_trainer(first=False)
        display.on_fit_start(trainer)
        display.on_log(trainer, RECORD)
        display.on_batch_end(trainer, None)
        display.on_evaluation_end(trainer, "validation", {"loss": 1.5})
        display.on_fit_end(trainer)
        assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (show_seconds(59.6), "1:00"),
        (show_seconds(0), "0:00"),
        (show_seconds(86_400), "1d 0:00:00"),
        (rate(0.001234), "0.00123"),
        (rate(2.5e9), "2.5B"),
        (show_metrics({}), ""),
    ],
)
def test_formats(said: str, expected: str) -> None:
    assert said == expected
