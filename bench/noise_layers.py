"""How the noise scale of LayerNorm weights alone goes with that of all weights, on a small GPT.

Run `python bench/noise_layers.py`; the last result lies in `bench/results/noise_layers.json` and
`.txt`. Two runs from the same seed on the packaged text: one measures from four micro-batches in a
step, the other from single samples in the LayerNorms. Neither changes the weights, so they are the
same run to the last bit, which is checked, and their noise scales belong to the same weights.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
from machine import processor
from noise import with_layer_norms

from stretto.examples.text import PythonDocs, next_byte_loss
from stretto.examples.tiny_gpt import TinyGPT
from stretto.schedules import Cosine
from stretto.training import Callback, Logging, Stepping, Trainer
from stretto.training.algorithms import NoiseReport

STEPS, EVERY, WINDOW = 800, 100, 100
RESULTS = Path(__file__).parent / "results"


class Keep(Callback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_log(self, trainer: Trainer, record: Any) -> None:
        """Keep it."""
        del trainer
        self.records.append(dict(record))


def run(noise_from: Any) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Return the lines of metrics, and the weights at the end."""
    torch.manual_seed(0)
    model, keep = TinyGPT(2, 64, context=64), Keep()
    with_layer_norms(model)
    Trainer(
        model,
        PythonDocs(64),
        optimizer=torch.optim.AdamW(model.parameters(), lr=2.8e-3, betas=(0.9, 0.95)),
        loss=next_byte_loss,
        max_duration=f"{STEPS}ba",
        batch_size=16,
        micro_batch_size=4,
        schedules={"lr": Cosine(warmup="5%")},
        stepping=Stepping(clip_norm=1.0, noise_from=noise_from),
        log=Logging(f"{EVERY}ba"),
        callbacks=[NoiseReport(window=WINDOW), keep],
    ).fit()
    return keep.records, list(model.parameters())


def main() -> None:
    """Measure, print and save."""
    torch.set_num_threads(1)
    (whole, weights), (layers, others) = run("micro_batches"), run("norm_layers")
    assert all(map(torch.equal, weights, others)), "measuring must not change the weights"
    rows = [
        {
            "step": one["ba"],
            "loss": round(one["loss"], 3),
            "all": one.get("noise_scale"),
            "layers": other.get("noise_scale"),
        }
        for one, other in zip(whole, layers, strict=True)
    ]
    lines = [f"{'step':>6}{'loss':>8}{'all weights':>13}{'LayerNorms':>12}{'ratio':>8}"]
    for row in rows:
        scales = row["all"], row["layers"]
        shown = ["-" if scale is None else f"{scale:.1f}" for scale in scales]
        ratio = "-" if None in scales else f"{scales[1] / scales[0]:.2f}"
        lines.append(f"{row['step']:>6}{row['loss']:>8}{shown[0]:>13}{shown[1]:>12}{ratio:>8}")
    lines.append(
        f"noise scales in samples, averaged over about {WINDOW} steps of 16; - not yet sure"
    )
    text = "\n".join(lines)
    result = {
        "what": "noise scale of all weights and of LayerNorm weights alone in the same run",
        "rows": rows,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "noise_layers.json").write_text(
        json.dumps(result, indent=2) + "\n", encoding="utf-8"
    )
    (RESULTS / "noise_layers.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
