"""Ray Train: checkpoints go to Ray's storage, and a restarted worker resumes from the last one.

Call `resume_from_ray(trainer)` before `fit` in the function that Ray runs on each worker.
Checkpoints that several ranks write (FSDP2) need a run folder that all workers see, on shared
storage. Else each worker may keep its folder on its own disk: Ray stores what the first rank
reports.

Tested with Ray 2.60.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, final

import ray.train

from stretto.training import Callback, Run

if TYPE_CHECKING:
    from stretto.training import Trainer

__all__ = ["ReportToRay", "resume_from_ray"]


@final
class ReportToRay(Callback):
    """Reports every complete checkpoint to Ray; all ranks do so at the same batch."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Report a checkpoint from the first rank, and the position from all."""
        saved = ray.train.Checkpoint.from_directory(path) if run.is_first_rank else None
        ray.train.report({"sample": run.timer.sample}, checkpoint=saved)


def resume_from_ray(trainer: Trainer) -> bool:
    """Resume from the checkpoint that Ray gives this worker; return whether there is one."""
    last = ray.train.get_checkpoint()
    if last is None:
        return False
    with last.as_directory() as folder:
        trainer.resume(folder)
    return True
