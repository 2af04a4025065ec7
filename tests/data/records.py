"""Checks for loaders: several ranks, cut and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from stretto.data import Step, StepLoader
from stretto.settings import Loading

_LOADING = {field.name for field in fields(Loading)}


def loader_with(data: Any, batch_size: Any, **settings: Any) -> StepLoader:
    """Return a loader; fields of `Loading` may stand among its arguments."""
    of_loading = {name: settings.pop(name) for name in _LOADING & settings.keys()}
    loading = {**settings.pop("loading", {}), **of_loading}
    return StepLoader(data, batch_size, loading=loading, **settings)


class StepRecord(NamedTuple):
    """The data that one rank got in one step."""

    sample: int
    """The position at which the step starts."""
    size: int
    samples: tuple[Any, ...]
    """The samples without padding, in order."""
    micro_batches: int
    weights: tuple[float, ...]
    tokens: int


def read(loader: StepLoader, values: Callable[[Any], list[Any]]) -> Iterator[StepRecord]:
    """Yield a record of each step of a loader; `values` lists the samples of a batch."""
    for step in loader:
        yield record_of(step, values)
        if loader.world_size > 1:
            loader.finish(step, tokens=0, seconds=0.0)


def record_of(step: Step, values: Callable[[Any], list[Any]]) -> StepRecord:
    """Return the record of one step."""
    samples: list[Any] = []
    for micro in step:
        if micro.num_samples:
            assert len(values(micro.batch)) == micro.num_samples
            samples += values(micro.batch)
    weights = tuple(micro.weight for micro in step)
    at = step.timestamp.sample
    return StepRecord(at, step.num_samples, tuple(samples), len(step), weights, step.num_tokens)


def assert_resumes(
    make_loader: Callable[[], StepLoader], values: Callable[[Any], list[Any]]
) -> None:
    """Save before, during and after every step, resume in a new loader, and compare."""
    loader = make_loader()
    states, records = [(0, json.dumps(loader.state_dict()))], []
    for record in read(loader, values):
        number, before = states[-1]
        in_hand = json.dumps(loader.state_dict(again=True))
        if _without_job(json.loads(in_hand)) != _without_job(json.loads(before)):
            states.append((number, in_hand))  # dropped samples were skipped
        records.append(record)
        loader.finish()
        states.append((number + 1, json.dumps(loader.state_dict())))
    end = _without_job(loader.state_dict())
    for number, state in states:
        resumed = make_loader()
        resumed.load_state_dict(json.loads(state))
        assert _without_job(resumed.state_dict()) == _without_job(json.loads(state))
        assert list(read(resumed, values)) == records[number:]
        assert _without_job(resumed.state_dict()) == end


def _without_job(state: Any) -> Any:
    """Return a loader's state without wall times."""
    if not isinstance(state, dict):
        return state
    return {key: _without_job(one) for key, one in state.items() if "nanoseconds" not in key}
