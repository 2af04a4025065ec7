"""Runs whose batch size follows what they measure: at once, and the same after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.batching import (
    BatchSizePolicy,
    LinearRamp,
    NoiseScale,
    NormTest,
    Plateau,
    PowerOfTwo,
)
from stretto.data import DataSpec
from stretto.timing import Every
from stretto.training import Callback, Checkpointing, Evaluation, Loading, Stepping

Make = Callable[..., Any]

POLICIES: dict[str, Callable[[], Any]] = {
    "noise scale": lambda: NoiseScale(2, 12, c=0.5, minimum=2, window=6, confidence=0.2),
    "norm test": lambda: PowerOfTwo(NormTest(2, 12, eta=0.8, window=4)),
    "plateau": lambda: Plateau("validation/loss", start=2, maximum=12, threshold=0.1, patience=1),
}


class Sizes(Callback):
    """Notes each batch: its size and the samples that it has."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_batch_start(self, run: Any, step: Any) -> None:
        self.seen.append((step.timestamp.sample, step.batch_size))


def settings(run: Any, policy: BatchSizePolicy, **more: Any) -> dict[str, Any]:
    return {
        "batch_size": policy,
        "micro_batch_size": 3,
        "max_duration": "3ep",
        "evaluate": Evaluation(run.data, "20sp", name="validation"),
        **more,
    }


@pytest.mark.parametrize("name", POLICIES)
def test_a_resumed_run_decides_as_the_whole_one(name: str, problem: Make, tmp_path: Path) -> None:
    whole, sizes = problem(), Sizes()
    whole.trainer(**settings(whole, POLICIES[name](), callbacks=[sizes])).fit()
    assert len({size for _, size in sizes.seen}) > 1, "the size must move, or nothing is tested"
    batches = len(sizes.seen)
    for cut in (1, batches // 2, batches - 1):
        folder = tmp_path / str(cut)
        first, after = problem(), Sizes()
        keep = Checkpointing(Every(f"{cut}ba"))

        class Stop(Callback):
            at = cut

            def on_batch_end(self, run: Any, step: Any) -> None:
                if run.timer.batch == self.at:
                    run.stop("cut here", is_final=False)

        given = settings(first, POLICIES[name](), checkpoint=keep, folder=folder)
        first.trainer(**given, callbacks=[after, Stop()]).fit()
        second = problem()
        given = settings(second, POLICIES[name](), checkpoint=keep, folder=folder)
        resumed = second.trainer(**given, callbacks=[after])
        resumed.resume()
        resumed.evaluate()  # looking changes nothing
        resumed.fit()
        assert after.seen == sizes.seen
        assert torch.equal(second.weights(), whole.weights())


@pytest.mark.parametrize("batch_size", ["noise scale", "ramp in tokens"])
def test_a_packing_run_is_the_same_with_any_workers(batch_size: str, problem: Make) -> None:
    """Rows of several sequences cannot be cut, so each micro-batch is collated by itself."""

    def pack(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        lengths = [1 + int(inputs.abs().sum()) for inputs, _ in samples]
        rows = [inputs.expand(n, -1) for (inputs, _), n in zip(samples, lengths, strict=True)]
        return {
            "row": torch.cat(rows)[None],
            "lengths": lengths,
            "targets": [targets for _, targets in samples],
        }

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        parts = model(batch["row"])[0].split(batch["lengths"])
        means = torch.stack([part.mean(0) for part in parts])
        return nn.functional.mse_loss(means, torch.stack(batch["targets"]))

    policies = {
        "noise scale": NoiseScale(4, 12, c=0.5, minimum=2, window=6, confidence=0.2),
        "ramp in tokens": LinearRamp(4, 12, "200tok"),
    }
    runs = []
    for workers in (0, 2):
        run, sizes = problem(), Sizes()
        run.data = DataSpec(
            run.data,
            get_num_samples_in_batch=lambda batch: len(batch["lengths"]),
            get_num_tokens_in_batch=lambda batch: sum(batch["lengths"]),
        )
        trainer = run.trainer(
            batch_size=policies[batch_size], micro_batch_size=2, loss=loss, callbacks=[sizes],
            stepping=Stepping(loss_weight=lambda batch: len(batch["lengths"])),
            loading=Loading(collate_fn=pack, num_workers=workers), max_duration="2.2ep",
        )  # fmt: skip
        assert trainer.plan is None
        why = "tokens" if batch_size == "ramp in tokens" else "what the run measures"
        assert why in trainer.run.horizon.batch_sizes.why, "and it says why"
        trainer.fit()
        runs.append((sizes.seen, run.weights().tolist()))
    assert len({size for _, size in runs[0][0]}) > 2
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noise scale", "plateau"])
def test_workers_that_fetch_ahead_change_nothing(name: str, problem: Make) -> None:
    seen = []
    for workers in (0, 2):
        run, sizes = problem(), Sizes()
        loading = Loading(num_workers=workers, prefetch_factor=4 if workers else None)
        run.trainer(**settings(run, POLICIES[name](), loading=loading, callbacks=[sizes])).fit()
        seen.append((sizes.seen, run.weights()))
    assert seen[0][0] == seen[1][0]
    # Workers bring chunks, of which a batch is a view: some CPUs round by where it begins.
    assert torch.allclose(seen[0][1], seen[1][1], rtol=0, atol=1e-12)


def test_the_very_next_batch_has_the_size(problem: Make) -> None:
    """A metric that is one too many without improvement counts for the batch right behind it."""
    run, sizes = problem(), Sizes()
    policy = Plateau("validation/loss", start=4, maximum=8, patience=1)
    run.trainer(
        batch_size=policy,
        max_duration="5ba",
        evaluate=Evaluation(run.data, "2ba", loss=lambda model, batch: torch.ones(())),
        callbacks=[sizes],
    ).fit()
    assert [size for _, size in sizes.seen] == [4, 4, 4, 4, 8]


def test_noise_of_a_known_problem_sets_the_size(problem: Make) -> None:
    """Gradients are drawn with |mu|^2 = 1 and tr(Sigma) = 40, whatever the weights are."""
    chance = torch.Generator().manual_seed(6)
    draws = torch.randn(8_000, 10, generator=chance) * 2.0
    draws[:, 0] += 1.0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (batch * next(model.parameters())).sum(1).mean()

    from stretto.training import Trainer

    model, sizes = nn.Linear(10, 1, bias=False), Sizes()
    Trainer(
        model,
        draws,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss=loss,
        max_duration="8_000sp",
        batch_size=NoiseScale(16, 200, window=200),
        micro_batch_size=5,
        callbacks=[sizes],
    ).fit()
    assert sizes.seen[-1][1] == pytest.approx(40, rel=0.2)
