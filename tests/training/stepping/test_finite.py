"""Steps whose loss or gradient is nan or infinite."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from stretto.errors import ConfigError, TrainingError
from stretto.run import MOST_IN_A_ROW, SkippedSteps
from stretto.timing import Timestamp
from stretto.training import Callback, Checkpointing, Loading, Logging, Stepping, Trainer
from stretto.training.stepper import FiniteCheck

Make = Callable[..., Any]
BAD = float("nan"), float("inf"), -float("inf")


def weight_with(gradient: Tensor | None) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = gradient
    return weight


@pytest.mark.parametrize("bad", BAD)
def test_a_gradient_or_a_loss_that_is_not_finite_is_found(bad: float) -> None:
    good, fine = weight_with(torch.ones(2)), [torch.tensor(1.0)]
    assert FiniteCheck([good]).passes(fine)
    assert FiniteCheck([weight_with(None)]).passes(fine)
    assert not FiniteCheck([good, weight_with(torch.tensor([0.0, bad]))]).passes(fine)
    assert not FiniteCheck([good]).passes([torch.tensor(0.0), torch.tensor(bad)])
    assert FiniteCheck([good]).passes([])


def test_a_gradient_that_is_known_to_be_finite_is_not_read() -> None:
    check = FiniteCheck([weight_with(torch.full((2,), math.nan))])
    assert check.passes([torch.tensor(0.0)], is_gradient_known=True)
    assert not check.passes([torch.tensor(math.nan)], is_gradient_known=True)


def test_the_check_leaves_the_gradient_alone_and_does_not_overflow() -> None:
    """Norms overflow where the elements do not."""
    gradient = torch.tensor([3e38, -1e-45])
    weight = weight_with(gradient.clone())
    assert FiniteCheck([weight]).passes([])
    assert torch.equal(weight.grad, gradient)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_every_type_of_parameter_is_looked_at(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    weight.grad = torch.ones(2, dtype=dtype)
    other = weight_with(torch.ones(2))
    assert FiniteCheck([other, weight]).passes([])
    weight.grad[1] = math.inf
    assert not FiniteCheck([other, weight]).passes([])


def test_sparse_gradients_are_looked_at() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    assert FiniteCheck(embedding.parameters()).passes([])
    (embedding(torch.tensor([1])).sum() * math.nan).backward()
    assert not FiniteCheck(embedding.parameters()).passes([])


class Spoil(Callback):
    """Makes the gradient of some batches infinite by way of the data."""

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def on_batch_start(self, run: Any, step: Any) -> None:
        self.is_bad = step.timestamp.batch in self.batches

    def transform_batch(self, run: Any, batch: Any) -> Any:
        return [batch[0], batch[1] * math.inf] if self.is_bad else batch


def test_a_spoiled_step_stops_the_run_with_the_weights_from_before(
    problem: Make, tmp_path: Path
) -> None:
    whole, run = problem(), problem()
    whole.trainer(max_duration="3ba").fit()
    trainer = run.trainer(
        callbacks=[Spoil(3)], folder=tmp_path, checkpoint=Checkpointing("2ba"), max_duration="9ba"
    )
    with pytest.raises(TrainingError, match="gradient"):
        trainer.fit()
    assert torch.equal(run.weights(), whole.weights())
    assert trainer.resume().name == "checkpoint-000000000016"


def test_a_spoiled_step_is_skipped_and_counted(problem: Make, tmp_path: Path) -> None:
    run, records = problem(), []

    class Read(Callback):
        def on_log(self, run: Any, record: Any) -> None:
            records.append(record)

    trainer = run.trainer(
        callbacks=[Spoil(3, 5), Read()],
        stepping=Stepping(non_finite="skip"),
        log=Logging("4ba"),
        folder=tmp_path,
        checkpoint=Checkpointing("6ba"),
        max_duration="8ba",
    )
    trainer.fit()
    assert torch.isfinite(run.weights()).all()
    assert (trainer.timer.batch, trainer.timer.sample) == (8, 60)
    assert trainer.run.skipped_steps == 2
    assert [record.get("skipped_steps") for record in records] == [1, 2]
    assert all(math.isfinite(record["loss"]) for record in records)
    again = problem().trainer(
        stepping=Stepping(non_finite="skip"), folder=tmp_path, checkpoint=Checkpointing("6ba")
    )
    again.resume()
    assert again.run.skipped_steps == 2


def test_a_skipped_step_leaves_weights_and_optimizer_as_they_were(problem: Make) -> None:
    """The run is that of the other batches."""

    class Leave(Callback):
        def on_batch_start(self, trainer: Any, step: Any) -> None:
            self.before = run.weights(), trainer.optimizers[0].state_dict()["state"]
            self.number = step.timestamp.batch

        def on_batch_end(self, trainer: Any, step: Any) -> None:
            if self.number == 2:
                assert torch.equal(self.before[0], run.weights())
                after = trainer.optimizers[0].state_dict()["state"]
                for key, entry in self.before[1].items():
                    assert torch.equal(entry["momentum_buffer"], after[key]["momentum_buffer"])

    run = problem()
    run.trainer(
        callbacks=[Spoil(2), Leave()], stepping=Stepping(non_finite="skip"), max_duration="4ba"
    ).fit()


def test_nobody_looks_where_it_is_said_so(problem: Make) -> None:
    run = problem()
    run.trainer(
        callbacks=[Spoil(2)], stepping=Stepping(non_finite="ignore"), max_duration="4ba"
    ).fit()
    assert not torch.isfinite(run.weights()).all()


def test_skipping_ends_where_all_is_lost() -> None:
    data = TensorDataset(torch.full((64, 1), math.nan), torch.zeros(64, 1))
    model = nn.Linear(1, 1)
    trainer = Trainer(
        model,
        data,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch[0]).mean(),
        max_duration="60ba",
        batch_size=2,
        loading=Loading(shuffle=False),
        stepping=Stepping(non_finite="skip"),
    )
    with pytest.raises(TrainingError, match="finite"):
        trainer.fit()
    assert trainer.timer.batch == MOST_IN_A_ROW - 1


def test_a_step_that_is_taken_ends_the_row() -> None:
    skipped = SkippedSteps()
    for _ in range(3):
        for _ in range(MOST_IN_A_ROW - 1):
            skipped.add(Timestamp())
        skipped.in_a_row = 0
    assert skipped.count == 3 * (MOST_IN_A_ROW - 1)


def test_overflow_under_loss_scaling_is_skipped_and_counted(problem: Make) -> None:
    """The scaler begins at 65,536: a float16 gradient of that size is infinite."""
    run = problem(dtype=torch.float32)
    trainer = run.trainer(
        precision="fp16",
        loss=lambda model, batch: (model(batch[0]) * 1e3).mean(),
        max_duration="6ba",
    )
    trainer.fit()
    assert trainer.run.skipped_steps > 0
    assert torch.isfinite(run.weights()).all()


def test_a_choice_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="ignore"):
        Stepping(non_finite="raise")  # type: ignore[arg-type]


def test_who_goes_on_where_all_is_lost_is_told_again() -> None:
    skipped = SkippedSteps()
    for _ in range(2):
        for _ in range(MOST_IN_A_ROW - 1):
            skipped.add(Timestamp())
        with pytest.raises(TrainingError, match="steps"):
            skipped.add(Timestamp())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_default_type_of_float64_trains(problem: Make, precision: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        run = problem()
        trainer = run.trainer(clip_norm=1.0, precision=precision)
        trainer.fit()
    finally:
        torch.set_default_dtype(torch.float32)
    assert trainer.timer.batch == 16
    assert run.weights().isfinite().all()


def test_what_is_found_late_is_found_before_anything_is_saved(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device that the host does not wait for."""
    found: list[bool] = []

    def late(check: FiniteCheck, losses: Any, **_: bool) -> bool:
        check.is_late = True
        found.append(all(math.isfinite(loss) for loss in losses))
        return True

    monkeypatch.setattr(FiniteCheck, "passes", late)
    monkeypatch.setattr(FiniteCheck, "settle", lambda check: all(found))
    checkpoint = Checkpointing("4ba", keep=9)
    run = problem()
    trainer = run.trainer(callbacks=[Spoil(5)], folder=tmp_path, checkpoint=checkpoint)
    with pytest.raises(TrainingError) as caught:
        trainer.fit()
    assert "the weights have changed" in str(caught.value)
    assert [one.name[-2:] for one in (tmp_path / "checkpoints").glob("checkpoint-*")] == ["32"]


class HostReads(TorchDispatchMode):
    """Counts tensors that are read on the host, for which an accelerator has to be waited for."""

    count = 0

    def __torch_dispatch__(self, function: Any, *rest: Any) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            # Positions of samples are numbers of the host, whatever the device is.
            files = [frame.filename for frame in traceback.extract_stack()]
            self.count += not any(name.endswith("/data/indices.py") for name in files)
        _, arguments, options = (*rest, None)[:3]
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    ("settings", "micro_batch_size"),
    [({}, None), ({}, 2), ({"clip_norm": 1.0}, None), ({"stepping": {"non_finite": "skip"}}, 2)],
    ids=["plain", "micro-batches", "clipped", "skip"],
)
def test_a_step_reads_nothing_on_the_host(
    settings: Any, micro_batch_size: int | None, problem: Make
) -> None:
    counts = []
    for length in ("20ba", "60ba"):
        trainer = problem().trainer(
            max_duration=length,
            micro_batch_size=micro_batch_size,
            **settings,
            log=Logging("100ba", console=False),
        )
        with HostReads() as reads:  # type: ignore[no-untyped-call]
            trainer.fit()
        counts.append(reads.count)
    assert counts[0] == counts[1]
