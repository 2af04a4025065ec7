"""One rank of runs that measure noise in normalisation layers, or all of them in one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from stretto.batching import NoiseScale
from stretto.errors import TrainingError
from stretto.training import Callback, Stepping, Trainer

Outcome = dict[str, Any]
IS_ALONE = os.environ.get("WORLD_SIZE", "1") == "1"


class Listener(Callback):
    """Keeps what was measured."""

    def __init__(self) -> None:
        self.terms: list[tuple[float | None, ...]] = []
        self.sizes: list[int] = []

    def on_noise(self, trainer: Any, step: Any, signals: Any) -> None:
        self.sizes.append(step.batch_size)
        numerator, denominator = signals.noise_numerator, signals.noise_denominator
        assert None not in (numerator, denominator, signals.num_samples)
        self.terms.append((numerator, denominator, denominator + numerator / signals.num_samples))


def data(count: int = 61) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(count, 4, 2, generator=generator, dtype=torch.float64))


def net() -> nn.Sequential:
    torch.manual_seed(2)
    layers = (nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.RMSNorm(6), nn.Linear(6, 2))
    return nn.Sequential(*layers).double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def by_units(model: nn.Module, batch: Any) -> Tensor:
    """A mean over units, of which samples have different numbers."""
    counts = (batch[1] > -0.5).flatten(1).sum(1)
    return ((model(batch[0]) - batch[1]).square().mean((1, 2)) * counts).sum() / counts.sum()


def penalised(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) + sum(p.square().sum() for p in model.parameters())


def run(*, by_tokens: bool = False, sharded: bool = False, **settings: Any) -> Outcome:
    """What is measured, and the weights afterwards."""
    model, listener = net(), Listener()
    if sharded and not IS_ALONE:
        fully_shard(model[1])
        fully_shard(model)
    stepping = Stepping(
        loss_weight=(lambda batch: int((batch[1] > -0.5).sum())) if by_tokens else "samples",
        noise_from="norm_layers",
        device="cpu",
    )
    defaults = {"max_duration": "1ep", "batch_size": 13, "micro_batch_size": 3}
    Trainer(
        model,
        data(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        stepping=stepping,
        **{
            "loss": by_units if by_tokens else loss,
            "callbacks": [listener],
            **defaults,
            **settings,
        },
    ).fit()
    weights = [] if sharded else [p.flatten().tolist() for p in model.parameters()]
    return {"terms": listener.terms, "sizes": listener.sizes, "weights": weights}


def refused() -> Outcome:
    """What is said of a gradient that is not that of the layers alone."""
    try:
        run(loss=penalised)
    except TrainingError as error:
        return {"error": str(error)}
    return {}


SCENARIOS = {
    "samples": run,
    "one pass": lambda: run(micro_batch_size=None),
    "an empty share": lambda: run(batch_size="0ba:13 2ba:3", micro_batch_size=1),
    "tokens": lambda: run(by_tokens=True),
    "found": lambda: run(micro_batch_size="auto"),
    "sharded": lambda: run(sharded=True),
    "sharded, tokens": lambda: run(sharded=True, by_tokens=True, micro_batch_size=None),
    "followed": lambda: run(
        batch_size=NoiseScale(4, 20, c=0.5, minimum=2, window=6, confidence=0.2),
        max_duration="3ep",
    ),
    "not measured": lambda: run(callbacks=[]),
    "refused": refused,
}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    outcomes = {name: scenario() for name, scenario in SCENARIOS.items()}
    name = "alone" if IS_ALONE else os.environ["RANK"]
    (out / f"norms-{name}.json").write_text(json.dumps(outcomes))
