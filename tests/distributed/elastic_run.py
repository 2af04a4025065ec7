"""A run that resumes on the ranks that there are: `elastic_run.py FOLDER SECONDS EVERY`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from tests.scale import Pace, trainer, weights

from stretto import Callback, Run, Step


class Trace(Callback):
    """Writes a line for each batch of this process."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / f"trace-{os.getpid()}").open("a")

    def on_batch_end(self, run: Run, step: Step) -> None:
        self.file.write(f"{step.timestamp.sample} {run.world_size}\n")
        self.file.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    callbacks = (Trace(folder), Pace(float(sys.argv[2])))
    run = trainer(folder / "run", every=sys.argv[3], callbacks=callbacks)
    run.resume("auto")
    if run.run.is_first_rank:
        with (folder / "began").open("a") as file:
            file.write(f"{run.run.world_size} {run.timer.sample}\n")
    run.fit()
    if run.run.is_first_rank:
        torch.save(weights(run.model), folder / "weights.pt")
