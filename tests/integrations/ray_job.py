"""Jobs of Ray Train that die and come back: `python ray_job.py OUT`."""

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
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from tests.scale import trainer, weights

from stretto import Callback, Run, Step
from stretto.integrations.ray import ReportToRay, resume_from_ray

ENVIRONMENT = {
    "PYTHONPATH": os.environ["PYTHONPATH"],
    "OMP_NUM_THREADS": "1",
    "RAY_TRAIN_V2_ENABLED": "1",
    "PYTHONWARNINGS": "ignore",
}


class Die(Callback):
    """Kills its worker (-9) once, after a position."""

    def __init__(self, at: int, mark: Path) -> None:
        self.at, self.mark = at, mark

    def on_batch_end(self, run: Run, step: Step) -> None:
        is_victim = run.rank == run.world_size - 1 and self.at
        if is_victim and step.timestamp.sample > self.at and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def work(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    out = Path(config["out"])
    die = Die(config["die"], out / f"died-{config['job']}-{config['workers']}")
    run = trainer(tempfile.mkdtemp(prefix="node-"), callbacks=(ReportToRay(), die))
    resumed = resume_from_ray(run)
    if run.run.is_first_rank:
        line = json.dumps([config["job"], run.run.world_size, resumed, run.timer.sample])
        with (out / "began.jsonl").open("a") as file:
            file.write(line + "\n")
    run.fit()
    if run.run.is_first_rank:
        torch.save(weights(run.model), out / f"{config['job']}.pt")


def attempt(out: Path, job: str, workers: int, *, die: int = 0, failures: int = 0) -> None:
    config = {"out": str(out), "job": job, "workers": workers, "die": die}
    run = TorchTrainer(
        work,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=job,
            storage_path=str(out / "storage"),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        run.fit()
    except Exception as error:
        if not die or failures:
            raise
        print("died as planned:", type(error).__name__)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        runtime_env={"env_vars": ENVIRONMENT},
    )
    attempt(folder, "restarted", 2, die=700, failures=2)
    attempt(folder, "resized", 2, die=500)
    attempt(folder, "resized", 1)
    ray.shutdown()
