"""Copies of checkpoints in a store: whole ones alone, and never in the way of training."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from stretto.checkpoint import UrlStore, checkpoint_path, write_checkpoint
from stretto.checkpoint.folder import position_of
from stretto.checkpoint.writing import write_part
from stretto.data import Step
from stretto.errors import CheckpointError, TrainingError
from stretto.run import Run
from stretto.training import Callback, Checkpointing, Evaluation
from stretto.training.checkpointing import copies, saver
from stretto.training.checkpointing.copies import Uploader, newest_copy, run_ids

Make = Callable[..., Any]


class Faulty:
    """A store whose writes fail, some of them half-way, unless they are mended."""

    def __init__(self, url: Path) -> None:
        self.inner = UrlStore(str(url))
        self.url = url
        self.is_broken = True
        self.is_gone = False
        self.may_delete = True
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
        if self.is_gone:
            raise RuntimeError("no route")
        return self.inner.list()

    def open(self, name: str, file: str, target: Path) -> None:
        self.inner.open(name, file, target)

    def keep(self, names: Collection[str]) -> None:
        if not self.may_delete:
            raise PermissionError("delete")
        self.inner.keep(names)


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
    names = UrlStore(url).list()
    assert all(re.fullmatch(r"checkpoint-\d{12}-[0-9a-f]{8}", name) for name in names)
    UrlStore(url).keep(names[:1])  # not the one of the end
    second = trainer("20ba", "there")
    found = second.resume("auto")
    assert found == tmp_path / "there" / "checkpoints" / f"checkpoint-{kept[0]:012d}"
    with pytest.warns(RuntimeWarning, match="lacks"):  # the lines of metrics are not in the store
        second.fit()
    assert torch.equal(weights(second), weights(reference))
    assert not list((tmp_path / "there" / "checkpoints").glob("*.upload"))


def run(problem: Make, folder: Path, *, url: Any, to: str = "12ba", every: str = "6ba") -> Any:
    settings = Checkpointing(every, upload=url)
    return problem().trainer(folder=folder, max_duration=to, checkpoint=settings)


def drop_newest(folder: Path) -> None:
    shutil.rmtree(sorted((folder / "checkpoints").glob("checkpoint-*"))[-1])


def test_the_newest_of_both_places_is_resumed(problem: Make, tmp_path: Path) -> None:
    url, folder = str(tmp_path / "bucket"), tmp_path / "a"
    run(problem, folder, url=url).fit()
    again = run(problem, folder, url=url)
    again.resume("auto")
    assert again.timer.batch == 12
    assert not list((folder / "checkpoints").glob("*.old1"))  # its copy is equal, so not fetched
    drop_newest(folder)
    again = run(problem, folder, url=url)
    again.resume("latest")
    assert again.timer.batch == 12
    UrlStore(url).keep(UrlStore(url).list()[:1])
    again = run(problem, folder, url=url)
    again.resume("auto")
    assert again.timer.batch == 12


def test_of_one_position_the_last_written_is_resumed(problem: Make, tmp_path: Path) -> None:
    url = str(tmp_path / "bucket")
    run(problem, tmp_path / "a", url=url).fit()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    later = run(problem, tmp_path / "b", url=url, every="7ba")
    later.resume(sorted((tmp_path / "b" / "checkpoints").iterdir())[0])
    file = tmp_path / "b" / "checkpoints"
    time.sleep(1.1)  # a checkpoint keeps the second in which it was written
    later.fit()
    newest = sorted(file.glob("checkpoint-????????????"))[-1]
    again = run(problem, tmp_path / "a", url=url)
    found = again.resume("auto")
    assert found is not None
    assert (found / "manifest.json").read_text() == (newest / "manifest.json").read_text()
    assert list((tmp_path / "a" / "checkpoints").glob("*.old1"))


def test_another_run_resumes_from_an_address(problem: Make, tmp_path: Path) -> None:
    url = str(tmp_path / "bucket")
    first = run(problem, tmp_path / "a", url=tmp_path / "bucket")  # a path is an address
    first.fit()
    for folder in (None, tmp_path / "b"):
        settings = {} if folder is None else {"folder": folder, "checkpoint": "6ba"}
        other = problem().trainer(max_duration="12ba", **settings)
        other.resume(f"file://{url}")
        assert other.timer.batch == 12
        assert torch.equal(weights(other), weights(first))
    assert not list(tmp_path.glob("b/fetched-*"))
    with pytest.raises(CheckpointError, match="none"):
        problem().trainer().resume(f"file://{tmp_path}/nothing")
    with pytest.raises(CheckpointError, match="fsspec"):
        problem().trainer().resume("nosuch://bucket/run")


def test_a_new_run_does_not_delete_the_copies_of_another(problem: Make, tmp_path: Path) -> None:
    url = str(tmp_path / "bucket")
    run(problem, tmp_path / "a", url=url).fit()
    before = UrlStore(url).list()
    with pytest.raises(TrainingError, match="address"):
        run(problem, tmp_path / "b", url=url).fit()
    assert UrlStore(url).list() == before


def test_copies_of_another_run_are_neither_used_nor_deleted(problem: Make, tmp_path: Path) -> None:
    """As when an address is copied from the settings of another run."""
    url = str(tmp_path / "bucket")
    run(problem, tmp_path / "a", url=url, to="15ba").fit()
    there = UrlStore(url).list()
    run(problem, tmp_path / "b", url=None, to="6ba").fit()
    mixed = run(problem, tmp_path / "b", url=url)
    with pytest.raises(CheckpointError, match="another"):
        mixed.resume("auto")  # the newest of the other run is newer
    by_path = run(problem, tmp_path / "b", url=url)
    by_path.resume(next((tmp_path / "b" / "checkpoints").iterdir()))
    with pytest.raises(CheckpointError, match="another"):
        by_path.fit()
    assert UrlStore(url).list() == there


def test_an_attempt_that_was_given_up_is_not_resumed(problem: Make, tmp_path: Path) -> None:
    """Killed before its first checkpoint, a run that went back does not leap forward again."""

    class Die(Callback):
        def on_batch_end(self, run: Run, step: Step) -> None:
            if step.timestamp.batch == 8:
                raise KeyboardInterrupt

    url, folder = str(tmp_path / "bucket"), tmp_path / "a"
    run(problem, folder, url=url, to="18ba").fit()
    back = problem().trainer(
        folder=folder,
        max_duration="18ba",
        checkpoint=Checkpointing("6ba", upload=url),
        callbacks=[Die()],
    )
    back.resume(sorted((folder / "checkpoints").iterdir())[0])
    with pytest.raises(KeyboardInterrupt):
        back.fit()
    again = run(problem, folder, url=url, to="18ba")
    again.resume("auto")
    assert again.timer.batch == 6


def test_a_run_that_resumes_does_not_end_if_its_copies_cannot_be_reached(
    problem: Make, tmp_path: Path
) -> None:
    store = Faulty(tmp_path / "bucket")
    store.is_broken = False
    run(problem, tmp_path / "a", url=store).fit()
    again = run(problem, tmp_path / "a", url=store, to="18ba")
    again.resume("auto")
    store.is_gone = True
    with pytest.warns(RuntimeWarning) as said:
        again.fit()
    assert any("route" in str(one.message) for one in said)
    assert again.timer.batch == 18
    assert again.unsaved is not None
    store.is_gone = False
    back = run(problem, tmp_path / "a", url=store, to="18ba")
    back.resume(sorted((tmp_path / "a" / "checkpoints").iterdir())[0])
    store.may_delete = False
    with pytest.warns(RuntimeWarning) as said:
        back.fit()
    assert any("an earlier attempt stay in" in str(one.message) for one in said)


def test_what_was_not_copied_is_copied_after_a_resume(problem: Make, tmp_path: Path) -> None:
    """Also if nothing is left to train, and to another address."""
    store = Faulty(tmp_path / "bucket")
    with pytest.warns(RuntimeWarning) as said:
        run(problem, tmp_path / "a", url=store).fit()
    assert any("cut" in str(one.message) for one in said)
    for mended in (store, UrlStore(str(tmp_path / "other"))):
        store.is_broken = False
        again = run(problem, tmp_path / "a", url=mended)
        again.fit(resume="auto")
        assert again.unsaved is None
        assert positions(mended) == [again.timer.sample]
    names = store.list()
    run(problem, tmp_path / "a", url=store).fit(resume="auto")
    assert store.list() == names  # not once more


def test_one_place_is_known_however_it_is_written(problem: Make, tmp_path: Path) -> None:
    url, folder = f"file://{tmp_path}/bucket", tmp_path / "a"
    run(problem, folder, url=f"{url}/").fit()
    UrlStore(url).keep(UrlStore(url).list()[:1])
    again = run(problem, folder, url=f"{url}/")
    again.resume(url)  # both places: that of the folder is newer
    assert again.timer.batch == 12
    assert UrlStore(f"{url}/") == UrlStore(str(tmp_path / "bucket")) != UrlStore(f"{url}2")
    assert UrlStore(f"file:{tmp_path}/bucket") == UrlStore(url)  # as pathlib writes it


def test_a_copy_can_be_named(problem: Make, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    run(problem, tmp_path / "a", url=url).fit()
    first = UrlStore(url).list()[0]
    other = problem().trainer(max_duration="12ba")
    other.resume(f"{url}/{first}")
    assert other.timer.sample == position_of(first)
    with pytest.raises(CheckpointError, match="none"):
        other.resume(f"{url}/checkpoint-000000000001-00000000")


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_copies_beside_the_checkpoints(problem: Make, tmp_path: Path, inside: str) -> None:
    """Useless, but not wrong."""
    folder = tmp_path / "a"
    first = run(problem, folder, url=str(folder / inside))
    first.fit()
    again = run(problem, folder, url=str(folder / inside))
    again.fit(resume="auto")
    assert again.unsaved is None
    assert again.timer.batch == 12
    assert positions(UrlStore(str(folder / inside)))[-1] == again.timer.sample


def test_runs_in_folders_below_are_not_seen(problem: Make, tmp_path: Path) -> None:
    run(problem, tmp_path / "a", url=str(tmp_path / "bucket" / "one")).fit()
    assert UrlStore(str(tmp_path / "bucket")).list() == []
    below = UrlStore(str(tmp_path / "bucket" / "one"))
    before = below.list()
    run(problem, tmp_path / "b", url=str(tmp_path / "bucket")).fit()
    assert below.list() == before


def test_what_cannot_be_deleted_is_tried_next_time(problem: Make, tmp_path: Path) -> None:
    store = Faulty(tmp_path / "bucket")
    store.is_broken = store.may_delete = False
    settings = Checkpointing("2ba", keep=1, upload=store)
    trainer = problem().trainer(folder=tmp_path / "a", max_duration="6ba", checkpoint=settings)
    with pytest.warns(RuntimeWarning, match="delete"):
        trainer.fit()
    assert trainer.unsaved is None
    assert len(store.list()) > 1
    half = tmp_path / "bucket" / "checkpoint-000000000008-00000000"
    half.mkdir()
    (half / "state.json").touch()
    store.may_delete = True
    longer = problem().trainer(folder=tmp_path / "a", max_duration="8ba", checkpoint=settings)
    longer.fit(resume="auto")
    assert positions(store) == [longer.timer.sample]
    assert not (half / "state.json").exists()


def test_a_checkpoint_that_is_complete_when_an_error_ends_the_run_is_uploaded(
    problem: Make, tmp_path: Path
) -> None:
    class Break(Callback):
        def on_batch_end(self, run: Run, step: Step) -> None:
            if step.timestamp.batch == 2:
                raise ArithmeticError("mine")

    settings = Checkpointing("2ba", upload=str(tmp_path / "bucket"))
    trainer = problem().trainer(folder=tmp_path / "a", checkpoint=settings, callbacks=[Break()])
    with pytest.raises(ArithmeticError):
        trainer.fit()
    assert positions(UrlStore(str(tmp_path / "bucket"))) == [16]
    assert trainer.unsaved is None


def test_the_end_waits_only_so_long(problem: Make, tmp_path: Path) -> None:
    run(problem, tmp_path / "a", url=None).fit()
    path = next((tmp_path / "a" / "checkpoints").iterdir())
    store = Faulty(tmp_path / "bucket")
    store.is_broken = False
    store.may_write.clear()
    uploader = Uploader(store, 1, patience=0.05)
    uploader.submit(path, ())
    with pytest.warns(RuntimeWarning, match=path.name):
        uploader.close()
    assert uploader.held == [path]
    store.may_write.set()
    for _ in range(400):
        if uploader.missing is None:
            break
        time.sleep(0.05)
    assert len(store.list()) == 1
    assert uploader.held == []


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

    class Release(Callback):
        def on_fit_end(self, run: Run) -> None:
            store.may_write.set()  # training has waited for no copy

    settings = Checkpointing("2ba", keep=9, upload=store)
    trainer = problem().trainer(
        folder=tmp_path / "a", max_duration="12ba", checkpoint=settings, callbacks=[Release()]
    )
    trainer.fit()
    assert trainer.unsaved is None
    assert positions(store)[-1] == trainer.timer.sample
    assert len(positions(store)) == 2


def test_a_checkpoint_is_not_deleted_while_it_is_copied(problem: Make, tmp_path: Path) -> None:
    store = Faulty(tmp_path / "bucket")
    store.is_broken = False
    store.may_write.clear()
    there: list[str] = []

    class Release(Callback):
        def on_fit_end(self, run: Run) -> None:
            there.extend(path.name for path in (tmp_path / "a" / "checkpoints").iterdir())
            store.may_write.set()

    settings = Checkpointing("2ba", keep=1, upload=store)
    trainer = problem().trainer(
        folder=tmp_path / "a", max_duration="12ba", checkpoint=settings, callbacks=[Release()]
    )
    trainer.fit()
    assert min(map(position_of, there)) == 16  # the first, which was not replaced
    assert len(there) < 4
    assert positions(store) == [trainer.timer.sample]


def test_a_damaged_copy_is_not_used(problem: Make, tmp_path: Path) -> None:
    url = tmp_path / "bucket"
    settings = Checkpointing("6ba", upload=str(url))
    problem().trainer(folder=tmp_path / "a", max_duration="12ba", checkpoint=settings).fit()
    newest = UrlStore(str(url)).list()[-1]
    file = next((url / newest).glob("model*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    other = run(problem, tmp_path / "b", url=str(url))
    with pytest.warns(RuntimeWarning, match="damaged"):
        found = other.resume("auto")
    assert found is not None
    assert position_of(found.name) < position_of(newest)
    for file in url.rglob("state.json"):
        file.unlink()
    with pytest.raises(CheckpointError, match="damaged"):  # it does not begin anew
        run(problem, tmp_path / "c", url=str(url)).resume("auto")


def test_a_store_that_is_not_there_is_an_error_before_the_run(
    problem: Make, tmp_path: Path
) -> None:
    for wrong in ("nosuch://bucket/run", "", 7):
        with pytest.raises(CheckpointError, match="copy"):
            problem().trainer(folder=tmp_path, checkpoint=Checkpointing("6ba", upload=wrong))

    store = Faulty(tmp_path / "bucket")
    trainer = run(problem, tmp_path / "a", url=store)
    store.is_gone = True
    for asked in ("auto", "latest"):
        with pytest.raises(CheckpointError, match="route"):
            trainer.resume(asked)
    with pytest.raises(CheckpointError, match="route"):
        newest_copy(store, None, {})


class Erratic:
    """A store whose list lags behind, and whose writes are lost; other runs write there, too.

    `lags` and `losses` say how many looks a list is behind, and whether a write is lost, in turn.
    """

    def __init__(self, url: Path, lags: list[int], losses: list[bool]) -> None:
        self.inner = UrlStore(str(url))
        self.lags, self.losses = itertools.cycle(lags), itertools.cycle(losses)
        self.seen: list[list[str]] = [[]]

    def write(self, name: str, folder: Path) -> None:
        if not next(self.losses):
            self.inner.write(name, folder)
        self.seen.append(self.inner.list())

    def list(self) -> list[str]:
        self.seen.append(self.inner.list())
        return self.seen[max(0, len(self.seen) - 1 - next(self.lags))]

    def open(self, name: str, file: str, target: Path) -> None:
        self.inner.open(name, file, target)

    def keep(self, names: Collection[str]) -> None:
        self.inner.keep(names)


def checkpoint_of_run(folder: Path, sample: int, run_id: str) -> Path:
    path = checkpoint_path(folder, sample)
    write_checkpoint(path, {"model": {"weight": torch.ones(2)}}, {"setup": {"run": run_id}})
    return path


@given(
    lags=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    losses=st.lists(st.booleans(), min_size=1, max_size=4),
    keep=st.integers(1, 3),
    bests=st.lists(st.booleans(), min_size=4, max_size=4),
    other=st.sampled_from([None, 0, 2]),
)
@example(lags=[0], losses=[False, True], keep=1, bests=[False, True, False, False], other=None)
@examples(max_examples=25, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_a_copy_that_was_seen_is_never_lost_to_a_store_that_errs(
    lags: list[int], losses: list[bool], keep: int, bests: list[bool], other: int | None
) -> None:
    with (
        TemporaryDirectory() as name,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        patch.setattr(copies, "LIST_PAUSES", (0, 0, 0, 0, 0))
        place = Path(name)
        store = Erratic(place / "bucket", lags, losses)
        (place / "bucket").mkdir()
        uploader, saved, foreign = Uploader(store, keep), list[int](), list[str]()
        best: Path | None = None
        for number, is_best in enumerate(bests):
            if number == other:
                path = checkpoint_of_run(place / "other", 8 * (number + 2), "theirs")
                foreign = [f"{path.name}-00000000"]
                store.inner.write(foreign[0], path)
            path = checkpoint_of_run(place / "own", 8 * (number + 1), "ours")
            best = path if is_best else best
            uploader.submit(path, [] if best is None else [best])
            uploader.close()
            if path.name not in uploader._missing:  # an older one, the best, may be missing
                saved.append(8 * (number + 1))
            whole = UrlStore(str(place / "bucket")).list()
            assert not saved or saved[-1] in map(position_of, whole)
            if best is not None and position_of(best.name) in saved:
                assert position_of(best.name) in map(position_of, whole)
            assert set(foreign) <= set(whole)
            assert (uploader.missing is None) <= (path.name in [one[:-9] for one in whole])


def test_two_runs_at_one_address_delete_none_of_each_others_copies(
    problem: Make, tmp_path: Path
) -> None:
    """Both begin before the other has copied anything."""
    url = str(tmp_path / "bucket")
    second = problem().trainer(
        folder=tmp_path / "b", max_duration="12ba", checkpoint=Checkpointing("6ba", 1, upload=url)
    )

    class Meanwhile(Callback):
        def on_batch_start(self, run: Run, step: Step) -> None:
            if step.timestamp.batch == 1:
                second.fit()

    first = problem().trainer(
        folder=tmp_path / "a",
        max_duration="12ba",
        checkpoint=Checkpointing("4ba", 1, upload=url),
        callbacks=[Meanwhile()],
    )
    with pytest.warns(RuntimeWarning, match="another run"):
        first.fit()
    assert first.unsaved is None
    ids = set(run_ids(UrlStore(url), UrlStore(url).list()).values())
    assert len(ids) == 2
    for other in ("c", "d"):
        with pytest.raises(CheckpointError, match="several runs"):
            run(problem, tmp_path / other, url=url).resume("auto")


def test_a_copy_whose_records_cannot_be_read_is_not_deleted(tmp_path: Path) -> None:
    """It may be another run's: its list is ahead of its files."""
    store = UrlStore(str(tmp_path / "bucket"))
    theirs = checkpoint_of_run(tmp_path / "other", 8, "theirs")
    store.write(f"{theirs.name}-00000000", theirs)
    (tmp_path / "bucket" / f"{theirs.name}-00000000" / "state.json").rename(tmp_path / "late")
    uploader = Uploader(store, keep=1)
    uploader.submit(checkpoint_of_run(tmp_path / "own", 16, "ours"), [])
    uploader.close()
    assert uploader.missing is None
    assert f"{theirs.name}-00000000" in store.list()


def test_copies_whose_manifests_are_gone_are_no_reason_to_begin_anew(
    problem: Make, tmp_path: Path
) -> None:
    url = tmp_path / "bucket"
    run(problem, tmp_path / "a", url=str(url)).fit()
    for manifest in url.rglob("manifest.json"):
        manifest.unlink()
    with pytest.raises(CheckpointError, match="gone"):
        run(problem, tmp_path / "b", url=str(url)).resume("auto")
    for copy in url.iterdir():  # an upload that was cut: the records come last
        (copy / "state.json").unlink()
    assert run(problem, tmp_path / "c", url=str(url)).resume("auto") is None


def test_two_slashes_are_one(tmp_path: Path) -> None:
    store = UrlStore(f"memory://{tmp_path.name}//run/")
    path = checkpoint_of_run(tmp_path, 8, "ours")
    store.write(f"{path.name}-00000000", path)
    assert len(store.list()) == 1
    assert store == UrlStore(f"memory://{tmp_path.name}/run")


@pytest.mark.parametrize("size", [0, 1 << 40])
def test_a_copy_of_another_size_is_not_fetched(size: int, problem: Make, tmp_path: Path) -> None:
    url = tmp_path / "bucket"
    run(problem, tmp_path / "a", url=str(url)).fit()
    for kind in ("manifest.json", "state.json", "model.safetensors"):
        for file in url.rglob(kind):
            with file.open("r+b") as opened:
                opened.truncate(size)
        with pytest.raises(CheckpointError, match="damaged"):
            run(problem, tmp_path / f"b{kind}", url=str(url)).resume("auto")


SECRET = "SECRET/KEY+1"


@pytest.mark.parametrize("name", ["memory://ID:{}@bucket/{}", "memory://bucket/{1}?sig={0}"])
def test_no_password_of_an_address_is_kept_or_said(
    name: str, problem: Make, tmp_path: Path
) -> None:
    url = name.format(SECRET, tmp_path.name)
    trainer = run(problem, tmp_path / "a", url=url)
    trainer.fit()
    again = run(problem, tmp_path / "a", url=url, to="18ba")
    again.resume("auto")
    assert not any("upload" in line for line in again.changes)
    store = trainer._loop.saver.store
    for text in (repr(store), *(str(said_by(what)) for what in failing(problem, tmp_path, url))):
        assert SECRET not in text
        assert SECRET.split("/")[1] not in text
    for file in (*(tmp_path / "a").rglob("*"), *(tmp_path / "b").rglob("*")):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def said_by(work: Callable[[], object]) -> Exception:
    try:
        work()
    except (CheckpointError, TrainingError) as error:
        return error
    raise AssertionError


def failing(problem: Make, folder: Path, url: str) -> list[Callable[[], object]]:
    return [
        lambda: run(problem, folder / "b", url=url).fit(),  # the copies of another run
        lambda: run(problem, folder / "b", url=url.replace("memory", "nosuch")),
        lambda: problem().trainer().resume(url.replace("memory", "nosuch")),
        lambda: problem().trainer(folder=url),
    ]


def test_the_secrets_of_a_store_of_yours_are_not_in_a_checkpoint(
    problem: Make, tmp_path: Path
) -> None:
    @dataclass
    class Shelf:
        inner: UrlStore
        secret: str

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    store = Shelf(UrlStore(str(tmp_path / "bucket")), SECRET)
    run(problem, tmp_path / "a", url=store).fit()
    for file in (tmp_path / "a").rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_a_best_checkpoint_that_could_not_be_written_is_unsaved(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if later ones could, and after a resume."""
    values = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    metrics = {"value": lambda model, batch: torch.tensor(next(values))}
    evaluation = Evaluation(problem().data, "4ba", metrics=metrics, batch_size=60)
    write = write_part

    def full(path: Path, *arguments: Any, **named: Any) -> None:
        if position_of(path.name) == 60:  # after batch 8, the last of the epoch
            raise CheckpointError.cannot("write", why="the disk is full", instead="free space")
        write(path, *arguments, **named)

    monkeypatch.setattr(saver, "write_part", full)
    more: dict[str, Any] = {
        "folder": tmp_path,
        "evaluate": evaluation,
        "checkpoint": Checkpointing("4ba", monitor="validation/value"),
    }
    trainer = problem().trainer(max_duration="12ba", **more)
    with pytest.warns(RuntimeWarning, match="full"):
        trainer.fit()
    assert "best" in str(trainer.unsaved)
    again = problem().trainer(max_duration="16ba", **more)
    again.resume("auto")
    assert "best" in str(again.unsaved)
