"""What messages say to write is accepted in the place that the message is about."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stretto
from stretto import batching, schedules
from stretto._foreign import FOREIGN
from stretto.config import RunConfig
from stretto.errors import ConfigError, StrettoError, TimeError
from stretto.schedules import WSD, Cosine, CosineRestarts, Linear, MultiStep, Periods, StepDecay
from stretto.timing import At, Every, Horizon, Time, parse_trigger

DATA = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
Call = Callable[..., object]
FILE: dict[str, Any] = {
    "max_duration": "9ep",
    "data": {"target": "my.data:make", "num_samples": 100},
    "batch_size": 8,
}


def key(name: str, value: Callable[[Any], Any]) -> Call:
    """A run file in which one key has a value."""
    return lambda given: RunConfig.parse({**FILE, name: value(given)})


def sizes(given: Any) -> object:
    """Batch sizes from steps, as a whole or with one time."""
    return batching.PiecewiseConstant(given if ":" in str(given) else {"0ep": 8, given: 16})


PLACES: dict[str, Call] = {
    "Time": Time,
    "Every": Every,
    "At": At,
    "parse_trigger": parse_trigger,
    "warmup": lambda given: Cosine(warmup=given),
    "over": lambda given: Linear(1, 0, over=given),
    "step": lambda given: StepDecay(given, 0.1),
    "milestone": lambda given: MultiStep([given]),
    "decay": lambda given: WSD(decay=given),
    "restart": CosineRestarts,
    "period": lambda given: Periods([(given, 1.0), ("rest", 0.5)]),
    "period of sizes": lambda given: batching.PeriodSizes([(given, 8), ("rest", 16)]),
    "ramp": lambda given: batching.DoublingRamp(8, 64, given),
    "steps": sizes,
    "horizon": lambda given: Horizon(given, dataset_num_samples=100),
    "prepare": lambda given: stretto.prepare(range(99), 8, max_duration=given),
    "every": lambda given: stretto.prepare(range(99), 8, max_duration="9ep", every={"a": given}),
    "max_duration": key("max_duration", lambda given: given),
    "evaluate.every": key("evaluate", lambda given: {"every": given}),
    "checkpoint.every": key("checkpoint", lambda given: {"every": given}),
    "log.every": key("log", lambda given: {"every": given}),
    "schedules.lr": key("schedules", lambda given: {"lr": {"Cosine": {"warmup": given}}}),
    "batch_size.over": key(
        "batch_size", lambda given: {"DoublingRamp": {"start": 8, "end": 64, "over": given}}
    ),
}
WORDS = ["", "ep", "ba", "sp", "tok", "dur", "sec", "%", "s", "h", "m", "K", "M", "B", "Msp"]
WORDS += ["epochs", "epoch", "steps", "step", "batches", "iterations", "samples", "tokens", "tokn"]
WORDS += ["percent", "pct", "hours", "min", "minutes", "days", "x", "%%", "kba", "1h", "h90m"]
NUMBERS = st.one_of(
    st.integers(-3, 2000).map(str),
    st.integers(-150, 150).map(lambda value: str(value / 100)),
    st.sampled_from(["1e3", "1_000", "1/3", "1/0", "0", "1e400", "1e-3", "", "-", "rest"]),
)
TEXTS = st.builds(
    lambda number, space, word: number + space + word,
    NUMBERS,
    st.sampled_from(["", " "]),
    st.sampled_from(WORDS),
)
BARE = st.one_of(st.integers(-2, 2000), st.floats(-2, 3), st.sampled_from([None, True, 0.03, 100]))


def advised(error: StrettoError) -> list[str]:
    """The times in quotes that an error says to write."""
    return re.findall(r"'([^']*)'", error.message.instead)


@pytest.mark.parametrize("place", PLACES)
@given(value=st.one_of(TEXTS, BARE))
@settings(max_examples=60, deadline=None)
def test_a_time_that_is_advised_is_accepted_there(place: str, value: Any) -> None:
    try:
        PLACES[place](value)
    except StrettoError as error:
        for better in advised(error):
            if ": " not in better:  # of a key that is missing
                PLACES[place](better)


@pytest.mark.parametrize(
    ("value", "write"),
    [(0.03, "'3%'"), ("0.5", "'50%'"), (100, "'100ba'"), ("100", "'100ba'"), ("2.5", "'2.5ep'")],
)
def test_a_number_without_a_unit(value: Any, write: str) -> None:
    with pytest.raises(TimeError) as raised:
        Cosine(warmup=value)
    assert write in str(raised.value)
    assert "'0.03ba'" not in str(raised.value)


@pytest.mark.parametrize("value", [-1, "-1"])
def test_minus_one_is_the_rest(value: Any) -> None:
    for place in (PLACES["period"], PLACES["period of sizes"]):
        with pytest.raises(StrettoError, match="write 'rest'"):
            place(value)
    periods = [["5%", {"Linear": {}}], [value, {"Cosine": {}}]]
    with pytest.raises(ConfigError, match="write 'rest'"):
        RunConfig.parse({**FILE, "schedules": {"lr": {"Periods": periods}}})


def settings_of(text: str) -> dict[str, Any]:
    """The arguments that an answer writes, as Python evaluates them."""
    text = re.sub(r" \([a-z ]*\)$", "", text.removeprefix("write "))
    names = {**vars(schedules), **vars(batching), "Evaluation": stretto.Evaluation}
    names |= {"MSELoss": nn.MSELoss, "SGD": torch.optim.SGD, "model": nn.Linear(4, 1), "data": DATA}
    names |= {"function": lambda epoch, current_batch_size: 0, "step": None, "batch": None}
    names["find_batch_size"] = lambda step, batch: SimpleNamespace(size=8)
    found: dict[str, Any] = eval(f"dict({text})", names)
    return found


def trained(**given: Any) -> object:
    """A trainer with these arguments."""
    torch.manual_seed(0)
    given.setdefault("train_data", DATA)
    optimizer = given.get("optimizer") or torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    model = nn.Linear(4, 1)
    given["optimizer"] = type(optimizer)(model.parameters(), lr=optimizer.param_groups[0]["lr"])
    usual: dict[str, Any] = {"loss": nn.MSELoss(), "max_duration": "2ep", "batch_size": 8}
    return stretto.Trainer(model, **{**usual, **given})


def prepared(**given: Any) -> object:
    """A run with these arguments."""
    usual: dict[str, Any] = {"data": DATA, "max_duration": "2ep", "batch_size": 8}
    return stretto.prepare(**{**usual, **given})


@pytest.mark.filterwarnings("ignore::stretto.errors.PlanWarning")
@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("call", [trained, prepared, Cosine, Linear])
def test_the_argument_that_replaces_another_is_accepted(
    name: str, call: Call, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if call is trained and name == "use_maximum_batch_size":
        return  # a word of a seed, which is an argument of `Trainer`
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=name) as raised:
        call(**{name: 1})
    said = str(raised.value.message.instead)
    if said.startswith("leave it out") or said.endswith(" in Trainer"):
        return  # `trained` executes it
    better = settings_of(said)
    if call == trained and "checkpoint" in better:
        better["folder"] = "run"
    call(**better)


@pytest.mark.parametrize("name", FOREIGN)
def test_the_key_that_replaces_another_is_accepted(name: str) -> None:
    with pytest.raises(ConfigError, match=name) as raised:
        RunConfig.parse({**FILE, name: 1})
    said = str(raised.value.message.instead)
    if not said.startswith("leave it out"):
        text = re.sub(r" \([a-z ]*\)$", "", said.removeprefix("write "))
        RunConfig.parse({**FILE, **yaml.safe_load(text)})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


@pytest.mark.parametrize("call", [trained, prepared])
def test_an_unknown_number_of_samples_is_stated_with_the_data(call: Any) -> None:
    name = "train_data" if call is trained else "data"
    loader = DataLoader(Stream(), batch_size=8)
    with pytest.raises(StrettoError, match="num_samples of the data"):
        call(**{name: loader}, schedules={"lr": Cosine()})
    call(**{name: stretto.DataSpec(loader, num_samples=64)}, schedules={"lr": Cosine()})


class Triangle:
    def get_factor(self, timer: stretto.timing.Timer) -> float:
        passed = timer.get_elapsed_duration()
        return passed if passed <= 0.5 else 1 - passed


def test_an_object_with_get_factor_is_a_schedule() -> None:
    planned = stretto.plan(Horizon("1ep", dataset_num_samples=64), 8, schedules={"lr": Triangle()})
    assert [planned.values_at(batch)["lr"] for batch in range(8)] == [
        0, 0.125, 0.25, 0.375, 0.5, 0.375, 0.25, 0.125
    ]  # fmt: skip
