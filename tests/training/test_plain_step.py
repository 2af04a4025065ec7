"""What a plain training step costs, in functions of ours; its time is measured in `bench/`."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import stretto
from stretto.training import Logging, Trainer

SOURCE = str(Path(stretto.__file__).parent)
FIRST, LAST = 30, 70
MOST_FUNCTIONS, MOST_FILES = 20, 11


def test_a_plain_step_enters_few_functions_of_few_files(tmp_path: Path) -> None:
    """One process, a constant size, no options; a run folder, whose ledger gets each step."""
    # The second of a pair of normal numbers that another test has left would be read at each step.
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    calls: Counter[tuple[str, str]] = Counter()
    steps = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        # Own loops of other tests that are not collected yet; a trainer has none.
        is_other = frame.f_code.co_filename.endswith("mistakes.py")
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE) and not is_other:
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == FIRST:
            sys.setprofile(count)
        elif steps == LAST:
            sys.setprofile(None)
        rows, targets = batch
        return nn.functional.mse_loss(model(rows), targets)

    model = nn.Linear(4, 1)
    trainer = Trainer(
        model,
        TensorDataset(torch.randn(400, 4), torch.randn(400, 1)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        max_duration="1ep",
        batch_size=4,
        log=Logging("90ba", console=False),
        folder=tmp_path / "run",
    )
    try:
        trainer.fit()
    finally:
        sys.setprofile(None)
    each = {place: number for place, number in calls.items() if number >= LAST - FIRST}
    assert len(each) <= MOST_FUNCTIONS, sorted(each)
    assert len({file for file, _ in each}) <= MOST_FILES, sorted(each)
    assert (tmp_path / "run" / "ledger.csv").read_text().count("\n") == 101
