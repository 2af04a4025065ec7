"""A run of the study of times: a tiny GPT that is trained on a made clock until its loss is low."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import TensorDataset

from stretto.batching import BatchSizePolicy, Signals
from stretto.data import Step
from stretto.examples.text import PythonDocs, next_byte_loss
from stretto.examples.tiny_gpt import TinyGPT
from stretto.schedules import Linear
from stretto.training import Callback, Loading, Run, Trainer

LENGTH, WIDTH = 16, 32
MOST_SAMPLES = 140_000
REFERENCE = 32
"""The learning rate is meant for this size; at another it goes with the root."""
LOSSES = (2.4, 2.2, 2.0)
EVERY = 1_500
"""Samples from one measurement of the loss to the next."""
HALF_LIFE = 5_000
"""Samples in which the weight of the past halves in the averaged weights."""


class Setting(NamedTuple):
    """What is tuned on each side."""

    rate: float
    warmup: int
    """Samples over which the learning rate rises."""


@final
class Clock:
    """What a machine shows on which a step of B samples takes `ratio + B` milliseconds.

    Each step takes 5 percent more or less, 1 percent of them 10 times as long, and the first five
    20 times.
    """

    def __init__(self, ratio: float, seed: int) -> None:
        self.ratio, self.now = ratio, 0
        self._chance, self._steps = random.Random(seed), 0
        self._factor = self._next()

    def __call__(self) -> int:
        """Return nanoseconds."""
        return self.now

    def _next(self) -> float:
        chance = self._chance
        factor = math.exp(0.05 * chance.gauss(0, 1)) * (10 if chance.random() < 0.01 else 1)
        return factor * (20 if self._steps < 5 else 1)

    def watch(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let the passes of a model and the steps of its optimizer take time."""
        model.register_forward_pre_hook(self._passes)
        optimizer.register_step_post_hook(self._ends)

    def _passes(self, model: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if model.training:
            self.now += round(len(inputs[0]) * self._factor * 1e6)

    def _ends(self, *_: object) -> None:
        self.now += round(self.ratio * self._factor * 1e6)
        self._steps += 1
        self._factor = self._next()


@final
class Curve(Callback):
    """Notes the loss of the averaged weights, and ends the run where it is low enough."""

    def __init__(
        self, model: torch.nn.Module, clock: Clock, until: float, most: Mapping[float, float]
    ) -> None:
        self.points: list[tuple[int, int, float, int]] = []
        """Steps, samples, the loss and the size."""
        self.measuring = 0.0
        """Milliseconds, or samples, that passed before the first batch."""
        self.c: float | None = None
        self.noise: list[tuple[int, float]] = []
        self._model, self._clock, self._at = model, clock, 0
        self._until, self._most = until, most
        self._parameters: list[torch.Tensor] = [*model.parameters()]
        self._average = [one.detach().clone() for one in self._parameters]
        text = PythonDocs(LENGTH, split="validation")
        self._batch = text.get_batch(list(range(0, len(text), 4)))

    def on_batch_start(self, run: Run, step: Step) -> None:
        """Note when the first one comes."""
        del step
        if not run.timer.timestamp.batch:
            self.measuring = self._clock.now / 1e6

    @torch.no_grad()
    def on_batch_end(self, run: Run, step: Step) -> None:
        """Average the weights, and measure the loss if it is time."""
        now, size = run.timer.timestamp, step.num_samples
        half_life = min(HALF_LIFE, max((now.sample - size) / 4, 1))  # short at the start
        torch._foreach_lerp_(self._average, self._parameters, 1 - 2.0 ** (-size / half_life))
        if now.sample - self._at >= EVERY:
            self._at = now.sample
            loss = self._loss()
            self.points.append((now.batch, now.sample, round(loss, 5), size))
            is_late = any(
                loss > one and self._clock.ratio * now.batch + now.sample > most
                for one, most in self._most.items()
            )
            if loss <= self._until or is_late or not math.isfinite(loss):
                run.stop("nothing more is to be learnt")

    def on_log(self, run: Run, record: Mapping[str, float]) -> None:
        """Note the noise scale, and the price that a policy follows."""
        self.c = record.get("c", self.c)
        if "noise_scale" in record:
            self.noise.append((run.timer.timestamp.sample, round(record["noise_scale"], 1)))

    def _loss(self) -> float:
        trained = [one.clone() for one in self._parameters]
        self._model.eval()
        torch._foreach_copy_(self._parameters, self._average)
        loss = next_byte_loss(self._model, self._batch).item()
        torch._foreach_copy_(self._parameters, trained)
        self._model.train()
        return loss


@final
class Noise(Callback):
    """Has the noise measured where no policy asks for it."""

    def on_noise(self, run: Run, step: Step, signals: Signals) -> None:
        """Do nothing."""


def reached(points: list[tuple[int, int, float, int]]) -> dict[str, tuple[float, float]]:
    """Return steps and samples to each loss, along the line between two measurements."""
    found: dict[str, tuple[float, float]] = {}
    start = (0, 0, math.log(256), 0)
    for before, after in itertools.pairwise([start, *points]):
        for loss in LOSSES:
            if str(loss) not in found and after[2] <= loss:
                part = (before[2] - loss) / (before[2] - after[2])
                steps = before[0] + part * (after[0] - before[0])
                found[str(loss)] = steps, before[1] + part * (after[1] - before[1])
    return found


def train(
    policy: BatchSizePolicy | int,
    setting: Setting,
    *,
    seed: int,
    ratio: float = 32,
    until: float = min(LOSSES),
    most: Mapping[float, float] = MappingProxyType({}),
    folder: Path | None = None,
    micro_batch_size: int | None = None,
    callbacks: tuple[Callback, ...] = (),
) -> dict[str, Any]:
    """Train until a loss is reached, and return what there is to know.

    Args:
        policy: the batch size.
        setting: the learning rate and its warm-up.
        seed: of weights, order and clock.
        ratio: milliseconds of a step without its samples, of which each takes one.
        until: the loss at which the run ends.
        most: milliseconds by loss after which a run that has not reached it ends.
        folder: where the log goes.
        micro_batch_size: the most samples of a pass.
        callbacks: further listeners.
    """
    torch.manual_seed(seed)
    text = PythonDocs(LENGTH)
    model = TinyGPT(1, WIDTH, heads=2, context=LENGTH)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    clock = Clock(ratio, seed)
    clock.watch(model, optimizer)
    curve = Curve(model, clock, until, most)
    trainer = Trainer(
        model,
        TensorDataset(*text.get_batch(list(range(len(text))))),
        optimizer=optimizer,
        loss=next_byte_loss,
        max_duration=f"{MOST_SAMPLES}sp",
        batch_size=policy,
        micro_batch_size=micro_batch_size,
        schedules={"lr": Linear(1, 1, warmup=f"{setting.warmup}sp")},
        rule={"sqrt": REFERENCE},
        loading=Loading(seed=seed, last_batch="carry"),
        callbacks=[curve, *callbacks],
        log="20ba",
        folder=folder,
        clock=clock,
    )
    trainer.fit()
    return {
        "reached": reached(curve.points),
        "loss": curve.points[-1][2],
        "c": curve.c,
        "measuring": round(curve.measuring),
        "sizes": curve.points[:: max(1, len(curve.points) // 8)],
        "noise": curve.noise[:: max(1, len(curve.noise) // 16)],
    }
