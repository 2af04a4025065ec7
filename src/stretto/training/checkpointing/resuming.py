"""Find the checkpoint from which a run resumes."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from stretto._location import local_path
from stretto.checkpoint import latest_good, open_checkpoint
from stretto.checkpoint.folder import Store, candidates, position_of
from stretto.distributed.ranks import Ranks, check_agreement
from stretto.errors import CheckpointError, TrainingError
from stretto.timing import Timestamp
from stretto.training.checkpointing.records import locked, set_aside, unwritable
from stretto.training.checkpointing.upload import fetch_newest
from stretto.training.logs.recorder import Recorder

FOLDER = "checkpoints"
"""The folder of checkpoints inside a run folder."""


def find_checkpoint(
    asked: str | Path, run_folder: Path | None, ranks: Ranks, store: Store | None = None
) -> Path | None:
    """Return the checkpoint to resume from, the same on every rank; every rank must call it.

    The first rank searches and verifies. If the newest one is damaged, the previous one is used.

    Args:
        asked: `"auto"`, `"latest"`, a checkpoint, or a run folder, to use its newest checkpoint.
        run_folder: the folder of this run.
        ranks: the processes of the run.
        store: where `"auto"` and `"latest"` look if the folder of this run has no checkpoint.

    Returns:
        The path; None if `"auto"` finds nothing.

    Raises:
        CheckpointError: there is no checkpoint; the given one is damaged, or all are; or one cannot
            be read.
        TrainingError: `"auto"` or `"latest"` without a run folder; or another live run writes to
            the folder.
    """

    def look() -> str:
        with _locked_if_there(run_folder):
            if store is not None and run_folder is not None and str(asked) in ("auto", "latest"):
                folder = run_folder / FOLDER
                if not any(folder.glob("checkpoint-*")):
                    fetch_newest(store, folder)
            found = _find(asked, run_folder)
        return "" if found is None else str(found)

    found = ranks.from_first(look, call="resume()")
    return Path(found) if found else None


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
    resources: ExitStack, folder: Path | None, recorder: Recorder, at: Timestamp, ranks: Ranks
) -> None:
    """Lock the run folder on the first rank and open the log files; all ranks fail together.

    First, check that all ranks are at the same position: one may have resumed alone.
    """
    place = {unit: str(at.get(unit)) for unit in ("ep", "ba", "sp", "tok")}
    settings = {f"position in {unit}": text for unit, text in place.items()}
    check_agreement(settings, ranks, call="fit()")

    def open_folder() -> str:
        if folder is not None:
            resources.enter_context(locked(folder))
        recorder.open(at)
        if folder is not None:
            set_newer_aside(folder, at.sample)
        return ""

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


def _find(asked: str | Path, run_folder: Path | None) -> Path | None:
    if str(asked) not in ("auto", "latest"):
        path = local_path(asked, "resume from", CheckpointError)
        path = path if path.name else path.resolve()  # '.'
        if (path / FOLDER).is_dir():
            return newest_of(path)
        open_checkpoint(path)  # every byte of it
        return path
    if run_folder is None:
        instead = "pass folder='runs/name', or the path of a checkpoint"
        what = f"resume from {asked!r}"
        raise TrainingError.cannot(what, why="the run has no folder", instead=instead)
    return latest_good(run_folder / FOLDER) if str(asked) == "auto" else newest_of(run_folder)


def newest_of(run_folder: Path) -> Path:
    """Return the newest intact checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    found = latest_good(run_folder / FOLDER)
    if found is None:
        what = f"resume from the latest checkpoint in {run_folder}"
        instead = "pass 'auto' to begin anew, or name another folder"
        raise CheckpointError.cannot(what, why="it has none", instead=instead)
    return found
