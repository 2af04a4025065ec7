"""The adapter of torchtitan, against its real trainer, through two changes of the degree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan.trainer", reason="needs torchtitan 0.3: make test-adapters")

import torch
from tests.integrations.distributed_torchtitan import (
    MICRO,
    RATE,
    SCHEDULES,
    SEED,
    SIZES,
    Rows,
    configuration,
)

import stretto
from stretto.errors import StrettoError
from stretto.integrations.torchtitan import StrettoDataLoader

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPT = Path(__file__).with_name("distributed_torchtitan.py")


def launch(out: Path, ranks: int, stop_at: int) -> str:
    how = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint=localhost:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *how, str(SCRIPT)]
    done = subprocess.run(
        [*command, str(out), str(stop_at)], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def planned() -> dict[int, tuple[list[int], float]]:
    """Return the samples and the learning rate of each step by its position."""
    loader = stretto.StepLoader(Rows(), SIZES, max_duration="2ep", seed=SEED, micro_batch_size=4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    parameters = stretto.Hyperparameters(optimizer, SCHEDULES, loader.horizon)
    found = {}
    for step in loader:
        parameters.apply(step.timestamp, step.batch_size)
        ids = sorted(int(one) for micro in step for one in micro.batch[0]["input"][:, 0])
        found[step.timestamp.sample] = (ids, optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_every_step_is_as_planned_through_two_other_degrees(tmp_path: Path) -> None:
    expected = planned()
    launch(tmp_path, 2, stop_at=9)
    launch(tmp_path, 1, stop_at=17)
    said = launch(tmp_path, 2, stop_at=0)
    assert f"DONE {len(expected)} {len(expected)}" in said
    ids: dict[int, list[int]] = {}
    worlds: dict[int, int] = {}
    for file in tmp_path.glob("steps-*.jsonl"):
        for line in file.read_text().splitlines():
            at, world, lr, own = json.loads(line)
            ids.setdefault(at, []).extend(own)
            worlds[at] = world
            assert lr == pytest.approx(expected[at][1], rel=0, abs=1e-15)
    assert {at: sorted(own) for at, own in ids.items()} == {
        at: own for at, (own, _) in expected.items()
    }
    assert [worlds[at] for at in sorted(worlds)] == [2] * 9 + [1] * 8 + [2] * (len(expected) - 17)


def data_loader(**settings: Any) -> StrettoDataLoader:
    config = StrettoDataLoader.Config(
        make_data=lambda tokenizer, seq_len: Rows(), max_duration="2ep", **settings
    )
    return StrettoDataLoader(
        config, dp_world_size=2, dp_rank=1, tokenizer=None, seq_len=16, local_batch_size=MICRO
    )


def test_even_gives_one_shape(tmp_path: Path) -> None:
    loader = data_loader(batch_size="0sp:8 48sp:16", even=True)
    shapes = set()
    while (step := loader.draw()) is not None:
        shapes |= {micro.batch[1].shape for micro in step}
        loader.loader.finish(step)
        assert step.num_samples in (8, 16)
    assert shapes == {(MICRO, 16)}
    with pytest.raises(StrettoError, match="evenly"):
        data_loader(batch_size="0sp:8 48sp:12", even=True)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="torchtitan"):
        data_loader(batch_size=stretto.NoiseScale(start=8, maximum=32))
    config = configuration(str(tmp_path))
    config.training.global_batch_size = 8
    with pytest.raises(StrettoError, match="global_batch_size"):
        config.build()
