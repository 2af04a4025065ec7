"""Find the checkpoint from which a run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from stretto._location import local_path, url_of
from stretto.checkpoint import UrlStore, latest_good, open_checkpoint
from stretto.checkpoint.folder import Store, candidates, chosen, newest_whole, position_of
from stretto.checkpoint.formats import is_dcp
from stretto.checkpoint.manifest import MANIFEST
from stretto.distributed.ranks import Ranks, check_agreement
from stretto.errors import CheckpointError, StrettoError, TrainingError, first_line
from stretto.timing import Timestamp
from stretto.training.checkpointing.records import locked, set_aside, unwritable
from stretto.training.checkpointing.upload import fetch_newer, fetch_same, reading
from stretto.training.logs.recorder import Recorder

FOLDER = "checkpoints"
"""The folder of checkpoints inside a run folder."""


@contextmanager
def find_checkpoint(
    asked: str | Path, run_folder: Path | None, ranks: Ranks, store: Store | None = None
) -> Iterator[Path | None]:
    """Find the checkpoint to resume from; every rank must call it.

    The first rank searches and verifies. If the newest one is damaged, the previous one is used.
    Nodes that do not see its folder fetch their own copy from the store. The checkpoint of another
    address is there until the context ends.

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
    url = url_of(asked)
    if url is not None and run_folder is not None and url == getattr(store, "url", None):
        asked, url = "latest", None
    with ExitStack() as resources:
        folder = None if run_folder is None else run_folder / FOLDER
        if url is not None:
            store = _opened(url)
            near = run_folder if run_folder is not None and run_folder.is_dir() else None
            fetched = TemporaryDirectory(prefix="fetched-", dir=near)
            folder = Path(resources.enter_context(fetched))

        def look() -> str:
            path: Path | None
            if url is not None and store is not None and folder is not None:
                if (path := _newest_of_both(None, store, folder)) is None:
                    raise _nothing_in(store)
            else:
                with _locked_if_there(run_folder):
                    path = _find(asked, run_folder, store)
            return "" if path is None else json.dumps([str(path), _manifest(path)])

        found = ranks.from_first(look, call="resume()")
        path, manifest = json.loads(found) if found else ("", "")
        if path and _manifest(Path(path)) != manifest and _manifest(Path(asked)) == manifest:
            path = str(asked)  # a node's own folder of the same checkpoint
        yield _on_this_node(Path(path), manifest, folder, store, ranks) if path else None
        if url is not None:
            ranks.agree((0,))  # another rank may still read what the first one has fetched


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
) -> None:
    """Lock the run folder on the first rank and open the log files; all ranks fail together.

    First, check that all ranks are at the same position: one may have resumed alone.

    Raises:
        TrainingError: a run that begins would delete the copies of another one in the store.
    """
    place = {unit: str(at.get(unit)) for unit in ("ep", "ba", "sp", "tok")}
    settings = {f"position in {unit}": text for unit, text in place.items()}
    check_agreement(settings, ranks, call="fit()")

    def open_folder() -> str:
        if folder is not None:
            resources.enter_context(locked(folder))
        if store is not None and not at.batch:
            _check_empty(store)
        recorder.open(at)
        if folder is not None:
            set_newer_aside(folder, at.sample)
        return ""

    ranks.from_first(open_folder)
    if not ranks.is_first:
        recorder.open(at)


def _check_empty(store: Store) -> None:
    with reading(store):
        has_copies = bool(store.list())
    if has_copies:
        raise TrainingError.cannot(
            f"begin a run that copies checkpoints to {store!r}",
            why="another run has checkpoints there",
            instead="continue it with resume='auto', or choose another address",
        )


def _locked_if_there(run_folder: Path | None) -> AbstractContextManager[None]:
    """Lock the run folder, if it exists, while checkpoints are verified and renamed."""
    try:
        has_folder = run_folder is not None and run_folder.is_dir()
    except OSError as error:
        raise unwritable(Path(str(run_folder)), error) from error
    return locked(run_folder) if run_folder is not None and has_folder else nullcontext()


def _find(asked: str | Path, run_folder: Path | None, store: Store | None) -> Path | None:
    if str(asked) not in ("auto", "latest"):
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
    folder = run_folder / FOLDER
    found = _newest_of_both(folder, store, folder)
    if found is None and str(asked) == "latest":
        raise _nothing_in(run_folder)
    return found


def _newest_of_both(own: Path | None, store: Store | None, into: Path) -> Path | None:
    """Return the newest whole checkpoint of a folder and a store; that of the store is fetched."""
    bad: list[str] = []
    found = None if own is None else newest_whole(own, bad)
    if store is not None:
        found = fetch_newer(store, into, found, bad) or found
    return chosen(found, own or store, bad)


def _opened(url: str) -> Store:
    try:
        return UrlStore(url)
    except Exception as error:
        raise CheckpointError.cannot(
            f"resume from {url}",
            why=first_line(error),
            instead="write an address that fsspec knows, such as 's3://bucket/run', with s3fs "
            "installed",
        ) from error


def _on_this_node(
    path: Path, manifest: str, folder: Path | None, store: Store | None, ranks: Ranks
) -> Path:
    """Return the checkpoint that the first rank has found, as this rank sees it.

    Every rank must call it. The first rank of a node that does not see it fetches it.
    """
    is_leader = os.environ.get("LOCAL_RANK", "0") == "0"
    for fetches in (is_leader, True):
        failure: StrettoError | None = None
        if ranks.world_size > 1 and fetches and _manifest(path) != manifest:
            try:
                if store is None or folder is None:
                    raise CheckpointError.cannot(
                        f"resume from {path}",
                        why=f"rank {ranks.rank} does not see that folder",
                        instead="use a folder that all nodes see, or Checkpointing(upload=...)",
                    )
                path = fetch_same(store, folder, path.name, manifest)
            except StrettoError as error:
                failure = error.with_traceback(None)
        for other in ranks.gather(failure):
            if other is not None:
                raise other
    return path


def _manifest(path: Path) -> str:
    try:
        return (path / MANIFEST).read_text("utf-8")
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
