"""Settings that must be the same on every rank, compared before ranks wait for each other.

Ranks with different settings would train on wrong samples, or wait for each other without end. So
they compare a digest, in one small exchange; only if it differs do they exchange the settings.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import takewhile
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stretto.data import DataSpec
from stretto.errors import TrainingError
from stretto.optim.joined import each_of
from stretto.runtime import TrainStep
from stretto.settings import Checkpointing, Computing, Loading, Stepping
from stretto.training.callback import Callback, overrides
from stretto.training.distributed.ranks import Ranks
from stretto.training.settings import Evaluation, Logging

_OWN_OF_A_RANK = frozenset({"num_workers", "prefetch_factor", "pin_memory", "device", "data"})
"""Settings that ranks need not share."""
_CHANGING = "callbacks that change batches or listen to noise"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LONGEST = 100


def check_agreement(settings: Mapping[str, str], ranks: Ranks, *, call: str) -> None:
    """Refuse to go on if `settings` are not the same on every rank, which must all call it.

    Args:
        settings: by name.
        ranks: the processes of the run.
        call: what the user has called.

    Raises:
        TrainingError: they are not; it names the first that differs, on every rank.
    """
    if ranks.world_size == 1:
        return
    text = json.dumps(settings)
    if len(set(ranks.gather(hashlib.sha256(text.encode()).hexdigest(), call=call))) == 1:
        return
    difference = first_difference([json.loads(one) for one in ranks.gather(text)])
    raise TrainingError.cannot(
        f"train on {ranks.world_size} ranks with different settings",
        why=difference,
        instead="write the same settings on every rank",
    )


def first_difference(records: Sequence[Mapping[str, str]]) -> str:
    """Return the first setting that differs, its values, and who has them.

    >>> first_difference([{"seed": "1"}, {"seed": "2"}, {"seed": "1"}])
    'seed is 1 on ranks 0, 2 and 2 on rank 1'
    """
    for name in {name: None for record in records for name in record}:
        values = [record.get(name, "missing") for record in records]
        if len(set(values)) > 1:
            return f"{name} is {_listed(values)}"
    return "their order differs"


def describe_settings(
    *,
    given: Mapping[str, Any],
    spec: DataSpec,
    optimizer: Optimizer,
    step: TrainStep,
    loading: Loading,
    computing: Computing,
    stepping: Stepping,
    evaluations: Sequence[Evaluation],
    checkpoint: Checkpointing | None,
    log: Logging,
    callbacks: Sequence[Callback],
    has_folder: bool,
    device: str,
) -> dict[str, Any]:
    """Return the settings of a run, all but the model, in the order in which ranks compare them."""
    settings: dict[str, Any] = {**given, **_of_data(spec), **_fields("loading.", loading)}
    settings |= _of_optimizer(optimizer)
    settings |= {"step": type(step), "loss": step.loss, "device": device}
    settings |= _fields("", computing) | _fields("stepping.", stepping)
    settings["number of evaluations"] = len(evaluations)
    for one in evaluations:
        settings |= _of_evaluation(one)
    settings["checkpoint"] = None if checkpoint is None else "given"
    if checkpoint is not None:
        settings |= _fields("checkpoint.", checkpoint) | {"checkpoint.every": checkpoint.trigger}
    settings |= {"log.every": log.trigger, "log.flush": log.flush_trigger}
    settings["folder"] = "given" if has_folder else None
    # Others may be on one rank alone, such as one that shows progress.
    changing = [
        type(one)
        for one in callbacks
        if overrides(one, "transform_batch") or overrides(one, "on_noise")
    ]
    settings[_CHANGING] = changing
    return settings


def as_texts(settings: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Return settings and the model as texts, which ranks compare."""
    texts = {name: as_text(value) for name, value in settings.items()}
    return texts | dict(_of_model(model, optimizer))


def as_config(
    settings: Mapping[str, Any], model: nn.Module, callbacks: Sequence[Callback]
) -> dict[str, Any]:
    """Return settings as plain values, which loggers show: numbers and flags as they are."""
    parameters: Iterable[Tensor] = model.parameters()
    shown = {name: value for name, value in settings.items() if name != _CHANGING}
    shown |= {
        "model": type(model),
        "parameters": sum(0 if is_lazy(one) else one.numel() for one in parameters),
        "callbacks": ", ".join(type(one).__name__ for one in callbacks),
    }
    return {
        name: value if isinstance(value, (bool, int, float, str, type(None))) else as_text(value)
        for name, value in shown.items()
    }


def in_batch(number: int, values: Mapping[str, object]) -> dict[str, str]:
    """Return what functions, which are compared by name only, or streams may have set apart.

    >>> in_batch(3, {"lr": 0.1})
    {'lr in batch 3': '0.1'}
    """
    return {
        f"{name} in batch {number}": f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }


def _of_data(spec: DataSpec) -> dict[str, Any]:
    facts: dict[str, Any] = {"sharded": spec.sharded, "is_map_style": spec.is_map_style}
    # Data of which each rank has its own part may be longer on one than on another.
    facts["num_samples"] = spec.num_samples if spec.sharded else spec.known_num_samples
    facts["num_tokens"] = spec.num_tokens if spec.sharded else spec.known_num_tokens
    facts["tokens_per_sample"] = spec.known_tokens_per_sample
    for one in fields(spec):
        if isinstance(value := getattr(spec, one.name), (bool, str)):
            facts[one.name] = value
    return {f"data.{name}": value for name, value in facts.items()}


def _of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    groups = optimizer.param_groups
    kinds = [f"{type(one).__module__}.{type(one).__qualname__}" for one in each_of(optimizer)]
    settings: dict[str, Any] = {"optimizer": " and ".join(kinds), "parameter groups": len(groups)}
    for number, group in enumerate(groups):
        at = "" if len(groups) == 1 else f"@{group.get('name', number)}"
        settings |= {
            f"optimizer.{name}{at}": value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
    return settings


def _of_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    at = f"evaluate.{evaluation.name}"
    settings = _fields(at, evaluation) | {f"{at}.every": evaluation.trigger}
    settings[f"{at}.metrics"] = {name: as_text(one) for name, one in evaluation.metrics.items()}
    facts = _of_data(DataSpec.of(evaluation.data))
    return settings | {f"{at}.{name}": value for name, value in facts.items()}


def _of_model(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    groups = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    for number, (name, parameter) in enumerate(model.named_parameters()):
        group = groups.get(id(parameter))
        place = "not in the optimizer" if group is None else f"in parameter group {group}"
        frozen = "" if parameter.requires_grad else ", frozen"
        yield f"parameter {number} of the model", f"{_of_tensor(name, parameter)}, {place}{frozen}"
    for number, (name, buffer) in enumerate(model.named_buffers()):
        yield f"buffer {number} of the model", _of_tensor(name, buffer)


def _of_tensor(name: str, tensor: Tensor) -> str:
    shape = "of unknown shape" if is_lazy(tensor) else f"of shape {list(tensor.shape)}"
    return f"{name!r} {shape} and type {str(tensor.dtype).removeprefix('torch.')}"


def _fields(at: str, settings: Any) -> dict[str, Any]:
    names = [one.name for one in fields(settings) if one.name not in _OWN_OF_A_RANK]
    return {at + name: getattr(settings, name) for name in names}


def as_text(value: Any) -> str:
    """Return a setting as it is compared and shown: a function by its name, else its repr."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() == 1 else list(value.shape)
    return _ADDRESS.sub("", repr(value))


def _listed(values: Sequence[str]) -> str:
    """The different values, each with the ranks that have it."""
    pairs = takewhile(lambda letters: len(set(letters)) == 1, zip(*values, strict=False))
    start = sum(1 for _ in pairs)
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    shown = [f"{_cut(value, start)} on {_ranks(ranks)}" for value, ranks in by_value.items()]
    return " and ".join(shown[:3]) + (" (and more)" if len(shown) > 3 else "")


def _cut(value: str, start: int) -> str:
    """A value; of a long one, what is around the first difference."""
    if len(value) <= _LONGEST:
        return value
    first = max(0, min(start - _LONGEST // 4, len(value) - _LONGEST))
    part = value[first : first + _LONGEST]
    return f"{'...' if first else ''}{part}{'...' if first + _LONGEST < len(value) else ''}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = ", ".join(map(str, ranks[:8]))
    return f"ranks {listed}{' ...' if len(ranks) > 8 else ''}"
