from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from stretto.errors import TrainingError
from stretto.memory import find_batch_size
from stretto.schedules import Cosine
from stretto.timing import At, Every
from stretto.training import Callback, Checkpointing, Evaluation, Logging, Run, Trainer
from stretto.training.callback import EVENTS, Events


class Everything(Callback):
    """Notes every event by name."""

    def __init__(self) -> None:
        self.seen: list[str] = []


def _note(name: str) -> Any:
    def listener(self: Everything, trainer: Any, *details: Any) -> Any:
        self.seen.append(name)
        return details[0] if name == "transform_batch" else None

    return listener


for _name in EVENTS:
    setattr(Everything, _name, _note(_name))


def test_every_event_happens_in_its_order(problem: Callable[..., Any], tmp_path: Path) -> None:
    run, callback = problem(), Everything()
    run.trainer(
        max_duration="2ba",
        batch_size=30,
        micro_batch_size=15,
        folder=tmp_path,
        log=Logging("1ep"),
        evaluate=Evaluation(run.data, "1ep"),
        checkpoint=Checkpointing("1ep"),
        callbacks=[callback],
    ).fit()
    step = ["on_batch_start", "transform_batch", "transform_batch", "on_gradient"]
    step += ["on_noise", "on_batch_end"]
    ends = ["on_epoch_end", "on_log", "on_evaluation_start", "on_evaluation_end"]
    ends += ["on_checkpoint_start", "on_checkpoint"]
    assert callback.seen == ["on_build", "on_fit_start", *step, *step, *ends, "on_fit_end"]


class NoteDue(Callback):
    """Notes the clock when it is due."""

    def __init__(self, every: Any) -> None:
        self.every = every
        self.seen: list[int] = []

    def on_due(self, run: Any) -> None:
        self.seen.append(run.timer.sample)
        run.log("due", run.timer.sample, reduce="last")


@pytest.mark.parametrize(
    ("every", "scale", "expected"),
    [
        ("25%", None, [16, 32, 48, 60]),
        ("20sp", None, [24, 40, 60]),
        (Every("1ep") | At("3ba"), None, [24, 60]),
        ("2ep", 0.25, [32, 60]),
        (None, None, []),
    ],
)
def test_a_callback_of_yours_is_due_at_times_of_its_own(
    problem: Callable[..., Any], every: Any, scale: Any, expected: list[int]
) -> None:
    trainer = problem().trainer(
        max_duration="1ep" if scale is None else "4ep",
        batch_size=8,
        callbacks=[NoteDue(every)],
        scale_schedule=scale,
    )
    trainer.fit()
    mine = trainer.callbacks[0]
    assert mine.seen == expected
    counts = {event.name: event.count for event in trainer.plan.events}
    assert counts.get("NoteDue", 0) == len(expected)


def test_what_is_due_comes_in_one_order(problem: Callable[..., Any], tmp_path: Path) -> None:
    """A value that is logged when it is due is on the line that is due at the same time."""
    run, lines = problem(), tmp_path / "metrics.jsonl"
    order: list[str] = []

    class Order(NoteDue):
        def on_due(self, run: Any) -> None:
            super().on_due(run)
            order.append("due")

        def on_log(self, run: Any, record: Any) -> None:
            order.append("log")

        def on_evaluation_end(self, run: Any, name: str, metrics: Any) -> None:
            order.append("evaluate")

        def on_checkpoint_start(self, run: Any) -> None:
            order.append("save")

    run.trainer(
        max_duration="4ba",
        folder=tmp_path,
        log="2ba",
        evaluate=Evaluation(run.data, "2ba"),
        checkpoint="2ba",
        callbacks=[Order("2ba")],
    ).fit()
    assert order == ["due", "log", "evaluate", "save"] * 2
    assert '"due": 16' in lines.read_text().splitlines()[0]


def test_two_callbacks_of_one_type_are_due_each_on_its_own(problem: Callable[..., Any]) -> None:
    one, other = NoteDue("3ba"), NoteDue("2ba")
    trainer = problem().trainer(max_duration="6ba", batch_size=8, callbacks=[one, other])
    trainer.fit()
    assert (len(one.seen), len(other.seen)) == (2, 3)
    names = {event.name for event in trainer.plan.events}
    assert names == {"log", "NoteDue", "NoteDue_2"}


def test_a_search_for_what_fits_comes_after_what_callbacks_allocate(
    problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Allocate(Callback):
        def on_build(self, run: Any) -> None:
            seen.append("built")

    def find(*asked: Any, **how: Any) -> Any:
        seen.append("tried")
        return find_batch_size(*asked, **how)

    monkeypatch.setattr("stretto.memory.find_batch_size", find)
    problem().trainer(micro_batch_size="auto", callbacks=[Allocate()])
    assert seen == ["built", "tried"]


def test_who_does_not_listen_is_not_called(problem: Callable[..., Any]) -> None:
    events = Events([Callback(), Everything()], problem().trainer().run)
    assert all(len(events.listeners(name)) == 1 for name in EVENTS)


class Ends(Callback):
    """Notes when it is told the start and the end, and fails where it is to."""

    def __init__(self, seen: list[str], name: str, fails_at: str = "") -> None:
        self.seen, self.name, self.fails_at = seen, name, fails_at

    def on_fit_start(self, run: Any) -> None:
        self._note("start")

    def on_fit_end(self, run: Any) -> None:
        self._note("end")

    def _note(self, event: str) -> None:
        self.seen.append(f"{event} {self.name}")
        if event in self.fails_at:
            raise ValueError(f"{event} of {self.name}")


def test_all_are_told_the_end_where_some_fail_at_it(problem: Callable[..., Any]) -> None:
    seen: list[str] = []
    ends = [Ends(seen, "a"), Ends(seen, "b", "end"), Ends(seen, "c", "end"), Ends(seen, "d")]
    with pytest.raises(ValueError, match="end") as raised:
        problem().trainer(callbacks=ends, max_duration="1ba").fit()
    assert seen[4:] == ["end a", "end b", "end c", "end d"]
    assert raised.value.__notes__ == ["and Ends.on_fit_end failed: ValueError: end of c"]


def test_who_was_told_the_start_is_told_the_end_where_the_start_of_another_fails(
    problem: Callable[..., Any],
) -> None:
    seen: list[str] = []
    ends = [Ends(seen, "a", "end"), Ends(seen, "b"), Ends(seen, "c", "start"), Ends(seen, "d")]
    with pytest.raises(ValueError, match="start") as raised:
        problem().trainer(callbacks=ends).fit()
    assert seen == ["start a", "start b", "start c", "end a", "end b"]
    assert raised.value.__notes__ == ["and Ends.on_fit_end failed: ValueError: end of a"]


def test_what_ends_a_run_is_raised_before_what_fails_at_its_end(
    problem: Callable[..., Any],
) -> None:
    class Interrupt(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            raise KeyboardInterrupt

    seen: list[str] = []
    ends = [Ends(seen, "a", "end"), Ends(seen, "b")]
    with pytest.raises(KeyboardInterrupt) as raised:
        problem().trainer(callbacks=[*ends, Interrupt()]).fit()
    assert seen[2:] == ["end a", "end b"]
    assert raised.value.__notes__ == ["and Ends.on_fit_end failed: ValueError: end of a"]


class Moments(Callback):
    """Keeps tensors of several types and a number that is not finite."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mean = torch.zeros(2, 3, dtype=torch.bfloat16)
        self.seen: tuple[Any, ...] = ()

    def on_batch_end(self, run: Any, step: Any) -> None:
        self.mean += torch.rand(2, 3)
        self.seen = (run.timer.batch, math.inf, b"x", torch.tensor(step.num_samples))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": [self.seen]}

    def load_state_dict(self, state: Any) -> None:
        self.mean = state["mean"]
        (self.seen,) = state["seen"]

    def __repr__(self) -> str:
        return f"Moments({self.name!r})"


def test_tensors_of_a_callback_survive_a_resume_to_the_last_bit(
    problem: Callable[..., Any], tmp_path: Path
) -> None:
    saved = [Moments("a"), Moments("b")]
    problem().trainer(
        folder=tmp_path, checkpoint=Checkpointing("1ep"), callbacks=[*saved, Callback()]
    ).fit()
    resumed = [Moments("a"), Moments("b")]
    trainer = problem().trainer(
        folder=tmp_path, checkpoint=Checkpointing("1ep"), callbacks=[*resumed, Callback()]
    )
    trainer.resume()
    for one, other in zip(saved, resumed, strict=True):
        assert other.mean.dtype == torch.bfloat16
        assert torch.equal(one.mean, other.mean)
        assert one.seen == other.seen
    assert trainer.changes == ()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({1, 2}, "seen.1.at is of type set"),
        (torch.eye(2).to_sparse(), "seen.1.at is a tensor that is sparse"),
        (torch.eye(2, dtype=torch.complex128), "seen.1.at"),
    ],
    ids=["set", "sparse", "complex128"],
)
def test_state_that_no_checkpoint_can_hold_is_refused_when_the_trainer_is_built(
    problem: Callable[..., Any], value: Any, why: str
) -> None:
    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": [0, {"at": value}]}

    with pytest.raises(TrainingError, match=re.escape(why)) as raised:
        problem().trainer(callbacks=[Keeps()])
    assert "Keeps" in str(raised.value)


class ForeignMapping(Mapping[str, Any]):
    """A mapping that refuses to be asked for its truth."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.given = values

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)

    def __bool__(self) -> bool:
        raise AssertionError("asked for truth")


class Empty(Callback):
    """A callback that counts as false, and is due at times of its own."""

    every = "0.5ep"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 0

    def on_due(self, run: Run) -> None:
        self.seen.append(run.timer.sample)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [*self.seen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = [*state["seen"]]


def test_what_is_due_stays_so_for_foreign_objects_and_other_sizes(tmp_path: Path) -> None:
    seen = []
    for size, length in ((8, "2ep"), (16, "4ep")):
        model, callback = torch.nn.Linear(4, 1), Empty()
        trainer = Trainer(
            model,
            TensorDataset(torch.ones(64, 4), torch.ones(64, 1)),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.MSELoss(),
            max_duration=length,
            batch_size=size,
            schedules=ForeignMapping({"lr": Cosine(warmup="5ba")}),
            loading=ForeignMapping({"seed": 3}),
            callbacks=[callback],
            checkpoint="1ep",
            log=Logging("1ep", console=False),
            folder=tmp_path,
        )
        trainer.fit(resume="auto")
        seen.append(callback.seen)
    assert seen == [[32, 64, 96, 128], [*range(32, 257, 32)]]


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("on_batch_ends", "on_batch_end"),
        ("on_epoch_stop", "on_epoch_end"),
        ("on_train_batch_end", "on_batch_end"),
        ("transform_batches", "transform_batch"),
    ],
)
def test_a_method_that_looks_like_an_event_is_said(name: str, event: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} is no event.*{event}"):
        type("Misspelt", (Callback,), {name: lambda self, run: None})


def test_other_methods_and_those_of_another_base_are_left_alone() -> None:
    class Other:
        def on_train_batch_end(self) -> None:
            """An event of another library."""

    both = {"on_train_batch_end": lambda self: None, "read": len, "on_log": lambda *_: None}
    assert issubclass(type("Both", (Callback, Other), both), Callback)


def test_a_group_that_a_callback_adds_is_refused() -> None:
    class Unfreezing(Callback):
        def on_epoch_end(self, run: Run) -> None:
            run.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})

    model = torch.nn.Linear(4, 1)
    trainer = Trainer(
        model,
        TensorDataset(torch.randn(16, 4), torch.randn(16, 1)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        max_duration="2ep",
        batch_size=8,
        callbacks=[Unfreezing()],
    )
    with pytest.raises(TrainingError, match="requires_grad_"):
        trainer.fit()
