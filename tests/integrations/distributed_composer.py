"""Trainers of Composer on two ranks, that a test starts; rank 0 writes what all saw."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.integrations.composer_toys import Trained
from tests.integrations.toys import RANK, WORLD, flat

from stretto.errors import StrettoError


def gathered(values: Any) -> list[Any]:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, values)
    return found


def main(out: Path) -> None:
    run = Trained(save_folder=str(out / "saved"), save_interval="1ba", save_filename="{batch}.pt")
    steps = gathered(run.watch.steps)
    try:
        Trained(policy="0sp:8 1ep:1")
    except StrettoError as error:
        refused = str(error)
    result = {
        "ids": [sorted(chain(*parts)) for parts in zip(*steps, strict=True)],
        "rates": run.watch.rates,
        "weights": flat(run.model).tolist(),
        "clocks": run.clocks,
        "evaluated": run.watch.evaluated,
        "refused": refused,
    }
    if RANK == 0:
        (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
