"""Critical batch sizes by `stretto branch` against a full sweep, with the packaged model.

Run `python bench/branches.py FOLDER` (hours of one core; started again, it goes on) or, for a ramp
and a constant with AdamW and Muon, `python bench/branches.py FOLDER --growth`.

Setting: TinyGPT of 1 layer and width 32 on sequences of 16 bytes of PythonDocs, AdamW, the packaged
learning rate for batches of 64 (its largest), the square root rule, no clipping (its effect depends
on the batch size), a warm-up of 2 percent, then constant: with a learning rate that decays over
time, sizes that reach a loss at different times would reach it with different rates.

Points: 5, 10 and 20 percent of 128,000 samples, where the critical size grows. A branch can show no
size to be too large if the run itself improves by less than the tolerance while it lasts. Of a loss
that falls by 0.3 for each factor of e in samples, a branch of 0.6 percent is worth 0.036 at 5
percent, 0.009 at 20 and 0.002 at 80 percent of the run.

What is compared, written down before the first run of it ended:

- *branch*: from a checkpoint at sample p of a run of size 8, h samples at size B. Its excess is the
  mean, over the second half of them, of its loss less that of size 8. That is the product's own.
- *sweep*: the same excess without the switch. Five seeds of each size from the start. The loss of
  a run near a sample s is a parabola in log(samples), fitted from s / 2 to 2 s. Let l be the loss of
  size 8 at p, and s the sample where size B has that loss, too. The excess of B is the mean of
  L_B(s + u) - L_8(p + u) for u from h / 2 to h. Each seed gives one; `critical` does the rest.
- *crossing*: the size at which the excess crosses 0.005, interpolated as in the product. Beyond
  the largest size it counts as that one, in both.
- *agreement*: a repetition is a run of size 8 with a seed of its own and its three points. It agrees
  if all three crossings are within a factor of 1.5 of the sweep's.
- *coverage*: the part of the branches' 90 percent intervals that hold the sweep's crossing.

The lag from the start, by which a larger size is behind at the same sample, is another quantity.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from stretto.cli import main
from stretto.report.critical import Critical, Tried, compared, critical
from stretto.run_folder import metrics_lines

NUM_SAMPLES = 128_000
POINTS = {"5%": 6_400, "10%": 12_800, "20%": 25_600}
SIZES = (8, 16, 32, 64)
TOLERANCE = 0.005
SWEEP_SEEDS, REPETITIONS = range(5), range(100, 110)
MODEL = (
    "model={target: 'stretto.examples.tiny_gpt:TinyGPT', layers: 1, width: 32, heads: 2, context: 16}",
    "data={target: 'stretto.examples.text:PythonDocs', sequence_length: 16}",
    "schedules={lr: {Constant: {warmup: 2560sp}}}",
    "rule={sqrt: 64}",
    "clip_norm=null",
    "evaluate=[]",
    "log={every: 64sp, loggers: [], console: false}",
)


def stretto(*arguments: object) -> int:
    """Run a command in this process."""
    try:
        main([str(one) for one in arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def train(folder: Path, size: int, seed: int, end: int, *settings: str) -> None:
    """Train a run up to sample `end`, unless it is there."""
    if not (folder / "done").exists():
        given = [*MODEL, f"batch_size={size}", f"seed={seed}", f"max_duration={end}sp", *settings]
        resume = ("--resume", "auto") if (folder / "run.yaml").exists() else ()
        assert stretto("train", *given, "--folder", folder, *resume, "--quiet") == 0
        (folder / "done").touch()


def branch(run: Path, *options: object) -> dict[str, Any]:
    """Branch from a run as if it were longer, and return what the command prints as JSON."""
    out = run.with_name(f"{run.name}.json")
    if not out.exists():
        from contextlib import redirect_stdout
        from io import StringIO

        with redirect_stdout(StringIO()) as text:
            longer = f"max_duration={NUM_SAMPLES}sp"
            assert stretto("branch", run, longer, *options, "--json") == 0
        out.write_text(text.getvalue())
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def curve(folder: Path) -> Callable[[float], numpy.poly1d]:
    """Return the loss of a run near a sample: a parabola in the logarithm of the samples."""
    lines = [one for one in metrics_lines(folder) if "loss" in one]
    at = numpy.array([one["sp"] - 32 for one in lines])
    loss = numpy.array([one["loss"] for one in lines])

    def near(sample: float) -> numpy.poly1d:
        part = (at >= sample / 2) & (at <= sample * 2)
        return numpy.poly1d(numpy.polyfit(numpy.log(at[part]), loss[part], 2))

    return near


def excess(base: Callable, other: Callable, point: int, length: int) -> float:
    """Return the excess of one seed of the sweep, as the first lines of this file say."""
    of_base = base(point)
    level = of_base(math.log(point))
    low, high = point / 2, point * 8.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if other(middle)(math.log(middle)) > level else (low, middle)
    there, further = other(low), numpy.linspace(length / 2, length, 33)
    return float(numpy.mean(there(numpy.log(low + further)) - of_base(numpy.log(point + further))))


def sweep(folder: Path, length: int) -> dict[str, Critical]:
    """Return the critical size of the sweep at each point."""
    curves = {(b, n): curve(folder / f"sweep-{b}-{n}") for b in SIZES for n in SWEEP_SEEDS}
    found = {}
    for at, point in POINTS.items():
        each = {
            size: [
                0.0 if size == SIZES[0]
                else excess(curves[SIZES[0], n], curves[size, n], point, length)
                for n in SWEEP_SEEDS
            ]
            for size in SIZES
        }
        rows = compared(each)
        found[at] = critical(rows, TOLERANCE)
        print(f"sweep {at}:", *(f"{r.size}: {r.excess:+.4f} +- {r.reach:.4f}" for r in rows), "->", found[at])
    return found
