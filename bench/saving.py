"""How long a save holds the step, for a model of 100 million parameters with its Adam state.

Run `python bench/saving.py`; the last result lies in `bench/results/saving.json` and `.txt`. In one
process, turn by turn in each round: a real run of `Trainer` saves after a step, then `torch.save`
and `async_save` of distributed checkpoint save the same tensors, and they are copied to host memory
and no more. The aim: a save holds the step for no longer than that copy.

What is measured is the time from the end of the step until the next may begin: for stretto between
two events of the run, with all that its loop does there; for the others the call. Only stretto
synchronizes its files with the disk. Beside it: processor time of the main thread while it is held,
how long until the checkpoint is whole, and the longest pause of the main thread until then, which a
background thread causes that does not let go of the interpreter. One thread of torch; on a CPU the
tensors lie in host memory already, and the copy is from there to there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from machine import processor
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils.data import TensorDataset

from stretto.checkpoint import checkpoint_path, pack_optimizer
from stretto.training import Callback, Checkpointing, Logging, Run, Trainer

RESULTS = Path(__file__).parent / "results"
MODEL = {False: (24, 2048), True: (4, 512)}
"""Layers and their width: 100.7 million parameters in 48 tensors; the short form has a million."""
COPY = "copy into host memory that is reused"


class Rounds(Callback):
    """Times what happens between two steps, and lets the others save in between."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.figures: dict[str, dict[str, list[float]]] = {}
        self.round = 0
        self._ended = (0.0, 0.0)
        self._buffers: list[Tensor] = []

    def on_batch_end(self, run: Run, step: Any) -> None:
        """The step is over; what the run does next holds the following one."""
        del run, step
        self._ended = (time.perf_counter(), time.thread_time())

    def on_batch_start(self, run: Run, step: Any) -> None:
        """The step after a save begins: note how long that took, then let the others save."""
        held = time.perf_counter() - self._ended[0]
        worked = time.thread_time() - self._ended[1]
        sample = step.timestamp.sample
        if not sample:
            return
        path = checkpoint_path(self.folder / "run" / "checkpoints", sample)
        pause = longest_pause(path.is_dir)
        whole = time.perf_counter() - self._ended[0]
        if self.round:  # the first one warms up: memory is taken
            self.note("stretto", held=held, worked=worked, whole=whole, pause=pause)
        tensors = named_tensors(run)
        others = [self.copy, self.clone, self.torch_save, self.async_save]
        for number in range(len(others)):  # each goes first in its turn
            others[(number + self.round) % len(others)](tensors)
        self.round += 1

    def note(self, name: str, **seconds: float) -> None:
        """Keep the figures of one turn."""
        for key, value in seconds.items():
            self.figures.setdefault(name, {}).setdefault(key, []).append(1e3 * value)

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Return `work()`, whose time is noted, with the time at which it began."""
        start, worked = time.perf_counter(), time.thread_time()
        result = work()
        held, worked = time.perf_counter() - start, time.thread_time() - worked
        if self.round:
            self.note(name, held=held, worked=worked)
        return result, start

    def copy(self, tensors: dict[str, Tensor]) -> None:
        """Copy into buffers that the round before has used."""
        self._buffers = self._buffers or [tensor.clone() for tensor in tensors.values()]

        def work() -> None:
            for buffer, tensor in zip(self._buffers, tensors.values(), strict=True):
                buffer.copy_(tensor)

        self.timed(COPY, work)

    def clone(self, tensors: dict[str, Tensor]) -> None:
        """Copy into memory that is new each time."""
        self.timed(
            "copy into new host memory", lambda: [one.detach().clone() for one in tensors.values()]
        )

    def torch_save(self, tensors: dict[str, Tensor]) -> None:
        """Save as most scripts do."""
        file = self.folder / "checkpoint.pt"
        self.timed("torch.save", lambda: torch.save(tensors, file))
        file.unlink()

    def async_save(self, tensors: dict[str, Tensor]) -> None:
        """Save through distributed checkpoint, in its background thread."""
        folder = self.folder / f"distributed-{self.round}"
        name = "distributed checkpoint, async_save"
        saving, start = self.timed(
            name,
            lambda: async_save(dict(tensors), checkpoint_id=folder),
        )
        pause = longest_pause(saving.done)
        whole = time.perf_counter() - start
        saving.result()
        if self.round:
            self.note(name, whole=whole, pause=pause)
        shutil.rmtree(folder)


def longest_pause(is_done: Callable[[], bool]) -> float:
    """Work in small pieces until something is done; return the longest time between two."""
    longest, asked, before = 0.0, 0.0, time.perf_counter()
    while True:
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
        if now - asked > 2e-3:  # not so often that asking is what is measured
            if is_done():
                return longest
            time.sleep(0)  # lets go of the interpreter, as an operation of torch does
            asked = now


def named_tensors(run: Run) -> dict[str, Tensor]:
    """Everything that a checkpoint holds of the model and of its optimizer."""
    packed = pack_optimizer(run.optimizers[0]).items()
    tensors = {f"optimizer.{key}": one for key, one in packed if isinstance(one, Tensor)}
    return {**run.model.state_dict(), **tensors}


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Train for anything at all."""
    squares: Tensor = model(batch[0]).square().mean()
    return squares


def measure(layers: int, width: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Train `rounds` steps and one to warm up, each with a save behind it."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    callback = Rounds(folder)
    trainer = Trainer(
        model,
        TensorDataset(torch.randn(rounds + 2, width)),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-6),
        loss=loss,
        max_duration="1ep",
        batch_size=1,
        device="cpu",
        checkpoint=Checkpointing("1ba", keep=1),
        log=Logging("1ep", console=False),
        callbacks=[callback],
        folder=folder / "run",
    )
    trainer.fit()
    tensors = named_tensors(trainer.run)
    figures = callback.figures
    yardstick = figures[COPY]["held"]
    ratios = {
        name: spread([own / copy for own, copy in zip(one["held"], yardstick, strict=True)])
        for name, one in figures.items()
    }
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "milliseconds": {
            name: {key: spread(values) for key, values in one.items()}
            for name, one in figures.items()
        },
        "held_over_copy": ratios,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def table(case: dict[str, Any]) -> str:
    """Return the results as text."""
    millions, gigabytes = case["parameters"] / 1e6, case["bytes"] / 1e9
    lines = [
        f"{millions:.1f} million parameters, {gigabytes:.2f} GB with Adam's state; medians in ms",
        f"{'':38}{'step held':>11}{'quartiles':>20}{'over copy':>11}{'quartiles':>16}",
    ]
    lines[-1] += f"{'processor':>11}{'whole':>9}{'pause':>8}"
    for name, figures in case["milliseconds"].items():
        held, ratio = figures["held"], case["held_over_copy"][name]
        rest = "".join(
            f"{figures[key]['median']:{width}.0f}" if key in figures else " " * width
            for key, width in (("worked", 11), ("whole", 9), ("pause", 8))
        )
        lines.append(
            f"{name:38}{held['median']:11.0f}{held['low']:10.0f} .. {held['high']:<6.0f}"
            f"{ratio['median']:11.2f}{ratio['low']:8.2f} .. {ratio['high']:<4.2f}{rest}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description="how long a save holds the step")
    parser.add_argument("--quick", action="store_true", help="a small model, and nothing is saved")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(  # which async_save asks for
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        layers, width = MODEL[arguments.quick]
        case = measure(layers, width, 3 if arguments.quick else arguments.rounds, Path(folder))
        torch.distributed.destroy_process_group()
    print(table(case))
    if arguments.quick:
        return
    result = {
        "what": "how long a save holds the step, against others and against the bare copy",
        "aim": {"held_over_copy": 1.0},
        **case,
        "rounds": arguments.rounds,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "saving.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "saving.txt").write_text(table(case) + "\n")


if __name__ == "__main__":
    main()
