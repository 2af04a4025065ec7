"""What is done with the noise besides a batch size: a report, and a learning rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.batching import (
    NoiseScale,
    PowerOfTwo,
)
from stretto.errors import BatchSizeError
from stretto.training import Callback, Checkpointing, Logging, Trainer
from stretto.training.algorithms import NoiseReport

Make = Callable[..., Any]


def known(*callbacks: Callback, **settings: Any) -> Trainer:
    """Gradients are drawn with |mu|^2 = 1 and tr(Sigma) = 40, whatever the weights are."""
    draws = torch.randn(4000, 10, generator=torch.Generator().manual_seed(6)) * 2.0
    draws[:, 0] += 1.0
    model = nn.Linear(10, 1, bias=False)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        mean: Tensor = model(batch).mean()
        return mean

    given = {"max_duration": "4000sp", "batch_size": 40, "micro_batch_size": 5, **settings}
    model = given.pop("model", model)
    given.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return Trainer(model, draws, loss=loss, callbacks=callbacks, **given)


def test_the_noise_scale_is_logged_with_its_interval(tmp_path: Path) -> None:
    report = NoiseReport()
    known(report, folder=tmp_path, log=Logging("10ba")).fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "noise_scale" not in lines[0]
    last = lines[-1]
    assert last["noise_scale"] == pytest.approx(40, rel=0.35)
    assert last["noise_scale_low"] < last["noise_scale"] < last["noise_scale_high"]


def test_a_run_that_follows_the_noise_logs_what_it_follows(tmp_path: Path) -> None:
    logged: list[list[dict[str, float]]] = []
    for size, callbacks, name in (
        (PowerOfTwo(NoiseScale(20, 20)), [], "follows"),
        (16, [NoiseReport()], "reports"),
    ):
        folder = tmp_path / name
        known(*callbacks, batch_size=size, folder=folder, log=Logging("1ba")).fit()
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        names = ("noise_scale", "noise_scale_low", "noise_scale_high")
        logged.append([{name: line[name] for name in names if name in line} for line in lines])
    own, reported = logged
    assert not own[0]
    assert own[-1]
    # The policy has decided by what was measured up to the batch before, and it may go by an end
    # of the interval where the scale is not known well enough to be reported.
    assert [one if "noise_scale" in one else {} for one in own[1:]] == reported[:-1]
    assert any(one and "noise_scale" not in one for one in own)


def test_a_report_leaves_the_run_as_it_is(problem: Make) -> None:
    plain, reported = problem(), problem()
    plain.trainer(micro_batch_size=2).fit()
    reported.trainer(micro_batch_size=2, callbacks=[NoiseReport()]).fit()
    assert torch.equal(plain.weights(), reported.weights())


def test_a_resumed_run_goes_on_to_the_last_bit(problem: Make, tmp_path: Path) -> None:
    whole, cut, states = problem(), problem(), []
    one = NoiseReport()
    settings = {"micro_batch_size": 2, "max_duration": "60ba", "log": Logging("7ba")}
    whole.trainer(**settings, callbacks=[one]).fit()
    states.append(one.state_dict())

    class Stop(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            if run.timer.batch == 31:
                run.stop("cut", is_final=False)

    keep = {"checkpoint": Checkpointing("31ba"), "folder": tmp_path}
    cut.trainer(**settings, **keep, callbacks=[NoiseReport(), Stop()]).fit()
    again, other = problem(), NoiseReport()
    trainer = again.trainer(**settings, **keep, callbacks=[other])
    trainer.resume()
    trainer.fit()
    assert other.state_dict() == states[0]
    assert torch.equal(again.weights(), whole.weights())


def test_values_that_cannot_be() -> None:
    with pytest.raises(BatchSizeError, match="confidence"):
        NoiseReport(confidence=2)
