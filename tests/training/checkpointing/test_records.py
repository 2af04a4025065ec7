"""Parts of a run: those that do not fit are named, and one may add some."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import open_checkpoint
from stretto.errors import CheckpointError
from stretto.training import Callback, Checkpointing, Evaluation, Logging
from stretto.training.checkpointing.state import restore

Make = Callable[..., Any]
REMOVED = object()


class Counter(Callback):
    """A listener with state."""

    count = 0

    def on_batch_end(self, run: Any, step: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = int(state["count"])


def trainer_of(problem: Make, folder: Path | None = None) -> Any:
    run = problem()
    return run.trainer(
        optimizer=torch.optim.AdamW(run.model.parameters(), lr=0.01),
        batch_size=20,
        max_duration="1ep",
        micro_batch_size=10,
        folder=folder,
        evaluate=Evaluation(run.data),
        checkpoint=Checkpointing("2ba") if folder else None,
        log=Logging("2ba"),
        callbacks=[Counter()],
    )


def changed(records: Any, path: tuple[Any, ...], value: object) -> Any:
    records = copy.deepcopy(records)
    at = records
    for key in path[:-1]:
        at = at[key]
    if value is REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return records


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("optimizer.type", "SGD", "it was saved from SGD"),
        ("optimizer.values", {"9.step": 1}, "parameters"),
        ("recorder.loss.weight", REMOVED, "'recorder' .*'weight'"),
        ("callback_Counter.count", "x", "'callback_Counter' .*invalid literal"),
        ("step.scaler", {"scale": "x"}, "'step' .*'scale' is 'x'"),
        ("setup.samples", "another", "'setup'"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_and_named(
    place: str, value: object, said: str, problem: Make, tmp_path: Path
) -> None:
    trainer_of(problem, tmp_path).fit()
    path = sorted((tmp_path / "checkpoints").iterdir())[0]
    trainer, reader = trainer_of(problem), open_checkpoint(path, verify=False)
    reader.records = changed(reader.records, tuple(place.split(".")), value)
    with pytest.raises(CheckpointError, match=said) as caught:
        restore(trainer.parts, reader, path)
    assert str(path) in str(caught.value)


def test_an_optimizer_that_cannot_use_its_state_is_told_in_the_first_step(
    problem: Make, tmp_path: Path
) -> None:
    trainer_of(problem, tmp_path).fit()
    path = sorted((tmp_path / "checkpoints").iterdir())[0]
    trainer = trainer_of(problem)
    for group in trainer.optimizer.param_groups:
        group["amsgrad"] = True  # as a callback may
    trainer.resume(path)
    for group in trainer.optimizer.param_groups:
        group["amsgrad"] = True
    with pytest.raises(CheckpointError, match="max_exp_avg_sq"):
        trainer.fit()


class Part:
    """Something of a user that a checkpoint keeps."""

    def __init__(self) -> None:
        self.seen, self.weight = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "weight": self.weight, "more": [self.weight, (1, b"x")]}

    def load_state_dict(self, state: Any) -> None:
        self.seen, self.weight, self.more = state["seen"], state["weight"], state["more"]


def test_a_part_of_yours_is_saved_and_restored(problem: Make, tmp_path: Path) -> None:
    trainer, part = trainer_of(problem, tmp_path), Part()
    trainer.parts["tokenizer"] = part
    part.seen, part.weight = 7, torch.ones(2)
    trainer.fit()
    without = trainer_of(problem, tmp_path / "b")
    without.resume(tmp_path)
    assert "tokenizer: its state is dropped" in without.changes
    again, part = trainer_of(problem, tmp_path), Part()
    again.parts["tokenizer"], again.parts["another"] = part, Part()
    again.resume()
    assert again.changes == ("another: begins afresh",)
    assert (part.seen, part.weight.tolist()) == (7, [1, 1])
    assert (part.more[0].tolist(), part.more[1]) == ([1, 1], (1, b"x"))
