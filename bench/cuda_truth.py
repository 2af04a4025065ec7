"""The largest batch whose training steps fit into the memory of a CUDA device.

Run `python bench/cuda_truth.py NAME --memory GIB` in an environment whose device is imitated: its
memory is set by an environment variable, and all of torch's own CUDA code runs. A model is built on
the CPU and moved; three whole optimizer steps run, so the optimizer makes its state. `--all`
measures every family and saves `bench/results/cuda_truth.json`; `--size` prints the peaks
of one size, and `--history` saves who allocated what.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cuda_families import FAMILIES, CudaFamily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = Path(__file__).parent / "results"
MEMORY_VARIABLE = "FAKE_CUDA_TOTAL"
"""The environment variable that says how many bytes the device has."""
DEVICE_KIND = "h100"
"""What is imitated: the number of multiprocessors decides what some kernels allocate."""
STEPS = 3
_RANDOM = ("normal_", "uniform_")


class _Zeros(TorchDispatchMode):
    """Makes all weights zero: their values do not matter, and random ones take time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _RANDOM and args[0].device.type == "cpu":
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


def run_steps(family: CudaFamily, size: int) -> None:
    """Build the model, and take a few optimizer steps with batches of `size`."""
    with _Zeros():  # type: ignore[no-untyped-call]
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
    return {"largest": fits, **found, "sizes_tried": tried}


def save_history(family: CudaFamily, size: int, file: Path) -> None:
    """Save what torch recorded of each allocation of some steps."""
    empty_caches()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=10_000_000)
    run_steps(family, size)
    file.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))


def measure(name: str, memory: int, environment: dict[str, str]) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, name, "--memory", str(memory)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=3600, check=False
    )
    if done.returncode:
        return {"name": name, "memory": memory, "error": done.stderr.splitlines()[-1]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measure_all(environment: dict[str, str]) -> None:
    """Measure every family at every memory that it names, and save the rows."""
    rows = []
    for name, family in FAMILIES.items():
        for memory in family.memories:
            rows.append(measure(name, memory, environment))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "what": "largest batch whose optimizer steps fit; CUDA code of torch on an imitated device",
        "device_kind": DEVICE_KIND,
        "steps": STEPS,
        "torch": torch.__version__,
        "rows": rows,
    }
    file = RESULTS / "cuda_truth.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=FAMILIES)
    parser.add_argument("--memory", type=int, default=80, help="of the device, in GiB")
    parser.add_argument("--size", type=int, help="print the peaks of this size only")
    parser.add_argument("--history", type=Path, help="save the history of a run of --size")
    parser.add_argument("--all", action="store_true", help="measure all, and save the result")
    given = parser.parse_args()
    environment = {**os.environ, MEMORY_VARIABLE: str(given.memory * 2**30)}
    if given.all:
        measure_all(environment)
        return
    if os.environ.get(MEMORY_VARIABLE) != environment[MEMORY_VARIABLE]:
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606
    family = FAMILIES[given.name]
    torch.backends.cudnn.enabled = family.uses_cudnn
    start = time.perf_counter()
    if given.history is not None:
        save_history(family, given.size, given.history)
        return
    row: dict[str, Any] = {"size": given.size}
    if given.size is None:
        row = largest(family)
    else:
        row.update(peaks(family, given.size) or {"fits": False})
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"name": given.name, "memory": given.memory, **row, "seconds": seconds}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # some destructors need a real device
