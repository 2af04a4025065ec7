"""Checkpoints of a run on an accelerator: through pinned memory, and after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.numbered import BATCH_SIZE, NUM_SAMPLES, NumberedRun

from stretto.run_folder import read_ledger
from stretto.training import Callback, Checkpointing

pytestmark = pytest.mark.phantom

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training.numbered import NumberedRun
from stretto.run_folder import read_ledger
from stretto.training import Callback, Checkpointing, Stepping

class Kill(Callback):
    def on_checkpoint(self, run, path):
        self.path = path

    def on_batch_end(self, run, step):
        if getattr(self, "path", None) is not None and run.timer.batch >= 5:
            print(self.path.name, run.timer.batch, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

run = NumberedRun(
    folder=Path(sys.argv[1]),
    checkpoint=Checkpointing(every="2ba"),
    device="cuda", precision=sys.argv[2],
    max_duration="1000ba",
    callbacks=[Kill()],
)
run.trainer.fit()
"""


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), torch.cuda.get_rng_state().tolist()]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_killed_run_goes_on_where_its_checkpoint_is(tmp_path: Path, precision: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), precision],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    settings: dict[str, Any] = {
        "device": "cuda",
        "precision": precision,
        "max_duration": "12ba",
    }
    whole = NumberedRun(**settings)
    whole.trainer.fit()
    expected = generators()
    again = NumberedRun(folder=tmp_path, checkpoint=Checkpointing(every="2ba"), **settings)
    found = again.trainer.resume()
    assert found is not None
    sample = int(found.name.rpartition("-")[2])
    assert sample >= int(done.stdout.split()[0].rpartition("-")[2])
    assert again.trainer.timer.sample == sample
    again.trainer.fit()
    assert again.samples == whole.samples[sample:]
    assert again.trainer.timer.sample == 12 * BATCH_SIZE
    assert again.trainer.timer.epoch == 12 * BATCH_SIZE // NUM_SAMPLES
    assert generators() == expected
    rows = [row.counts for row in read_ledger(tmp_path)]
    assert [row["batch"] for row in rows] == list(range(12))


class Watch(Callback):
    """Keeps how much pinned memory torch holds."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_batch_end(self, run: Any, step: Any) -> None:
        self.bytes.append(pinned_bytes())


def pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


@pytest.mark.skipif(
    not hasattr(torch.accelerator, "empty_host_cache"), reason="needs a later torch"
)
def test_pinned_memory_is_given_back_when_the_run_ends(tmp_path: Path) -> None:
    """Torch would keep it for later, and nothing else could have it."""
    watch = Watch()
    run = NumberedRun(folder=tmp_path, checkpoint=Checkpointing(every="2ba"), callbacks=[watch])
    run.trainer.fit()
    # The first batch is before the first checkpoint; numbers are read through a few bytes.
    assert watch.bytes[-1] > watch.bytes[0] + 8 * 8 * 4
    assert pinned_bytes() <= watch.bytes[0]
