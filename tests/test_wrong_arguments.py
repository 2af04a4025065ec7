"""Arguments of a wrong kind, for everything on the flat face: each works or is refused in words."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import stretto
from stretto.errors import StrettoError

DATA = TensorDataset(torch.randn(32, 3), torch.randn(32, 1))


class Object:
    """Something that nobody knows."""


POOL: dict[str, Any] = {
    "text": "nonsense",
    "empty text": "",
    "time": "1ep",
    "mapping": {"nonsense": 1},
    "empty mapping": {},
    "pairs": [("0ep", 8), ("1ep", 16)],
    "empty list": [],
    "true": True,
    "nan": math.nan,
    "infinity": math.inf,
    "none": None,
    "negative": -1,
    "zero": 0,
    "fraction": 3.7,
    "huge": 10**30,
    "class": nn.Linear,
    "object": Object(),
    "function": lambda *_, **__: None,
    "tensor": torch.ones(2),
    "bytes": b"x",
    "path": Path("nowhere"),
    "set": {1, "a"},
}


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def over(given: dict[str, Any], **usual: Any) -> dict[str, Any]:
    """Return the usual arguments with those that are given in their place."""
    return usual | given


def trainer(**given: Any) -> object:
    model = nn.Linear(3, 1)
    usual: dict[str, Any] = {
        "model": model,
        "train_data": DATA,
        "batch_size": 8,
        "max_duration": "1ep",
    }
    usual |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": loss}
    return stretto.Trainer(**usual | given)


def fitted(**given: Any) -> None:
    model = nn.Linear(3, 1)
    made = stretto.Trainer(
        model,
        DATA,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        batch_size=8,
        max_duration="1ep",
    )
    made.fit(**given)


def prepared(**given: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    run = stretto.prepare(
        **over(given, data=DATA, batch_size=8, max_duration="1ep", optimizer=optimizer)
    )
    if run.is_bound:
        next(iter(run))
        run.finish()


def loaded(**given: Any) -> None:
    usual: dict[str, Any] = {"data": DATA, "batch_size": 8, "max_duration": "1ep"}
    next(stretto.StepLoader(**usual | given))


def planned(**given: Any) -> None:
    horizon = stretto.Horizon("2ep", dataset_num_samples=32)
    stretto.plan(**over(given, horizon=horizon, policy=8))


def evaluated(**given: Any) -> None:
    trainer(evaluate=stretto.Evaluation(**over(given, data=DATA)))


def hyper(**given: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    horizon = stretto.Horizon("2ep", dataset_num_samples=32)
    usual: dict[str, Any] = {"optimizer": optimizer, "schedules": {"lr": 1.0}, "horizon": horizon}
    stretto.Hyperparameters(**usual | given)


FACE: dict[str, tuple[Callable[..., Any], str]] = {
    "Trainer": (
        trainer,
        (
            "max_duration batch_size micro_batch_size schedules values rule precision clip_norm "
            "compile device loading stepping evaluate checkpoint log callbacks strategy mesh "
            "sequence_length scale_schedule folder model train_data optimizer loss"
        ),
    ),
    "fit": (fitted, "resume on_signal"),
    "prepare": (
        prepared,
        (
            "data batch_size max_duration optimizer schedules values rule every micro_batch_size "
            "loading model callbacks folder mesh sequence_length loss_weight shifts_labels"
        ),
    ),
    "StepLoader": (
        loaded,
        "data batch_size max_duration micro_batch_size loading rank world_size sequence_length",
    ),
    "plan": (planned, "horizon policy schedules rule world_size micro_batch_size base"),
    "Evaluation": (evaluated, "data every metrics batch_size name loss predict"),
    "Hyperparameters": (hyper, "optimizer schedules horizon rule"),
    "Loading": (
        stretto.Loading,
        "seed shuffle last_batch num_workers prefetch_factor packed",
    ),
    "Stepping": (
        stretto.Stepping,
        "loss_weight shifts_labels loss_reduction non_finite measure_noise rank_timeout",
    ),
    "Checkpointing": (stretto.Checkpointing, "every keep monitor mode"),
    "Logging": (stretto.Logging, "every flush loggers"),
    "Horizon": (
        lambda **given: stretto.Horizon(**over(given, max_duration="2ep")),
        "max_duration dataset_num_samples dataset_num_tokens tokens_per_sample last_batch",
    ),
    "convert": (
        lambda **given: stretto.convert(**over(given, time="1ep", unit="sp")),
        "time unit dataset_num_samples dataset_num_tokens max_training_duration batch_size",
    ),
    "Time": (lambda **given: stretto.Time(*given.values()), "value"),
    "Every": (lambda **given: stretto.Every(*given.values()), "interval"),
    "At": (lambda **given: stretto.At(*given.values()), "time"),
    "DataSpec": (
        lambda **given: stretto.DataSpec(**over(given, data=DATA)),
        "data num_samples num_tokens tokens_per_sample lengths",
    ),
    "Cosine": (stretto.Cosine, "start end over warmup warmup_start"),
    "Linear": (stretto.Linear, "start end over warmup"),
    "WSD": (lambda **given: stretto.WSD(**over(given, decay="10%")), "warmup decay"),
    "PiecewiseConstant": (stretto.PiecewiseConstant, "steps"),
    "DoublingRamp": (
        lambda **given: stretto.DoublingRamp(**over(given, start=8, end=32, over="50%")),
        "start end over",
    ),
    "LinearRamp": (
        lambda **given: stretto.LinearRamp(**over(given, start=8, end=32, over="50%")),
        "start end over",
    ),
    "LinearRule": (stretto.LinearRule, "reference"),
    "SquareRootRule": (stretto.SquareRootRule, "reference"),
    "NoiseScale": (
        lambda **given: stretto.NoiseScale(**over(given, start=8, maximum=32)),
        "start maximum",
    ),
    "AtMost": (
        lambda **given: stretto.AtMost(**over(given, policy=8, maximum=32)),
        "policy maximum",
    ),
    "find_batch_size": (
        lambda **given: stretto.find_batch_size(
            **over(given, step=None, batch=(torch.ones(2, 3),))
        ),
        "step",
    ),
}
"""By name what is called, and the arguments that are tried."""


def wrong(name: str) -> Iterator[tuple[str, Any]]:
    for argument in FACE[name][1].split():
        for kind, value in POOL.items():
            if argument == "step" and kind in ("class", "function"):
                continue  # it makes the step
            yield f"{argument}={kind}", {argument: value}


@pytest.mark.parametrize("name", FACE)
def test_a_wrong_argument_is_refused_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, _ = FACE[name]
    raw = []
    for case, given in wrong(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call(**given)
            except StrettoError:
                continue
            except Exception as error:  # noqa: BLE001  listed
                raw.append(f"{case}: {type(error).__name__}: {error}")
    assert not raw, "\n".join(raw)


@pytest.mark.parametrize("name", [name for name in FACE if name not in ("Time", "Every", "At")])
def test_an_unknown_argument_is_answered(name: str) -> None:
    call, arguments = FACE[name]
    known = arguments.split()[0]
    with pytest.raises(StrettoError, match=f"did you mean '{known}'|write "):
        call(**{f"{known}x": 1})


@pytest.mark.parametrize(
    "given",
    [
        {"device": torch.device("cpu")},
        {"folder": Path("runs")},
        {"compile": np.bool_(False)},
        {"callbacks": {"a": stretto.Callback()}.values()},
        {"loading": {"seed": 3}, "stepping": {}, "schedules": {}},
    ],
)
def test_what_is_as_good_is_taken(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(trainer(**given), stretto.Trainer)
