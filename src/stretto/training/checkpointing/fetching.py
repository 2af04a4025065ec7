"""Fetch checkpoints from a store. Ranks that see one folder share the work."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stretto._location import MOST_BYTES, NotPlainError, read_plain
from stretto.checkpoint import open_checkpoint
from stretto.checkpoint.folder import Store, UrlStore, position_of
from stretto.checkpoint.manifest import (
    MANIFEST,
    RECORDS,
    DamagedError,
    Entry,
    check_member,
    damage,
    parse_manifest,
    parse_object,
)
from stretto.checkpoint.reading import open_or_damage
from stretto.errors import CheckpointError, StrettoError, first_line
from stretto.runtime.ranks import Ranks
from stretto.training.checkpointing.lock import set_aside

PAUSES = (0.1, 0.4, 1.0, 2.0, 4.0)
"""Seconds between looks for a copy that was written."""
UNFINISHED = ".upload"
"""Ends the names of folders that are copied to or from a store."""


def newest_copy(
    store: Store, than: Path | None, damaged: dict[str, str], only: str = ""
) -> tuple[str, str] | None:
    """Return the manifest and the name of the newest copy, if it is newer than a checkpoint.

    Of one position, the one that was written last is the newer one.

    Args:
        store: where copies are.
        than: the newest whole checkpoint on this disk.
        damaged: what is wrong with damaged copies, by name; those are left out.
        only: the name of the copy that is asked for; by default any.

    Raises:
        CheckpointError: the store cannot be read, has the checkpoints of another run or of several,
            or has lost their manifests.
    """
    with reading(store):
        names = store.list()
        if than is None and not only:
            _check_one_run(store, names)
        for name in reversed(names):
            if name in damaged or only not in ("", name):
                continue
            try:
                if than is not None and not _is_newer(store, name, than):
                    return None
                manifest = text_of(store, name, MANIFEST)
                parse_manifest(manifest, name)
            except DamagedError as error:
                damaged[name] = f"{name} in {store!r} is damaged: {error}"
            else:
                return manifest, name
    return None


def _check_one_run(store: Store, names: Sequence[str]) -> None:
    """Refuse to choose between runs, or to begin anew where there were copies."""
    lost = store.without_manifest() if isinstance(store, UrlStore) and not names else []
    if lost:
        raise CheckpointError.cannot(
            f"resume from {store!r}",
            why=f"the {MANIFEST} of {', '.join(lost)} is gone",
            instead="put it back, or delete what is left of them to begin anew",
        )
    if len(names) > 1 and len({*run_ids(store, names).values()} - {None}) > 1:
        raise CheckpointError.cannot(
            f"resume from {store!r}",
            why="several runs have checkpoints there",
            instead=f"name one, such as {names[-1]}, by its address, and give each run its own",
        )


def run_ids(store: Store, names: Iterable[str]) -> dict[str, str | None]:
    """Return of which run each copy is that can be read; None: an older version wrote it."""
    found: dict[str, str | None] = {}
    for name in names:
        with suppress(DamagedError):
            found[name] = origin(store, name)[0]
    return found


def copied(store: Store, name: str, folder: Path) -> str:
    """Return the name of the copy of a checkpoint; if there is none, copy it.

    It is a copy once it can be read back and is in the list.

    Args:
        store: where copies are.
        name: the name of the checkpoint.
        folder: where its files are.

    Raises:
        Exception: what the store raises.
    """
    manifest = read_plain(folder / MANIFEST).decode()
    for copy in store.list():
        if checkpoint_of(copy) == name and text_of(store, copy, MANIFEST) == manifest:
            return copy
    copy = f"{name}-{secrets.token_hex(4)}"
    store.write(copy, folder)
    for pause in PAUSES:  # some lists lag behind
        if copy in store.list() and all(_is_there(store, copy, one) for one in folder.iterdir()):
            return copy
        time.sleep(pause)
    raise OSError(f"{copy} is not there after it was written")


def _is_there(store: Store, copy: str, file: Path) -> bool:
    """Return whether a file of a copy can be seen; of a large one, its size."""
    if file.name in (MANIFEST, RECORDS):
        return text_of(store, copy, file.name).encode() == file.read_bytes()
    return not isinstance(store, UrlStore) or store.size_of(copy, file.name) == file.stat().st_size


def fetch(
    store: Store, copy: str, manifest: str, folder: Path, ranks: Ranks, *, needs: bool
) -> Path:
    """Copy a checkpoint of a store into a folder of each node; every rank must call it.

    Each file is fetched once for each folder: ranks that see the same one share the files out, and
    verify what they fetch. The manifest is written last, and then the folder is renamed.

    Args:
        store: where copies are.
        copy: the name of one.
        manifest: its manifest.
        folder: a folder of checkpoints.
        ranks: the processes of the run.
        needs: whether this rank does not see the checkpoint yet.

    Returns:
        Its path.

    Raises:
        DamagedError: it is damaged, on every rank.
        CheckpointError: the store cannot be read.
    """
    attempt = ranks.gather(secrets.token_hex(4))[0]  # killed ones have left files
    path, unfinished = folder / checkpoint_of(copy), folder / f"{copy}-{attempt}{UNFINISHED}"
    files = parse_manifest(manifest, copy)

    def meet() -> None:
        if needs:
            unfinished.mkdir(parents=True, exist_ok=True)
            (unfinished / f"rank{ranks.rank}").touch()

    def finish() -> None:
        if members[:1] == [ranks.rank]:
            for mark in unfinished.glob("rank*"):
                mark.unlink()
            (unfinished / MANIFEST).write_text(manifest, "utf-8")
            open_or_damage(unfinished, verify=False)
            if path.exists():
                set_aside(path)
            unfinished.rename(path)

    try:
        with writing():
            ranks.together(meet)
            seen = ranks.together(lambda: sorted(mark.name for mark in unfinished.glob("rank*")))
            own = seen[ranks.rank]
            members = [rank for rank, marks in enumerate(seen) if own and marks == own]
            own_files = list(files)[members.index(ranks.rank) :: len(members)] if members else []
            share = {name: files[name] for name in own_files}
            ranks.together(lambda: _get(store, copy, share, unfinished))
            ranks.together(finish)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


@contextmanager
def writing() -> Iterator[None]:
    """Translate errors of this disk.

    Raises:
        CheckpointError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError.cannot(
            "fetch a checkpoint",
            why=first_line(error),
            instead="free space or choose another folder",
        ) from error


def _get(store: Store, copy: str, files: dict[str, Entry], folder: Path) -> None:
    """Fetch files and verify them."""
    for file, entry in files.items():
        for is_last in (False, True):  # a transfer may have been cut
            try:
                with reading(store):
                    try:
                        _check_size(store, copy, file, entry.size, entry.size)
                        store.open(copy, file, folder / file)
                    except FileNotFoundError as error:
                        raise DamagedError(f"{file} is missing") from error
                check_member(folder, file, entry)
                break
            except DamagedError:
                if is_last:
                    raise


def _is_newer(store: Store, name: str, than: Path) -> bool:
    """Return whether a copy is newer than a checkpoint of this disk; equal ones are not."""
    there, here = position_of(name), position_of(than.name)
    if there < here or (
        there == here and text_of(store, name, MANIFEST) == read_plain(than / MANIFEST).decode()
    ):
        return False
    own = open_checkpoint(than, verify=False)
    run_id, created = origin(store, name)
    check_run(store, run_id, run_of(own.records))
    return there > here or created > str(own.created)


def origin(store: Store, name: str) -> tuple[str | None, str]:
    """Return of which run a copy is, and when the checkpoint was written.

    Raises:
        DamagedError: it is damaged.
    """
    document = parse_object(text_of(store, name, RECORDS), RECORDS)
    with damage(RECORDS):
        return run_of(document["records"]), str(document["created"])


def run_of(records: Mapping[str, Any]) -> str | None:
    """Return of which run a checkpoint is; None: an older version of stretto wrote it.

    >>> run_of({"setup": {"run": "0a1b2c3d"}}), run_of({})
    ('0a1b2c3d', None)
    """
    setup = records.get("setup")
    return setup.get("run") if isinstance(setup, Mapping) else None


def check_run(store: Store, there: str | None, own: str | None) -> None:
    """Refuse the copies of another run. Of those of older versions, it is not known.

    Raises:
        CheckpointError: they are of another run.
    """
    if None not in (there, own) and there != own:
        raise CheckpointError.cannot(
            f"continue a run that copies checkpoints to {store!r}",
            why="another run has checkpoints there",
            instead="choose another address for upload, or resume from that address in a new "
            "folder",
        )


def text_of(store: Store, name: str, file: str) -> str:
    """Return a small file of a copy; empty text if it is missing or is no small file."""
    with TemporaryDirectory(prefix="stretto-") as folder:
        target = Path(folder) / file
        try:
            _check_size(store, name, file, 1, MOST_BYTES)
            store.open(name, file, target)
            return read_plain(target).decode(errors="replace")
        except (FileNotFoundError, NotPlainError, DamagedError):
            return ""


def _check_size(store: Store, copy: str, file: str, least: int, most: int) -> None:
    """Check the size of a file before it is fetched, if the store is ours.

    Raises:
        DamagedError: the file has another size.
    """
    if isinstance(store, UrlStore) and not least <= store.size_of(copy, file) <= most:
        raise DamagedError(f"{file} is not as long as it was written")


@contextmanager
def reading(store: Store) -> Iterator[None]:
    """Turn what a store raises into a `CheckpointError`."""
    try:
        yield
    except (StrettoError, DamagedError):
        raise
    except Exception as error:
        raise CheckpointError.cannot(
            f"resume from {store!r}",
            why=first_line(error),
            instead="check the address and the rights, or copy a checkpoint into the run folder",
        ) from error


def checkpoint_of(copy: str) -> str:
    """Return the name of the checkpoint of a copy.

    >>> checkpoint_of("checkpoint-000000000640-0a1b2c3d")
    'checkpoint-000000000640'
    """
    return copy.rpartition("-")[0]
