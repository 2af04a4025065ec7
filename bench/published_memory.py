"""Peaks of memory that others published for real GPUs, beside ours on a GPU that is not there.

    python bench/published_memory.py [--only WORD] [--save]

Each row trains the same model in the same way with `phantomgpu`, which needs the CUDA build of
torch (`phantomgpu setup`) and no GPU. The versions of torch differ: the published runs are from
2021 to 2024. `--save` writes `results/published_memory.txt`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import published_models

import phantomgpu

RESULT = Path(__file__).parent / "results" / "published_memory.txt"
GIB = 1 << 30
TITAN = "github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
FSDP2 = "github.com/pytorch/torchtitan/pull/165"
ANATOMY = "huggingface.co/docs/transformers/v4.27.2/en/perf_train_gpu_one"


class Row(NamedTuple):
    """One published run."""

    name: str
    source: str
    function: str
    options: dict[str, Any]
    published: dict[str, float]
    """GiB: reserved, or active (which is nearly what is allocated)."""
    gpu: str
    memory: str
    ranks: int = 1
    known: str = ""


def llama(**options: Any) -> dict[str, Any]:
    """Return the settings of a Llama."""
    return {"batch": 8, "length": 2048, "keeps": "all", **options}


# torchtitan of March 2024 held the logits until the next step.
L7 = {"vocabulary": 32000, "hidden": 11008, "kv_heads": 32, "holds_logits": True}
L8 = {"vocabulary": 128256, "hidden": 14336, "kv_heads": 8}
H100 = ("h100", "95.04GiB")
V100 = ("t4", "16GiB")
LOADED = 1343 / 1024  # what the page shows before the model is loaded: the context
SOFTMAX = "older torch kept the input of softmax, too: about 1.5 GiB at batch 4, 0.4 at batch 1"


def bert(name: str, megabytes: int, **options: Any) -> Row:
    """Return a row of the page of Hugging Face."""
    published = {"reserved": megabytes / 1024 - LOADED}
    return Row(f"BERT-large, {name}", ANATOMY, "bert", options, published, *V100, known=SOFTMAX)


ROWS = (
    Row(
        "Llama 3.1 8B, FSDP2 on 8 H100, 2 x 8192, selective checkpointing",
        TITAN,
        "titan",
        llama(**L8, batch=2, length=8192, keeps="some"),
        {"reserved": 82.4},
        *H100,
        ranks=8,
    ),
    Row(
        "Llama 3.1 8B, FSDP2 on 128 H100, 2 x 8192, selective checkpointing",
        TITAN,
        "titan",
        llama(**L8, batch=2, length=8192, keeps="some"),
        {"reserved": 67.0},
        *H100,
        ranks=128,
    ),
    Row(
        "Llama 7B, FSDP2 on 8 H100, 8 x 2048, full checkpointing",
        FSDP2,
        "titan",
        llama(**L7, keeps="none"),
        {"active": 22.73, "reserved": 31.02},
        *H100,
        ranks=8,
        known="not explained",
    ),
    Row(
        "Llama 7B, FSDP2 on 8 H100, 8 x 2048, selective checkpointing",
        FSDP2,
        "titan",
        llama(**L7, keeps="some"),
        {"active": 49.54, "reserved": 59.41},
        *H100,
        ranks=8,
    ),
    Row(
        "Llama 7B, FSDP2 on 8 H100, 16 x 2048, selective checkpointing",
        FSDP2,
        "titan",
        llama(**L7, keeps="some", batch=16),
        {"reserved": 88.23},
        *H100,
        ranks=8,
        known="published for torch.compile, ours is eager",
    ),
    Row(
        "Llama 7B, FSDP2 on 8 H100, 8 x 2048, no checkpointing",
        FSDP2,
        "titan",
        llama(**L7),
        {"reserved": 90.28},
        *H100,
        ranks=8,
        known="published for torch.compile, ours is eager",
    ),
    bert("batch 4", 14949, batch=4),
    bert("batch 1, 4 accumulated", 8681, batch=1, accumulate=4),
    bert("the same, checkpointing", 6775, batch=1, accumulate=4, checkpoints=True),
    bert("batch 4, fp16", 13939, batch=4, fp16=True),
    bert(
        "accumulated, checkpointing, fp16", 7275, batch=1, accumulate=4, checkpoints=True, fp16=True
    ),
    bert("batch 4, Adafactor", 12295, batch=4, adafactor=True),
    bert(
        "accumulated, checkpointing, fp16, Adafactor",
        4847,
        batch=1,
        accumulate=4,
        checkpoints=True,
        fp16=True,
        adafactor=True,
    ),
)


FUNCTIONS: dict[str, Callable[..., None]] = {
    "bert": published_models.bert_large,
    "titan": published_models.titan,
}


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    given = parser.parse_args()
    lines = [f"{'published':>9} {'ours':>7} {'ratio':>6}  what, GiB"]
    torch = ""
    for row in ROWS:
        if given.only not in row.name:
            continue
        began = time.perf_counter()
        report = phantomgpu.run(
            FUNCTIONS[row.function],
            gpu=row.gpu,
            memory=row.memory,
            ranks=row.ranks,
            kwargs=row.options,
        )
        torch = report.torch or torch
        ours = {"active": report.peak_allocated / GIB, "reserved": report.peak_reserved / GIB}
        for what, published in row.published.items():
            ratio = ours[what] / published
            known = f"; {row.known}" if row.known and abs(ratio - 1) > 0.02 else ""
            line = f"{published:9.2f} {ours[what]:7.2f} {ratio:6.3f}  {what}: {row.name} "
            lines.append(f"{line}[{row.source}]{known}")
            print(lines[-1], report.status, f"{time.perf_counter() - began:.0f} s", flush=True)
    lines.append(
        f"torch {torch}; three optimizer steps; cuDNN off; BERT was published for a V100, "
        "which CUDA 13 has no code for: a T4 with 16 GiB here"
    )
    if given.save:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
