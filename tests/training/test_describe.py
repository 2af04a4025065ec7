"""What has changed since a checkpoint was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.data import DataSpec
from stretto.data.described import samples_mark
from stretto.errors import CheckpointError
from stretto.schedules import Cosine, Linear
from stretto.training import Callback, Checkpointing, Evaluation, Loading, Stepping
from stretto.training.algorithms import ExponentialMovingAverage
from stretto.training.describe import changes

Make = Callable[..., Any]


def test_only_what_differs_is_told() -> None:
    saved = {"world_size": 1, "schedules.lr": "Cosine()", "schedules.momentum": "Linear()"}
    present = {
        "world_size": 1,
        "schedules.lr": "Linear()",
        "schedules.betas": "Step()",
        "new": None,
    }
    assert list(changes(saved, present)) == [
        "schedules.lr: Cosine() -> Linear()",
        "schedules.betas: None -> Step()",
        "schedules.momentum: Linear() -> None",
    ]
    assert list(changes(saved, saved)) == []
    assert list(changes({}, {"torch": "2.13"})) == ["torch: None -> 2.13"]


def test_a_checkpoint_from_before_times_had_suffixes_is_the_same_run() -> None:
    saved = {"max_duration": "20000000tok", "batch_size": "PiecewiseConstant('0tok:8 90000tok:16')"}
    present = {"max_duration": "20Mtok", "batch_size": "PiecewiseConstant('0tok:8 90Ktok:16')"}
    assert list(changes(saved, present)) == []
    other = present | {"max_duration": "21Mtok"}
    assert list(changes(saved, other)) == ["max_duration: 20000000tok -> 21Mtok"]


def test_a_resumed_run_says_what_it_does_otherwise(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    problem().trainer(max_duration="4ba", schedules={"lr": Cosine()}, **settings).fit()
    same = problem().trainer(max_duration="4ba", schedules={"lr": Cosine()}, **settings)
    same.resume()
    assert same.changes == ()
    other = problem().trainer(
        max_duration="4ba",
        batch_size="0sp:8 20sp:12",
        micro_batch_size=4,
        schedules={"lr": Linear()},
        loading=Loading(num_workers=1),
        clip_norm=1.0,
        **settings,
    )
    other.resume()
    names = [line.partition(":")[0] for line in other.changes]
    assert names == ["batch_size", "micro_batch_size", "schedules.lr", "num_workers", "clip_norm"]
    assert "micro_batch_size: None -> 4" in other.changes


def test_a_second_run_with_the_same_optimizer_is_set_up_as_the_first(
    problem: Make, tmp_path: Path
) -> None:
    """A run that ended in its warm-up leaves a learning rate near 0 behind."""
    run, settings = problem(), {"schedules": {"lr": Linear(0, 1), "momentum": Linear(1, 0)}}
    kept = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    run.trainer(max_duration="2ba", **kept, **settings).fit()
    rates: list[float] = []

    class Watch(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            rates.append(run.optimizers[0].param_groups[0]["lr"])

    second = run.trainer(max_duration="4ba", callbacks=[Watch()], **settings)
    second.fit()
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.075])
    third = run.trainer(max_duration="2ba", **kept, **settings)
    third.resume()
    assert third.changes == ()


def test_a_new_learning_rate_counts_from_the_resume_on(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    problem().trainer(max_duration="2ba", schedules={"lr": Linear(0, 1)}, **settings).fit()
    run = problem()
    run.optimizer.param_groups[0]["lr"] = 0.5
    second = run.trainer(max_duration="4ba", schedules={"lr": Linear(0, 1)}, **settings)
    second.resume()
    assert "optimizer.lr: 0.1 -> 0.5" in second.changes
    second.fit()
    assert run.optimizer.param_groups[0]["lr"] == 0.375


def test_a_noise_that_is_measured_at_other_steps_is_reported(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    problem().trainer(max_duration="4ba", **settings).fit()
    other = problem().trainer(max_duration="4ba", stepping=Stepping(measure_noise=5), **settings)
    other.resume()
    assert other.changes == ("measure_noise: auto -> 5",)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loading": Loading(seed=1)}, "seed=0"),
        ({"loading": Loading(shuffle=False)}, "shuffle=True"),
        ({"num_samples": 61}, "num_samples=60"),
    ],
)
def test_what_cannot_change_is_refused(
    problem: Make, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    problem().trainer(max_duration="4ba", **settings).fit()
    run = problem(change.pop("num_samples", 60))
    with pytest.raises(CheckpointError, match=why):
        run.trainer(max_duration="4ba", **change, **settings).resume()


@pytest.mark.parametrize("groups", [1, 2])
def test_what_the_optimizer_is_built_with_otherwise_holds_from_there_on(
    problem: Make, tmp_path: Path, groups: int
) -> None:
    class Calm(Callback):
        """Changes on the way what nobody schedules."""

        def on_batch_end(self, run: Any, step: Any) -> None:
            run.optimizers[0].param_groups[0]["dampening"] = 0.25

    def trainer(duration: str, **built: Any) -> Any:
        run = problem()
        parts = [run.model[0], run.model[2]]
        split = [{"params": list(part.parameters())} for part in parts]
        run.optimizer = torch.optim.SGD(
            run.model.parameters() if groups == 1 else split, momentum=0.9, **built
        )
        return run.trainer(
            max_duration=duration,
            folder=tmp_path,
            checkpoint=Checkpointing("1ep"),
            callbacks=[Calm()],
        )

    trainer("1ep", lr=0.1).fit()
    second = trainer("2ep", lr=0.05, weight_decay=0.5)
    second.resume()
    ends = [""] if groups == 1 else ["@0", "@1"]
    assert set(second.changes) == {
        "max_duration: 1ep -> 2ep",
        *(f"optimizer.lr{end}: 0.1 -> 0.05" for end in ends),
        *(f"optimizer.weight_decay{end}: 0 -> 0.5" for end in ends),
    }
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.5] * groups
    assert second.optimizer.param_groups[0]["dampening"] == 0.25
    second.fit()
    assert second.optimizer.param_groups[0]["lr"] == 0.05


def other_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.l1_loss(model(batch[0]), batch[1])


def collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"loss": other_loss}, "loss: "),
        ({"loading": Loading(collate_fn=collate)}, "collate_fn: None -> "),
        ({"stepping": Stepping(non_finite="skip")}, "non_finite: stop -> skip"),
        ({"callbacks": [ExponentialMovingAverage(half_life="10ba")]}, "callbacks: "),
        ({"evaluate": Evaluation([1.0], name="test", loss=other_loss)}, "evaluate.test.every: "),
        ({"dtype": torch.float32}, "model.types: torch.float64 -> torch.float32"),
        ({"frozen": True}, "model.frozen:  -> 0.weight"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_all_that_can_be_seen_is_a_line(
    problem: Make, tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    problem().trainer(max_duration="4ba", **settings).fit()
    run = problem()
    if change.pop("frozen", False):
        run.model[0].weight.requires_grad_(False)
    run.model.to(change.pop("dtype", torch.float64))
    trainer = run.trainer(max_duration="4ba", **settings | change)
    trainer.resume()
    assert any(one.startswith(line) for one in trainer.changes), trainer.changes


def test_another_order_of_the_data_is_refused(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    problem().trainer(max_duration="4ba", **settings).fit()
    data = problem().data
    turned = torch.utils.data.TensorDataset(*(one.flip(0) for one in data.tensors))
    with pytest.raises(CheckpointError, match="order"):
        problem().trainer(max_duration="4ba", train_data=turned, **settings).resume()


def test_random_samples_have_no_fingerprint() -> None:
    class Noisy(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(1) + index

    before = torch.get_rng_state()
    assert samples_mark(DataSpec.of(Noisy())) is None
    assert samples_mark(DataSpec.of([1, 2, 3])) == samples_mark(DataSpec.of([1, 2, 3]))
    assert samples_mark(DataSpec.of(torch.utils.data.ChainDataset([]))) is None
    assert torch.equal(torch.get_rng_state(), before)
