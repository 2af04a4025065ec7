"""The state of every run is JSON of plain types, as a checkpoint of any framework keeps it."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from stretto.batching import (
    AtMost,
    Hysteresis,
    IncreaseFunction,
    Monotone,
    NoiseScale,
    NormTest,
    PiecewiseConstant,
    Plateau,
    PowerOfTwo,
    Signals,
    SizeFunction,
    Tokens,
)
from stretto.data import DataSpec
from stretto.errors import TrainingError
from stretto.runtime.packing import as_json
from stretto.schedules import Cosine
from stretto.training import Run, prepare

LENGTHS = [3, 5, 2, 7] * 12


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return (torch.ones(3) * at for at in range(48))

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1, "kind": (1, b"x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Forget it."""


POLICIES: list[Any] = [
    4,
    "40tok",
    "0sp:4 10sp:8",
    PiecewiseConstant("0sp:16tok 12sp:40tok"),
    Plateau("validation/loss", start=4, maximum=16, patience=1),
    Plateau("validation/loss", start="16tok", maximum="64tok", patience=1),
    NoiseScale(4, 16),
    NoiseScale("16tok", "64tok"),
    NormTest(4, 16),
    Monotone(NoiseScale(4, 16)),
    Hysteresis(NoiseScale("16tok", "64tok"), 1.5),
    PowerOfTwo(AtMost(NoiseScale(4, 16), 8)),
    IncreaseFunction(lambda epoch, size: epoch + size, 4, max_batch_size=16),
    SizeFunction(lambda timestamp, current: 4 + timestamp.batch % 3),
]
SIGNALS = st.builds(
    Signals,
    loss=st.none() | st.floats(),
    metric=st.none() | st.floats(),
    noise_numerator=st.none() | st.floats(0, 1e6),
    noise_denominator=st.none() | st.floats(0, 1e6),
)


def is_plain(state: Any) -> bool:
    if type(state) is dict:
        return all(type(key) is str and is_plain(one) for key, one in state.items())
    if type(state) is list:
        return all(map(is_plain, state))
    return state is None or type(state) in (bool, int, float, str)


def check(run: Run) -> None:
    state = run.state_dict()
    assert is_plain(state)
    again = json.loads(json.dumps(state))
    assert again == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@given(st.sampled_from(POLICIES), st.lists(SIGNALS, max_size=8), st.sampled_from(["map", "stream"]))
@settings(max_examples=60)
def test_a_state_is_what_json_gives_back(policy: Any, signals: list[Signals], kind: str) -> None:
    data: Any = DataSpec([torch.ones(3)] * 48, lengths=LENGTHS)
    if kind == "stream":
        data = DataSpec(DataLoader(Stream(), batch_size=6), num_samples=48, tokens_per_sample=3)
    made: dict[str, Any] = {"micro_batch_size": 4, "schedules": {"lr": Cosine()}}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    run = prepare(data, policy, max_duration="1ep", **made)
    run.bind(optimizer)
    check(run)
    for one in signals:
        if run.begin() is None:
            break
        check(run)
        run.finish(one)
        check(run)


def test_subclasses_of_plain_types_are_made_plain() -> None:
    class Word(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "other"

    state = as_json({"size": Tokens(8), Word("key"): [(True, Word("text"), math.pi)]})
    assert is_plain(state)
    assert state == {"size": 8, "key": [[True, "text", math.pi]]}


def test_what_json_does_not_know_is_refused() -> None:
    with pytest.raises(TrainingError, match="complex"):
        as_json({"size": 1j})
