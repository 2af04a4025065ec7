"""Memory of sharded models: predicted in one CPU process, beside what torch's CUDA build allocates.

Run `python bench/sharded_memory.py --phantom FOLDER`, with the folder that `tools/phantom/make.py`
has made; the last result lies in `bench/results/sharded_memory.json` and `.txt`.

Each case is predicted for rank 0 of an H100, in a process of its own, with the model on the meta
device. The truth is torch's own CUDA build at work (its dispatcher, FSDP2, DTensor, autograd and
the caching allocator), with stand-ins for the libraries below it and the fake process group. So
NCCL's own buffers are in neither. Both run three steps with AdamW; seconds and memory are those of
the prediction, with torch imported and the model built.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import processor

from stretto.memory import predict

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.families

from tests.families.sharded import MODES, Case, data_parallel, model_of, step_of

HERE = Path(__file__).parent
RESULTS = HERE / "results"
GPU_MEMORY = 400 << 30
"""Of the stand-in: nothing may run out of it."""
CASES = [
    Case("tiny", 8, "FSDP", 2),
    Case("tiny", 16, "FSDP, bf16 policy", 2, clips=True),
    Case("tiny", 64, "HSDP", 2),
    Case("tiny", 8, "TP", 2),
    Case("tiny", 16, "TP and FSDP", 2),
    Case("tiny", 8, "DDP", 4),
    Case("tiny", 8, "DDP, views", 4),
    Case("1B", 8, "FSDP", 1),
    Case("1B", 8, "FSDP, bf16 policy", 4),
    Case("1B", 8, "FSDP, not resharded", 1, clips=True),
    Case("1B", 16, "FSDP, bf16 policy", 2, checkpoints=True),
    Case("1B", 64, "HSDP", 2),
    Case("1B", 8, "DDP", 1),
    Case("1B", 8, "DDP, views", 2, checkpoints=True),
    Case("7B", 8, "FSDP, bf16 policy", 1, checkpoints=True),
    Case("7B", 8, "TP", 1),
    Case("7B", 16, "TP and FSDP", 1),
    Case("7B", 64, "FSDP", 1, checkpoints=True, clips=True),
    Case("7B", 64, "FSDP, bf16 policy", 1, checkpoints=True),
    Case("7B", 64, "FSDP, bf16 policy", 4, checkpoints=True),
    Case("7B", 64, "FSDP, not resharded", 1, checkpoints=True),
    Case("7B", 64, "HSDP", 2, checkpoints=True),
]


def predicted(case: Case) -> dict[str, Any]:
    """Return the prediction of a case, with its cost."""
    step = step_of(case, model_of(case))
    start, used = time.perf_counter(), time.process_time()
    prediction = predict(
        step,
        lambda size: torch.zeros(size, case.length, dtype=torch.long),
        device="cuda",
        world_size=case.ranks,
        shard=MODES.get(case.mode) or data_parallel(case),
    )
    return {
        "allocated": prediction.allocated(case.samples),
        "reserved": prediction.peak(case.samples),
        "traces": prediction.num_steps,
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(time.process_time() - used, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def run(command: list[str], **environment: str) -> dict[str, Any]:
    """Return what a process prints."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=HERE,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-600:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def measure(case: Case, phantom: Path) -> dict[str, Any]:
    """Return the prediction of a case and the truth."""
    text = json.dumps(case)
    ours = run([sys.executable, __file__, "--predict", text])
    truth = run(
        [str(phantom / "venv/bin/python"), "sharded_truth.py", text],
        LD_LIBRARY_PATH=str(phantom / "lib"),
        FAKE_CUDA_TOTAL=str(GPU_MEMORY),
        PYTHONPATH=str(HERE.parent / "src"),
    )
    both = {f"{what}_ratio": round(ours[what] / truth[what], 5) for what in KINDS}
    return {"case": case._asdict(), "predicted": ours, "truth": truth, **both}


KINDS = ("allocated", "reserved")


def line(row: dict[str, Any]) -> str:
    """Return a result as a line of text."""
    parts = [f"{Case(**row['case'])!s:58}"]
    for what in KINDS:
        gib = [row[who][what] / 2**30 for who in ("predicted", "truth")]
        error = 100 * (row[f"{what}_ratio"] - 1)
        parts.append(f"{what} {gib[0]:7.3f} / {gib[1]:7.3f} GiB {error:+6.2f}%")
    ours = row["predicted"]
    parts.append(f"{ours['traces']} traces, {ours['processor_seconds']} s, {ours['peak_mib']} MiB")
    return "  ".join(parts)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phantom", type=Path, help="the folder with torch's CUDA build")
    parser.add_argument("--model", help="only this model, and nothing is saved")
    parser.add_argument("--predict", help="one case, as JSON, without the truth")
    arguments = parser.parse_args()
    if arguments.predict:
        print(json.dumps(predicted(Case(*json.loads(arguments.predict)))))
        return
    if arguments.phantom is None:
        parser.error("--phantom is needed")
    rows = []
    for case in CASES:
        if arguments.model in {None, case.model}:
            rows.append(measure(case, arguments.phantom))
            print(line(rows[-1]), flush=True)
    if arguments.model:
        return
    saved = {
        "what": "memory of sharded models, predicted and allocated by torch's CUDA build",
        "cases": rows,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sharded_memory.json").write_text(json.dumps(saved, indent=2) + "\n")
    text = "predicted / true, with the difference; then what the prediction cost\n"
    (RESULTS / "sharded_memory.txt").write_text(text + "\n".join(map(line, rows)) + "\n")


if __name__ == "__main__":
    main()
