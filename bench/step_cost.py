"""What a trainer adds to a training step: stretto and its peers over a bare loop of torch.

Run `python bench/step_cost.py` (makes an environment for each peer first), with
`--only stretto composer` for some. The last result lies in `bench/results/step_cost.json` and
`.txt`, with the load of the machine; `--quick` measures stretto alone, briefly, and saves nothing.

There are two kinds of data with a bare loop for each; every result is compared with the bare loop
on the same data. A wide network shows what is left where a step takes milliseconds. The aim: at
most 40 us over it, and at most 20 us with a `TensorDataset`.

Each framework is timed in a process of its own, alternating with the bare loop, so that both see
the same machine. `fastest` is the difference of the fastest rounds, which a busy machine disturbs
least. Times are of the processor, which other processes disturb least; on one thread of
a quiet machine they equal those of the wall, which are in the JSON too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import processor
from peer_environments import ENVIRONMENTS, python_of

HERE = Path(__file__).parent
RESULTS = HERE / "results"
STEPS = 3_000

WHAT = (
    "MLP 64-64-10, batches of 32, SGD, cosine learning rate, float32 on the CPU, one thread. "
    "Yardstick: a loop of torch alone over torch's DataLoader (shuffled, no workers; a batch is "
    "one indexing operation on each of two tensors), which is also the loader of every peer; "
    "'bare without DataLoader' cuts its batches from one permutation instead. A step is timed "
    "between the forward passes of step 200 and of the last one. 'TensorDataset': the same rows "
    "in one; its bare loop indexes it a batch at a time, without a DataLoader (which takes "
    "samples one by one: the row below), and steps torch's CosineAnnealingLR. 'wide': batches of "
    "256, a hidden layer of 2,048, 600 steps. Peers: logging, progress bars and checkpoints off. "
    "stretto: clock in all units, cosine, a run folder with a logged line every 100 batches (12 "
    "in 'wide'), its own loader; 'ramp': the batch size grows from 24 to 42 over the same samples."
)


def run_pair(name: str, *, rounds: int, steps: int) -> dict[str, Any]:
    """Return what `step_cost_pair.py` measured in the environment of `name`."""
    python = Path(sys.executable) if name == "stretto" else python_of(name)
    # Nothing may reach for a network or a second thread.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(HERE / "step_cost_pair.py"), name]
    command += ["--rounds", str(rounds), "--steps", str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=HERE
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def yardstick_of(label: str) -> str:
    """Return the bare loop that a loop is compared with: the one that reads the same data.

    >>> yardstick_of("stretto, ramp"), yardstick_of("stretto, TensorDataset, ramp")
    ('bare', 'bare, TensorDataset')
    """
    return next((f"bare, {kind}" for kind in ("TensorDataset", "wide") if kind in label), "bare")


def compare(pair: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return each loop of a pair against its bare loop: medians and quartiles over the rounds."""
    times = pair["microseconds"]
    rows: dict[str, dict[str, float]] = {}
    for label, rounds in times.items():
        cpu = [one["cpu"] for one in rounds]
        bare = [one["cpu"] for one in times[yardstick_of(label)]]
        over = [own - yardstick for own, yardstick in zip(cpu, bare, strict=True)]
        ratios = [own / yardstick for own, yardstick in zip(cpu, bare, strict=True)]
        rows[label] = {
            "cpu": round(statistics.median(cpu), 1),
            "wall": round(statistics.median([one["wall"] for one in rounds]), 1),
            "over_bare": round(statistics.median(over), 1),
            "over_bare_low": round(_quartiles(over)[0], 1),
            "over_bare_high": round(_quartiles(over)[1], 1),
            "fastest": round(min(cpu) - min(bare), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_low": round(_quartiles(ratios)[0], 3),
            "ratio_high": round(_quartiles(ratios)[1], 3),
        }
    return rows


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def table(pairs: Sequence[dict[str, Any]]) -> str:
    """Return the results as text."""
    heads = f"{'':32}{'us a step':>10}{'over bare':>11}{'quartiles':>18}"
    lines = [f"{heads}{'fastest':>9}{'ratio':>8}{'quartiles':>16}{'load':>7}"]
    for pair in pairs:
        name = f"{pair['name']} {pair['version']}"
        for label, row in compare(pair).items():
            shown = {"bare": f"bare, beside {pair['name']}", pair["name"]: name}.get(label, label)
            ratios = f"{row['ratio_low']:.3f} .. {row['ratio_high']:.3f}"
            spread = f"{row['over_bare_low']:.1f} .. {row['over_bare_high']:.1f}"
            lines.append(
                f"{shown:32}{row['cpu']:10.1f}{row['over_bare']:+11.1f}{spread:>18}"
                f"{row['fastest']:+9.1f}{row['ratio']:8.3f}{ratios:>16}{max(pair['load_average']):7.1f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description="cost of a training step over a bare loop")
    parser.add_argument("--quick", action="store_true", help="stretto alone, nothing saved")
    parser.add_argument("--only", nargs="+", choices=["stretto", *ENVIRONMENTS])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.quick:
        print(table([run_pair("stretto", rounds=2, steps=500)]))
        return
    names = arguments.only or ["stretto", *ENVIRONMENTS]
    for name in names:  # made before anything is timed
        if name in ENVIRONMENTS:
            python_of(name)
    pairs = [run_pair(name, rounds=arguments.rounds, steps=STEPS) for name in names]
    print(save(pairs, rounds=arguments.rounds))


def save(pairs: Sequence[dict[str, Any]], *, rounds: int) -> str:
    """Write the results, beside those of frameworks not measured this time; return the table."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "step_cost.json"
    known = json.loads(path.read_text(encoding="utf-8"))["pairs"] if path.exists() else []
    machine = {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()}
    new = {
        pair["name"]: {**pair, "rounds": rounds, "steps": STEPS, "machine": machine}
        for pair in pairs
    }
    kept = {pair["name"]: pair for pair in known} | new
    ordered = [kept[name] for name in ("stretto", *ENVIRONMENTS) if name in kept]
    summary = {pair["name"]: compare(pair) for pair in ordered}
    content = {"what": WHAT, "microseconds_a_step": summary, "pairs": ordered}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    text = table(ordered)
    (RESULTS / "step_cost.txt").write_text(text + "\n", encoding="utf-8")
    return text


if __name__ == "__main__":
    main()
