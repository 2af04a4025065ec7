"""Critical batch sizes by `stretto branch` against a full sweep, with the packaged model.

Run `python bench/branches.py FOLDER`. The sweep trains each size from the start to the end, with
several seeds of model and order; its critical size at a point follows from the losses around that
point. The branches start from the checkpoints of one run. Started again in the same folder, it goes
on. `--small` takes a GPT of 1 layer and width 16 and 4,096 samples: a minute of one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stretto.cli import main
from stretto.cli.branching import smoothed
from stretto.report.critical import Critical, compared, critical
from stretto.run_folder import metrics_lines

POINTS = ("20%", "50%", "80%")
SIZES = (8, 16, 32, 64)
LEAST = 8
SMALL = (
    "model={target: 'stretto.examples.tiny_gpt:TinyGPT', layers: 1, width: 16, context: 16}",
    "data={target: 'stretto.examples.text:PythonDocs', sequence_length: 16}",
)
PART = 16
"""A branch has this part of the run, and a loss of the sweep is smoothed over as much of it."""


def stretto(*arguments: object) -> int:
    """Run a command in this process."""
    try:
        main([str(one) for one in arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def train(folder: Path, size: int, seed: int, given: list[str]) -> None:
    """Train one run of the sweep, unless it is there."""
    checkpoints = (
        "checkpoint={every: 10%, keep: 10}" if (size, seed) == (LEAST, 0) else "checkpoint=null"
    )
    if not (folder / "done").exists():
        settings = [f"batch_size={size}", f"seed={seed}", checkpoints, "evaluate=[]", *given]
        log = "log={every: 1ba, loggers: [], console: false}"
        resume = ("--resume", "auto") if (folder / "run.yaml").exists() else ()
        assert stretto("train", *settings, log, "--folder", folder, *resume, "--quiet") == 0
        (folder / "done").touch()


def sweep(folder: Path, seeds: int, num_samples: int, tolerance: float) -> dict[str, Critical]:
    """Return the critical size of the sweep at each point."""
    found = {}
    for point in POINTS:
        half = num_samples // PART // 2 // SIZES[-1] * SIZES[-1]
        at = int(point[:-1]) * num_samples // 100 // SIZES[-1] * SIZES[-1]
        losses = dict[int, list[float]]()
        for size in SIZES:
            for seed in range(seeds):
                lines = metrics_lines(folder / f"{size}-{seed}")
                each = [(int(one["sp"]) - size, one["loss"]) for one in lines if "loss" in one]
                mean = smoothed(each, at - half, at + half)
                losses.setdefault(size, []).append(mean)
        rows = compared(losses)
        found[point] = critical(rows, tolerance)
        print(f"sweep {point}:", *(f"{r.size}: {r.excess:+.4f} +- {r.reach:.4f}" for r in rows))
    return found


def branches(folder: Path, orders: int, tolerance: float) -> dict[str, list[Critical]]:
    """Return the critical sizes of the branches at each point: of all orders, then of each."""
    read = [
        json.loads(one.read_text()) | {"name": one.parent.name}
        for one in folder.glob("*/branch.json")
    ]
    found = dict[str, list[Critical]]()
    starts = sorted({one["name"].split("-")[0] for one in read})
    for point, start in zip(POINTS, starts, strict=True):
        losses = {
            size: [
                next(o["loss"] for o in read if o["name"] == f"{start}-{size}-{n}")
                for n in range(orders)
            ]
            for size in SIZES
        }
        single = [
            compared({size: [each[n]] for size, each in losses.items()}) for n in range(orders)
        ]
        rows = compared(losses)
        print(f"branches {point}:", *(f"{r.size}: {r.excess:+.4f} +- {r.reach:.4f}" for r in rows))
        found[point] = [critical(one, tolerance) for one in (rows, *single)]
    return found


def run() -> None:
    """Train what is missing, and print both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=20_480, help="of a run")
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE in the packaged run file")
    asked = parser.parse_intermixed_args()
    seeds, orders = asked.seeds, asked.orders
    num_samples = 4096 if asked.small else asked.samples
    overrides = [*(SMALL if asked.small else ()), *asked.overrides]
    given = ["rule={sqrt: 16}", f"max_duration={num_samples}sp", *overrides]
    for seed in range(seeds):
        for size in SIZES:
            train(asked.folder / f"{size}-{seed}", size, seed, given)
    base = asked.folder / f"{LEAST}-0"
    options = (
        "--at",
        ",".join(POINTS),
        "--sizes",
        "1x,2x,4x,8x",
        "--for",
        f"{num_samples // PART}sp",
        "--seeds",
        orders,
    )
    stretto("branch", base, *options, "--tolerance", asked.tolerance)
    of_sweep = sweep(asked.folder, seeds, num_samples, asked.tolerance)
    of_branches = branches(base.with_name(f"{base.name}-branches"), orders, asked.tolerance)
    for point in POINTS:
        whole, *single = of_branches[point]
        alone = ", ".join(str(one.crossing and round(one.crossing)) for one in single)
        print(f"{point}: sweep {of_sweep[point]}; branches {whole}; single orders cross at {alone}")


if __name__ == "__main__":
    run()
