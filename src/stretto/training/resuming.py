"""Which checkpoint a run goes on from."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from stretto.checkpoint import (
    CheckpointReader,
    checkpoint_path,
    checkpoints,
    latest_good,
    open_checkpoint,
)
from stretto.errors import CheckpointError, TrainingError, cannot
from stretto.training.lock import locked, set_aside, unwritable
from stretto.training.ranks import Ranks

FOLDER = "checkpoints"
"""Where in a run folder its checkpoints lie."""


def find_checkpoint(asked: str | Path, run_folder: Path | None, ranks: Ranks) -> Path | None:
    """Return the checkpoint that is meant, the same on every rank; every rank must call it.

    The first rank looks and verifies. Of its own run a damaged one is renamed and the one before
    it is used.

    Args:
        asked: `"auto"`, `"latest"`, a checkpoint, or the folder of a run whose newest is meant.
        run_folder: the folder of this run.
        ranks: the processes of the run.

    Returns:
        None where `"auto"` finds nothing.

    Raises:
        CheckpointError: there is none, or the one that was named is damaged.
        TrainingError: the newest is asked for and the run has no folder; or another live run
            writes to the folder.
    """

    def look() -> str:
        with _held(run_folder):
            found = _find(asked, run_folder)
        return "" if found is None else str(found)

    found = ranks.from_first(look)
    return Path(found) if found else None


def open_verified(path: Path) -> CheckpointReader:
    """Open what `find_checkpoint` returned, which has been verified."""
    return open_checkpoint(path, verify=False)


def set_newer_aside(run_folder: Path, sample: int) -> list[Path]:
    """Rename the checkpoints behind position `sample`: those of a run that was gone back on.

    Returns:
        Their new paths, which end in `.old`.
    """
    moved = []
    own = checkpoint_path(run_folder / FOLDER, sample)
    for path in checkpoints(run_folder / FOLDER):
        if path.name > own.name:
            try:
                moved.append(set_aside(path))
            except OSError as error:
                raise unwritable(path.parent, error) from error
    return moved


def _held(run_folder: Path | None) -> AbstractContextManager[None]:
    """Nobody else writes there while checkpoints are looked at and, if damaged, renamed."""
    return locked(run_folder) if run_folder is not None and run_folder.is_dir() else nullcontext()


def _find(asked: str | Path, run_folder: Path | None) -> Path | None:
    if str(asked) not in ("auto", "latest"):
        path = Path(asked)
        path = path if path.name else path.resolve()  # '.'
        if (path / FOLDER).is_dir():
            is_own = run_folder is not None and path.resolve() == run_folder.resolve()
            return _newest(path) if is_own else newest_of(path)
        open_checkpoint(path)  # every byte of it
        return path
    if run_folder is None:
        raise TrainingError(
            cannot(
                f"resume from {asked!r}",
                why="the run has no folder",
                instead="pass folder='runs/name', or the path of a checkpoint",
            )
        )
    if str(asked) == "auto":
        return latest_good(run_folder / FOLDER)
    return _newest(run_folder)


def _newest(run_folder: Path) -> Path:
    found = latest_good(run_folder / FOLDER)
    if found is None:
        raise _none(run_folder, "pass 'auto' to begin anew where there is none, or name another")
    return found


def newest_of(run_folder: Path) -> Path:
    """Return the newest whole checkpoint of a run that may live: nothing is renamed there.

    Raises:
        CheckpointError: there is none.
    """
    for path in reversed(checkpoints(run_folder / FOLDER)):
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            warnings.warn(f"{error}; an older one is looked for", RuntimeWarning, stacklevel=2)
        else:
            return path
    raise _none(run_folder, "name another")


def _none(run_folder: Path, instead: str) -> CheckpointError:
    return CheckpointError(
        cannot(
            f"resume from the latest checkpoint in {run_folder}",
            why="it holds none",
            instead=f"{instead} folder",
        )
    )
