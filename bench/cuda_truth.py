"""The largest batch whose training steps fit into the memory of a CUDA device.

Run `make phantom`, then `python bench/cuda_truth.py NAME --memory GIB`. The device is not there:
its memory is a number, and all of torch's own CUDA code runs (`tools/phantom/make.py`). A model is
built on the CPU and moved; three whole optimizer steps run, so the optimizer makes its state.
`--all` measures every family and saves `bench/results/cuda_truth.json`; `--size` prints the peaks
of some sizes; `--history` saves who allocated what.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import phantom_runs as phantom
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.families

from tests.families.cuda import FAMILIES, CudaFamily

RESULTS = Path(__file__).parent / "results"
STEPS = 3
_RANDOM = ("normal_", "uniform_")


class Zeros(TorchDispatchMode):
    """Makes all weights zero: their values do not matter, and random ones take time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _RANDOM and args[0].device.type == "cpu":
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


def run_steps(family: CudaFamily, size: int) -> None:
    """Build the model, and take a few optimizer steps with batches of `size`."""
    with Zeros():  # type: ignore[no-untyped-call]
        step = family.make_step("cuda")
    for _ in range(STEPS):
        batch = pytree.tree_map(lambda tensor: tensor.to("cuda"), family.make_batch(size))
        step.run(batch)
        del batch


def empty_caches() -> None:
    """Give all memory back to the device, that of cuBLAS too."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peaks(family: CudaFamily, size: int) -> dict[str, int] | None:
    """Return the most bytes allocated and reserved; None: it does not fit."""
    empty_caches()
    try:
        run_steps(family, size)
    except torch.OutOfMemoryError:
        return None
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def largest(family: CudaFamily) -> dict[str, Any]:
    """Return a size that fits while the next one does not, by doubling and halving, and its peaks.

    The peaks of half of this size say what is reserved while there is memory enough.
    Fragments of memory let a few sizes above fit, or a few below not: up to 6 percent away.
    """
    fits, fails, tried = 0, None, 0
    found: dict[str, int] = {}
    while fails is None or fails - fits > 1:
        size = max(1, 2 * fits) if fails is None else (fits + fails) // 2
        now = peaks(family, size)
        tried += 1
        if now is None:
            fails = size
        else:
            fits, found = size, now
    half = max(1, fits // 2)
    return {
        "largest": fits,
        **found,
        "half": {"size": half, **(peaks(family, half) or {})},
        "sizes_tried": tried,
    }


def save_history(family: CudaFamily, size: int, file: Path) -> None:
    """Save what torch recorded of each allocation of some steps."""
    empty_caches()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=10_000_000)
    run_steps(family, size)
    file.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))


def measure(
    name: str,
    memory: int,
    *,
    sizes: Sequence[int] = (),
    history: Path | None = None,
    version: str = phantom.VERSION,
) -> dict[str, Any]:
    """Measure in a process of its own, on the phantom; see `main` for the arguments."""
    arguments = [name, "--here"]
    if sizes:
        arguments += ["--size", *map(str, sizes)]
    if history is not None:
        arguments += ["--history", str(history.absolute())]
    row = phantom.run(Path(__file__).name, *arguments, memory=memory, version=version)
    return {"name": name, "memory": memory, **row}


def measure_all() -> None:
    """Measure every family at every memory that it names, and save the rows."""
    cases = [(name, memory) for name, family in FAMILIES.items() for memory in family.memories]
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        for row in workers.map(measure, *zip(*cases, strict=True)):
            rows.append(row)
            print(json.dumps(row), flush=True)
    result = {
        "what": "largest batch whose optimizer steps fit; CUDA code of torch on an imitated device",
        "device_kind": phantom.KIND,
        "steps": STEPS,
        "torch": phantom.VERSION,
        "rows": rows,
    }
    file = RESULTS / "cuda_truth.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure_here(family: CudaFamily, sizes: list[int], history: Path | None) -> dict[str, Any]:
    """Return the largest size, or the peaks of given sizes; None: it does not fit."""
    torch.backends.cudnn.enabled = family.uses_cudnn
    start = time.perf_counter()
    if history is not None:
        save_history(family, sizes[0], history)
    row = {"peaks": [peaks(family, size) for size in sizes]} if sizes else largest(family)
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=FAMILIES)
    parser.add_argument("--memory", type=int, default=80, help="of the device, in GiB")
    parser.add_argument(
        "--size", type=int, nargs="+", default=[], help="print the peaks of these sizes only"
    )
    parser.add_argument("--history", type=Path, help="save the history of a run of --size")
    parser.add_argument("--all", action="store_true", help="measure all, and save the result")
    parser.add_argument("--here", action="store_true", help="this process is on the phantom")
    given = parser.parse_args()
    if given.all:
        measure_all()
        return
    if given.here:
        row = measure_here(FAMILIES[given.name], given.size, given.history)
    else:
        row = measure(given.name, given.memory, sizes=given.size, history=given.history)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # some destructors need a real device
