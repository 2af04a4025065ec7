"""The largest batch for a GPU that is not here: what the phantom answers.

Run `python bench/memory.py` (an hour; `--quick`: three families). Three optimizer steps of each
answer have run, and the next larger size ran out of memory. Results are added to
`bench/results/memory.json` and `.txt` one by one, and what is there is not asked again.
`phantomgpu setup` comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from families.cuda import FAMILIES, CudaFamily
from families.cuda_more import MORE

from stretto.errors import FitError
from stretto.memory import Answer, find_batch_size, phantom

RESULTS = Path(__file__).parent / "results"
QUICK = ("MLP, SGD, mse", "GPT, bf16, dropout, clipping", "LSTM")
HEAD = f"{'':45} {'GiB':>4} {'fits':>9} {'does not':>9} {'trials':>6} {'CPU s':>6}"


def ask(family: CudaFamily, memory: int) -> dict[str, Any]:
    """Return what the phantom answers for so many GiB."""
    torch.manual_seed(0)
    before, start = os.times(), time.perf_counter()
    try:
        answer = find_batch_size(
            family.make_step("cpu"),
            family.make_batch,
            gpu="h100",
            device_memory=f"{memory}GiB",
            context=0,
            margin=0,
        )
    except (FitError, ImportError) as error:
        return {"phantom": {"refused": str(error)[-400:]}}
    check(answer)
    found = {
        "size": answer.size,
        "too_large": answer.too_large,
        "peak": answer.peak,
        "trials": answer.cost.phantom_steps,
        "out_of_memory": answer.cost.num_out_of_memory,
        "processor_seconds": round(sum(os.times()[:4]) - sum(before[:4]), 1),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return {"phantom": found}


def check(answer: Answer) -> None:
    """Refuse an answer that was not run, or whose next size did not run out of memory."""
    assert answer.size in answer.peaks
    assert answer.too_large == answer.size + 1
    assert answer.too_large not in answer.peaks
    assert answer.cost.num_out_of_memory == answer.cost.phantom_steps - len(answer.peaks) > 0


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    found = row["phantom"]
    start = f"{row['name']:45} {row['memory']:>4}"
    if "refused" in found:
        return f"{start} refused: {found['refused'].splitlines()[-1]}"
    return (
        f"{start} {found['size']:>9,} {found['too_large']:>9,} {found['trials']:>6} "
        f"{found['processor_seconds']:>6}"
    )


def known() -> list[dict[str, Any]]:
    """Return the rows that are there."""
    file = RESULTS / "memory.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    return rows


def save(row: dict[str, Any], order: list[tuple[str, int]]) -> None:
    """Add a row, in the order of the families."""
    rows = sorted([*known(), row], key=lambda one: order.index((one["name"], one["memory"])))
    (RESULTS / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "memory.txt").write_text("\n".join([HEAD, *map(line, rows)]) + "\n")


def main() -> None:
    """Ask about every family, first with the least memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="names with this pattern")
    options = parser.parse_args()
    missing = phantom.setup_problem()
    if missing is not None:
        parser.exit(0, f"skipped: {missing}\n")
    families = {**FAMILIES, **MORE}
    order = [(name, memory) for name, one in families.items() for memory in one.memories]
    asked = sorted(order, key=lambda one: families[one[0]].memories.index(one[1]))
    print(HEAD, flush=True)
    for name, memory in asked:
        if (options.quick and name not in QUICK) or not re.search(options.only, name):
            continue
        there = [(one["name"], one["memory"]) for one in known()]
        if not options.quick and (name, memory) in there:
            continue
        row = {"name": name, "memory": memory, **ask(families[name], memory)}
        print(line(row), flush=True)
        if not options.quick:
            save(row, order)


if __name__ == "__main__":
    main()
