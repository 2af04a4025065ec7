"""A run that uploads: s3_run.py URL FOLDER WEIGHTS.pt fresh|resume."""

from __future__ import annotations

import json
import sys
import warnings

import torch
from tests.scale import Pace, trainer, weights

from stretto.errors import CheckpointError

ATTEMPTS = 6


def main(url: str, folder: str, out: str, how: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run = None
    for attempt in range(ATTEMPTS):
        try:
            run = run or trainer(folder, upload=url, callbacks=(Pace(0.05),))
            if how == "resume":
                run.resume("auto")
            break
        except (CheckpointError, RuntimeError):
            if attempt == ATTEMPTS - 1:
                raise
    assert run is not None
    print(json.dumps({"began": run.timer.sample}), flush=True)
    run.fit()
    torch.save(weights(run.model), out)
    print(json.dumps({"unsaved": run.unsaved}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
