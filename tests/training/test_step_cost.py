"""The price of a step in a run: measured before it or beside it, kept, and never in its way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from stretto import Evaluation, NoiseScale, Trainer, prepare
from stretto.batching import PowerOfTwo
from stretto.errors import BatchSizeError, TrainingError
from stretto.training import pricing

FIXED = 64
"""Samples that cost as much as a step without any."""


class Clock:
    """A clock that the model and the optimizer move: a step takes `FIXED + samples` ms."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Model(torch.nn.Linear):
    def __init__(self, clock: Clock) -> None:
        super().__init__(20, 1)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += len(x) * 10**6
        return super().forward(x)


class Sgd(torch.optim.SGD):
    clock = Clock()

    def step(self, *given: Any) -> Any:
        self.clock.now += FIXED * 10**6
        return super().step(*given)


def made(folder: Path, batch_size: Any, **given: Any) -> Trainer:
    torch.manual_seed(0)
    x = torch.randn(4000, 20)
    y = x @ torch.randn(20, 1) + 3 * torch.randn(4000, 1)
    clock = given.setdefault("clock", Clock())
    model = Model(clock)
    optimizer = Sgd(model.parameters(), lr=0.02)
    optimizer.clock = clock
    settings = {"rule": {"sqrt": 8}, "max_duration": "120ba", "log": "10ba"}
    return Trainer(
        model,
        TensorDataset(x, y),
        optimizer=optimizer,
        loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        batch_size=batch_size,
        folder=folder,
        **{**settings, **given},
    )


def weight(trainer: Trainer) -> torch.Tensor:
    return trainer.model.get_parameter("weight")


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def sizes(folder: Path) -> list[str]:
    return [row.split(",")[4] for row in (folder / "ledger.csv").read_text().splitlines()[1:]]


POLICIES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda c: NoiseScale(8, 256, c=c, power=0.5, minimum=4),
    "wrapped": lambda c: PowerOfTwo(NoiseScale(8, 256, c=c, power=0.5, minimum=4)),
}


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_run_with_the_logged_c_is_the_same_run(
    tmp_path: Path, make: Callable[[Any], Any]
) -> None:
    measured = made(tmp_path / "a", make("time"))
    measured.fit()
    c = lines(tmp_path / "a")[0]["c"]
    assert c == pytest.approx(math.sqrt(FIXED))
    assert {line["c"] for line in lines(tmp_path / "a")} == {c}
    repeated = made(tmp_path / "b", make(c))
    repeated.fit()
    assert len(set(sizes(tmp_path / "a"))) > 3
    assert sizes(tmp_path / "a") == sizes(tmp_path / "b")
    assert torch.equal(weight(measured), weight(repeated))


def test_a_run_that_is_cut_anywhere_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = POLICIES["plain"]("time")
    often = {"every": "3ba", "keep": 99}
    whole = made(tmp_path / "whole", policy, max_duration="63ba", checkpoint=often)
    whole.fit()
    saved = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert len(saved) >= 20
    monkeypatch.setattr(pricing, "timed", None)  # nothing measures again
    for number, checkpoint in enumerate(saved[:20]):
        resumed = made(tmp_path / str(number), policy, max_duration="63ba")
        resumed.fit(resume=checkpoint)
        rest = sizes(tmp_path / "whole")[resumed_at(checkpoint, tmp_path) :]
        assert rest == sizes(tmp_path / str(number))
        assert torch.equal(weight(whole), weight(resumed))


def resumed_at(checkpoint: Path, tmp_path: Path) -> int:
    """How many batches a checkpoint is after."""
    sample = int(checkpoint.name.rpartition("-")[2])
    rows = (tmp_path / "whole" / "ledger.csv").read_text().splitlines()[1:]
    return sum(int(row.split(",")[2]) < sample for row in rows)


def test_the_price_is_in_the_folder_and_another_machine_measures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = POLICIES["plain"]("time")
    made(tmp_path, policy, max_duration="30ba", checkpoint="10ba").fit()
    monkeypatch.setattr("stretto.training.trainer.machine_of", lambda _: "another")
    made(tmp_path, policy, max_duration="60ba").fit(resume="latest")
    first, second = (one for one in lines(tmp_path, "events.jsonl") if one["event"] == "step_cost")
    assert first["c"] == second["c"] == pytest.approx(math.sqrt(FIXED))
    assert (first["machine"], second["machine"]) == ("cpu x 1", "another")
    assert "measured again" in second["text"]


def test_measuring_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    plain, looked = (made(tmp_path / name, "8", precision="bf16") for name in "ab")
    cost = looked.measure_cost([8, 32, 128])
    assert cost.line is not None
    assert cost.line.ratio == pytest.approx(FIXED)
    expected = {size: (FIXED + size) / 1000 for size in (8, 32, 128)}
    assert cost.sizes == pytest.approx(expected)
    plain.fit()
    looked.fit()
    assert torch.equal(weight(plain), weight(looked))
    assert sizes(tmp_path / "a") == sizes(tmp_path / "b")


def test_lines_have_the_seconds_of_a_step_without_pauses(tmp_path: Path) -> None:
    evaluate = Evaluation(TensorDataset(torch.ones(2000, 20), torch.ones(2000, 1)), every="20ba")
    made(tmp_path, "0ba:8 40ba:16 75ba:32", evaluate=evaluate).fit()
    found = [line.get("step_seconds") for line in lines(tmp_path) if "loss" in line]
    first, *rest = found
    assert first is None  # the start is slow
    assert rest[:3] == [pytest.approx(0.072)] * 3
    assert rest[3:6] == [pytest.approx(0.080)] * 3
    assert rest[6] is None  # of two sizes
    assert rest[7:] == [pytest.approx(0.096)] * 4


def test_micro_batches_tell_the_seconds_of_a_sample(tmp_path: Path) -> None:
    made(tmp_path / "a", 16, micro_batch_size=4).fit()
    told = [line["sample_seconds"] for line in lines(tmp_path / "a") if "sample_seconds" in line]
    assert told == [pytest.approx(0.001)] * 2
    made(tmp_path / "b", 16, micro_batch_size=12).fit()  # 8 and 8
    made(tmp_path / "c", 16).fit()
    assert not any("sample_seconds" in line for name in "bc" for line in lines(tmp_path / name))


def test_nothing_more_is_read_from_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal reads
            reads += 1
            return read(*given, **named)

        return call

    for name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    made(tmp_path / "a", 16, micro_batch_size=4).fit()
    with_totals, reads = reads, 0
    monkeypatch.setattr("stretto.training.further.Further.watched", lambda *given: given[-1])
    made(tmp_path / "b", 16, micro_batch_size=4).fit()
    assert with_totals == reads > 0


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(20), torch.ones(1)


def test_what_cannot_be_measured_is_refused_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = POLICIES["plain"]("time")
    for rule in (None, {"momentum": {"half_life": 8}}):
        with pytest.raises(TrainingError, match=r"rule={'linear': 4}"):
            made(tmp_path, policy, rule=rule)
    with monkeypatch.context() as patched:
        patched.setattr(pricing, "_sizes", lambda *_: [8])
        with pytest.raises(TrainingError, match=r"no split.*write c="):
            made(tmp_path, policy).fit()
    with pytest.raises(BatchSizeError, match="leave it out"):
        NoiseScale(8, 64, c="time", power=0.7)
    with pytest.raises(BatchSizeError, match="'time'"):
        NoiseScale(8, 64, c="tim")  # type: ignore[arg-type]
    with pytest.raises(BatchSizeError, match="samples"):
        NoiseScale("8Ktok", "64Ktok", c="time")
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(64, 20))
    with pytest.raises(BatchSizeError, match="step-cost"):
        next(iter(prepare(data, policy, max_duration="1ep", optimizer=optimizer)))
    trainer = Trainer(
        model,
        Endless(),
        optimizer=optimizer,
        loss=torch.nn.MSELoss(),
        max_duration="4ba",
        batch_size=8,
    )
    with pytest.raises(TrainingError, match=r"iterable.*write c="):
        trainer.measure_cost([8, 16])


def test_an_optimizer_with_another_norm_is_warned_of() -> None:
    model = torch.nn.Linear(20, 1)
    own = torch.optim.Rprop(model.parameters())
    with pytest.warns(UserWarning, match=r"Rprop.*2602.03001"):
        Trainer(
            model,
            TensorDataset(torch.ones(64, 20), torch.ones(64, 1)),
            optimizer=own,
            loss=torch.nn.MSELoss(),
            max_duration="4ba",
            batch_size=POLICIES["plain"]("time"),
            rule={"sqrt": 8},
        )
