"""The largest batch for a GPU that is not here: what the phantom answers, and the estimate.

Run `python bench/memory.py` (about 20 minutes; `--quick`: three of them). Each answer of the
phantom was run: three steps of that size fit, and the next larger size that was tried did not.
Results are saved in `bench/results/memory.json` and `.txt`. `phantomgpu setup` comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stretto.errors import FitError
from stretto.memory import find_batch_size, phantom

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.families

from tests.families.cuda import FAMILIES, CudaFamily
from tests.families.cuda_more import MORE

RESULTS = Path(__file__).parent / "results"
QUICK = ("MLP, SGD, mse", "GPT, bf16, dropout, clipping", "LSTM")


def ask(family: CudaFamily, memory: int) -> dict[str, Any]:
    """Return what the phantom and the estimate answer for so many GiB."""
    torch.manual_seed(0)
    row: dict[str, Any] = {"memory": memory}
    for method in ("phantom", "estimate"):
        before, start = os.times(), time.perf_counter()
        try:
            answer = find_batch_size(
                family.make_step("cpu"),
                family.make_batch,
                gpu="h100",
                device_memory=f"{memory}GiB",
                context=0,
                margin=0,
                method=method,
            )
        except FitError as error:
            row[method] = {"refused": error.message.why[-300:]}
            continue
        after = os.times()
        row[method] = {
            "size": answer.size,
            "too_large": answer.too_large,
            "peak": answer.peak,
            "processor_seconds": round(sum(after[:4]) - sum(before[:4]), 2),
            "seconds": round(time.perf_counter() - start, 2),
        }
    return row


def line(name: str, row: dict[str, Any]) -> str:
    """Return a row of the table."""
    found, guess = row["phantom"], row["estimate"]
    if "refused" in found:
        return f"{name:45} {row['memory']:>4}  refused: {found['refused'].splitlines()[-1]}"
    ratio = f"{guess['size'] / found['size']:.2f}" if "size" in guess else "refused"
    return (
        f"{name:45} {row['memory']:>4} {found['size']:>9,} {found['too_large'] or 0:>9,} "
        f"{found['processor_seconds']:>7} {ratio:>8}"
    )


def main() -> None:
    """Ask about every family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    missing = phantom.missing()
    if missing is not None:
        parser.exit(0, f"skipped: {missing}\n")
    print(f"{'':45} {'GiB':>4} {'fits':>9} {'does not':>9} {'CPU s':>7} {'estimate':>8}")
    rows, lines = [], []
    for name, family in {**FAMILIES, **MORE}.items():
        if (options.quick and name not in QUICK) or options.only not in name:
            continue
        for memory in family.memories[: 1 if options.quick else 2]:
            row = ask(family, memory)
            rows.append({"name": name, **row})
            lines.append(line(name, row))
            print(lines[-1], flush=True)
    if not options.quick and not options.only:
        (RESULTS / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
        (RESULTS / "memory.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
