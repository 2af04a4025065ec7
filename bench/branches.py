"""Critical batch sizes by `stretto branch` against a full sweep, with the packaged model.

Run `python bench/branches.py FOLDER` (hours of one core; started again, it goes on) or, for a ramp
and a constant with AdamW and Muon, `python bench/branches.py FOLDER --growth`.

Setting: TinyGPT of 1 layer and width 32 on sequences of 16 bytes of PythonDocs, AdamW, the packaged
learning rate for batches of 64 (its largest), the square root rule, no clipping (its effect depends
on the batch size), a warm-up of 1,920 samples, then constant: with a learning rate that decays over
time, sizes that reach a loss at different times would reach it with different rates.

Points: samples 4,912, 9,824 and 19,648 of 393,216, where the critical size grows. A branch can show
no size to be too large if the run itself improves by less than the tolerance while it lasts: later
in the run, every size would be within.

What is compared, written down before the first run of it ended. Changed after two repetitions: the
length of the run, from 98,304, a quarter of which are branches of 10 steps of 64 (those showed the
switch, with Adam's averages still those of the small batch, and not the size); and the tolerance,
from 0.005, as the five seeds of the sweep leave 0.008 at the first point.

- *branch*: from a checkpoint at sample p of a run of size 8, h samples at size B. Its excess is the
  mean, over the second half of them, of its loss less that of size 8. That is the product's own.
- *sweep*: the same excess without the switch. Five seeds of each size from the start. The loss L_B
  of a run near a sample s is a parabola in log(samples), fitted from s / 2 to 2 s. Let s be the
  sample where size B has the loss of size 8 at p. The excess of B is the mean of
  L_B(s + u) - L_8(p + u) for u from h / 2 to h. Each seed gives one; `critical` does the rest.
- *crossing*: the size at which the excess crosses 0.01, the command's default. Beyond
  the largest size it counts as that one, in both.
- *agreement*: a repetition is a run of size 8 with a seed of its own, at three points. It agrees if
  all three crossings are within a factor of 1.5 of the sweep's.
- *coverage*: the part of the branches' 90 percent intervals that hold the sweep's crossing.

The lag from the start, by which a larger size is behind at the same sample, is another quantity.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stretto.cli import main
from stretto.examples.text import PythonDocs
from stretto.examples.tiny_gpt import TinyGPT
from stretto.report.critical import Tried, compared, critical

NUM_SAMPLES, WARMUP = 393_216, 1_920
POINTS = {"1.25%": 4_912, "2.5%": 9_824, "5%": 19_648}
SIZES = (8, 16, 32, 64)
TOLERANCES = (0.01, 0.005, 0.0075, 0.015)
"""The first is the command's default, and counts; the others show how it depends on it."""
SWEEP_SEEDS, REPETITIONS = range(5), range(100, 110)
LENGTH = 2_688
"""Samples of a branch, by the command's default: a quarter of the run over 36 branches."""
SWEEP_END = {8: 39_296, 16: 49_152, 32: 49_152, 64: 49_152}
BASE_END, MUON_END = 20_480, 39_680
"""All branches lie before the ends: what would follow changes nothing, and is not trained."""
KEEP = "checkpoint={every: 4912sp, keep: 20}"
Near = Callable[[float], numpy.poly1d]
GPT = "stretto.examples.tiny_gpt:TinyGPT"
MODEL = (
    f"model={{target: '{GPT}', layers: 1, width: 32, heads: 2, context: 16}}",
    "data={target: 'stretto.examples.text:PythonDocs', sequence_length: 16}",
    f"schedules={{lr: {{Constant: {{warmup: {WARMUP}sp}}}}}}",
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
        given = [*MODEL, f"batch_size={size}", f"seed={seed}", f"max_duration={end}sp", KEEP]
        resume = ("--resume", "auto") if (folder / "run.yaml").exists() else ()
        assert stretto("train", *given, *settings, "--folder", folder, *resume, "--quiet") == 0
        (folder / "done").touch()


def branch(run: Path, *options: object) -> None:
    """Branch from a run, as if it were longer, and keep what the command prints as JSON."""
    out = run.with_name(f"{run.name}.json")
    if not out.exists():
        with redirect_stdout(StringIO()) as text:
            given = (f"max_duration={NUM_SAMPLES}sp", *options)
            assert stretto("branch", run, *given, "--json") == 0
        out.write_text(text.getvalue())


def train_sweep(file: Path, size: int, end: int) -> None:
    """Train all seeds of one size from the start, side by side, and keep their losses.

    It is plain torch, and no code of the product: stacked models, which AdamW trains as if they
    were alone, five at about the price of two.
    """
    if file.exists():
        return
    text, models, orders = PythonDocs(16), list[TinyGPT](), list[torch.Tensor]()
    pairs = [text[n] for n in range(len(text))]
    tokens, targets = torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
    for seed in SWEEP_SEEDS:
        chance = torch.Generator().manual_seed(torch.manual_seed(seed).initial_seed() + 1_000)
        models.append(TinyGPT(1, 32, heads=2, context=16))
        epochs = range(math.ceil(end / len(text)) + 1)
        orders.append(torch.cat([torch.randperm(len(text), generator=chance) for _ in epochs]))
    weights, _ = torch.func.stack_module_state(models)
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_of(weights: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(models[0], weights, (tokens,))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    losses = []
    for sample in range(0, end, size):
        rate = 4e-3 * math.sqrt(size / 64) * min(1.0, sample / WARMUP)
        optimizer.param_groups[0]["lr"] = rate
        batch = torch.stack([order[sample : sample + size] for order in orders])
        with sdpa_kernel(SDPBackend.MATH):  # the fused one has no rule for stacked models
            each = torch.func.vmap(loss_of)(weights, tokens[batch], targets[batch])
        optimizer.zero_grad()
        each.sum().backward()
        optimizer.step()
        losses.append(each.tolist())
    file.write_text(
        json.dumps([[round(one, 5) for one in each] for each in zip(*losses, strict=True)])
    )


def curve(losses: list[float], size: int) -> Near:
    """Return the loss of a run near a sample: a parabola in the logarithm of the samples."""
    at = numpy.maximum(numpy.arange(len(losses)) * size, 1)  # a loss is that before its batch
    loss = numpy.array(losses)

    def near(sample: float) -> numpy.poly1d:
        part = (at >= sample / 2) & (at <= sample * 2)
        return numpy.poly1d(numpy.polyfit(numpy.log(at[part]), loss[part], 2))

    return near


def excess(base: Near, other: Near, point: int) -> float:
    """Return the excess of one seed of the sweep, as the first lines of this file say."""
    of_base = base(point)
    level = of_base(math.log(point))
    low, high = point / 2, point * 8.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if other(middle)(math.log(middle)) > level else (low, middle)
    there, further = other(low), numpy.linspace(LENGTH / 2, LENGTH, 33)
    return float(numpy.mean(there(numpy.log(low + further)) - of_base(numpy.log(point + further))))


def sweep(folder: Path) -> dict[str, list[Tried]]:
    """Return the sizes of the sweep, compared at each point."""
    curves = dict[tuple[int, int], Near]()
    for size in SIZES:
        each = json.loads((folder / f"sweep-{size}.json").read_text())
        curves |= {(size, seed): curve(losses, size) for seed, losses in enumerate(each)}
    found = {}
    for at, point in POINTS.items():
        losses = {SIZES[0]: [0.0 for _ in SWEEP_SEEDS]}
        for size in SIZES[1:]:
            losses[size] = [
                excess(curves[SIZES[0], n], curves[size, n], point) for n in SWEEP_SEEDS
            ]
        found[at] = compared(losses)
        shown = ", ".join(f"{row.size}: {row.shown}" for row in found[at][1:])
        print(f"sweep {at}: {shown} -> {critical(found[at], TOLERANCES[0])}")
    return found


def show_agreement(folder: Path, of_sweep: dict[str, list[Tried]]) -> None:
    """Print each repetition beside the sweep, and how many agree and cover."""
    repetitions = {file.stem: json.loads(file.read_text()) for file in folder.glob("run-*.json")}
    for tolerance in TOLERANCES:
        all_near, near, covered, touched, intervals = 0, 0, 0, 0, 0
        for name, found in sorted(repetitions.items()):
            shown, ratios = list[str](), list[float]()
            for at, right in of_sweep.items():
                rows = [
                    Tried._make(math.inf if n is None else n for n in row.values())
                    for row in found[at]["tried"]
                ]
                one, other = critical(rows, tolerance), critical(right, tolerance)
                (least, most), (low, high) = one.interval or (0, None), other.interval or (0, None)
                crossing, expected = one.crossing or SIZES[-1], other.crossing or SIZES[-1]
                ratios.append(max(crossing / expected, expected / crossing))
                covered += least <= expected <= (most or math.inf)
                touched += least <= (high or math.inf) and low <= (most or math.inf)
                excesses = ", ".join(f"{row.excess:+.4f}" for row in rows[1:])
                shown.append(f"{at}: {excesses} -> {one}")
            near += sum(ratio <= 1.5 for ratio in ratios)
            all_near += max(ratios) <= 1.5
            intervals += len(ratios)
            if tolerance == TOLERANCES[0]:
                print(f"{name} (cost {found['cost']})", *shown, sep="\n  ")
        print(
            f"tolerance {tolerance}: within a factor of 1.5 at all points {all_near} of"
            f" {len(repetitions)} repetitions, at {near} of {intervals} points;"
            f" {covered} of {intervals} intervals hold the sweep's crossing, {touched} its interval"
            " or a part of it"
        )


def agreement(folder: Path) -> None:
    """Train what is missing of the study, and print it."""
    for size in SIZES:
        train_sweep(folder / f"sweep-{size}.json", size, SWEEP_END[size])
    for seed in REPETITIONS:
        train(folder / f"run-{seed}", SIZES[0], seed, BASE_END)
        branch(folder / f"run-{seed}", "--at", ",".join(POINTS))
    show_agreement(folder, sweep(folder))


def growth(folder: Path) -> None:
    """Print what the command says where the critical size grows, and later, for AdamW and Muon."""
    muon = "optimizer={target: 'torch.optim:Muon', adjust_lr_fn: match_rms_adamw, lr: 4.0e-3}"
    adamw = folder / f"run-{REPETITIONS[0]}"
    train(adamw, SIZES[0], REPETITIONS[0], BASE_END)
    train(folder / "Muon", SIZES[0], REPETITIONS[0], MUON_END, muon)
    for run, early, later in (
        (adamw, "1.25%,5%", "2.5%,5%"),
        (folder / "Muon", "1.25%,5%", "7.5%,10%"),
    ):
        for times in (early, later):
            print(f"{run.name}, {times}", flush=True)
            longer = f"max_duration={NUM_SAMPLES}sp"
            stretto("branch", run, longer, "--at", times, "--for", f"{LENGTH}sp")


def run() -> None:
    """Train what is missing, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--growth", action="store_true", help="a ramp and a constant")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    (growth if asked.growth else agreement)(asked.folder)


if __name__ == "__main__":
    run()
