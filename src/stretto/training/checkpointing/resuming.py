"""Find the checkpoint from which a run resumes."""

from __future__ import annotations

import json
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

from stretto._location import local_path, read_plain, url_of
from stretto.checkpoint import UrlStore, latest_good, open_checkpoint
from stretto.checkpoint.folder import Store, candidates, chosen, newest_whole, position_of
from stretto.checkpoint.formats import is_dcp
from stretto.checkpoint.manifest import MANIFEST, DamagedError
from stretto.errors import CheckpointError, TrainingError, first_line
from stretto.runtime.ranks import Ranks
from stretto.timing import Timestamp
from stretto.training.checkpointing.fetching import (
    check_run,
    copied,
    fetch,
    newest_copy,
    reading,
    run_ids,
    writing,
)
from stretto.training.checkpointing.lock import locked, set_aside, unwritable
from stretto.training.describe import check_agreement
from stretto.training.logs.recorder import Recorder

FOLDER = "checkpoints"
"""The folder of checkpoints inside a run folder."""
NEWEST = ("auto", "latest")
"""Words for the newest checkpoint of a run."""


@contextmanager
def find_checkpoint(
    asked: str | Path, run_folder: Path | None, ranks: Ranks, store: Store | None = None
) -> Iterator[Path | None]:
    """Find the checkpoint to resume from; every rank must call it.

    The first rank searches. If the newest one is damaged, the previous one is used. Nodes that do
    not see its folder fetch their own copy from the store. The checkpoint of another address is
    there until the context ends.

    Args:
        asked: `"auto"`, `"latest"`, a checkpoint, or a run folder or address, to use its newest
            checkpoint.
        run_folder: the folder of this run.
        ranks: the processes of the run.
        store: where copies of this run's checkpoints are.

    Yields:
        The path; None if `"auto"` finds nothing.

    Raises:
        CheckpointError: there is no checkpoint; the given one is damaged, or all are; or one cannot
            be read.
        TrainingError: `"auto"` or `"latest"` without a run folder; or another live run writes to
            the folder.
    """
    url, only = url_of(asked), ""
    folder = place = None if run_folder is None else run_folder / FOLDER
    damaged: dict[str, str] = {}
    bad: list[str] = []
    on_disk: list[Path | None] = []
    with ExitStack() as resources:
        if url is not None:
            opened: list[UrlStore] = []
            ranks.together(lambda: opened.append(_opened(str(url))))
            there, only = opened[0].of_one()
            if there == store and not only and folder is not None:
                asked, url = "latest", None
            else:
                store, folder = there, _fetched_folder(run_folder, ranks, resources)

        def look() -> str:
            """Return a path and its manifest, or a manifest and the copy to fetch."""
            if url is None and not on_disk:
                resources.enter_context(_locked_if_there(run_folder))
                on_disk.append(_find(asked, run_folder, bad))
            path = on_disk[0] if on_disk else None
            if store is not None and (url is not None or str(asked) in NEWEST):
                newest = newest_copy(store, path, damaged, only)
                if newest is not None:
                    return json.dumps(["", *newest])
            path = chosen(path, place or store, [*bad, *damaged.values()])
            if path is None and str(asked) != "auto":
                raise _nothing_in(run_folder if url is None else store)
            return "" if path is None else json.dumps([str(path), _manifest(path), ""])

        while True:
            text = ranks.from_first(look, call="resume()")
            found = _Found(*json.loads(text)) if text else None
            try:
                here = found and _on_this_node(asked, found, folder, store, ranks)
                break
            except DamagedError as damage:
                assert found is not None
                damaged[found.copy] = f"{found.copy} in {store!r} is damaged: {damage}"
        if found is not None and found.copy and ranks.is_first:
            chosen(here, place or store, [*bad, *damaged.values()])
        yield here
        if url is not None:
            ranks.agree((0,))  # another rank may still read what was fetched


def _fetched_folder(run_folder: Path | None, ranks: Ranks, resources: ExitStack) -> Path:
    """Return a new folder of the same name on every node, which is there until the end."""
    is_there = run_folder is not None and run_folder.is_dir()
    near = str(run_folder.absolute()) if run_folder is not None and is_there else gettempdir()
    folder = Path(ranks.from_first(lambda: f"{near}/fetched-{secrets.token_hex(8)}"))
    with writing():
        ranks.together(lambda: folder.mkdir(mode=0o700, parents=True, exist_ok=True))
    resources.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def set_newer_aside(run_folder: Path, sample: int) -> list[Path]:
    """Rename checkpoints after position `sample`, which an earlier attempt has left.

    Returns:
        Their new paths, which end in `.old1` and so on.
    """
    folder = run_folder / FOLDER
    try:
        newer = [path for path in candidates(folder) if position_of(path.name) > sample]
        return list(map(set_aside, newer))
    except OSError as error:
        raise unwritable(folder, error) from error


def open_run(
    resources: ExitStack,
    folder: Path | None,
    recorder: Recorder,
    at: Timestamp,
    ranks: Ranks,
    *,
    store: Store | None = None,
    run_id: str | None = None,
) -> None:
    """Lock the run folder on the first rank and open the log files; all ranks fail together.

    First, check that all ranks are at the same position: one may have resumed alone.

    Raises:
        CheckpointError: another run has copies in the store, which this one would delete.
    """
    place = {unit: str(at.get(unit)) for unit in ("ep", "ba", "sp", "tok")}
    settings = {f"position in {unit}": text for unit, text in place.items()}
    check_agreement(settings, ranks, call="fit()")

    def open_folder() -> str:
        if folder is not None:
            resources.enter_context(locked(folder))
        if store is not None:
            _check_copies(store, at, run_id)
        recorder.open(at)
        if folder is not None:
            set_newer_aside(folder, at.sample)
        return ""

    ranks.from_first(open_folder)
    if not ranks.is_first:
        recorder.open(at)


def _check_copies(store: Store, at: Timestamp, run_id: str | None) -> None:
    """Refuse copies of another run; delete those after this position, of an earlier attempt.

    If a run that resumes does not reach its copies, that is a warning.
    """
    try:
        with reading(store):
            names = store.list()
            there = {*run_ids(store, names if at.batch else ()).values()} - {None, run_id}
    except CheckpointError as error:
        if not at.batch:
            raise
        _warn_of_copies(store, error)
        return
    if names and not at.batch:
        raise TrainingError.cannot(
            f"begin a run that copies checkpoints to {store!r}",
            why="another run has checkpoints there",
            instead="continue it with resume='auto', or choose another address",
        )
    check_run(store, next(iter(there), None), run_id)
    older = [name for name in names if position_of(name) <= at.sample]
    if len(older) < len(names):
        try:
            store.keep(older)
        except Exception as error:  # noqa: BLE001  a store may raise anything
            _warn_of_copies(store, error)


def _warn_of_copies(store: Store, error: Exception) -> None:
    message = f"cannot delete copies of an earlier attempt in {store!r}: {first_line(error)}; "
    message += "until this run has copied a newer checkpoint, resume='auto' may use one of those"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _locked_if_there(run_folder: Path | None) -> AbstractContextManager[None]:
    """Lock the run folder, if it exists, while checkpoints are verified and renamed."""
    try:
        has_folder = run_folder is not None and run_folder.is_dir()
    except OSError as error:
        raise unwritable(Path(str(run_folder)), error) from error
    return locked(run_folder) if run_folder is not None and has_folder else nullcontext()


def _find(asked: str | Path, run_folder: Path | None, bad: list[str]) -> Path | None:
    """Return the checkpoint on this disk; add what is wrong with newer ones to `bad`."""
    if str(asked) not in NEWEST:
        path = local_path(asked, "resume from", CheckpointError)
        path = path if path.name else path.resolve()  # '.'
        if (path / FOLDER).is_dir():
            return newest_of(path)
        if is_dcp(path):
            raise CheckpointError.cannot(
                f"resume from {path}",
                why="it is a checkpoint of torch.distributed, which can run code when it is read",
                instead="pass unpickle=True if you trust it; it gives the weights alone",
            )
        open_checkpoint(path)  # every byte of it
        return path
    if run_folder is None:
        instead = "pass folder='runs/name', or the path of a checkpoint"
        what = f"resume from {asked!r}"
        raise TrainingError.cannot(what, why="the run has no folder", instead=instead)
    return newest_whole(run_folder / FOLDER, bad)


def _opened(url: str) -> UrlStore:
    try:
        return UrlStore(url)
    except Exception as error:
        raise CheckpointError.cannot(
            f"resume from {url}",
            why=first_line(error),
            instead="write an address that fsspec knows, such as 's3://bucket/run', with s3fs "
            "installed",
        ) from error


class _Found(NamedTuple):
    """What the first rank has found: a checkpoint on its disk, or the copy to fetch."""

    path: str
    manifest: str
    copy: str


def _on_this_node(
    asked: str | Path, found: _Found, folder: Path | None, store: Store | None, ranks: Ranks
) -> Path:
    """Return the checkpoint as this rank sees it; every rank must call it.

    Ranks that do not see it fetch a copy. One is made now if there is none: uploads come late.

    Raises:
        DamagedError: the copy is damaged.
    """
    path = found.path
    sees = bool(path) and (ranks.world_size == 1 or _manifest(Path(path)) == found.manifest)
    if path and not sees and _manifest(Path(asked)) == found.manifest:
        path, sees = str(asked), True  # a node's own folder of the same checkpoint
    blind = [rank for rank, other in enumerate(ranks.gather(sees)) if not other]
    if not blind:
        return Path(path)
    if store is None or folder is None:
        raise CheckpointError.cannot(
            f"resume from {asked}",
            why=f"rank {blind[0]} does not see the folder of the checkpoint",
            instead="use a folder that all nodes see, or Checkpointing(upload=...)",
        )
    name = Path(path).name

    def copy_now() -> str:  # those that do not see it get it from there
        with reading(store):
            return copied(store, name, Path(path))

    copy = found.copy or ranks.from_first(copy_now)
    try:
        fetched = fetch(store, copy, found.manifest, folder, ranks, needs=not sees)
    except DamagedError as error:
        if found.copy:
            raise
        instead = "delete that copy, or keep checkpoints in a folder that all nodes see"
        what = f"resume from {copy} in {store!r}"
        raise CheckpointError.cannot(what, why=str(error), instead=instead) from error
    return Path(path) if sees else fetched


def _manifest(path: Path) -> str:
    try:
        return read_plain(path / MANIFEST).decode()
    except OSError:
        return ""


def newest_of(run_folder: Path) -> Path:
    """Return the newest intact checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    found = latest_good(run_folder / FOLDER)
    if found is None:
        raise _nothing_in(run_folder)
    return found


def _nothing_in(place: object) -> CheckpointError:
    what = f"resume from the latest checkpoint in {place}"
    instead = "pass 'auto' to begin anew, or name another folder"
    return CheckpointError.cannot(what, why="it has none", instead=instead)
