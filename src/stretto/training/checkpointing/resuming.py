"""Find the checkpoint from which a run resumes."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from stretto._location import local_path, read_plain, url_of
from stretto.checkpoint import UrlStore, latest_good, open_checkpoint
from stretto.checkpoint.folder import (
    Store,
    candidates,
    chosen,
    newest_whole,
    position_of,
    unfinished,
)
from stretto.checkpoint.formats import is_dcp
from stretto.checkpoint.manifest import MANIFEST, DamagedError
from stretto.checkpoint.writing import remove
from stretto.errors import CheckpointError, TrainingError
from stretto.run_folder import locked, set_aside, unwritable
from stretto.runtime.agreement import check_agreement
from stretto.runtime.ranks import Ranks
from stretto.timing import Timestamp
from stretto.training.checkpointing.copies import (
    copied,
    fetch,
    newer_copies,
    newest_copy,
    open_store,
    reading,
    set_copies_aside,
    writing,
)
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
    with ExitStack() as resources:
        if url is not None:
            opened = open_store(url, ranks, call="resume()")
            assert isinstance(opened, UrlStore)
            there, only = opened.of_one()
            if there == store and not only and folder is not None:
                asked, url = "latest", None
            else:
                store, folder = there, _fetched_folder(run_folder, ranks, resources)

        def on_disk() -> tuple[Path, str] | None:
            resources.enter_context(_locked_if_there(run_folder))
            path = _find(asked, run_folder, bad)
            return None if path is None else (path, _manifest(path))

        own = None if url is not None else ranks.from_first(on_disk, call="resume()")
        here = own and own[0]
        while store is not None and (url is not None or str(asked) in NEWEST):
            newest = partial(newest_copy, store, own and own[0], damaged, only)
            copy = ranks.from_first(newest)
            if copy is None:
                break
            assert folder is not None, "or the newest of no folder was asked for"
            try:
                own, here = None, fetch(store, *copy, folder, ranks, needs=True)
                break
            except DamagedError as damage:
                damaged[copy[0]] = f"{copy[0]} in {store!r} is damaged: {damage}"
        if own is not None:
            here = _on_this_node(asked, own, folder, store, ranks)

        def check() -> None:
            found = chosen(here, place or store, [*bad, *damaged.values()])
            if found is None and str(asked) != "auto":
                raise _nothing_in(run_folder if url is None else store)

        ranks.from_first(check)
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


def set_others_aside(run_folder: Path, sample: int, run_id: str | None) -> None:
    """Rename checkpoints that are not of the past of a run; the names end in `.old1` and so on.

    What a kill has left of a checkpoint of the run is deleted.

    Args:
        run_folder: the folder of the run.
        sample: where the run is: those after it are of an earlier attempt.
        run_id: which run it is; None: it begins here, and all that is there is another's.
    """
    folder = run_folder / FOLDER
    try:
        for path in candidates(folder):
            is_newer = run_id is None or position_of(path.name) > sample
            if is_newer or _run_of(path) not in (None, run_id):
                set_aside(path)
        for left in unfinished(folder):
            set_aside(left) if run_id is None else remove(left)
    except OSError as error:
        raise unwritable(folder, error) from error


def _run_of(path: Path) -> str | None:
    """Return of which run a checkpoint is; None: it does not say."""
    with suppress(CheckpointError, LookupError, TypeError):
        return str(open_checkpoint(path, verify=False).records["setup"]["run"])
    return None


def open_run(
    resources: ExitStack,
    folder: Path | None,
    recorder: Recorder,
    at: Timestamp,
    ranks: Ranks,
    *,
    store: Store | None,
    run_id: str,
) -> None:
    """Lock the run folder on the first rank and open the log files; all ranks fail together.

    First, check that all ranks are at the same position: one may have resumed alone. Nothing is
    renamed, cut or deleted before everything is checked.

    Raises:
        CheckpointError: another run has copies in the store.
    """
    place = {unit: str(at.get(unit)) for unit in ("ep", "ba", "sp", "tok")}
    settings = {f"position in {unit}": text for unit, text in place.items()}
    check_agreement(settings, ranks, call="fit()")

    def open_folder() -> None:
        if folder is not None:
            resources.enter_context(locked(folder))
        newer = [] if store is None else newer_copies(store, at, run_id)
        recorder.files.check()
        if folder is not None:
            set_others_aside(folder, at.sample, run_id if recorder.files.are_own else None)
        recorder.open(at)
        if store is not None:
            set_copies_aside(store, newer)

    ranks.from_first(open_folder)
    if not ranks.is_first:
        recorder.open(at)


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


def _on_this_node(
    asked: str | Path,
    own: tuple[Path, str],
    folder: Path | None,
    store: Store | None,
    ranks: Ranks,
) -> Path:
    """Return the checkpoint of the first rank's disk as this rank sees it; every rank must call it.

    Ranks that do not see it fetch a copy. One is made now if there is none: uploads come late.
    """
    found, manifest = own
    if ranks.world_size == 1:
        return found
    # `asked` is a node's own folder of the same checkpoint, if it names one.
    path = next((each for each in (found, Path(asked)) if _manifest(each) == manifest), None)
    blind = [rank for rank, is_blind in enumerate(ranks.gather(path is None)) if is_blind]
    if not blind:
        assert path is not None
        return path
    if store is None or folder is None:
        raise CheckpointError.cannot(
            f"resume from {asked}",
            why=f"rank {blind[0]} does not see the folder of the checkpoint",
            instead="use a folder that all nodes see, or Checkpointing(upload=...)",
        )

    def copy_now() -> str:  # those that do not see it get it from there
        with reading(store):
            return copied(store, found)

    copy = ranks.from_first(copy_now)
    try:
        fetched = fetch(store, copy, manifest, folder, ranks, needs=path is None)
    except DamagedError as error:
        instead = "delete that copy, or keep checkpoints in a folder that all nodes see"
        what = f"resume from {copy} in {store!r}"
        raise CheckpointError.cannot(what, why=str(error), instead=instead) from error
    return path or fetched


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
