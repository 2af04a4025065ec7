"""From `resume()` to the end of the first step, at the start and at the end of a long epoch.

Run `python bench/resume.py`; the last result lies in `bench/results/resume.json` and `.txt`. The
data set is map-style, shuffled, and has 1e8 samples, made when they are asked for. A checkpoint at
the first batch is trained; those in the middle and 1,000 samples before the end of the epoch are
copies of it with the clock set forward. Each is resumed turn by turn, with a trainer of its own,
by 0 and by 2 workers. The aim: the same time wherever the run stands.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import processor
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto import StepLoader
from stretto.checkpoint import checkpoints, read_checkpoint, write_checkpoint
from stretto.timing import Timestamp
from stretto.training import Callback, Checkpointing, Loading, Run, Trainer

RESULTS = Path(__file__).parent / "results"
BATCH_SIZE = 64
WIDTH = 64


class Endless(Dataset[Tensor]):
    """Samples that are a function of their index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), float(index % 1000))


class StopAfter(Callback):
    """Ends the run after its first step, and notes when that was."""

    def __init__(self) -> None:
        self.stepped_at = 0.0

    def on_batch_end(self, run: Run, step: Any) -> None:
        """Note the time and stop."""
        del step
        self.stepped_at = time.perf_counter()
        run.stop("one step is enough", is_final=False)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Train for anything at all."""
    squares: Tensor = model(batch).square().mean()
    return squares


def make_trainer(
    num_samples: int, num_workers: int, stop: StopAfter, folder: Path | None = None
) -> Trainer:
    """Return the trainer of the run."""
    model = nn.Linear(WIDTH, WIDTH)
    return Trainer(
        model,
        Endless(num_samples),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5),
        loss=loss,
        max_duration="2ep",
        batch_size=BATCH_SIZE,
        loading=Loading(num_workers=num_workers),
        device="cpu",
        checkpoint=None if folder is None else Checkpointing("1ba"),
        callbacks=[stop],
        folder=folder,
    )


def write_checkpoints(num_samples: int, folder: Path) -> dict[str, Path]:
    """Return checkpoints of the same run at several places of its first epoch."""
    make_trainer(num_samples, 0, StopAfter(), folder / "run").fit()
    first = checkpoints(folder / "run" / "checkpoints")[-1]
    places = {"start": first}
    for name, batch in (
        ("middle", num_samples // 2 // BATCH_SIZE),
        ("end", (num_samples - 1000) // BATCH_SIZE),
    ):
        tensors, records = read_checkpoint(first)
        sample = batch * BATCH_SIZE
        clock = Timestamp(
            batch=batch, sample=sample, batch_in_epoch=batch, sample_in_epoch=sample
        ).to_state()
        records["loader"]["clock"] = {**records["loader"]["clock"], **clock}
        places[name] = folder / name
        write_checkpoint(places[name], tensors, records)
    return places


def seconds_to_first_step(num_samples: int, num_workers: int, path: Path) -> float:
    """Resume once."""
    stop = StopAfter()
    trainer = make_trainer(num_samples, num_workers, stop)
    start = time.perf_counter()
    trainer.resume(path)
    trainer.fit()
    trainer.run.loader.close()
    return stop.stepped_at - start


def measure(num_samples: int, num_workers: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the times at each place, and how those at the end compare to those at the start."""
    places = write_checkpoints(num_samples, folder)
    times: dict[str, list[float]] = {name: [] for name in places}
    for number in range(rounds + 1):
        # Whoever goes first in one round goes last in the next.
        for name in list(places)[:: 1 if number % 2 else -1]:
            seconds = seconds_to_first_step(num_samples, num_workers, places[name])
            if number:  # the first round warms up
                times[name].append(seconds)
    ratios = [end / start for end, start in zip(times["end"], times["start"], strict=True)]
    return {
        "num_samples": num_samples,
        "num_workers": num_workers,
        "milliseconds": {name: spread([1e3 * one for one in some]) for name, some in times.items()},
        "end_over_start": spread(ratios),
    }


def loader_start(world_size: int, sample: int) -> dict[str, Any]:
    """Return the processor time to build a loader, set its clock and read one step."""
    data, times = Endless(10**8), []
    for _ in range(21):
        start = time.process_time()
        loader = StepLoader(
            data, 8 * world_size, max_duration="2ep", rank=world_size - 1, world_size=world_size
        )
        state = loader.state_dict()
        state["clock"] |= {"sample": sample, "sample_in_epoch": sample}
        loader.load_state_dict(state)
        next(loader)
        times.append(1e3 * (time.process_time() - start))
    return {"ranks": world_size, "sample": sample, "milliseconds": spread(times[1:])}


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def line(case: dict[str, Any]) -> str:
    """Return a case as a line of text."""
    times = ", ".join(
        f"{name} {one['median']:.1f} ({one['low']:.1f} to {one['high']:.1f})"
        for name, one in case["milliseconds"].items()
    )
    ratio = case["end_over_start"]
    return (
        f"{case['num_samples']:.0e} samples, {case['num_workers']} workers: ms to the first step: "
        f"{times}; end over start {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
    )


def loader_line(one: dict[str, Any]) -> str:
    """Return the start of a loader as a line of text."""
    time_taken = one["milliseconds"]
    return (
        f"1e+08 samples, {one['ranks']} ranks: ms of processor time from building a loader to its "
        f"first step, at sample {one['sample']:.0e}: {time_taken['median']:.1f} "
        f"({time_taken['low']:.1f} to {time_taken['high']:.1f})"
    )


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description="time to the first step after a resume")
    parser.add_argument("--quick", action="store_true", help="seconds, and nothing is saved")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    cases = []
    for num_samples, num_workers in (
        ((10**8, 0),) if quick else ((10**8, 0), (10**8, 2), (10**6, 0))
    ):
        with tempfile.TemporaryDirectory() as folder:
            case = measure(num_samples, num_workers, 3 if quick else 25, Path(folder))
        cases.append(case)
        print(line(case), flush=True)
    loaders = [loader_start(ranks, at) for ranks in (1, 512) for at in (0, 5 * 10**7)]
    for one in loaders:
        print(loader_line(one), flush=True)
    if quick:
        return
    result = {
        "what": "from resume() to the end of the first step, at three places of an epoch",
        "aim": {"end_over_start": 1.0},
        "cases": cases,
        "loaders": loaders,
        "batch_size": BATCH_SIZE,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "resume.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "resume.txt").write_text(
        "\n".join([*map(line, cases), *map(loader_line, loaders)]) + "\n"
    )


if __name__ == "__main__":
    main()
