from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.batching import DoublingRamp, LinearRamp, Seesaw
from stretto.errors import CheckpointError, StrettoError, cannot
from stretto.ordering import SampleOrder
from stretto.schedules import Cosine, Linear
from stretto.timing import At, Every
from stretto.training import (
    Callback,
    Checkpointing,
    Evaluation,
    Loading,
    Logging,
    Run,
    Stepping,
)
from stretto.training.logs.recorder import Recorder

Make = Callable[..., Any]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def ledger(path: Path) -> list[dict[str, str]]:
    with (path / "ledger.csv").open() as file:
        return [{**row, "sec": ""} for row in csv.DictReader(file)]


class Losses(Callback):
    """Remembers the exact loss that each batch was logged with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, run: Run, record: Any) -> None:
        self.seen.append(record["loss"])


def test_without_a_ramp_it_is_a_plain_pytorch_loop_to_the_last_bit(problem: Make) -> None:
    plain = problem(dtype=torch.float32)
    order = SampleOrder(60, seed=3)
    expected, position = [], 0
    for _ in range(3):
        for start in range(0, 60, 8):
            size = min(8, 60 - start)
            rows = [order[position + i] for i in range(size)]
            inputs, targets = plain.data[rows]
            for group in plain.optimizer.param_groups:
                group["lr"] = 0.1 * (1 - position / 180)
            loss = nn.functional.mse_loss(plain.model(inputs), targets)
            loss.backward()
            plain.optimizer.step()
            plain.optimizer.zero_grad()
            expected.append(loss.item())
            position += size

    ours, losses = problem(dtype=torch.float32), Losses()
    ours.trainer(
        max_duration="3ep",
        schedules={"lr": Linear(1, 0)},
        loading=Loading(seed=3),
        log=Logging("1ba"),
        callbacks=[losses],
    ).fit()
    assert losses.seen == expected
    assert torch.equal(ours.weights(), plain.weights())


def test_the_first_stage_of_a_ramp_is_a_run_at_that_size_to_the_last_bit(problem: Make) -> None:
    fixed, ramp = problem(dtype=torch.float32), problem(dtype=torch.float32)
    seen: list[list[float]] = []
    for one, batch_size in ((fixed, 6), (ramp, "0sp:6 60sp:12")):
        losses = Losses()
        one.trainer(batch_size=batch_size, log=Logging("1ba"), callbacks=[losses]).fit()
        seen.append(losses.seen)
    assert seen[0][:10] == seen[1][:10]
    assert seen[0][10:] != seen[1][10:]


@pytest.mark.parametrize("micro_batch_size", [1, 3, 5, 8, 100])
def test_micro_batches_do_not_change_the_result(problem: Make, micro_batch_size: int) -> None:
    whole, split = problem(), problem()
    whole.trainer(batch_size="0sp:7 40sp:20").fit()
    split.trainer(batch_size="0sp:7 40sp:20", micro_batch_size=micro_batch_size).fit()
    assert torch.allclose(whole.weights(), split.weights(), rtol=0, atol=1e-12)


def test_a_sum_loss_gives_the_same_result(problem: Make) -> None:
    mean, total = problem(), problem()
    mean.trainer(micro_batch_size=3).fit()

    def summed(model: nn.Module, batch: Any) -> torch.Tensor:
        total: torch.Tensor = nn.functional.mse_loss(model(batch[0]), batch[1]) * len(batch[0])
        return total

    losses = Losses()
    total.trainer(
        loss=summed, micro_batch_size=3, stepping=Stepping(loss_reduction="sum"), callbacks=[losses]
    ).fit()
    assert torch.allclose(mean.weights(), total.weights(), rtol=0, atol=1e-12)


def test_unit_weights_make_the_mean_over_units(problem: Make) -> None:
    """Units differ between micro-batches: a weighted mean, not a mean of means."""

    def units(batch: Any) -> int:
        return int((batch[0][:, 0] > 0).sum())

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        errors = (model(batch[0]) - batch[1]).square().mean(1)
        mean: torch.Tensor = errors[batch[0][:, 0] > 0].mean()
        return mean

    whole, split = problem(), problem()
    whole.trainer(loss=loss, batch_size=12, stepping=Stepping(loss_weight=units)).fit()
    # Some micro-batches of 2 have no unit at all: their mean is nan and must not spoil anything.
    split.trainer(
        loss=loss, batch_size=12, micro_batch_size=2, stepping=Stepping(loss_weight=units)
    ).fit()
    assert torch.allclose(whole.weights(), split.weights(), rtol=0, atol=1e-12)


def test_the_logged_loss_is_the_sample_weighted_mean_since_the_last_log(problem: Make) -> None:
    one, two = problem(), problem()
    each, some = Losses(), Losses()
    settings: dict[str, Any] = {"batch_size": "0sp:4 24sp:10", "max_duration": "2ep"}
    one.trainer(log=Logging("1ba"), callbacks=[each], **settings).fit()
    two.trainer(log=Logging("24sp"), callbacks=[some], **settings).fit()
    sizes = [step.size for step in one.trainer(**settings).plan.batches()]
    expected, total, weight, position, mark = [], 0.0, 0, 0, 24
    for loss, size in zip(each.seen, sizes, strict=True):
        total, weight, position = total + loss * size, weight + size, position + size
        if position >= mark or position == 120:
            expected.append(total / weight)
            total, weight = 0.0, 0
            mark = position // 24 * 24 + 24
    assert some.seen == pytest.approx(expected, rel=1e-12)


def test_every_line_has_the_clock_in_every_unit(problem: Make, tmp_path: Path) -> None:
    run = problem()
    run.trainer(folder=tmp_path, log=Logging("25%"), evaluate=Evaluation(run.data, "1ep")).fit()
    recorded = lines(tmp_path)
    assert all({"ep", "ba", "sp", "tok", "dur", "sec"} <= set(line) for line in recorded)
    logs = [line for line in recorded if "loss" in line]
    assert [line["sp"] for line in logs] == [32, 60, 92, 120]
    assert {"loss", "batch_size", "samples_per_second"} <= set(logs[0])
    evaluations = [line for line in recorded if "validation/loss" in line]
    assert [line["ep"] for line in evaluations] == [1, 2]


PAIR = Seesaw(Cosine(warmup="10%"), DoublingRamp(2, 4, "20%"), maximum=16)
RAMP = {"batch_size": DoublingRamp(4, 16, "50%"), "schedules": {"lr": Cosine(end=0.1)}}


@pytest.mark.parametrize(
    ("batch_size", "schedules"),
    [
        (LinearRamp(3, 17, "60%"), {"lr": Cosine(end=0.1, warmup="10ba"), "momentum": 0.5}),
        (PAIR, {"momentum": Linear(0.5, 1, over="20sp")}),
    ],
    ids=["ramp", "pair"],
)
def test_the_ledger_follows_the_plan_batch_for_batch(
    problem: Make, tmp_path: Path, batch_size: Any, schedules: Any
) -> None:
    trainer = problem().trainer(
        folder=tmp_path, batch_size=batch_size, schedules=schedules, micro_batch_size=4
    )
    trainer.fit()
    rows, planned = ledger(tmp_path), list(trainer.plan.batches())
    assert [int(row["size"]) for row in rows] == [step.size for step in planned]
    assert [int(row["sample"]) for row in rows] == [step.timestamp.sample for step in planned]
    for name in ("lr", "momentum"):
        assert [float(row[name]) for row in rows] == [step.values[name] for step in planned]
    assert [int(row["micro_batches"]) for row in rows] == [-(-step.size // 4) for step in planned]


def test_evaluation_is_the_mean_over_all_samples(problem: Make) -> None:
    run = problem()
    trainer = run.trainer(
        evaluate=Evaluation(
            run.data,
            metrics={"error": lambda m, b: (m(b[0]) - b[1]).abs().mean()},
            batch_size=7,
            name="train",
        )
    )
    with torch.no_grad():
        outputs = run.model(run.data.tensors[0])
        loss = nn.functional.mse_loss(outputs, run.data.tensors[1]).item()
        error = (outputs - run.data.tensors[1]).abs().mean().item()
    measured = trainer.evaluate()
    assert measured == pytest.approx({"train/loss": loss, "train/error": error}, rel=1e-6)
    assert run.model.training


def test_intervals_in_any_unit_fire_where_they_should(problem: Make) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.evaluated: list[int] = []
            self.epochs: list[int] = []

        def on_evaluation_end(self, run: Run, name: str, metrics: Any) -> None:
            self.evaluated.append(run.timer.batch)

        def on_epoch_end(self, run: Run) -> None:
            self.epochs.append(run.timer.sample)

    run, watch = problem(), Watch()
    run.trainer(
        max_duration="30ba",
        batch_size=6,
        evaluate=Evaluation(run.data, Every("0.1dur") | At("1ba")),
        callbacks=[watch],
    ).fit()
    assert watch.evaluated == [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    assert watch.epochs == [60, 120, 180]


def test_the_end_of_the_run_is_in_any_unit(problem: Make) -> None:
    for length, expected in (("2ep", 120), ("100sp", 100), ("5ba", 40), ("0.5ep", 30)):
        trainer = problem().trainer(max_duration=length)
        trainer.fit()
        assert trainer.timer.sample == expected
        assert trainer.timer.get_elapsed_duration() == 1.0


class StopAt(Callback):
    def __init__(self, batch: int, how: Callable[[Run], None]) -> None:
        self.batch, self.how = batch, how

    def on_batch_end(self, run: Run, step: Any) -> None:
        if run.timer.batch == self.batch:
            self.how(run)


@pytest.mark.parametrize(
    ("how", "reason", "raised"),
    [
        (lambda _: os.kill(os.getpid(), signal.SIGINT), "received SIGINT", KeyboardInterrupt),
        (lambda _: os.kill(os.getpid(), signal.SIGTERM), "received SIGTERM", SystemExit),
        (lambda run: run.stop("enough", is_final=False), "enough", None),
    ],
    ids=["SIGINT", "SIGTERM", "stop"],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    problem: Make, tmp_path: Path, how: Any, reason: str, raised: Any
) -> None:
    settings: dict[str, Any] = {"log": Logging("50sp"), "checkpoint": Checkpointing("1ep")}
    settings |= {"batch_size": PAIR} if raised is None else RAMP
    whole = problem()
    whole.trainer(folder=tmp_path / "whole", **settings).fit()

    first = problem()
    trainer = first.trainer(folder=tmp_path / "cut", callbacks=[StopAt(7, how)], **settings)
    if raised is None:
        trainer.fit()
    else:
        with pytest.raises(raised) as ended:
            trainer.fit()
        assert raised is KeyboardInterrupt or ended.value.code == 143
    assert trainer.stop_reason == reason
    assert trainer.timer.batch in (7, 8)  # a signal is seen before the next batch or during it
    second = problem()
    resumed = second.trainer(folder=tmp_path / "cut", **settings)
    assert resumed.resume() is not None
    assert resumed.timer.batch == trainer.timer.batch
    assert resumed.changes == ("callbacks: StopAt -> ",)
    resumed.fit()

    assert torch.equal(second.weights(), whole.weights())
    assert ledger(tmp_path / "cut") == ledger(tmp_path / "whole")
    assert_same_but_time(lines(tmp_path / "cut"), lines(tmp_path / "whole"))


def assert_same_but_time(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    timed = {"sec", "samples_per_second", "tokens_per_second", "memory_peak_bytes"}
    timed |= {"step_seconds", "sample_seconds"}
    assert [{k: v for k, v in line.items() if k not in timed} for line in one] == [
        {k: v for k, v in line.items() if k not in timed} for line in two
    ]


@pytest.mark.parametrize("last_batch", ["keep", "drop", "carry"])
def test_resuming_from_any_batch_is_exact(problem: Make, tmp_path: Path, last_batch: Any) -> None:
    settings: dict[str, Any] = {
        "batch_size": "0sp:7 50sp:13",
        "checkpoint": Checkpointing("1ba", keep=100),
        "loading": Loading(last_batch=last_batch, seed=5),
        "micro_batch_size": 4,
    }
    whole = problem(num_samples=33)
    whole.trainer(folder=tmp_path, **settings).fit()
    paths = sorted((tmp_path / "checkpoints").iterdir())
    assert len(paths) > 5
    for path in paths[:-1]:
        again = problem(num_samples=33)
        trainer = again.trainer(**{**settings, "checkpoint": None})
        trainer.resume(path)
        trainer.fit()
        assert torch.equal(again.weights(), whole.weights())


def test_dropout_is_the_same_after_a_resume(tmp_path: Path, problem: Make) -> None:
    def with_dropout() -> Any:
        run = problem()
        run.model.insert(2, nn.Dropout(0.5))
        return run

    settings: dict[str, Any] = {"checkpoint": Checkpointing("5ba"), "folder": tmp_path}
    torch.manual_seed(0)
    whole = with_dropout()
    torch.manual_seed(11)
    whole.trainer(**settings).fit()
    again = with_dropout()
    trainer = again.trainer()
    trainer.resume(sorted((tmp_path / "checkpoints").iterdir())[0])
    torch.manual_seed(999)
    trainer.resume(sorted((tmp_path / "checkpoints").iterdir())[0])
    trainer.fit()
    assert torch.equal(again.weights(), whole.weights())


def test_another_models_checkpoint_is_refused(problem: Make, tmp_path: Path) -> None:
    problem().trainer(folder=tmp_path, checkpoint=Checkpointing()).fit()
    other = problem()
    other.model.append(nn.Linear(2, 2).double().requires_grad_(False))
    with pytest.raises(CheckpointError, match="model"):
        other.trainer(folder=tmp_path).resume()


def test_only_the_newest_checkpoints_stay(problem: Make, tmp_path: Path) -> None:
    problem().trainer(folder=tmp_path, checkpoint=Checkpointing("2ba", keep=2)).fit()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_trains(problem: Make, precision: Any) -> None:
    run = problem(dtype=torch.float32)
    trainer = run.trainer(
        max_duration="5ep",
        precision=precision,
        clip_norm=1.0,
        evaluate=Evaluation(run.data),
    )
    before = trainer.evaluate()["validation/loss"]
    trainer.fit()
    assert run.model(run.data.tensors[0]).dtype == torch.float32
    assert trainer.evaluate()["validation/loss"] < before


def test_evaluation_computes_in_the_type_that_training_does(problem: Make) -> None:
    seen: list[torch.dtype] = []

    def watched(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        seen.append(outputs.dtype)
        return nn.functional.mse_loss(outputs.float(), batch[1])

    run = problem(dtype=torch.float32)
    run.trainer(loss=watched, precision="bf16", evaluate=Evaluation(run.data)).evaluate()
    assert set(seen) == {torch.bfloat16}


def test_clipping_bounds_the_gradient_of_the_whole_batch(problem: Make) -> None:
    class Norms(Callback):
        def __init__(self) -> None:
            self.updates: list[float] = []

        def on_batch_start(self, run: Run, step: Any) -> None:
            self.before = torch.cat([p.detach().flatten() for p in run.model.parameters()])

        def on_batch_end(self, run: Run, step: Any) -> None:
            now = torch.cat([p.detach().flatten() for p in run.model.parameters()])
            self.updates.append((now - self.before).norm().item())

    run, norms = problem(), Norms()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
    run.trainer(clip_norm=0.01, micro_batch_size=3, callbacks=[norms]).fit()
    assert max(norms.updates) <= 0.01 + 1e-9
    assert min(norms.updates) > 0.009


@pytest.mark.slow
@pytest.mark.timeout(400)  # the compiler alone takes a minute on a busy machine
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler uses torch.jit
def test_a_compiled_model_trains_like_an_eager_one(problem: Make) -> None:
    eager, compiled = problem(), problem()
    eager.trainer(max_duration="5ba").fit()
    compiled.trainer(max_duration="5ba", compile=True).fit()
    assert torch.allclose(eager.weights(), compiled.weights(), rtol=0, atol=1e-10)


def test_everything_wrong_is_found_before_the_first_step(problem: Make) -> None:
    run = problem()
    wrong: list[dict[str, Any]] = [
        {"batch_size": 0},
        {"batch_size": "64 samples"},
        {"micro_batch_size": 0},
        {"max_duration": "3epochs"},
        {"max_duration": "1Mtok"},
        {"schedules": {"learning_rate": Linear(1, 0)}},
        {"schedules": {"lr": Linear(1, 0, over="10tok")}},
        {"checkpoint": Checkpointing()},
        {"evaluate": Evaluation(run.data, every="0ep")},
        {"loading": Loading(last_batch="drop"), "batch_size": 100},
        {"log": Logging("soon")},
        {"device": "teapot"},
    ]
    for settings in wrong:
        with pytest.raises(StrettoError):
            problem().trainer(**settings)


def test_workers_end_where_a_run_is_stopped(problem: Callable[..., Any]) -> None:
    class Stop(Callback):
        def on_batch_end(self, run: Run, step: Any) -> None:
            if run.timer.batch == 2:
                run.stop("enough", is_final=False)

    before = set(multiprocessing.active_children())
    run = problem()
    trainer = run.trainer(loading=Loading(num_workers=2), callbacks=[Stop()])
    trainer.fit()
    assert set(multiprocessing.active_children()) == before
    trainer.fit()  # it goes on where it was
    assert trainer.timer.sample == 120


def test_what_ranks_do_together_comes_before_what_may_fail_on_one(
    problem: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that fails earlier would leave the others waiting for its shards."""
    done: list[str] = []

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        done.append("shard")
        return tensor

    def record(_: Recorder) -> Any:
        done.append("record")
        raise CheckpointError(cannot("save", why="the ledger is gone", instead="look for it"))

    monkeypatch.setattr("stretto.distributed.strategy.to_shard", shard)
    monkeypatch.setattr(Recorder, "state_dict", record)
    trainer = problem().trainer(
        folder=tmp_path, checkpoint=Checkpointing("1ep"), max_duration="1ep"
    )
    with pytest.warns(RuntimeWarning, match="ledger"):
        trainer.fit()
    assert "shard" in done
    assert done[done.index("record") - 1] == "shard"
