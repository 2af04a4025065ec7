"""Ray Train: checkpoints go to Ray's storage, and a restarted worker resumes from the last one.

Pass `ReportToRay()` to the callbacks of the trainer, and call `resume_from_ray(trainer)` before
`fit`, in the function that Ray runs on each worker. Ray stores what the first rank reports, so each
worker may have its run folder on its own disk. Checkpoints that several ranks write (FSDP2) need a
run folder that all workers see.

A run resumes from the last checkpoint that was reported. A checkpoint is written while training
continues and is reported when it is complete, so it may be one or two intervals old.

Tested with Ray 2.44 and 2.60, each with Train V1 and V2.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, final

import ray.train

from stretto.checkpoint.folder import position_of
from stretto.training import Callback, Run

if TYPE_CHECKING:
    from stretto.training import Trainer

__all__ = ["ReportToRay", "resume_from_ray"]


@final
class ReportToRay(Callback):
    """Reports every complete checkpoint to Ray; all ranks do so at the same batch."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Report a checkpoint from the first rank, and its position from all."""
        saved = ray.train.Checkpoint.from_directory(path) if run.is_first_rank else None
        ray.train.report({"sample": position_of(path.name)}, checkpoint=saved)


def resume_from_ray(trainer: Trainer) -> bool:
    """Resume from the checkpoint that Ray gives this worker; return whether there is one."""
    last = ray.train.get_checkpoint()
    if last is None:
        return False
    with last.as_directory() as folder:
        trainer.resume(folder)
    return True
