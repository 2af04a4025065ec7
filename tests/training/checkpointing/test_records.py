"""Parts of a run: those that do not fit are named, and one may add some."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import load_weights, open_checkpoint
from stretto.errors import CheckpointError, ScheduleError, StrettoError, TrainingError
from stretto.training import Callback, Checkpointing, Evaluation, Logging
from stretto.training.algorithms import EarlyStopping, ExponentialMovingAverage
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


class Memory(Callback):
    """Keeps what it was built with, so that a test sees whose state it got."""

    def __init__(self, name: str) -> None:
        self.name = self.saved = name

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self.saved}

    def load_state_dict(self, state: Any) -> None:
        self.saved = state["saved"]

    def __repr__(self) -> str:
        return f"Memory({self.name!r})"


def remembered(problem: Make, folder: Path, saved: Sequence[str], present: Sequence[str]) -> Any:
    place: dict[str, Any] = {"folder": folder, "checkpoint": Checkpointing()}
    problem().trainer(**place, max_duration="1ba", callbacks=[*map(Memory, saved)]).fit()
    callbacks = [*map(Memory, present)]
    trainer = problem().trainer(**place, max_duration="1ba", callbacks=callbacks)
    for one in callbacks:
        one.saved = "fresh"
    trainer.resume()
    return {one.name: one.saved for one in callbacks}, trainer.changes


@pytest.mark.parametrize("present", [*permutations("abc"), *permutations("abcd"), *"abc", "cab"])
def test_callbacks_find_their_state_in_any_order(
    present: Sequence[str], problem: Make, tmp_path: Path
) -> None:
    found, _ = remembered(problem, tmp_path, "abc", present)
    assert found == {name: name if name in "abc" else "fresh" for name in present}


@pytest.mark.parametrize(
    ("saved", "present", "expected"),
    [("a", "b", "a"), ("ab", "cb", "ab"), ("ab", "bc", "ba"), ("ab", "ba", "ba"), ("", "b", None)],
)
def test_the_one_callback_that_has_changed_keeps_its_state(
    saved: str, present: str, expected: str | None, problem: Make, tmp_path: Path
) -> None:
    found, _ = remembered(problem, tmp_path, saved, present)
    assert [*found.values()] == [*(expected or ["fresh"])]


@pytest.mark.parametrize(("saved", "present"), [("ab", "cd"), ("ab", "c"), ("a", "bc")])
def test_several_that_have_changed_are_refused(
    saved: str, present: str, problem: Make, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"Memory\('a'\)"):
        remembered(problem, tmp_path, saved, present)


def test_callbacks_that_nothing_tells_apart_are_refused(problem: Make, tmp_path: Path) -> None:
    class A(Counter): ...

    class A_2(Counter): ...  # noqa: N801  as the second A would be called

    place: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing()}
    with pytest.raises(TrainingError, match="__repr__"):
        problem().trainer(**place, callbacks=[Counter(), Counter()])
    problem().trainer(callbacks=[Counter(), Counter()])
    trainer = problem().trainer(**place, callbacks=[A(), A_2()])
    assert len([name for name in trainer.parts if name.startswith("callback_")]) == 2


def grouped(problem: Make, folder: Path, first: float, second: float, names: Any) -> Any:
    run = problem()
    groups = [
        {"params": run.model[0].parameters(), "weight_decay": first},
        {"params": run.model[2].parameters(), "weight_decay": second},
    ]
    for group, name in zip(groups, names, strict=True):
        group.update({} if name is None else {"name": name})
    optimizer = torch.optim.SGD(groups, lr=0.1)
    checkpoint = Checkpointing("1ep")
    return run.trainer(optimizer=optimizer, folder=folder, checkpoint=checkpoint), optimizer


@pytest.mark.parametrize("before", [("a", "a"), (None, None), ("a", None), ("1", None), ("a", "b")])
@pytest.mark.parametrize("after", [("a", "a"), (None, None), ("b", "a"), ("1", None)])
def test_a_changed_weight_decay_stays_whatever_groups_are_called(
    before: Any, after: Any, problem: Make, tmp_path: Path
) -> None:
    trainer, _ = grouped(problem, tmp_path, 0.1, 0.2, before)
    trainer.fit()
    again, optimizer = grouped(problem, tmp_path, 0.5, 0.2, after)
    again.resume()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.2]
    assert tuple(group.get("name") for group in optimizer.param_groups) == after
    assert any("0.5" in line for line in again.changes)


def test_parameters_in_another_order_are_refused(problem: Make, tmp_path: Path) -> None:
    def trainer_of(order: int) -> Any:
        run = problem()
        run.model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)).double()
        parameters = [*run.model.parameters()]
        optimizer = torch.optim.SGD(parameters[order:] + parameters[:order], lr=0.1, momentum=0.9)
        return run.trainer(
            optimizer=optimizer,
            loss=lambda model, batch: model(batch[0]).square().mean(),
            folder=tmp_path,
            checkpoint=Checkpointing(),
        )

    trainer_of(0).fit()
    trainer_of(0).resume()
    with pytest.raises(CheckpointError, match=r"'1\.weight' is where '0\.weight' was"):
        trainer_of(2).resume()


def test_a_part_may_not_replace_one_of_the_run_or_be_without_state(problem: Make) -> None:
    trainer = trainer_of(problem)
    trainer.parts["model"] = Part()
    with pytest.raises(TrainingError, match="name"):
        trainer.fit()

    class Nothing(Callback):
        def state_dict(self) -> Any: ...

    with pytest.raises(TrainingError, match="None"):
        problem().trainer(callbacks=[Nothing()])
    trainer = problem().trainer()
    trainer.parts["nothing"] = Nothing()
    with pytest.raises(TrainingError, match="None"):
        trainer.fit()


def places(record: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    each: Any = record.items() if isinstance(record, dict) else ()
    each = enumerate(record) if isinstance(record, list) else each
    for key, value in each:
        yield from places(value, (*at, key))
    if at:
        yield at


OURS = ("retry", "recorder", "callback_EarlyStopping", "evaluated", "skipped", "optimizer")


def test_what_resume_takes_of_a_forged_record_fit_can_train_with(
    problem: Make, tmp_path: Path
) -> None:
    def make(**settings: Any) -> Any:
        run = problem()
        return run.trainer(
            batch_size=20,
            max_duration="1ep",
            micro_batch_size=10,
            evaluate=Evaluation(run.data, "2ba"),
            callbacks=[EarlyStopping(patience="9ep")],
            log=Logging("2ba"),
            **settings,
        )

    make(folder=tmp_path, checkpoint=Checkpointing("1ba")).fit()
    path, refused = sorted((tmp_path / "checkpoints").iterdir())[0], 0
    real = copy.deepcopy(open_checkpoint(path).records)
    forged = [at for at in places({name: real[name] for name in OURS}) if "params" not in at]
    for at, value in product(forged, ("x", [], 2.5)):
        trainer, reader = make(), open_checkpoint(path, verify=False)
        reader.records = changed(real, at, value)
        try:
            restore(trainer.parts, reader, path)
        except StrettoError:
            refused += 1
            continue
        with suppress(StrettoError):  # an optimizer of torch checks some of its values in a step
            trainer.fit()
    assert refused > len(forged)


def test_names_that_would_mean_two_things_are_refused(problem: Make, tmp_path: Path) -> None:
    run = problem()
    groups = [{"params": run.model[0].parameters(), "name": "1"}]
    groups.append({"params": run.model[2].parameters()})
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(ScheduleError, match="'1'"):
        run.trainer(optimizer=optimizer, schedules={"lr@1": 0.5})
    zero: Any = {"b/loss": lambda model, batch: torch.zeros(())}
    both = [Evaluation(run.data, name="a", metrics=zero), Evaluation(run.data, name="a/b")]
    with pytest.raises(TrainingError, match="a/b/loss"):
        problem().trainer(evaluate=both)
    averages = [ExponentialMovingAverage(0.5), ExponentialMovingAverage(0.9)]
    run = problem()
    run.trainer(
        folder=tmp_path, max_duration="1ba", checkpoint=Checkpointing(), callbacks=averages
    ).fit()
    with pytest.raises(CheckpointError, match="2 callbacks"):
        load_weights(run.model, next((tmp_path / "checkpoints").iterdir()), averaged=True)
