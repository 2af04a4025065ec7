"""The sides of the study of batch sizes, and how one of them is trained."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stretto.batching import (
    BatchSizePolicy,
    DoublingRamp,
    Fixed,
    LinearRamp,
    NoiseScale,
    Rule,
    Seesaw,
    SquareRootRule,
)
from stretto.examples.text import PythonDocs, next_byte_loss
from stretto.examples.tiny_gpt import TinyGPT
from stretto.schedules import Cosine, Schedule
from stretto.training import Callback, Evaluation, Loading, Run, Trainer

BASE_RATE = 2.8e-3
"""The learning rate at batches of 16; at another size times the root of its ratio."""
LENGTH = 64
"""Bytes of a sample."""
MICRO_BATCH = 8
"""Where the noise is measured: between micro-batches of this size."""
LARGEST = 256
"""No batch that grows by itself goes beyond it; with a linear warm-up, beyond 96."""


RATES = tuple(round(2 ** (power / 2), 4) for power in range(-4, 8))
"""Times the base learning rate."""
WARMUPS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""The part of the run over which the learning rate rises."""


class Setting(NamedTuple):
    """What is tuned for each side, as positions in the two lists: neighbours differ by one."""

    rate: int = 4
    warmup: int = 2


START = Setting()
"""Where a search begins."""


class Parts(NamedTuple):
    """What a side gives the trainer."""

    policy: BatchSizePolicy
    schedule: Schedule
    rule: Rule | None = None
    micro_batch_size: int | None = None


@dataclass(frozen=True)
class Arm:
    """One side of the study."""

    title: str
    reference: int
    """The size that its learning rate is meant for."""
    parts: Callable[[Schedule], Parts]
    """What becomes of a cosine to 0."""
    start: Setting = START
    """Where the search for its setting begins."""
    is_drawn: bool = True
    """Whether the picture shows it; the table shows all."""


def _seesaw(size: Any, maximum: int = LARGEST, **options: Any) -> Callable[[Schedule], Parts]:
    def parts(cosine: Schedule) -> Parts:
        pair = Seesaw(cosine, size, maximum=maximum, **options)
        return Parts(pair.policy, pair.schedule, pair.rule)

    return parts


def _noise(
    start: int, c: float, maximum: int = LARGEST, power: float = 1.0
) -> Callable[[Schedule], Parts]:
    policy = NoiseScale(start, maximum, c=c, power=power)
    return lambda cosine: Parts(policy, cosine, SquareRootRule(16), MICRO_BATCH)


_WARMUP = DoublingRamp(8, 32, "15%")
ARMS: Mapping[str, Arm] = {
    "constant-16": Arm("constant 16", 16, lambda cosine: Parts(Fixed(16), cosine)),
    "constant-24": Arm("constant 24", 24, lambda cosine: Parts(Fixed(24), cosine)),
    "constant-32": Arm("constant 32", 32, lambda cosine: Parts(Fixed(32), cosine)),
    "warmup": Arm(
        "batch warm-up 8-16-32", 32, lambda cosine: Parts(_WARMUP, cosine, SquareRootRule(32))
    ),
    "seesaw": Arm("Seesaw from 16, doubling", 16, _seesaw(16), is_drawn=False),
    "seesaw-continuous": Arm(
        "Seesaw from 16, continuous", 16, _seesaw(16, factor="continuous"), is_drawn=False
    ),
    "warmup-seesaw": Arm("8-16-32, then Seesaw, doubling", 32, _seesaw(_WARMUP), is_drawn=False),
    "late-warmup-seesaw": Arm(
        "16-20, then Seesaw to 96, continuous",
        20,
        _seesaw(LinearRamp(16, 20, "30%"), 96, factor="continuous"),
        Setting(7, 2),
    ),
    "long-warmup-seesaw": Arm(
        "8-32, then Seesaw to 96, continuous",
        32,
        _seesaw(LinearRamp(8, 32, "30%"), 96, factor="continuous"),
        Setting(8, 3),
        is_drawn=False,
    ),
    "seesaw-from-18": Arm(
        "Seesaw from 18 to 96, continuous",
        18,
        _seesaw(18, 96, factor="continuous"),
        Setting(8, 4),
    ),
    "even-warmup-seesaw": Arm(
        "16-28, then Seesaw to 64, continuous",
        28,
        _seesaw(LinearRamp(16, 28, "30%"), 64, factor="continuous"),
        Setting(8, 4),
    ),
    "noise-from-16": Arm(
        "noise-driven from 16, c = 0.4", 16, _noise(16, 0.4), Setting(7, 2), is_drawn=False
    ),
    # With a longer warm-up and a higher rate the noise scale is smaller; so a larger part of it.
    "noise-from-16-0.5": Arm(
        "noise-driven from 16, c = 0.5", 16, _noise(16, 0.5), Setting(8, 3), is_drawn=False
    ),
    "noise-from-16-0.6": Arm(
        "noise-driven from 16, c = 0.6", 16, _noise(16, 0.6), Setting(9, 3), is_drawn=False
    ),
    # Begins with one of the best settings of the one before; bounded as the late Seesaws are.
    "noise-from-16-to-96": Arm(
        "noise-driven 16-96, c = 0.6", 16, _noise(16, 0.6, 96), Setting(8, 4), is_drawn=False
    ),
    # Grows where Seesaw from 18 does; begins with the setting that was chosen for that.
    "noise-from-18": Arm("noise-driven 18-96, c = 0.5", 16, _noise(18, 0.5, 96), Setting(8, 4)),
    "noise-root": Arm(
        "noise-driven 16-96, root, c = 3.8",
        16,
        _noise(16, 3.8, 96, power=0.5),
        Setting(8, 4),
        is_drawn=False,
    ),
    # With a long warm-up of the learning rate constant 24 does as well as constant 16.
    "noise-root-24": Arm(
        "noise-driven 24-64, root, c = 3.8",
        16,
        _noise(24, 3.8, 64, power=0.5),
        Setting(9, 4),
        is_drawn=False,
    ),
}
BASELINE = "constant-16"
"""What all others are held against."""


class _Curve(Callback):
    """Notes the validation loss and the clock at each evaluation."""

    def __init__(self) -> None:
        self.points: list[tuple[int, int, float]] = []

    def on_evaluation_end(self, run: Run, name: str, metrics: Mapping[str, float]) -> None:
        """Note where the run stands."""
        now = run.timer.timestamp
        self.points.append((now.batch, now.token, round(metrics[f"{name}/loss"], 5)))


def train(
    arm: str,
    setting: Setting,
    *,
    seed: int,
    num_samples: int,
    measure_every: str = "5%",
    compiled: bool = True,
) -> dict[str, Any]:
    """Train one run, and return what there is to know of it."""
    torch.manual_seed(seed)
    model = TinyGPT(2, 64, heads=2, context=LENGTH)
    if compiled:
        # In place, and for all sizes at once: a step takes about half the time.
        model.compile(dynamic=True)
    side = ARMS[arm]
    parts = side.parts(Cosine(warmup=f"{WARMUPS[setting.warmup]:g}dur"))
    rate = BASE_RATE * RATES[setting.rate] * math.sqrt(side.reference / 16)
    curve, started = _Curve(), time.monotonic()
    trainer = Trainer(
        model,
        PythonDocs(LENGTH),
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1
        ),
        loss=next_byte_loss,
        max_duration=f"{num_samples}sp",
        batch_size=parts.policy,
        micro_batch_size=parts.micro_batch_size,
        schedules={"lr": parts.schedule},
        loading=Loading(seed=seed, last_batch="carry"),
        clip_norm=1.0,
        rule=parts.rule,
        evaluate=Evaluation(PythonDocs(LENGTH, split="validation"), measure_every, batch_size=256),
        callbacks=[curve],
    )
    trainer.fit()
    if not trainer.run.horizon.is_done(trainer.timer.timestamp):
        raise SystemExit("stopped in the middle of a run, which is not counted")
    return {
        "loss": curve.points[-1][2],
        "steps": trainer.timer.timestamp.batch,
        "learning_rate": round(rate, 6),
        "warmup": WARMUPS[setting.warmup],
        "seconds": round(time.monotonic() - started, 1),
        "curve": curve.points,
    }
