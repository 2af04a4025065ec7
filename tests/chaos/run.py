"""One run of the chaos suite, in a process of its own: it resumes by itself and may kill itself.

`python run.py FOLDER SEED [--epochs 4] [--die-at N] [--power-cut]`. The seed picks a setting:
workers, batch size policy, what happens at the end of an epoch, precision. The run is kept in
FOLDER/run and goes on from whatever checkpoint is there; when it has ended, FOLDER/end.json and
FOLDER/end.safetensors say how. With `--die-at N` the process sends itself SIGKILL before its N-th
file operation, which it counts in every thread: opening for writing, fsync, rename, mkdir, remove.
With `--power-cut` it first cuts every file back to what was certain to be on the disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto import Cosine, LinearRamp
from stretto.batching import Hysteresis, IncreaseFunction, SizeFunction
from stretto.checkpoint import pack_optimizer
from stretto.training import (
    Callback,
    Checkpointing,
    Evaluation,
    Loading,
    Logging,
    Run,
    Trainer,
)

NUM_SAMPLES = 389
"""A prime: nothing divides it, so epochs end inside batches."""

AUDITED = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}


class FileOperations:
    """Counts what this process does to files in a folder, and may kill it before one of them."""

    def __init__(self, folder: Path, die_at: int | None, *, power_cut: bool) -> None:
        self.count = 0
        self._folder = str(folder)
        self._die_at = die_at
        self._power_cut = power_cut
        self._synced = {file.stat().st_ino: file.stat().st_size for file in _files(folder)}
        """How much of each file, by its number, is sure to be on the disk."""
        self._fsync = os.fsync
        sys.addaudithook(self._hear)
        os.fsync = self._synchronize  # type: ignore[assignment]

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in AUDITED and str(arguments[0]).startswith(self._folder):
            reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if not reads:
                self._before(event, str(arguments[0]))

    def _synchronize(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        self._before("os.fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        self._fsync(descriptor)
        status = os.fstat(descriptor)
        self._synced[status.st_ino] = status.st_size

    def _before(self, event: str, path: str) -> None:
        self.count += 1
        if self.count == self._die_at:
            self._die_at = None
            if self._power_cut:
                self._lose_what_is_not_synchronized()
            os.write(2, f"killed before {event} of {Path(path).name}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def _lose_what_is_not_synchronized(self) -> None:
        for path in _files(Path(self._folder)):
            status = path.stat()
            os.truncate(path, min(status.st_size, self._synced.get(status.st_ino, 0)))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def numpy_draw() -> float:
    """A draw from the generator that everybody shares, as code that knows no other makes them."""
    return float(numpy.random.random())  # noqa: NPY002


class Noisy(Dataset[Any]):
    """Samples with an augmentation from three generators, and the index of each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_SAMPLES, 4, 16, generator=generator)
        self.targets = torch.randint(0, 5, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.randn(4, 16) * (0.1 + random.random())
        noise *= numpy_draw()
        return self.inputs[index] + noise, self.targets[index], index


class Witness(Callback):
    """Has state: how often each sample was trained on, and draws of its own from each generator."""

    def __init__(self) -> None:
        self.times_seen = [0] * NUM_SAMPLES
        self.drawn = [0.0, 0.0, 0.0]
        self.order = ""

    def on_batch_start(self, run: Run, step: Any) -> None:
        indices = [
            index for micro in step.micro_batches for index in micro.batch[2].tolist()
            if micro.weight
        ]  # fmt: skip
        for index in indices:
            self.times_seen[index] += 1
        self.order = hashlib.sha256(f"{self.order} {indices}".encode()).hexdigest()

    def on_batch_end(self, run: Run, step: Any) -> None:
        draws = (random.random(), numpy_draw(), float(torch.rand(())))
        self.drawn = [before + draw for before, draw in zip(self.drawn, draws, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"times_seen": self.times_seen, "drawn": self.drawn, "order": self.order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.times_seen = list(state["times_seen"])
        self.drawn = list(state["drawn"])
        self.order = state["order"]


POLICIES: dict[str, Callable[[], Any]] = {
    "linear ramp": lambda: LinearRamp(2, 8, "70%"),
    "steps": lambda: "0ep:3 300sp:5 80%:8",
    "at the step": lambda: SizeFunction(
        lambda timestamp, current: 2 + timestamp.batch * 7 % 5, planned=False
    ),
    "with memory": lambda: Hysteresis(LinearRamp(2, 8, "60%"), 1.5, wait="20ba"),
    "increase": lambda: IncreaseFunction(lambda epoch, size: epoch, 3, 9),
}


def setting_of(seed: int) -> dict[str, Any]:
    """What a seed stands for; the policy and the workers go round, the rest is drawn."""
    chance = random.Random(seed)
    return {
        "batch_size": list(POLICIES)[seed % len(POLICIES)],
        "num_workers": 2 if seed % 3 == 2 else 0,
        "last_batch": chance.choice(["keep", "drop", "carry"]),
        "precision": chance.choice(["fp32", "fp32", "bf16"]),
        "micro_batch_size": chance.choice([None, 3]),
        "clip_norm": chance.choice([None, 0.5]),
        "every": chance.choice(["5ba", "8ba", "2%", "37sp"]),
        "keep": chance.choice([1, 2, 3]),
    }


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_trainer(seed: int, epochs: int, folder: Path, witness: Witness) -> Trainer:
    setting = setting_of(seed)
    for generator_seed in (torch.manual_seed, random.seed, numpy.random.seed):
        generator_seed(seed)
    model = nn.Sequential(
        nn.BatchNorm1d(4),
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(256, 5),
    )
    data = Noisy()
    held_out = torch.utils.data.TensorDataset(data.inputs[:50], data.targets[:50])
    return Trainer(
        model,
        data,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=loss,
        max_duration=f"{epochs}ep",
        batch_size=POLICIES[setting["batch_size"]](),
        micro_batch_size=setting["micro_batch_size"],
        schedules={"lr": Cosine(end=0.1, warmup="5%")},
        loading=Loading(
            seed=seed,
            last_batch=setting["last_batch"],
            num_workers=setting["num_workers"],
            keyed_randomness=True,
        ),
        precision=setting["precision"],
        clip_norm=setting["clip_norm"],
        device="cpu",
        evaluate=Evaluation(held_out, "150sp"),
        checkpoint=Checkpointing(setting["every"], keep=setting["keep"]),
        log=Logging("7ba", flush="3ba"),
        callbacks=[witness],
        folder=folder,
    )


def generators() -> str:
    """A digest of the state of every generator that training draws from."""
    legacy = numpy.random.get_state(legacy=True)  # noqa: NPY002
    numpy_state = [part.tolist() if hasattr(part, "tolist") else part for part in legacy]
    states = (torch.get_rng_state().tolist(), random.getstate(), numpy_state)
    return hashlib.sha256(repr(states).encode()).hexdigest()


def write_end(
    folder: Path, trainer: Trainer, witness: Witness, *, seed: int, operations: int
) -> None:
    """Say how the run ended; `end.json` comes last and by a rename."""
    state = pack_optimizer(trainer.optimizer)
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    record = {name: one for name, one in state.items() if name not in tensors}
    named = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
    named |= {f"optimizer.{name}": value for name, value in tensors.items()}
    save_file({name: value.clone() for name, value in named.items()}, folder / "end.safetensors")
    clock = {
        name: value
        for name, value in trainer.timer.timestamp.to_state().items()
        if not name.endswith("nanoseconds")
    }
    report = {
        "setting": setting_of(seed),
        "optimizer": record,
        "clock": clock,
        "witness": witness.state_dict(),
        "generators": generators(),
        "stop_reason": trainer.stop_reason,
        "operations": operations,
    }
    unfinished = folder / "end.tmp"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(folder / "end.json")


def main() -> None:
    """Resume, train to the end, and say how it ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--power-cut", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "a micro-batch of one sample")  # sequences have more values
    torch.set_num_threads(1)
    folder: Path = arguments.folder.resolve()
    witness = Witness()
    trainer = make_trainer(arguments.seed, arguments.epochs, folder / "run", witness)
    print("ready", flush=True)  # from here on it may be killed at any moment
    operations = FileOperations(folder / "run", arguments.die_at, power_cut=arguments.power_cut)
    found = trainer.resume("auto")
    os.write(2, f"resumed from {found.name if found else 'nothing'}\n".encode())
    trainer.fit()
    write_end(folder, trainer, witness, seed=arguments.seed, operations=operations.count)


if __name__ == "__main__":
    main()
