"""Memory that was predicted for CUDA, against what its allocator says; and what noise costs there.

Run `python bench/gpu.py` on a machine with an accelerator; the result is saved in
`bench/results/gpu.json` and `.txt`. Three questions: are predictions, made on fake tensors of the
CPU, near `torch.cuda.max_memory_allocated` and `max_memory_reserved`, for many kinds of models, in
bf16 and compiled; how large is a batch found by each method, beside the largest that does not run
out of memory; and what does measuring the noise of the gradient add to a step. `--device cpu` only
shows that the program runs: the peaks are then those of the CPU's allocator, and nothing is saved.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory import LARGE
from noise import MICRO_BATCHES, Listen
from torch.utils.data import TensorDataset

from stretto.errors import FitError
from stretto.examples.text import next_byte_loss
from stretto.examples.tiny_gpt import TinyGPT
from stretto.memory import find_batch_size, predict, probe
from stretto.memory.finding.finder import FindMethod
from stretto.memory.measuring.limits import allocated_bytes
from stretto.memory.measuring.real import record_step
from stretto.memory.prediction.tensors import state_tensors
from stretto.runtime import SupervisedStep
from stretto.training import Callback, Run, Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.families

from tests.families.memory import FAMILIES, Family, next_byte

RESULTS = Path(__file__).parent / "results"
SIZES = (64, 512)
COMPILED = ("MLP, AdamW", "GPT, SDPA", "GPT, SDPA, bf16")
METHODS: tuple[FindMethod, ...] = ("try", "auto", "probe", "predict")
STEPS = 30
"""Steps with and without measuring the noise, in turns of five."""
QUICK = ("MLP, AdamW", "GPT, SDPA, bf16")


def fresh(name: str, device: str, *, is_compiled: bool) -> Family:
    """Return a family whose tensors are made on a device."""
    torch.manual_seed(0)
    with torch.device(device):
        family = FAMILIES[name]()
    if is_compiled:
        family.step.model.compile()

    def make_batch(size: int) -> Any:
        with torch.device(device):
            return family.make_batch(size)

    return Family(family.step, make_batch)


def real_peak(family: Family, size: int) -> dict[str, int]:
    """Return what the allocator counts in a step, the third of that size."""
    device = family.step.device
    for _ in range(2):
        family.step.run(family.make_batch(size))
    if device.type == "cpu":
        return {"allocated": record_step(family.step, family.make_batch(size), size).peak}
    gc.collect()
    torch.cuda.empty_cache()
    kept = [*family.step.model.parameters(), *family.step.model.buffers()]
    own = allocated_bytes([*kept, *state_tensors(family.step)], device)
    # The workspaces of cuBLAS are the allocator's too, and no part of the step.
    workspaces = torch.cuda.memory_allocated(device) - own
    torch.cuda.reset_peak_memory_stats(device)
    family.step.run(family.make_batch(size))
    torch.cuda.synchronize(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device) - workspaces,
        "reserved": torch.cuda.max_memory_reserved(device),
        "workspaces": workspaces,
    }


def measure_family(name: str, device: str, *, is_compiled: bool) -> dict[str, Any]:
    """Return predictions, a probe and the real peaks of a family."""
    kind: Any = None if device == "cpu" else device
    row: dict[str, Any] = {"sizes": {}, "refused": []}
    prediction = found = None
    try:
        prediction = predict(*fresh(name, "cpu", is_compiled=is_compiled), device=kind)
    except FitError as error:
        row["refused"].append(str(error))
    family = fresh(name, device, is_compiled=is_compiled)
    try:
        found = probe(*family)
    except FitError as error:
        row["refused"].append(str(error))
    for size in SIZES:
        peaks = real_peak(family, size)
        if prediction is not None:
            peaks["predicted"] = prediction.at(size).bytes
            peaks["predicted_reserved"] = prediction.peak(size)
        if found is not None:
            peaks["probed"] = found.peak(size)
        row["sizes"][size] = peaks
    return row


def measure_finder(device: str, *, is_quick: bool) -> dict[str, Any]:
    """Return the batch that each method finds for a GPT of 124M parameters in bf16."""
    layers, width, heads, length, tied, _ = LARGE["GPT, 124M parameters"]
    if is_quick:
        layers, width, heads, length = 2, 64, 2, 64
    with torch.device(device):
        model = TinyGPT(layers, width, heads=heads, context=length, vocabulary=50257, tied=tied)
    step = SupervisedStep(
        model, torch.optim.AdamW(model.parameters()), next_byte, precision="bf16", clip_norm=1.0
    )
    found: dict[str, Any] = {}
    for method in METHODS:
        kind: Any = device if method == "predict" and device != "cpu" else None
        answer = find_batch_size(
            step,
            torch.zeros(2, length, dtype=torch.long),
            method=method,
            device=kind,
            maximum=64 if is_quick else 1 << 24,
        )
        found[method] = {"size": answer.size, **answer.cost._asdict()}
    return found


class Turns(Callback):
    """Stops every five steps, and knows how long each took, with the device waited for."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.milliseconds: list[float] = []
        self._wait = wait
        self._since = 0.0

    def on_batch_start(self, run: Run, step: Any) -> None:
        """Take the time; the batch is there."""
        del run, step
        self._wait()
        self._since = time.perf_counter()

    def on_batch_end(self, run: Run, step: Any) -> None:
        """Take the time again."""
        del step
        self._wait()
        self.milliseconds.append((time.perf_counter() - self._since) * 1e3)
        if run.timer.batch % 5 == 0:
            run.stop("the other one's turn")


def measure_noise(device: str, *, is_quick: bool) -> dict[str, Any]:
    """Return the milliseconds of a step without and with measuring the noise of the gradient."""
    layers, width, heads, length, tied, _ = LARGE["GPT, 124M parameters"]
    if is_quick:
        layers, width, heads, length = 2, 64, 2, 64
    tokens = torch.randint(0, 256, (512, length + 1))
    runs, turns = [], []
    for listens in (False, True):
        model = TinyGPT(layers, width, heads=heads, context=length, tied=tied).to(device)
        turns.append(Turns(torch.cuda.synchronize if device == "cuda" else lambda: None))
        runs.append(
            Trainer(
                model,
                TensorDataset(tokens[:, :-1], tokens[:, 1:]),
                optimizer=torch.optim.AdamW(model.parameters()),
                loss=next_byte_loss,
                max_duration="1_000_000ba",
                batch_size=32,
                micro_batch_size=32 // MICRO_BATCHES,
                precision="bf16",
                callbacks=[turns[-1], *([Listen()] if listens else [])],
            )
        )
    for _ in range(1 + (1 if is_quick else STEPS // 5)):
        for run in runs:
            run.fit()
    plain, measured = (statistics.quantiles(one.milliseconds[5:], n=4) for one in turns)
    return {"milliseconds": plain, "measured": measured}


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    rows = result["families"]
    width = max(map(len, rows))
    heads = ("samples", "allocated", "predicted", "reserved", "predicted", "probed")
    lines = [f"{'':<{width}}" + "".join(f"{head:>11}" for head in heads)]
    for name, row in rows.items():
        for size, peaks in row["sizes"].items():
            real, reserved = peaks["allocated"], peaks.get("reserved")
            cells = [f"{real / 2**20:.1f} MiB", _ratio(peaks.get("predicted"), real)]
            cells += [f"{reserved / 2**20:.1f} MiB" if reserved else ""]
            cells += [_ratio(peaks.get("predicted_reserved"), reserved)]
            cells += [_ratio(peaks.get("probed"), real)]
            lines.append(f"{name:<{width}}{size:>11}" + "".join(f"{one:>11}" for one in cells))
    lines.append("predicted and probed: as parts of what the allocator had")
    true = result["finder"]["try"]["size"]
    lines += [
        f"{method}: {found['size']} samples, {found['size'] / true:.1%} of the largest; "
        f"{found['real_steps']} real steps, {found['num_out_of_memory']} out of memory, "
        f"{found['num_samples']:,} samples, {found['seconds']:.1f} s"
        for method, found in result["finder"].items()
    ]
    plain, measured = result["noise"]["milliseconds"][1], result["noise"]["measured"][1]
    lines.append(
        f"noise: {plain:.1f} ms a step, {measured:.1f} with measuring ({measured / plain - 1:+.1%})"
    )
    return "\n".join(lines)


def _ratio(part: int | None, whole: int | None) -> str:
    return f"{part / whole:.3f}" if part and whole else ""


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few small rows; nothing is saved")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no accelerator here: nothing was measured")
    names = [(name, False) for name in FAMILIES if "transformers" not in name]
    names += [(name, True) for name in COMPILED]
    if given.quick:
        names = [(name, False) for name in QUICK]
    result = {
        "families": {
            f"{name}, compiled" if is_compiled else name: measure_family(
                name, given.device, is_compiled=is_compiled
            )
            for name, is_compiled in names
        },
        "finder": measure_finder(given.device, is_quick=given.quick),
        "noise": measure_noise(given.device, is_quick=given.quick),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
    }
    text = table(result)
    if given.device == "cuda" and not given.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "gpu.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (RESULTS / "gpu.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
