"""Records that somebody has changed: no error comes without the file and the key."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import open_checkpoint
from stretto.errors import CheckpointError, StrettoError
from stretto.runtime.packing import pack
from stretto.training import Callback, Checkpointing, Evaluation, Logging

Make = Callable[..., Any]
HUGE = 10**400
REMOVED = object()
VALUES = ["x", -1, float("inf"), HUGE, None, True, [], {}, REMOVED]
"""What takes the place of a value."""


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


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record; of a long list the first two."""
    if path:
        yield path
    inner: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inner = enumerate(value[:2])
    for key, one in inner:
        yield from places(one, (*path, key))


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


def resume(problem: Make, path: Path, records: Any) -> None:
    """Go on with these records for two batches."""
    trainer, reader = trainer_of(problem), open_checkpoint(path, verify=False)
    reader.records = records
    trainer._describe(trainer.run.prepared.policy)
    trainer._state.restore(reader, path, is_own=False)
    trainer.fit()


def test_any_value_of_the_wrong_kind_is_an_error_of_ours_that_says_where(
    problem: Make, tmp_path: Path
) -> None:
    trainer_of(problem, tmp_path).fit()
    path = sorted((tmp_path / "checkpoints").iterdir())[0]
    records = open_checkpoint(path).records
    everything = [(place, value) for place in places(records) for value in VALUES]
    assert len(everything) > 900
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, value in everything[::23]:
            try:
                resume(problem, path, changed(records, place, value))
            except StrettoError as error:
                said = str(error)
                assert str(path) in said or "is nan or infinite" in said, (place, value)
                refused += 1
    assert refused > 15


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("optimizer.param_groups.0.eps", "x", "param_groups.0.eps is 'x'"),
        ("optimizer.param_groups.0.eps", None, "param_groups.0.eps is None"),
        ("optimizer.param_groups.0.eps", REMOVED, "param_groups.0.eps is missing"),
        ("optimizer.param_groups.0.betas", 3, "param_groups.0.betas is 3"),
        (
            "optimizer.param_groups.0.betas",
            pack((0.9,)),
            r"param_groups.0.betas is \(0.9,\)",
        ),
        (
            "optimizer.param_groups.0.betas",
            pack(
                (
                    0.9,
                    "x",
                )
            ),
            r"betas is \(0.9, 'x'\)",
        ),
        ("optimizer.param_groups.0.amsgrad", "x", "param_groups.0.amsgrad is 'x'"),
        ("optimizer.param_groups.0.params", [0, 0, 1, 2], "param_groups.params is"),
        ("optimizer.param_groups.0.amsgrad", True, r"AdamW: .*KeyError: 'max_exp_avg_sq'"),
        ("optimizer.values", {"0_0.exp_avg": 1}, "AdamW: .*AttributeError"),
        ("optimizer.values", {"0.step": "x"}, "values.0.step is 'x'"),
        ("optimizer.type", "SGD", "it was saved from SGD"),
        ("recorder.loss.sum", "x", "'recorder' .*'sum' is 'x', and not a number"),
        ("recorder.loss.weight", REMOVED, "'recorder' .*'weight'"),
        ("loader.clock.run_nanoseconds", HUGE, "'loader' .*'run_nanoseconds' is 100000"),
        ("skipped.count", 1.5, "'skipped' .*'count' is 1.5, and not a count"),
        ("evaluated.validation", "x", "'evaluated' .*'validation' is 'x'"),
        ("callbacks.0.state.count", "x", "'callbacks' .*invalid literal"),
        ("step.scaler", {"scale": "x"}, "'step' .*'scale' is 'x'"),
    ],
)
def test_what_is_wrong_and_where_is_said(
    place: str, value: object, said: str, problem: Make, tmp_path: Path
) -> None:
    trainer_of(problem, tmp_path).fit()
    path = sorted((tmp_path / "checkpoints").iterdir())[0]
    keys = tuple(int(key) if key.isdigit() else key for key in place.split("."))
    records = changed(open_checkpoint(path).records, keys, value)
    with pytest.raises(CheckpointError, match=said) as caught:
        resume(problem, path, records)
    assert str(path) in str(caught.value)
