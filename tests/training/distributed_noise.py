"""One rank of runs that measure the noise of their gradient; writes what it saw."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from stretto.batching import NoiseScale
from stretto.training import Callback, Checkpointing, Run, Stepping, Trainer

Outcome = dict[str, Any]


class Listener(Callback):
    """Keeps what was measured, and the gradient of each micro-batch by itself.

    The weights do not move, so that a model of the same seed stands for the one that is trained.
    """

    def __init__(self, stepping: Stepping | None = None) -> None:
        self.terms: list[tuple[float | None, ...]] = []
        self.groups: list[list[tuple[int, list[float]]]] = []
        self.sizes: list[int] = []
        self.stepping = stepping

    def on_batch_start(self, run: Run, step: Any) -> None:
        self.sizes.append(step.batch_size)
        if self.stepping is not None:
            self.groups.append([self.group(micro) for micro in step.micro_batches])

    def group(self, micro: Any) -> tuple[int, list[float]]:
        assert self.stepping is not None
        model, weight = net(), self.stepping.loss_weight
        units = weight(micro.batch) if callable(weight) else micro.num_samples
        gradients = torch.autograd.grad(loss(model, micro.batch), [*model.parameters()])
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        return (units if micro.weight else 0), flat.tolist()

    def on_noise(self, run: Run, step: Any, signals: Any) -> None:
        numerator, denominator = signals.noise_numerator, signals.noise_denominator
        assert None not in (numerator, denominator, signals.num_samples)
        self.terms.append((numerator, denominator, denominator + numerator / signals.num_samples))


def data(count: int = 61) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(count, 2, generator=generator, dtype=torch.float64))


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def some(batch: Any) -> int:
    """Units that are not in proportion to samples."""
    return int((batch[1] > -0.5).sum())


def run(model: nn.Module, *callbacks: Callback, lr: float = 0.0, **settings: Any) -> nn.Module:
    defaults = {"max_duration": "4ba", "batch_size": 13, "micro_batch_size": 3}
    Trainer(
        model,
        data(),
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        loss=loss,
        callbacks=callbacks,
        **{**defaults, **settings},
    ).fit()
    return model


def groups(*, sharded: bool = False, by_tokens: bool = False, **settings: Any) -> Outcome:
    """What is measured, and the gradients that it should follow from."""
    model: Any = net()
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    stepping = Stepping(loss_weight=some if by_tokens else "samples")
    listener = Listener(stepping)
    run(model, listener, device="cpu", stepping=stepping, **settings)
    return {"terms": listener.terms, "groups": listener.groups, "sizes": listener.sizes}


def truth() -> Outcome:
    """Gradients of a known mean and covariance, in uneven shares: 7 samples, 2 at a time."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(7 * 1200, 6, generator=generator, dtype=torch.float64)
    draws = draws * torch.linspace(1.0, 2.0, 6) + torch.linspace(0.2, 0.7, 6)
    model, listener = nn.Linear(6, 1, bias=False).double(), Listener()
    Trainer(
        model,
        draws,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss=lambda model, batch: model(batch).mean(),
        max_duration="1ep",
        batch_size=7,
        micro_batch_size=2,
        callbacks=[listener],
    ).fit()
    away = []
    true = (
        float(torch.linspace(1.0, 2.0, 6).square().sum()),
        float(torch.linspace(0.2, 0.7, 6).square().sum()),
    )
    for values, value in zip(list(zip(*listener.terms, strict=True))[:2], true, strict=True):
        error = statistics.stdev(values) / math.sqrt(len(values))
        away.append((statistics.fmean(values) - value) / error)
    return {"away": away, "steps": len(listener.terms), "last": listener.terms[-1]}


def unchanged() -> Outcome:
    """Weights after training with and without measuring."""
    weights = []
    for callbacks in ((), (Listener(),)):
        model = run(net(), *callbacks, lr=0.1, max_duration="9ba")
        weights.append([p.flatten().tolist() for p in model.parameters()])
    return {"weights": weights}


def followed() -> Outcome:
    """The sizes of a run that follows the noise."""
    listener = Listener()
    policy = NoiseScale(4, 20, c=0.5, minimum=2, window=6, confidence=0.2)
    run(net(), listener, lr=0.1, batch_size=policy, max_duration="3ep")
    return {"sizes": listener.sizes, "terms": listener.terms}


def failed(folder: Path) -> Outcome:
    """Weights after a run, and after one that goes on behind a measured step that failed."""

    passes, weights = 0, []
    for fails_in in (None, 5 * 3):  # the last of three passes of the batch numbered 4
        model, passes = net(), 0

        def failing(model: nn.Module, batch: Any, fails_in: int | None = fails_in) -> Tensor:
            nonlocal passes
            passes += 1
            if passes == fails_in:
                raise LookupError
            return loss(model, batch)

        trainer = Trainer(
            model,
            data(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=failing,
            max_duration="6ba",
            batch_size=12,
            micro_batch_size=2,
            device="cpu",
            stepping=Stepping(measure_noise=2),
            callbacks=[Listener()],
            folder=folder / str(fails_in),
            checkpoint=Checkpointing("3ba"),
        )
        try:
            trainer.fit()
        except LookupError:
            trainer.resume()  # behind a batch that was not measured
            trainer.fit()
        weights.append([p.flatten().tolist() for p in model.parameters()])
    return {"weights": weights}


SCENARIOS: dict[str, Callable[[], Outcome]] = {
    "samples": groups,
    "one pass": lambda: groups(micro_batch_size=None),
    "an empty share": lambda: groups(batch_size="0ba:13 2ba:3", micro_batch_size=1),
    "tokens": lambda: groups(by_tokens=True),
    "sharded": lambda: groups(sharded=True),
    "sharded, one pass": lambda: groups(sharded=True, micro_batch_size=None),
    "sharded, a sample each": lambda: groups(sharded=True, batch_size=2),
    "sharded, tokens": lambda: groups(sharded=True, by_tokens=True),
    "truth": truth,
    "unchanged": unchanged,
    "followed": followed,
    "failed": lambda: failed(Path(sys.argv[1])),
}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    outcomes = {name: scenario() for name, scenario in SCENARIOS.items()}
    rank = os.environ["RANK"]
    (out / f"noise{rank}.json").write_text(json.dumps(outcomes))
