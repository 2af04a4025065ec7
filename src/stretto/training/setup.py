"""What a run was set up as, so that one that goes on can say what has changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto import __version__
from stretto.data import DataSpec, StepLoader
from stretto.data.iterables.shards import fingerprint
from stretto.data.randomness import seed_generators
from stretto.optim import Hyperparameters
from stretto.runtime import SupervisedStep, TrainStep
from stretto.runtime.random_state import kept_generators
from stretto.settings import Computing, Loading, Stepping
from stretto.training.callback import Callback
from stretto.training.distributed.agreement import as_text
from stretto.training.scaling import Timed

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LONGEST = 200


def describe_setup(
    loader: StepLoader,
    hyperparameters: Hyperparameters,
    *,
    loading: Loading,
    computing: Computing,
    stepping: Stepping,
    step: TrainStep,
    timed: Timed,
    device: str,
    finds_micro_batch_size: bool,
    optimizer: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the set-up of a run by name, as JSON.

    Args:
        loader: the run's data and batch sizes.
        hyperparameters: the schedules.
        loading: how samples are fetched.
        computing: how the model computes.
        stepping: how a step is computed.
        step: what computes it.
        timed: evaluations, checkpoints and callbacks.
        device: the type of device.
        finds_micro_batch_size: whether that is whatever fits.
        optimizer: what the optimizer was built with.
    """
    schedules = {name: _text(value) for name, value in hyperparameters.schedules.items()}
    parameters = dict(step.model.named_parameters())
    frozen = [name for name, one in parameters.items() if not one.requires_grad]
    checkpoint = timed.checkpoint
    return {
        "max_duration": str(loader.horizon.max_duration),
        "batch_size": _text(loader.policy),
        "micro_batch_size": "auto" if finds_micro_batch_size else loader.micro_batch_size,
        "world_size": loader.world_size,
        "schedules": schedules,
        "optimizer": dict(optimizer),
        "rule": _text(hyperparameters.rule),
        "last_batch": loader.horizon.last_batch,
        "num_workers": loading.num_workers or 0,
        "keyed_randomness": loading.keyed_randomness,
        "loss_weight": _text(stepping.loss_weight),
        "shifts_labels": stepping.shifts_labels,
        "loss_reduction": stepping.loss_reduction,
        "precision": computing.precision,
        "clip_norm": computing.clip_norm,
        "compile": computing.compile,
        # As usual is None: checkpoints from before these settings do not have them.
        "measure_noise": _unusual(stepping.measure_noise, "auto"),
        "step": _unusual(type(step).__qualname__, SupervisedStep.__qualname__),
        "loss": as_text(step.loss),
        "collate_fn": as_text(loading.collate_fn),
        "non_finite": stepping.non_finite,
        "model": {
            "types": ", ".join(sorted({str(one.dtype) for one in parameters.values()})),
            "frozen": ", ".join(frozen)[:_LONGEST],
        },
        "evaluate": {
            one.name: {
                "every": str(one.trigger),
                "metrics": ", ".join(f"{name}={as_text(of)}" for name, of in one.metrics.items()),
                "loss": as_text(one.loss),
                "predict": as_text(one.predict),
                "num_samples": DataSpec.of(one.data).known_num_samples,
            }
            for one in timed.evaluations
        },
        "monitor": checkpoint and checkpoint.monitor,
        "mode": checkpoint.mode if checkpoint and checkpoint.monitor else None,
        "callbacks": ", ".join(sorted(map(_callback_text, timed.callbacks))),
        "device": device,
        "torch": str(torch.__version__),
        "stretto": __version__,
    }


@final
class BuiltWith:
    """What an optimizer was built with, before anything is scheduled or loaded.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> BuiltWith(torch.optim.SGD([weight], lr=0.1)).values["lr"]
    0.1
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._places = {
            name if len(optimizer.param_groups) == 1 else f"{name}@{group.get('name', number)}": (
                number,
                name,
                group[name],
            )
            for number, group in enumerate(optimizer.param_groups)
            for name in optimizer.defaults
            if name in group and not isinstance(group[name], Tensor)
        }
        self.values = {key: _plain(value) for key, (*_, value) in self._places.items()}
        """By name, or name@group where there are several; as JSON."""

    def keep_changed(self, saved: Mapping[str, Any]) -> None:
        """Keep hyperparameters that changed since the checkpoint; restore the rest.

        Other values stay as loaded: a callback may have changed them during training.
        """
        for key, (number, name, value) in self._places.items():
            if key in saved and saved[key] != self.values[key]:
                self._optimizer.param_groups[number][name] = value


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


def samples_mark(spec: DataSpec) -> str | None:
    """Return a fingerprint of a few samples of map-style data, to recognise another order.

    None: not known, because they are random, or cannot be read here.
    """
    if not spec.is_map_style:
        return None
    length = len(spec.dataset)
    places = sorted({0, length // 2, length - 1})
    marks = []
    try:
        for seed in (1, 2):
            with kept_generators():
                seed_generators(seed)
                marks.append(fingerprint([spec.dataset[place] for place in places]))
    except Exception:  # noqa: BLE001  the loader reports what it cannot read
        return None
    return marks[0] if marks[0] == marks[1] else None


def _callback_text(callback: Callback) -> str:
    is_plain = type(callback).__repr__ is object.__repr__
    return type(callback).__name__ if is_plain else _text(callback)


def _unusual(value: object, usual: str) -> str | None:
    return None if value == usual else "never" if value is None else str(value)


def gone(callback: str) -> str:
    """Return the line for a callback that had state and is none of the run's any more.

    >>> gone("NoiseReport")
    'callbacks: NoiseReport -> None, and its state is dropped'
    """
    return f"callbacks: {callback} -> None, and its state is dropped"


def _plain(value: Any) -> Any:
    """A value as JSON keeps it."""
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    is_kept = value is None or isinstance(value, (bool, int, str))
    return value if is_kept or (isinstance(value, float) and isfinite(value)) else _text(value)


def _text(value: Any) -> str:
    """How a value is written, without addresses in memory."""
    return _ADDRESS.sub("", value if isinstance(value, str) else repr(value))[:_LONGEST]
