"""Single published figures: torchtitan's Llama with FSDP2, and BERT-large of Hugging Face."""

from __future__ import annotations

from typing import Any

import phantomgpu
from published.rows import GIB, Family, Row

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
ANATOMY = "perf_train_gpu_one of transformers 4.27.2"
FSDP2 = "torchtitan, pull request 165"


def llama(
    name: str, published: dict[str, float], *, ranks: int = 8, known: str = "", **options: Any
) -> Row:
    """Return a row of a Llama on H100 with 95.04 GiB; published GiB, active is nearly allocated."""
    settings = {
        "function": "titan",
        "gpu": ("h100", "95.04GiB"),
        "ranks": ranks,
        "options": {"batch": 8, "length": 2048, "keeps": "all", **options},
    }
    return _row(name, published, settings, known)


# torchtitan of March 2024 held the logits until the next step.
L7: dict[str, Any] = {"vocabulary": 32000, "hidden": 11008, "kv_heads": 32, "holds_logits": True}
L8: dict[str, Any] = {"vocabulary": 128256, "hidden": 14336, "kv_heads": 8}
LOADED = 1343  # MiB that the page shows before the model is loaded: the context
SOFTMAX = "older torch kept the input of softmax, too: about 1.5 GiB at batch 4, 0.4 at batch 1"
COMPILED = "published for torch.compile, ours is eager"


def bert(name: str, megabytes: int, *, known: str = SOFTMAX, **options: Any) -> Row:
    """Return a row of the page of Hugging Face: a V100, which CUDA 13 has no code for."""
    settings = {"function": "bert_large", "gpu": ("t4", "16GiB"), "ranks": 1, "options": options}
    return _row(f"BERT-large, {name}", {"reserved": (megabytes - LOADED) / 1024}, settings, known)


def _row(name: str, published: dict[str, float], settings: dict[str, Any], known: str) -> Row:
    settings["gpu"] = list(settings["gpu"])
    return Row(name, {what: size * GIB for what, size in published.items()}, settings, known)


ROWS = (
    llama(
        "Llama 3.1 8B, FSDP2 on 8 H100, 2 x 8192, selective checkpointing",
        {"reserved": 82.4},
        **{**L8, "batch": 2, "length": 8192, "keeps": "some"},
    ),
    llama(
        "Llama 3.1 8B, FSDP2 on 128 H100, 2 x 8192, selective checkpointing",
        {"reserved": 67.0},
        ranks=128,
        **{**L8, "batch": 2, "length": 8192, "keeps": "some"},
    ),
    llama(
        "Llama 7B, FSDP2 on 8 H100, 8 x 2048, full checkpointing",
        {"allocated": 22.73, "reserved": 31.02},
        **{**L7, "keeps": "none"},
    ),
    llama(
        "Llama 7B, FSDP2 on 8 H100, 8 x 2048, selective checkpointing",
        {"allocated": 49.54, "reserved": 59.41},
        **{**L7, "keeps": "some"},
    ),
    llama(
        "Llama 7B, FSDP2 on 8 H100, 16 x 2048, selective checkpointing",
        {"reserved": 88.23},
        known=COMPILED,
        **{**L7, "keeps": "some", "batch": 16},
    ),
    llama(
        "Llama 7B, FSDP2 on 8 H100, 8 x 2048, no checkpointing",
        {"reserved": 90.28},
        known=COMPILED,
        **L7,
    ),
    bert("batch 4", 14949, batch=4),
    bert("batch 1, 4 accumulated", 8681, batch=1, accumulate=4),
    bert("the same, checkpointing", 6775, known="", batch=1, accumulate=4, checkpoints=True),
    bert("batch 4, fp16", 13939, batch=4, fp16=True),
    bert(
        "accumulated, checkpointing, fp16",
        7275,
        known="",
        batch=1,
        accumulate=4,
        checkpoints=True,
        fp16=True,
    ),
    bert("batch 4, Adafactor", 12295, batch=4, adafactor=True),
    bert(
        "accumulated, checkpointing, fp16, Adafactor",
        4847,
        known="",
        batch=1,
        accumulate=4,
        checkpoints=True,
        fp16=True,
        adafactor=True,
    ),
)


def measure(row: Row) -> dict[str, float]:
    """Train three steps."""
    from published import others_models

    gpu, memory = row.settings["gpu"]
    report = phantomgpu.run(
        getattr(others_models, row.settings["function"]),
        gpu=gpu,
        memory=memory,
        ranks=row.settings["ranks"],
        kwargs=row.settings["options"],
    )
    if not report.fits:
        raise RuntimeError(report)
    return {"allocated": report.peak_allocated, "reserved": report.peak_reserved}


FAMILY = Family(
    key="others",
    title="torchtitan and Hugging Face",
    source="https://github.com/pytorch/torchtitan/pull/165",
    text=f"""\
Llama as torchtitan has it, in a few lines of our own, and BERT-large of a page of Hugging Face;
three optimizer steps, cuDNN off. Llama 3.1 8B: {TITAN}. Llama 7B: {FSDP2}; torchtitan of March
2024 held the logits until the next step, and so do we. BERT-large: {ANATOMY}, published for a V100.
CUDA 13 has no code for that, so ours is a T4 with 16 GiB. Published with torch of 2021 to 2024.""",
    rows=ROWS,
    measure=measure,
)
