"""What a run was set up as, so that one that goes on can say what has changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import torch

from stretto.data import StepLoader
from stretto.optim import Hyperparameters
from stretto.training.settings import Loading, Stepping

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LONGEST = 200


def describe_setup(
    loader: StepLoader,
    hyperparameters: Hyperparameters,
    *,
    loading: Loading,
    stepping: Stepping,
    device: str,
    finds_micro_batch_size: bool,
) -> dict[str, Any]:
    """Return the set-up of a run by name, as JSON.

    Args:
        loader: the run's data and batch sizes.
        hyperparameters: the schedules.
        loading: how samples are fetched.
        stepping: how a step is computed.
        device: the type of device.
        finds_micro_batch_size: whether that is whatever fits.
    """
    schedules = {name: _text(value) for name, value in hyperparameters.schedules.items()}
    return {
        "max_duration": str(loader.horizon.max_duration),
        "batch_size": _text(loader.policy),
        "micro_batch_size": "auto" if finds_micro_batch_size else loader.micro_batch_size,
        "world_size": loader.world_size,
        "schedules": schedules,
        "learning_rate_rule": _text(hyperparameters.rule),
        "last_batch": loading.last_batch,
        "num_workers": loading.num_workers or 0,
        "keyed_randomness": loading.keyed_randomness,
        "loss_weight": _text(stepping.loss_weight),
        "loss_reduction": stepping.loss_reduction,
        "precision": stepping.precision,
        "clip_norm": stepping.clip_norm,
        "compile": stepping.compile,
        "device": device,
        "torch": str(torch.__version__),
        "stretto": version("stretto"),
    }


def changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for everything that is not as it was saved.

    >>> list(changes({"world_size": 1, "clip_norm": 1.0}, {"world_size": 2, "clip_norm": 1.0}))
    ['world_size: 1 -> 2']
    """
    for name, value in present.items():
        before = saved.get(name)
        if isinstance(value, Mapping):
            before = before if isinstance(before, Mapping) else {}
            both = {f"{name}.{key}": None for key in (*before, *value)}
            yield from changes(
                {f"{name}.{key}": one for key, one in before.items()},
                both | {f"{name}.{key}": one for key, one in value.items()},
            )
        elif before != value and (name in saved or value is not None):
            yield f"{name}: {before} -> {value}"


def _text(value: Any) -> str:
    """How a value is written, without addresses in memory."""
    return _ADDRESS.sub("", value if isinstance(value, str) else repr(value))[:_LONGEST]
