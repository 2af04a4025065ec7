"""A job of Ray Train that dies and comes back: `python ray_job.py OUT`.

`RAY_TRAIN_V2_ENABLED` chooses between its two implementations, V1 (0) and V2 (1).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from tests.scale import trainer, weights

from stretto import Callback, Run, Step
from stretto.integrations.ray import ReportToRay, resume_from_ray


class Die(Callback):
    """Kills the last of several workers (-9), once after each of these positions."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_batch_end(self, run: Run, step: Step) -> None:
        for at in (500, 900):
            mark = self.out / f"died-{at}"
            is_due = step.timestamp.sample > at and not mark.exists()
            if is_due and run.rank == run.world_size - 1 > 0:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def work(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    out = Path(config["out"])
    run = trainer(tempfile.mkdtemp(prefix="node-"), callbacks=(ReportToRay(), Die(out)))
    resumed = resume_from_ray(run)
    if run.run.is_first_rank:
        line = json.dumps([run.run.world_size, resumed, run.timer.sample])
        with (out / "began.jsonl").open("a") as file:
            file.write(line + "\n")
    run.fit()
    if run.run.is_first_rank:
        torch.save(weights(run.model), out / "weights.pt")


def attempt(out: Path, workers: int, failures: int, **options: Any) -> None:
    TorchTrainer(
        work,
        train_loop_config={"out": str(out)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="job",
            storage_path=str(out / "storage"),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
        **options,
    ).fit()


def newest(out: Path) -> dict[str, Any]:
    """What continues a job: V2 finds the last report of a job of the same name by itself."""
    if os.environ["RAY_TRAIN_V2_ENABLED"] == "1":
        return {}
    last = max((out / "storage" / "job").rglob("checkpoint_*"))
    return {"resume_from_checkpoint": Checkpoint.from_directory(last)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        attempt(folder, workers=2, failures=1)
    except Exception as error:
        # Each implementation has a class of this name, in other modules in other releases.
        if "TrainingFailedError" not in [kind.__name__ for kind in type(error).__mro__]:
            raise
        print("died twice, as planned:", type(error).__name__)
        attempt(folder, workers=1, failures=0, **newest(folder))
    ray.shutdown()
