"""PEFT's MetaMathQA comparison: 63 ways to fine-tune Llama 3.2 3B on an L40S."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from published.packages import installed
from published.rows import Family, Row

HERE = Path(__file__).parent
REQUIREMENTS = ("transformers==5.13.1", "scikit-learn==1.9.1", "psutil==7.2.2")
ALONE = ("peft==0.20.0", "accelerate==1.15.0")
FITTED = "lora/llama-3.2-3B-rank32"
LONGEST, MEAN_LENGTH = 700, 215.6
"""Tokens of the longest padded batch, and of a mean one: fitted on that row."""
GROUPS = ((500, 400), (187, 86), (LONGEST, 400))
"""Lengths of batches, longest first as in the buckets; then the cache is emptied."""
EVALUATION = (
    "the peak is of an evaluation: generation on top of what training cached gave 22.97 GB after "
    "the longest batch, 21.0 without it; which batches come before is in the data"
)
ORDER = "hangs on the lengths before the longest batch: three orders gave 24.78, 25.12, 25.20 GB"
CAUSES = {
    "prefixtuning/llama-3.2-3B-lr_0.001": EVALUATION,
    "prefixtuning/llama-3.2-3B-lr_0.005_zero_init": EVALUATION,
    "prompt_tuning/llama-3.2-3B-default": ORDER,
    "prompt_tuning/llama-3.2-3B-lr_0.001": ORDER,
    "prompt_tuning/llama-3.2-3B-sample_vocab-lr_0.001": ORDER,
    "waveft/llama-3.2-3B-n_frequency-5000": (
        "hangs on the lengths before and after the longest batch: four orders gave 25.20, 25.26, "
        "25.98, 26.49 GB"
    ),
}
"""Why a row is more than 1 percent apart, shown by an experiment."""


def rows() -> tuple[Row, ...]:
    """Return the published rows: bytes, and settings that differ from the defaults."""
    given: list[dict[str, Any]] = json.loads((HERE / "peft_text.json").read_text("utf-8"))
    return tuple(
        Row(
            one["name"],
            one["published"],
            {"adapter": one["adapter"], "train": one["train"], "trainable": one["trainable"]},
            CAUSES.get(one["name"], ""),
            fitted=one["name"] == FITTED,
        )
        for one in given
    )


@cache
def worker() -> subprocess.Popen[str]:
    """Start the process that replays rows, each in a fork of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed("peft_text", REQUIREMENTS, ALONE)),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "phantomgpu", "run", "--whole", "--gpu", "l40s", "--"]
    command += [sys.executable, str(HERE / "peft_text_replay.py")]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def measure(row: Row) -> dict[str, float]:
    """Replay a row.

    Raises:
        RuntimeError: It failed, or trains another number of parameters than published.
    """
    process = worker()
    assert process.stdin
    assert process.stdout
    print(json.dumps({**row.settings, "groups": GROUPS}), file=process.stdin, flush=True)
    line = process.stdout.readline()
    found = json.loads(line or '{"problem": "the process ended"}')
    if "problem" in found:
        raise RuntimeError(found["problem"])
    if found["trainable"] != row.settings["trainable"]:
        raise RuntimeError(f"{found['trainable']} parameters are trained")
    return {"reserved": found["reserved"], "mean allocated": mean_allocated(found["steps"])}


def mean_allocated(steps: list[dict[str, int]]) -> float:
    """Return the bytes after a step of mean length: they grow evenly with the length."""
    by_length = {step["length"]: step["allocated"] for step in steps}
    short, long = GROUPS[1][0], LONGEST
    slope = (by_length[long] - by_length[short]) / (long - short)
    return by_length[short] + slope * (MEAN_LENGTH - short)


FAMILY = Family(
    key="peft_text",
    title="PEFT, text",
    source="https://github.com/huggingface/peft/tree/main/method_comparison/MetaMathQA",
    text="""\
Llama 3.2 3B in bf16, 4 texts a batch, on an L40S, with transformers 5.13.1, PEFT 0.20.0 (published:
commits of July 2026, 0.19.2.dev0) and the published build of torch. No weights and no data: the
model from its configuration, loaded as transformers does, a batch of the evaluation before
training, then batches of 500, 400; 187, 86; 700, 400 tokens. The cache is emptied after each group,
as the script does. Fitted on `lora/llama-3.2-3B-rank32`: the longest batch (700 tokens) and the
mean one (215.6). The other 62 rows are predictions. Changed: SHiRA's mask is made on the CPU, and
FRoD's decomposition, which runs on the CPU, is left out. The number of trained parameters is the
published one in every row, or the row fails.
""",
    rows=rows(),
    measure=measure,
)
