"""stretto in trainers of Hugging Face, against the real packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs stretto[huggingface]: make test-adapters")
pytest.importorskip("datasets", reason="needs stretto[huggingface]: make test-adapters")

import torch
from tests.integrations import huggingface_toys as toys
from transformers import Trainer, TrainerCallback

from stretto.integrations.huggingface import attach
from stretto.schedules import Cosine

PLAN = toys.planned()
assert PLAN.end is not None
STEPS = list(PLAN.batches())
ENDS = [*(step.timestamp for step in STEPS[1:]), PLAN.end]


class Watch(TrainerCallback):
    """The trainer's own counters after each step, and its events."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, int]] = []
        self.events: list[tuple[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append((state.global_step, state.epoch, state.max_steps))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("epoch begins", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("epoch ends", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("evaluates", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("saves", state.global_step))


def make(
    *, every: Any = None, schedules: Any = toys.SCHEDULES, sizes: Any = toys.SIZES, **settings: Any
) -> tuple[Any, toys.Recorder, Watch]:
    watch = Watch()
    trainer = Trainer(
        model=settings.pop("model", None) or toys.llama(),
        args=toys.arguments(**settings),
        train_dataset=settings.pop("data", None) or toys.dataset(),
        eval_dataset=toys.dataset(20),
        data_collator=toys.collate,
        callbacks=[watch],
    )
    attach(trainer, sizes, schedules, every=every)
    return trainer, toys.Recorder(trainer), watch


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, toys.Recorder, Watch, Path]:
    """A run that nothing interrupts, with a checkpoint after each step."""
    out = tmp_path_factory.mktemp("whole")
    trainer, recorder, watch = make(
        out=str(out), every={"evaluate": "70sp", "save": "1ba", "log": "1ba"}
    )
    trainer.train()
    return trainer, recorder, watch, out


def test_a_trainer_follows_the_plan(whole: Any) -> None:
    trainer, recorder, _, _ = whole
    assert recorder.ids == toys.planned_ids()
    assert recorder.rates == pytest.approx([step.values["lr"] for step in STEPS], rel=1e-15)
    assert max(size for sizes in recorder.micros for size in sizes) == 4
    weights, losses = toys.train_by_hand(toys.llama())
    torch.testing.assert_close(toys.flat(trainer.model), weights, rtol=0, atol=1e-7)
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["loss"] for line in logged] == pytest.approx(losses, rel=1e-5)
    assert [line["batch_size"] for line in logged] == [step.decided for step in STEPS]
    assert [line["learning_rate"] for line in logged] == recorder.rates


def test_the_counters_of_the_trainer_agree_with_the_clock(whole: Any) -> None:
    trainer, _, watch, _ = whole
    total = len(STEPS)
    assert watch.steps == [
        (number, after.sample / toys.N, total) for number, after in enumerate(ENDS, 1)
    ]
    first = trainer.stretto.run.steps_in_epoch(0).exact
    epochs = [event for event in watch.events if event[0].startswith("epoch")]
    assert epochs == [
        ("epoch begins", 0),
        ("epoch ends", first),
        ("epoch begins", first),
        ("epoch ends", total),
    ]
    assert trainer.state.epoch == 2.0
    bounds = [70, 140, 210, 280]
    crossed = [
        number
        for number, (step, after) in enumerate(zip(STEPS, ENDS, strict=True), 1)
        if any(step.timestamp.sample < one <= after.sample for one in bounds)
    ]
    assert [at for name, at in watch.events if name == "evaluates"] == crossed


@pytest.mark.parametrize("at", [1, 7, 12, 14, 16])
def test_a_resumed_trainer_sees_each_sample_once(at: int, whole: Any) -> None:
    trainer, recorder, _, out = whole
    other, seen, watch = make()
    other.train(resume_from_checkpoint=str(out / f"checkpoint-{at}"))
    assert seen.ids == recorder.ids[at:]
    assert seen.rates == recorder.rates[at:]
    assert torch.equal(toys.flat(other.model), toys.flat(trainer.model))
    assert watch.steps[-1] == (len(STEPS), 2.0, len(STEPS))


def test_a_resumed_trainer_may_have_other_micro_batches(whole: Any) -> None:
    trainer, recorder, _, out = whole
    other, seen, _ = make(per_device_train_batch_size=7)
    other.train(resume_from_checkpoint=str(out / "checkpoint-9"))
    assert seen.ids == recorder.ids[9:]
    torch.testing.assert_close(toys.flat(other.model), toys.flat(trainer.model), rtol=0, atol=1e-7)


def test_restored_callbacks_change_nothing(whole: Any) -> None:
    _, recorder, _, out = whole
    other, seen, watch = make(restore_callback_states_from_checkpoint=True)
    other.train(resume_from_checkpoint=str(out / "checkpoint-9"))
    assert seen.ids == recorder.ids[9:]
    assert watch.steps[-1] == (len(STEPS), 2.0, len(STEPS))


def test_training_again_starts_anew(whole: Any) -> None:
    _, recorder, _, _ = whole
    other, seen, _ = make(schedules={"lr": Cosine(warmup="60sp", warmup_start=0)})
    other.train()
    first, count = seen.rates[:], len(seen.rates)
    other.train()
    assert seen.rates[count:] == first
    assert seen.ids[count:] == recorder.ids
