"""The batch size found for a GPU that is not there, against the largest that really fits.

Run `make phantom`, then `python bench/cuda_memory.py`; the last result lies in
`bench/results/cuda_memory.json` and `.txt`. For each family of training steps and each memory,
`find_batch_size` predicts on a plain CPU. The truth comes from torch's own CUDA code
(`cuda_truth.py`): the largest size, as saved in `cuda_truth.json`; whether the size that was found
fits; and the peaks of half of the largest size, of which each byte is compared. A size above the
largest may fit too, because fragments of memory depend on the size.

Both sides have the same packages, and no CUDA context. Whatever a program reads from the device
of the phantom is 0; so here the prediction also takes values that are read to be 0, and not 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cuda_truth
import phantom_runs as phantom
import torch
from machine import processor

from stretto.memory import find_batch_size
from stretto.memory.prediction import predict as module_of_predictions

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.families

from tests.families.cuda import FAMILIES

RESULTS = Path(__file__).parent / "results"
QUICK = ("MLP, SGD, mse", "TinyGPT, AdamW", "GPT, bf16, dropout, clipping")
GOOD = 0.95
"""Rows with a smaller ratio are listed in the summary."""


def predict_here(name: str, memory: int, compared: int) -> dict[str, Any]:
    """Return the size that is found, and the predicted bytes of another."""
    reads_zeros: Any = module_of_predictions
    reads_zeros.READ_VALUES = (0,)
    family = FAMILIES[name]
    torch.backends.cudnn.enabled = family.uses_cudnn
    with cuda_truth.Zeros():  # type: ignore[no-untyped-call]
        step = family.make_step("cpu")
    start = time.process_time()
    answer = find_batch_size(
        step, family.make_batch, device="cuda", device_memory=memory << 30, context=0
    )
    return {
        "found": answer.size,
        "seconds": round(time.process_time() - start, 1),
        "fake_steps": answer.cost.fake_steps,
        "certainty": answer.certainty,
        "predicted": {
            "allocated": answer.estimator.allocated(compared),
            "reserved": answer.estimator.peak(compared),
        },
    }


def compare(truth: dict[str, Any], version: str = phantom.VERSION) -> dict[str, Any]:
    """Return what is found and true for a family and a memory."""
    name, memory, half = truth["name"], truth["memory"], truth["half"]
    row = {"name": name, "memory": memory, "largest": truth["largest"]}
    arguments = ("--ours", name, "--memory", str(memory), "--compared", str(half["size"]))
    ours = phantom.run(Path(__file__).name, *arguments, memory=0, version=version)
    if "error" in ours:
        return {**row, **ours}
    predicted = ours.pop("predicted")
    off = {kind: predicted[kind] - half[kind] for kind in predicted}
    row |= ours | {"ratio": round(ours["found"] / truth["largest"], 4)}
    row |= {"does_fit": True, "compared": half, "bytes_off": off}
    if ours["found"] != truth["largest"]:
        at_found = cuda_truth.measure(name, memory, sizes=[ours["found"]], version=version)
        row["does_fit"] = at_found["peaks"] != [None]
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers over all rows."""
    done = [row for row in rows if "found" in row]
    ratios = [row["ratio"] for row in done]
    off = {
        kind: [row["bytes_off"][kind] / row["compared"][kind] for row in done]
        for kind in ("allocated", "reserved")
    }
    return {
        "configurations": len(rows),
        "models": len({row["name"] for row in rows}),
        "smallest_ratio": min(ratios),
        "median_ratio": round(statistics.median(ratios), 4),
        f"below_{GOOD}": sum(ratio < GOOD for ratio in ratios),
        "do_not_fit": sum(not row["does_fit"] for row in done),
        "refused": len(rows) - len(done),
        "equal_to_the_byte": sum(not any(row["bytes_off"].values()) for row in done),
        "worst_allocated_percent": round(100 * max(off["allocated"], key=abs), 3),
        "worst_reserved_percent": round(100 * max(off["reserved"], key=abs), 3),
        "median_seconds": statistics.median(row["seconds"] for row in done),
        "most_seconds": max(row["seconds"] for row in done),
    }


def table(rows: list[dict[str, Any]], numbers: dict[str, Any]) -> str:
    """Return the rows and their summary as text."""
    width = max(len(row["name"]) for row in rows)
    columns = "GiB  largest    found  ratio  fits  allocated off  reserved off  seconds  fake steps"
    lines = [f"{'':<{width}}  {columns}"]
    for row in rows:
        start = f"{row['name']:<{width}}  {row['memory']:>3}  {row['largest']:>7,}"
        if "found" not in row:
            lines.append(f"{start}  {row['error']}")
            continue
        off, fits = row["bytes_off"], "yes" if row["does_fit"] else "NO"
        lines.append(
            f"{start}  {row['found']:>7,}  {row['ratio']:5.3f}  {fits:<4}  {off['allocated']:>+13,}"
            f"  {off['reserved']:>+12,}  {row['seconds']:>7}  {row['fake_steps']:>10}"
        )
    lines += [f"{name.replace('_', ' ')}: {number:,}" for name, number in numbers.items()]
    return "\n".join(lines)


def measure(truths: list[dict[str, Any]], version: str) -> list[dict[str, Any]]:
    """Return all rows, in the order of the truth."""
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        for row in workers.map(lambda truth: compare(truth, version), truths):
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def saved_truths(*, is_quick: bool, only: str) -> list[dict[str, Any]]:
    """Return the rows of `cuda_truth.json` that are asked for."""
    text = (RESULTS / "cuda_truth.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    if is_quick:
        return [row for row in rows if row["name"] in QUICK and row["memory"] == 1]
    return [row for row in rows if only in row["name"]]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 families; nothing is saved")
    parser.add_argument("--only", default="", help="families with this text; nothing is saved")
    parser.add_argument("--torch", default=phantom.VERSION, help="another one is not saved")
    parser.add_argument("--ours", choices=FAMILIES, help="predict in this process, print as JSON")
    parser.add_argument("--memory", type=int, help="for --ours, in GiB")
    parser.add_argument("--compared", type=int, help="for --ours: the size to predict the peaks of")
    given = parser.parse_args()
    if given.ours:
        print(json.dumps(predict_here(given.ours, given.memory, given.compared)))
        return
    truths = saved_truths(is_quick=given.quick, only=given.only)
    if given.torch != phantom.VERSION:
        truths = [
            cuda_truth.measure(row["name"], row["memory"], version=given.torch) for row in truths
        ]
    rows = measure(truths, given.torch)
    numbers = summary(rows)
    text = table(rows, numbers)
    if not given.quick and not given.only and given.torch == phantom.VERSION:
        result = {
            "what": "find_batch_size for an absent H100 against torch's own CUDA code; bytes at "
            "half of the largest size; no CUDA context, a margin of 1 percent; values that are "
            "read are 0 on both sides; seconds of the processor for the search alone",
            "summary": numbers,
            "rows": rows,
            "python": platform.python_version(),
            "torch": given.torch,
            "processor": processor(),
            "load_average": round(os.getloadavg()[0], 1),
        }
        content = json.dumps(result, indent=1) + "\n"
        (RESULTS / "cuda_memory.json").write_text(content, encoding="utf-8")
        (RESULTS / "cuda_memory.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
