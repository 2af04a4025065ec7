"""When a checkpoint is due, where it goes, and how many stay."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import final

from stretto.checkpoint import checkpoint_path, checkpoints, keep_newest, write_checkpoint
from stretto.errors import CheckpointError, TrainingError, cannot
from stretto.timing import BoundTrigger, Horizon, Timestamp
from stretto.training.ranks import Ranks
from stretto.training.settings import Checkpointing
from stretto.training.state import RunState

FOLDER = "checkpoints"


@final
class Saver:
    """Writes checkpoints into the run folder; rank 0 alone touches the disk.

    Raises:
        TrainingError: checkpoints are wanted and there is no folder for them.
    """

    def __init__(
        self,
        settings: Checkpointing | None,
        folder: Path | None,
        *,
        horizon: Horizon,
        ranks: Ranks,
        state: RunState,
    ) -> None:
        if settings is not None and folder is None:
            raise TrainingError(
                cannot(
                    "write checkpoints",
                    why="the run has no folder",
                    instead="pass folder='runs/name', or leave checkpoint out",
                )
            )
        self._folder = folder / FOLDER if folder is not None else None
        self._settings = settings
        self._trigger: BoundTrigger | None = settings.trigger.bind(horizon) if settings else None
        self._ranks = ranks
        self._state = state
        self.saved_at: int | None = None
        """The position of the last checkpoint of this run, which needs no second one."""

    def is_due(self, before: Timestamp, after: Timestamp) -> bool:
        """Return whether one is due between two timestamps."""
        return self._trigger is not None and self._trigger(before, after)

    def save(self, timestamp: Timestamp) -> Path | None:
        """Write a checkpoint unless this position has one; every rank must call it.

        A checkpoint that cannot be written is reported and does not stop the run; the ones before
        it stay.
        """
        if self._settings is None or self._folder is None or self.saved_at == timestamp.sample:
            return None
        tensors, records = self._state.capture()
        path = checkpoint_path(self._folder, timestamp.sample)
        has_failed = False
        if self._ranks.is_first:
            try:
                write_checkpoint(path, tensors, records)
                keep_newest(self._folder, self._settings.keep)
            except CheckpointError as error:
                warnings.warn(f"{error}; training goes on", RuntimeWarning, stacklevel=2)
                has_failed = True
        # The others wait here for the first one, and hear how it went.
        if self._ranks.agree((has_failed,))[0]:
            return None
        self.saved_at = timestamp.sample
        return path

    def latest(self) -> Path | None:
        """Return the newest checkpoint of the run folder, if there is one.

        Raises:
            TrainingError: the run has no folder.
        """
        if self._folder is None:
            raise TrainingError(
                cannot(
                    "resume from the latest checkpoint",
                    why="the run has no folder",
                    instead="pass folder='runs/name', or the path of a checkpoint",
                )
            )
        found = checkpoints(self._folder)
        return found[-1] if found else None

    def owns(self, path: Path) -> bool:
        """Return whether a checkpoint lies in the run folder."""
        return self._folder is not None and path.resolve().parent == self._folder.resolve()
