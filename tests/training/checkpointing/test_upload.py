"""Copies of checkpoints in a store: whole ones alone, and never in the way of training."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import UrlStore
from stretto.checkpoint.folder import position_of
from stretto.errors import CheckpointError, TrainingError
from stretto.training import Checkpointing
from stretto.training.checkpointing.upload import fetch_newest

Make = Callable[..., Any]


class Faulty:
    """A store whose writes fail, some of them half-way, unless they are mended."""

    def __init__(self, url: Path) -> None:
        self.inner = UrlStore(str(url))
        self.url = url
        self.is_broken = True
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, name: str, folder: Path) -> None:
        self.may_write.wait()
        if self.is_broken:
            half = self.url / name
            half.mkdir(parents=True)
            shutil.copy(folder / "state.json", half)
            raise OSError("connection cut")
        self.inner.write(name, folder)

    def list(self) -> list[str]:
        return self.inner.list()

    def open(self, name: str, folder: Path) -> None:
        self.inner.open(name, folder)

    def delete(self, name: str) -> None:
        self.inner.delete(name)


def positions(store: Any) -> list[int]:
    return [position_of(name) for name in store.list()]


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in trainer.model.parameters()])


def test_a_run_goes_on_from_its_copies_on_another_machine(problem: Make, tmp_path: Path) -> None:
    url = str(tmp_path / "bucket")

    def trainer(length: str, folder: str) -> Any:
        settings = Checkpointing("6ba", keep=2, upload=url)
        return problem().trainer(folder=tmp_path / folder, max_duration=length, checkpoint=settings)

    reference = problem().trainer(max_duration="20ba")
    reference.fit()
    first = trainer("20ba", "here")
    first.fit()
    assert first.unsaved is None
    assert torch.equal(weights(first), weights(reference))
    kept = positions(UrlStore(url))
    assert len(kept) == 2
    shutil.rmtree(tmp_path / "here")
    UrlStore(url).delete(UrlStore(url).list()[-1])  # the one of the end
    second = trainer("20ba", "there")
    found = second.resume("auto")
    assert found == tmp_path / "there" / "checkpoints" / f"checkpoint-{kept[0]:012d}"
    with pytest.warns(RuntimeWarning, match="lacks"):  # the lines of metrics are not in the store
        second.fit()
    assert torch.equal(weights(second), weights(reference))
    assert not list((tmp_path / "there" / "checkpoints").glob("*.upload"))


def test_a_folder_with_checkpoints_of_its_own_is_not_given_others(
    problem: Make, tmp_path: Path
) -> None:
    url, settings = str(tmp_path / "bucket"), {"max_duration": "12ba"}
    problem().trainer(
        folder=tmp_path / "a", checkpoint=Checkpointing("6ba", upload=url), **settings
    ).fit()
    own = problem().trainer(folder=tmp_path / "b", checkpoint=Checkpointing("4ba"), **settings)
    own.fit()
    shutil.rmtree(sorted((tmp_path / "b" / "checkpoints").iterdir())[-1])
    again = problem().trainer(
        folder=tmp_path / "b", checkpoint=Checkpointing("4ba", upload=url), **settings
    )
    found = again.resume("auto")
    assert found is not None
    assert again.timer.batch == 8


def test_what_fails_is_said_and_training_goes_on(problem: Make, tmp_path: Path) -> None:
    store = Faulty(tmp_path / "bucket")
    settings = Checkpointing("6ba", upload=store)
    trainer = problem().trainer(folder=tmp_path / "a", max_duration="12ba", checkpoint=settings)
    with pytest.warns(RuntimeWarning) as said:
        trainer.fit()
    assert "connection cut" in str(said[0].message)
    assert trainer.timer.batch == 12
    assert "checkpoint" in trainer.unsaved
    assert store.list() == []
    other = problem().trainer(folder=tmp_path / "b", max_duration="12ba", checkpoint=settings)
    assert other.resume("auto") is None
    store.is_broken = False
    other.fit()
    assert other.unsaved is None
    assert len(store.list()) == len(list((tmp_path / "bucket").rglob("state.json"))) == 2


def test_the_newest_that_waits_replaces_an_older_one(problem: Make, tmp_path: Path) -> None:
    store = Faulty(tmp_path / "bucket")
    store.is_broken = False
    store.may_write.clear()
    settings = Checkpointing("2ba", keep=9, upload=store)
    trainer = problem().trainer(folder=tmp_path / "a", max_duration="12ba", checkpoint=settings)
    threading.Timer(1.0, store.may_write.set).start()
    trainer.fit()
    assert trainer.unsaved is None
    found = positions(store)
    assert found[-1] == trainer.timer.sample
    assert len(found) < 6


def test_a_damaged_copy_is_not_used(problem: Make, tmp_path: Path) -> None:
    url = tmp_path / "bucket"
    settings = Checkpointing("6ba", upload=str(url))
    problem().trainer(folder=tmp_path / "a", max_duration="12ba", checkpoint=settings).fit()
    newest = UrlStore(str(url)).list()[-1]
    file = next((url / newest).glob("model*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    with pytest.warns(RuntimeWarning, match="damaged"):
        found = fetch_newest(UrlStore(str(url)), tmp_path / "b")
    assert found is not None
    assert position_of(f"{found.name}-0") < position_of(newest)


def test_a_store_that_is_not_there_is_an_error_before_the_run(
    problem: Make, tmp_path: Path
) -> None:
    for wrong in ("nosuch://bucket/run", 7):
        with pytest.raises(TrainingError, match="copy"):
            problem().trainer(folder=tmp_path, checkpoint=Checkpointing("6ba", upload=wrong))

    class Gone(Faulty):
        def list(self) -> list[str]:
            raise ConnectionError("no route")

    with pytest.raises(CheckpointError, match="route"):
        fetch_newest(Gone(tmp_path), tmp_path)
