"""A start that is refused has changed no byte; one that is not has lost nothing of another run."""

from __future__ import annotations

import hashlib
import itertools
import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.run_folder import EVENTS, LEDGER, LOCK, METRICS, PLAN, locked
from stretto.training import Checkpointing

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, `a` and `b`, with their copies in `a-up` and `b-up`; one is shorter."""
    from tests.training.conftest import Problem

    place = tmp_path_factory.mktemp("runs")
    for name, length in (("a", "12ba"), ("b", "8ba")):
        settings = Checkpointing("4ba", keep=3, upload=str(place / f"{name}-up"))
        trainer = Problem().trainer(folder=place / name, max_duration=length, checkpoint=settings)
        trainer.fit()
    return place


def first(folder: Path) -> Path:
    """The first checkpoint of a run, without those that are put beside it."""
    found = (folder / "checkpoints").glob("checkpoint-????????????")
    return next(one for one in sorted(found) if not one.name.endswith("01"))


def last(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("checkpoint-????????????"))[-1]


def nothing(here: Path, runs: Path) -> None:
    del here, runs


def link_metrics(here: Path, runs: Path) -> None:
    (here / "run" / METRICS).unlink(missing_ok=True)
    (here / "run" / METRICS).symlink_to(runs / "b" / METRICS)


def drop_manifest(here: Path, runs: Path) -> None:
    del runs
    for one in sorted((here / "up").glob("*/manifest.json"))[-1:]:
        one.unlink()


# What is done to the folder `run` and the bucket `up`, which are those of `a` or empty.
FOLDERS: dict[str, Callable[[Path, Path], object]] = {
    "as it was": nothing,
    "of files of the user": lambda here, _: [
        (here / "run" / name).write_text("mine\n") for name in (PLAN, EVENTS, METRICS, "run.yaml")
    ],
    "with a checkpoint of another run": lambda here, runs: shutil.copytree(
        first(runs / "b"), here / "run" / "checkpoints" / "checkpoint-000000000001"
    ),
    "with a newer one of another run": lambda here, runs: shutil.copytree(
        first(runs / "b"), here / "run" / "checkpoints" / "checkpoint-000000009999"
    ),
    "with half a checkpoint": lambda here, runs: shutil.copytree(
        first(runs / "b"), here / "run" / "checkpoints" / "checkpoint-000000000032.tmp"
    ),
    "with a folder of the user": lambda here, runs: shutil.copytree(
        first(runs / "b"), here / "run" / "checkpoints" / "checkpoint-mine.tmp"
    ),
    "with a damaged newest": lambda here, _: (
        (last(here / "run") / "state.json").write_text("{")
        if (here / "run" / "checkpoints").exists()
        else None
    ),
    "with metrics that are a link": link_metrics,
}
BUCKETS: dict[str, Callable[[Path, Path], object]] = {
    "as it was": nothing,
    "with copies of another run": lambda here, runs: shutil.copytree(
        runs / "b-up", here / "up", dirs_exist_ok=True
    ),
    "with a manifest that is gone": drop_manifest,
    "with a damaged newest": lambda here, _: [
        one.write_text("{") for one in sorted((here / "up").glob("*/state.json"))[-1:]
    ],
    "with files of the user": lambda here, _: (here / "up" / "notes.txt").write_text("mine"),
}
STARTS: dict[str, Callable[[Any, Path, Path], object]] = {
    "fresh": lambda *_: None,
    "auto": lambda trainer, *_: trainer.resume("auto"),
    "back to the first": lambda trainer, here, _: trainer.resume(first(here / "run")),
    "fork": lambda trainer, _, runs: trainer.resume(first(runs / "a")),
    "locked": lambda _, here, __: here,
}
PLACES = tuple(itertools.product((True, False), repeat=2))


def files(place: Path) -> dict[str, str]:
    """The digest of each file by its path, without locks and what a link leads to."""
    return {
        path.relative_to(place).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in place.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name != LOCK
    }


def is_own(path: str, *, goes_on: bool, at: int) -> bool:
    """Return whether a run may change or delete a file: one that it wrote, of its own past."""
    if not goes_on:
        return False
    parts = path.split("/")
    if len(parts) == 2 and parts[0] == "run":
        return parts[1] in (METRICS, LEDGER, EVENTS, PLAN, "run.yaml")
    name = next((one for one in parts if one.startswith("checkpoint-0")), "")
    digits = name.split("-")[1].removesuffix(".tmp") if name else ""
    is_newer = digits.isdecimal() and int(digits) > at
    return bool(name) and not is_newer and digits not in ("000000000001",)


CASES = random.Random(7).sample(list(itertools.product(FOLDERS, BUCKETS, STARTS, PLACES)), k=40)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_that_is_not_its_own_is_lost(
    case: tuple[str, str, str, tuple[bool, bool]], problem: Make, runs: Path, tmp_path: Path
) -> None:
    folder, bucket, start, has = case
    for is_there, source, target in zip(has, ("a", "a-up"), ("run", "up"), strict=True):
        if is_there:
            shutil.copytree(runs / source, tmp_path / target)
        (tmp_path / target).mkdir(exist_ok=True)
    if "checkpoint" in folder or "half" in folder:
        (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
    FOLDERS[folder](tmp_path, runs)
    BUCKETS[bucket](tmp_path, runs)
    settings = Checkpointing("3ba", keep=1, upload=str(tmp_path / "up"))
    before, elsewhere = files(tmp_path), files(runs)
    refusal: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            trainer = problem().trainer(
                folder=tmp_path / "run", max_duration="15ba", checkpoint=settings
            )
            STARTS[start](trainer, tmp_path, runs)
            at, goes_on = trainer.timer.sample, trainer._loop.recorder.files.are_own
            with locked(tmp_path / "run") if start == "locked" else nullcontext():
                trainer.fit()
        except (StrettoError, StopIteration) as error:
            refusal = error
    after = files(tmp_path)
    assert files(runs) == elsewhere
    if refusal is not None:
        assert {path: after.get(path) for path in before} == before, refusal
        return
    kept = {digest for path, digest in after.items() if ".old" in path}
    lost = [
        path
        for path, digest in before.items()
        if after.get(path) != digest
        and digest not in kept
        and not is_own(path, goes_on=goes_on, at=at)
    ]
    assert not lost
