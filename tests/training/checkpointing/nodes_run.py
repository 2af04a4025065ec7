"""A run whose ranks have folders of their own: `torchrun nodes_run.py OUT STOP|empty`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tests.scale import trainer, weights

from stretto import Callback, Run, Step
from stretto.errors import CheckpointError


class Stop(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_batch_end(self, run: Run, step: Step) -> None:
        if 0 < self.at < step.timestamp.sample:
            run.stop("as planned", is_final=False)


def resumed(out: Path) -> tuple[str, int]:
    """Why the run does not resume without copies, and where with an empty bucket."""
    try:
        trainer("run").resume("auto")
    except CheckpointError as error:
        run = trainer("run", upload=str(out / "empty"))
        run.resume("auto")
        return str(error), run.timer.sample
    return "", 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, rank = Path(sys.argv[1]), os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"  # each rank is a node
    node = out / f"node{rank}"
    node.mkdir(exist_ok=True)
    os.chdir(node)  # the folder has the same name on each node
    if sys.argv[2] == "empty":
        (out / f"resumed{rank}").write_text(json.dumps(resumed(out)))
        sys.exit()
    run = trainer("run", upload=str(out / "bucket"), callbacks=(Stop(int(sys.argv[2])),))
    run.resume("auto")
    (out / f"began{rank}").write_text(str(run.timer.sample))
    run.fit()
    torch.save(weights(run.model), out / f"weights{rank}.pt")
