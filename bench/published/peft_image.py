"""PEFT's comparison of image generation: 31 ways to fine-tune FLUX.2-klein-base-4B on an L40S."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from published.rows import Family, Row
from published.worker import Worker

LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"]
LAYERS += ["to_add_out", "linear_in", "linear_out", "to_qkv_mlp_proj"]
"""What most adapters are added to."""
STEPS = 8
"""Steps that are replayed; the other ones of 100 are taken as the last of them."""
CAUSES: dict[str, str] = {}
"""Why a row is more than 1 percent apart, shown by an experiment."""


def adapter(kind: str | None, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of an adapter; None: all parameters are trained."""
    if kind is None:
        return None
    layers = ["norm_q", "norm_k"] if kind == "LN_TUNING" else LAYERS
    more = {"feedforward_modules": LAYERS} if kind == "IA3" else {}
    return {"peft_type": kind, "target_modules": layers, **more, **settings}


def rows() -> tuple[Row, ...]:
    """Return the published rows: bytes after a step, in the mean of the first 100 steps."""
    text = Path(__file__).with_suffix(".json").read_text("utf-8")
    given: list[dict[str, Any]] = json.loads(text)
    return tuple(
        Row(
            one["name"],
            {what: one[what] for what in ("mean allocated", "mean reserved")},
            {
                "adapter": adapter(one["kind"], one["settings"]),
                "optimizer": one["optimizer"],
                "trainable": one["trainable"],
                **({"torch": one["torch"]} if "torch" in one else {}),
                **({"peft": JUNE} if one["kind"] == "SHIRA" else {}),
            },
            CAUSES.get(one["name"], ""),
        )
        for one in given
    )


PEFT = "peft==0.20.0"
JUNE = "b2d61f5f80a7ac540fb572c077d8265a95986db8"
"""The commit of PEFT that the rows of torch 2.12.0 used; SHiRA's code is another one in 0.20.0."""


def worker(packages: str, transformers: str, *torch: str, peft: str = PEFT) -> Worker:
    """Return what replays rows with these versions."""
    return Worker(
        Path(__file__).parent / "peft_image_replay.py",
        packages,
        requirements=("diffusers==0.38.0", f"transformers=={transformers}"),
        alone=(peft, "accelerate==1.15.0", *torch),
        gpu="l40s",
    )


WORKERS = {
    ("2.12.0", PEFT): worker("peft_image_2_12", "5.10.2", "torch==2.12.0"),
    ("2.12.0", JUNE): worker(
        "peft_image_june",
        "5.10.2",
        "torch==2.12.0",
        peft=f"https://github.com/huggingface/peft/archive/{JUNE}.zip",
    ),
    ("2.13.0", PEFT): worker("peft_image", "5.13.1"),
}
"""By the torch, of which 2.13.0 is the installed one, and the PEFT of a row."""


def versions(row: Row) -> tuple[str, str]:
    """Return the torch and the PEFT of a row."""
    return row.settings.get("torch", "2.13.0"), row.settings.get("peft", PEFT)


def measure(row: Row) -> dict[str, float]:
    """Replay a row.

    Raises:
        RuntimeError: It failed, or trains another number of parameters than published.
    """
    found = WORKERS[versions(row)].ask({**row.settings, "steps": STEPS})
    if found["trainable"] != row.settings["trainable"]:
        raise RuntimeError(f"{found['trainable']} parameters are trained")
    return {f"mean {what}": mean(found[what]) for what in ("allocated", "reserved")}


def mean(steps: list[int]) -> float:
    """Return the mean over 100 steps, of which the first are given."""
    return (sum(steps) + (100 - len(steps)) * steps[-1]) / 100


ROWS = rows()
EXACT = ", ".join(row.name.partition("/")[0] for row in ROWS if "torch" in row.settings)
FAMILY = Family(
    key="peft_image",
    title="PEFT, images",
    source="https://github.com/huggingface/peft/tree/main/method_comparison/image-gen",
    text=f"""\
FLUX.2-klein-base-4B in bf16, 512 x 512 pixels, batch 2, gradient checkpointing, on an L40S;
diffusers 0.38.0 as published, PEFT 0.20.0 (published: three commits of June to August 2026; SHiRA:
that of June). No weights and no data. What the script of those commits holds is held here in its
order: DINO's encoder, the model, text encoder and VAE, which come and go, 14 cached images with
padded prompts; the cache is emptied before the first step. The published figures are means over the
first 100 steps, before any evaluation; the last step that is run here stands for the rest. Nothing
was fitted. Changed: SHiRA's mask is made on the CPU, FourierFT and WaveFT draw their places with
repetition, and FRoD's decomposition, which runs on the CPU, is left out. The number of trained
parameters is the published one in every row, or the row fails.

Eight steps on the published torch 2.12.0 and transformers 5.10.2: {EXACT}. The other
rows ran before that on torch 2.13.0 and transformers 5.13.1 (published for seven of them, the
others as above): three steps, one prompt without padding.
""",
    rows=ROWS,
    measure=measure,
)
