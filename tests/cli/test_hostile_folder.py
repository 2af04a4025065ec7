"""A run folder that somebody else made: each file in turn a link, a pipe, a device or a hole.

Every verb ends soon, with its result or our error, and what a link leads to stays as it is.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from stretto.checkpoint import describe, export_weights
from stretto.errors import StrettoError
from stretto.report import page
from stretto.report.page.watch import WatchedRuns
from stretto.training import Callback, Trainer

PRECIOUS = b"PRECIOUS\n" * 500
LIMIT_SECONDS = 30


class StopHalfWay(Callback):
    def on_batch_end(self, run: Any, step: Any) -> None:
        if run.timer.batch == 3:
            run.stop("half", is_final=False)


def trainer(folder: Path, *callbacks: Callback) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return Trainer(
        model,
        TensorDataset(torch.randn(8, 2)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        max_duration="6ba",
        batch_size=2,
        folder=folder,
        log="1ba",
        checkpoint="1ba",
        callbacks=list(callbacks),
    )


def train(folder: Path) -> None:
    again = trainer(folder)
    again.resume("auto")
    again.fit()
    assert again.timer.batch == 6


def look(folder: Path) -> None:
    shown = [page.read_or_problem(one) for one in (folder, folder.parent / "good")]
    assert shown[1].series
    page.build(page.payload(shown))
    for _ in range(2):
        watched = WatchedRuns(folder.parent)
        watched.payload()
        watched.payload()


def inspect(folder: Path) -> None:
    for path in (folder / "checkpoints").glob("checkpoint-*"):
        describe(path)


def export(folder: Path) -> None:
    for number, path in enumerate((folder / "checkpoints").glob("checkpoint-*")):
        export_weights(path, folder.parent / f"exported{number}", "hf")


def as_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def as_socket(path: Path, victim: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def as_hole(path: Path, victim: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "pipe": as_pipe,
    "link": lambda path, victim: path.symlink_to(victim),
    "hard link": lambda path, victim: path.hardlink_to(victim),
    "folder": lambda path, victim: path.mkdir(),
    "hole": as_hole,
    "device": lambda path, victim: path.symlink_to("/dev/zero"),
    "socket": as_socket,
    "empty": lambda path, victim: path.touch(),
    "gone": lambda path, victim: None,
    "binary": lambda path, victim: path.write_bytes(b"\xff\x00\n" * 99),
}
FILES = (
    *("run.lock", "metrics.jsonl", "ledger.csv", "events.jsonl", "plan.json", "run.yaml"),
    *("plan.json.tmp", "NEWEST/state.json", "NEWEST/manifest.json", "NEWEST/model.safetensors"),
    *("NEWEST", "checkpoints", "checkpoints/checkpoint-000000000010.tmp"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    trainer(folder, StopHalfWay()).fit()
    return folder


@contextmanager
def in_time(what: str) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"{what} does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", [look, inspect, export, train], ids=lambda one: one.__name__)
def test_a_hostile_file_harms_nothing(
    verb: Callable[[Path], None], kind: str, run: Path, tmp_path: Path
) -> None:
    newest = max((run / "checkpoints").iterdir()).name
    for file in FILES:
        shutil.rmtree(tmp_path)
        folder, victim = tmp_path / "runs" / "theirs", tmp_path / "precious"
        shutil.copytree(run, folder)
        shutil.copytree(run, tmp_path / "runs" / "good")
        victim.write_bytes(PRECIOUS)
        path = folder / file.replace("NEWEST", f"checkpoints/{newest}")
        remove(path)
        KINDS[kind](path, victim)
        with in_time(f"{verb.__name__} with {file} as {kind}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(StrettoError):
                verb(folder)
        assert victim.read_bytes() == PRECIOUS, file


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "wandb"])
def test_nothing_is_written_or_deleted_in_a_folder_that_is_linked(
    name: str, run: Path, tmp_path: Path
) -> None:
    folder, elsewhere = tmp_path / "theirs", tmp_path / "elsewhere"
    shutil.copytree(run, folder)
    if (folder / name).is_dir():
        (folder / name).rename(elsewhere)
    else:
        elsewhere.mkdir()
    (folder / name).symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    with pytest.raises(StrettoError, match="link"):
        train(folder)
    assert sorted(elsewhere.iterdir()) == before


def test_a_run_folder_may_itself_be_a_link(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "scratch")
    (tmp_path / "latest").symlink_to(tmp_path / "scratch")
    train(tmp_path / "latest")
