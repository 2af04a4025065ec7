"""Memory that was predicted, against what the real allocator says; and what a prediction costs.

Run `python bench/memory.py`; the last result lies in `bench/results/memory.json` and `.txt`. The
families that need transformers are taken in a process of that environment (`bench/.venvs`, see
`peer_environments.py`), where it has been made; `--quick` leaves them and the large models out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import processor
from peer_environments import FOLDER

from stretto.errors import FitError
from stretto.examples.tiny_gpt import TinyGPT
from stretto.memory import find_batch_size, predict, probe
from stretto.memory.measuring.real import record_step
from stretto.runtime import SupervisedStep

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.families

from tests.families.memory import FAMILIES, Family, next_byte

RESULTS = Path(__file__).parent / "results"
SIZES = (8, 17, 40)
CALIBRATED_AT = 5
REPEATS = 5
QUICK = ("MLP, AdamW fused", "GPT, SDPA, bf16", "U-Net")
LARGE = {
    # name: layers, width, heads, length, tied, limit
    "GPT, 124M parameters": (12, 768, 12, 1024, True, 80 * 2**30),
    "GPT, 6.9B parameters": (32, 4096, 32, 2048, False, 640 * 2**30),
}


def real_peaks(family: Family) -> dict[int, int]:
    """Return the allocator's peak of a step of each size, the second of that size."""
    peaks = {}
    for size in SIZES:
        family.step.run(family.make_batch(size))
        peaks[size] = record_step(family.step, family.make_batch(size), size).peak
    return peaks


def measure_family(name: str) -> dict[str, Any]:
    """Return how far prediction and probe are from the real peaks of a family."""
    torch.manual_seed(0)
    family = FAMILIES[name]()
    row: dict[str, Any] = {}
    start = time.process_time()
    try:
        prediction = predict(*family)
    except FitError as error:
        prediction = None
        row["prediction"] = {"refused": str(error)}
    predicted_seconds = time.process_time() - start
    start = time.process_time()
    found = probe(*family)
    found.calibrate(CALIBRATED_AT)
    probed_seconds = time.process_time() - start
    peaks = real_peaks(family)
    row["peaks"] = peaks
    if prediction is not None:
        row["prediction"] = {
            "certainty": prediction.certainty_if_verified,
            "reason": prediction.reason,
            "seconds": round(predicted_seconds, 2),
            "bytes_off": {size: prediction.peak(size) - peak for size, peak in peaks.items()},
        }
    row["probe"] = {
        "seconds": round(probed_seconds, 2),
        "bytes_off": {size: found.peak(size) - peak for size, peak in peaks.items()},
    }
    return row


def high_water_mark() -> int:
    """Return the most memory that this process has had, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure_large(name: str) -> dict[str, Any]:
    """Return what it costs to find the largest batch of a large model, in a process of its own."""
    layers, width, heads, length, tied, limit = LARGE[name]
    with torch.device("meta"):
        model = TinyGPT(layers, width, heads=heads, context=length, vocabulary=50257, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    step = SupervisedStep(model, optimizer, next_byte, precision="bf16", clip_norm=1.0)
    # Making an optimizer has imported torch's compiler, about 2 s and 70 MiB, in any program.
    before, start = high_water_mark(), time.process_time()
    answer = find_batch_size(
        step,
        lambda size: torch.zeros(size, length, dtype=torch.long),
        method="predict",
        device_memory=limit,
        margin=0,
    )
    prediction, size = answer.estimator, answer.size
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "length": length,
        "limit": limit,
        "largest": size,
        "peak": prediction.peak(size),
        "fake_steps": prediction.num_steps,
        "processor_seconds": round(time.process_time() - start, 2),
        "memory_bytes": high_water_mark() - before,
    }


def apart(what: str, name: str, python: str = sys.executable) -> dict[str, Any]:
    """Measure in a process of its own."""
    source = Path(__file__).parents[1] / "src"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    command = [python, __file__, f"--{what}", name]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def least(name: str) -> dict[str, Any]:
    """Return the quickest of several searches: other programs on the machine slow all down."""
    rows = [apart("large", name) for _ in range(REPEATS)]
    every = [row["processor_seconds"] for row in rows]
    return {**min(rows, key=lambda row: row["processor_seconds"]), "every": every}


def measure(*, is_quick: bool) -> dict[str, Any]:
    """Return all rows."""
    with_transformers = FOLDER / "transformers" / "bin" / "python"
    families = {}
    for name in FAMILIES:
        if "transformers" in name:
            if not is_quick and with_transformers.exists():
                families[name] = apart("family", name, str(with_transformers))
        elif not is_quick or name in QUICK:
            families[name] = measure_family(name)
    large = {} if is_quick else {name: least(name) for name in LARGE}
    return {"families": families, "large": large}


def worst(row: dict[str, Any], estimator: str) -> str:
    """Return the greatest error of an estimator over the sizes, as text."""
    found = row[estimator]
    if "refused" in found:
        return "refused"
    # Keys are texts where the row came from another process.
    peaks = {int(size): peak for size, peak in row["peaks"].items()}
    off = {int(size): count for size, count in found["bytes_off"].items()}
    size = max(off, key=lambda size: abs(off[size]) / peaks[size])
    if off[size] == 0:
        return "0"
    if abs(off[size]) < 100:
        return f"{off[size]:+} B"
    return f"{100 * off[size] / peaks[size]:+.2f} %"


def table(result: dict[str, Any]) -> str:
    """Return the rows as text."""
    width = max(map(len, result["families"]))
    lines = [f"{'':<{width}}  {'prediction':>10}  {'says':<11}  {'seconds':>7}  {'probe':>8}"]
    for name, row in result["families"].items():
        found = row["prediction"]
        says, seconds = found.get("certainty", ""), found.get("seconds", "")
        lines.append(
            f"{name:<{width}}  {worst(row, 'prediction'):>10}  {says:<11}  {seconds:>7}  "
            f"{worst(row, 'probe'):>8}"
        )
    for name, row in result["large"].items():
        lines.append(
            f"{name}: {row['largest']} samples of {row['length']} tokens in "
            f"{row['limit'] / 2**30:.0f} GiB; {row['fake_steps']} fake steps, "
            f"{row['processor_seconds']} s of the processor, {row['memory_bytes'] / 2**20:.0f} MiB"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="nothing is saved")
    parser.add_argument("--family", help="measure one family, and print it as JSON")
    parser.add_argument("--large", help="measure one large model, and print it as JSON")
    given = parser.parse_args()
    if given.family or given.large:
        row = measure_family(given.family) if given.family else measure_large(given.large)
        print(json.dumps(row))
        return
    result = {
        "what": "the greatest error over batches of 8, 17 and 40 samples, one thread",
        **measure(is_quick=given.quick),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    text = table(result)
    if not given.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "memory.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (RESULTS / "memory.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
