"""The chaos suite: runs that are killed again and again must end as if nothing had happened.

`python suite.py [--seeds 20] [--kills 50] [--jobs 2]`. For each seed `run.py`
first trains unbroken. Then the same run is started again and again in another folder and killed
with SIGKILL: by this process at random moments, and by itself before a file operation drawn at
random, where now and then everything that was not yet synchronized with the disk is lost too. In
the end weights, optimizer, metrics, ledger, random state and what a callback saw are compared.
Seeds are added until there are at least as many kills as asked for. The exit status is 0 if there
is no difference at all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import runpy
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file

from stretto.checkpoint import checkpoints, read_checkpoint

RUN = Path(__file__).with_name("run.py")
FORKED = Path(__file__).parents[1] / "forked_process.py"
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "stretto.training"])
LIMIT_SECONDS = 240
"""No process of a run may live longer: a run takes about ten seconds."""
MOST_KILLS = 8
"""Kills of one run; then it may end."""
KINDS = {"moment": 5, "operation": 4, "power cut": 2}
"""How a process is killed, and how often one way against the others."""
RATES = {"samples_per_second", "tokens_per_second", "step_seconds", "sample_seconds"}
WALL_CLOCK = {"sec", "memory_peak_bytes", *RATES}
"""Keys of a line of metrics that no two runs have in common."""


class HungError(Exception):
    """A process neither ended nor died in time."""


class BrokenError(Exception):
    """A process ended with an error of its own."""


@dataclass
class Outcome:
    """What became of one seed."""

    seed: int
    setting: str = ""
    kinds: list[str] = field(default_factory=list)
    """How it was killed, each time."""
    while_saving: int = 0
    starts: int = 0
    seconds: float = 0.0
    batches: int = 0
    bits: int = 0
    lost: int = 0
    twice: int = 0
    other: list[str] = field(default_factory=list)
    """What else differs, in words."""

    @property
    def is_equal(self) -> bool:
        return not (self.bits or self.lost or self.twice or self.other)

    def row(self) -> str:
        kinds = [self.kinds.count(kind) for kind in KINDS]
        return (
            f"{self.seed:4} {self.setting:32} {self.batches:7} {len(self.kinds):5}"
            f" {'/'.join(map(str, kinds)):>8} {self.while_saving:6} {self.seconds:7.1f}"
            f" {self.bits:9} {self.lost:5} {self.twice:5}  "
            + ("equal" if self.is_equal else "; ".join(self.other) or "DIFFERS")
        )


HEAD = (
    "seed setting                          batches kills m/o/cut  saving seconds"
    "      bits  lost twice"
)


class Attempt:
    """One process of a run, forked from one that has imported torch already."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        said = folder / "said.stdout"
        said.unlink(missing_ok=True)
        self._said = said.with_suffix(".stderr")
        job = {
            "arguments": [str(RUN), str(folder), *arguments],
            "environment": {"OMP_NUM_THREADS": "1"},
            "folder": str(Path.cwd()),
            "output": str(said.with_suffix("")),
        }
        self._process = PROCESSES.Process(
            target=runpy.run_path, args=(str(FORKED), {"JOB": job}, "__main__")
        )
        self._process.start()
        self._hung = threading.Event()
        self._limit = threading.Timer(LIMIT_SECONDS, self._give_up)
        self._limit.daemon = True
        self._limit.start()
        # "ready": the run may be killed from here on.
        while self._process.is_alive() and not (said.exists() and said.read_text()):
            time.sleep(0.002)
        self.ready_at = time.monotonic()

    def _give_up(self) -> None:
        self._hung.set()
        self._process.kill()

    def kill_after(self, seconds: float) -> bool:
        """Kill the process in a while; return whether it was still running then."""
        self._process.join(seconds)
        self._process.kill()
        return self.was_killed()

    def was_killed(self) -> bool:
        """Wait for the end; return whether it was a kill, and raise if it was an error."""
        self._process.join()
        self._limit.cancel()
        status = self._process.exitcode
        if self._hung.is_set():
            raise HungError(f"still running after {LIMIT_SECONDS} s")
        if status not in (0, -9):
            raise BrokenError(self._said.read_text()[-3000:])
        return status == -9


@dataclass(frozen=True)
class Chaos:
    """What is done to the run of a seed."""

    epochs: int
    kinds: tuple[str, ...]
    """How it may be killed."""
    folder: Path

    def one_seed(self, seed: int) -> Outcome:
        """Train unbroken and broken, and compare."""
        outcome, start = Outcome(seed), time.monotonic()
        whole, killed = self.folder / f"{seed}-unbroken", self.folder / f"{seed}-killed"
        try:
            seconds, operations = self._unbroken(seed, whole)
            outcome.setting = setting_of(whole)
            self._broken(outcome, killed, seconds, operations)
            compare(whole, killed, outcome)
        except (HungError, BrokenError) as error:
            outcome.other.append(str(error))
        outcome.seconds = time.monotonic() - start
        print(outcome.row(), flush=True)
        if outcome.is_equal:
            shutil.rmtree(whole)
            shutil.rmtree(killed)
        return outcome

    def _unbroken(self, seed: int, folder: Path) -> tuple[float, int]:
        """Train without a kill; return how long that took, and how many file operations."""
        attempt = self._start(seed, folder)
        assert not attempt.was_killed(), "nobody has killed it"
        seconds = time.monotonic() - attempt.ready_at
        return seconds, json.loads((folder / "end.json").read_text())["operations"]

    def _broken(self, outcome: Outcome, folder: Path, seconds: float, operations: int) -> None:
        """Train the same run with kills until it ends."""
        seed = outcome.seed
        chance = random.Random(f"chaos {seed}")
        weights = [KINDS[kind] for kind in self.kinds]
        while True:
            outcome.starts += 1
            kind = chance.choices(self.kinds, weights)[0]
            if len(outcome.kinds) == MOST_KILLS:
                was_killed = self._start(seed, folder).was_killed()
            elif kind == "moment":
                delay = chance.uniform(0, 0.55 * seconds)
                was_killed = self._start(seed, folder).kill_after(delay)
            else:
                arguments = ["--die-at", str(chance.randint(1, operations // 2))]
                arguments += ["--power-cut"] * (kind == "power cut")
                was_killed = self._start(seed, folder, *arguments).was_killed()
            if not was_killed:
                return
            outcome.kinds.append(kind)
            outcome.while_saving += any((folder / "run" / "checkpoints").glob("*.tmp"))

    def _start(self, seed: int, folder: Path, *arguments: str) -> Attempt:
        return Attempt(folder, str(seed), "--epochs", str(self.epochs), *arguments)


def bits_of_difference(left: dict[str, Any], right: dict[str, Any]) -> int:
    """Return how many bits differ between tensors by name; all bits of what only one has."""
    total = 0
    for name in left.keys() | right.keys():
        one, other = (_bytes(side.get(name)) for side in (left, right))
        if one.size == other.size:
            total += int(numpy.unpackbits(one ^ other).sum())
        else:
            total += 8 * max(one.size, other.size)
    return total


def _bytes(tensor: Any) -> Any:
    if tensor is None:
        return numpy.zeros(0, numpy.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def compare(left: Path, right: Path, outcome: Outcome) -> None:
    """Hold what a killed run left against what the unbroken one left."""
    outcome.bits = bits_of_difference(
        load_file(left / "end.safetensors"), load_file(right / "end.safetensors")
    )
    last = [
        read_checkpoint(checkpoints(side / "run" / "checkpoints")[-1]) for side in (left, right)
    ]
    for group in last[0].tensors:
        outcome.bits += bits_of_difference(last[0].tensors[group], last[1].tensors[group])
    whole, killed = (json.loads((side / "end.json").read_text()) for side in (left, right))
    outcome.batches = whole["clock"]["batch"]
    seen = zip(whole["witness"]["times_seen"], killed["witness"]["times_seen"], strict=True)
    for expected, found in seen:
        outcome.lost += max(0, expected - found)
        outcome.twice += max(0, found - expected)
    for key in ("optimizer", "clock", "witness", "generators", "stop_reason"):
        if whole[key] != killed[key]:
            outcome.other.append(f"{key} differs")
    for name, read in (("metrics.jsonl", _metrics), ("ledger.csv", _lines)):
        one, other = (list(read(side / "run" / name)) for side in (left, right))
        differing = sum(a != b for a, b in zip(one, other, strict=False))
        if differing or len(one) != len(other):
            outcome.other.append(f"{name}: {len(one)} and {len(other)} lines, {differing} differ")


def _metrics(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield {k: v for k, v in json.loads(line).items() if k not in WALL_CLOCK}


def _lines(path: Path) -> list[str]:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    wall = rows[0].index("sec")
    return [",".join(row[:wall] + row[wall + 1 :]) for row in rows]


def setting_of(folder: Path) -> str:
    """Return in a few words what a seed stands for."""
    setting = json.loads((folder / "end.json").read_text())["setting"]
    words = (f"{setting['num_workers']} workers", setting["last_batch"], setting["precision"])
    return f"{setting['batch_size']}, {', '.join(words)}"


def summary(outcomes: list[Outcome]) -> str:
    """Return the counts."""
    kinds = [kind for outcome in outcomes for kind in outcome.kinds]
    saving = sum(outcome.while_saving for outcome in outcomes)
    return (
        f"{len(kinds)} kills ({kinds.count('moment')} at random moments, "
        f"{kinds.count('operation')} before a file operation, {kinds.count('power cut')} with what "
        f"was not synchronized lost; {saving} while saving) in {len(outcomes)} runs, "
        f"{sum(outcome.starts for outcome in outcomes)} starts: "
        f"{sum(outcome.bits for outcome in outcomes)} bits of difference, "
        f"{sum(outcome.lost for outcome in outcomes)} samples lost, "
        f"{sum(outcome.twice for outcome in outcomes)} samples seen twice; "
        f"{sum(outcome.is_equal for outcome in outcomes)} of {len(outcomes)} runs equal"
    )


def run_all(chaos: Chaos, *, seeds: int, kills: int, jobs: int) -> list[Outcome]:
    """Run so many seeds, and more until there are so many kills."""
    outcomes: list[Outcome] = []
    while len(outcomes) < seeds or (
        sum(len(outcome.kinds) for outcome in outcomes) < kills
        and all(outcome.is_equal for outcome in outcomes)
        and len(outcomes) < 3 * seeds
    ):
        start = len(outcomes)
        with ThreadPoolExecutor(jobs) as pool:
            outcomes += pool.map(chaos.one_seed, range(start, max(seeds, start + 1)))
    return outcomes


def main() -> int:
    """Run the suite; the exit status says whether anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stretto-chaos-"))
    chaos = Chaos(arguments.epochs, tuple(arguments.kinds), folder)
    print(HEAD, flush=True)
    outcomes = run_all(chaos, seeds=arguments.seeds, kills=arguments.kills, jobs=arguments.jobs)
    print(summary(outcomes))
    if all(outcome.is_equal for outcome in outcomes):
        shutil.rmtree(folder)
        return 0
    print(f"what differs lies in {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
