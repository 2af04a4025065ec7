"""A run that resumes on the ranks that there are: `elastic_run.py FOLDER SECONDS EVERY`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TextIO

import torch
from tests.scale import trainer, weights

from stretto import Callback, Run, Step


class Trace(Callback):
    """Writes a line for each batch of this rank: its position, and the samples of this rank.

    Each attempt has files of its own, whose names sort by time.
    """

    file: TextIO

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, run: Run) -> None:
        attempt = run.broadcast(time.time_ns())
        self.file = (self.folder / f"trace-{attempt}-{run.rank}").open("w")

    def on_batch_end(self, run: Run, step: Step) -> None:
        ids = [i for micro in step if micro.weight for i in micro.batch["id"].tolist()]
        self.file.write(json.dumps([step.timestamp.sample, ids]) + "\n")
        self.file.flush()


class Slow(Callback):
    """Makes each batch take some time, until a file tells it to hurry."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.hurry, self.seconds = folder / "hurry", seconds

    def on_batch_end(self, run: Run, step: Step) -> None:
        time.sleep(0.02 if self.hurry.exists() else self.seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    callbacks = (Trace(folder), Slow(folder, float(sys.argv[2])))
    run = trainer(folder / "run", every=sys.argv[3], callbacks=callbacks)
    run.resume("auto")
    if run.run.is_first_rank:
        with (folder / "began").open("a") as file:
            file.write(f"{run.run.world_size} {run.timer.sample}\n")
    run.fit()
    if run.run.is_first_rank:
        torch.save(weights(run.model), folder / "weights.pt")
