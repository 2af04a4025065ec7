"""One description of a run, for ranks, resumes and loggers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stretto import __version__
from stretto._location import public
from stretto.batching.functions import as_asked
from stretto.checkpoint import UrlStore
from stretto.data import DataSpec
from stretto.data.described import OWN_OF_A_RANK, described_data, described_run, samples_mark
from stretto.errors import CheckpointError
from stretto.optim.hyperparameters import INITIAL, restore_base_values
from stretto.run import Run
from stretto.runtime import TrainStep
from stretto.runtime.agreement import Plain, as_text, check_agreement, plain
from stretto.runtime.compiled import plain_naming, uncompiled
from stretto.runtime.ranks import Ranks
from stretto.schedules.names import group_name
from stretto.timing import Time, parse_trigger
from stretto.training.callback import Callback, overrides, unique

_OWN_OF_A_RANK = (*OWN_OF_A_RANK, "callbacks", "torch", "stretto")
"""Settings that ranks need not share."""
_NOT_DESCRIBED = ("data", "loggers", "console", "config")
_LONGEST = 200


def describe_run(
    step: TrainStep,
    due: Mapping[str, Any],
    run: Run,
    *,
    optimizer: Optimizer,
    settings: Iterable[Any],
    ranks: Ranks,
    max_duration: str,
    **given: Any,
) -> dict[str, Plain]:
    """Return the settings of a run by name, as JSON values.

    Args:
        step: the model and its loss.
        due: the settings of evaluations, checkpoints and lines of metrics, by name.
        run: the run.
        optimizer: the optimizers as one, before anything is scheduled or loaded.
        settings: those whose fields have names of their own, such as `Computing`.
        ranks: the processes of the run.
        max_duration: its length as it was given.
        given: further settings.
    """
    parameters, named = dict(step.model.named_parameters()), plain_naming(step.model)
    frozen = [named(name) for name, one in parameters.items() if not one.requires_grad]
    texts = [
        type(one).__name__ if type(one).__repr__ is object.__repr__ else as_text(one)[:_LONGEST]
        for one in run.callbacks
    ]
    found: dict[str, Any] = {
        "max_duration": max_duration,
        "batch_size": as_asked(run.prepared.policy),
        **given,
        "idle_ranks": run.idle_ranks,
        "folder": None if run.folder is None else "given",
        **described_run(run.spec, run.prepared, run.loading),
        **{name: value for one in settings for name, value in _fields(one).items()},
        "optimizer": " and ".join(
            f"{type(one).__module__}.{type(one).__qualname__}" for one in step.optimizers
        ),
        "optimizer.groups": len(optimizer.param_groups),
        **{name: value for name, _, _, value in _values_of(optimizer)},
        "step": type(step),
        "loss": step.loss,
        "device": ranks.device.type,
        "model": type(uncompiled(step.model)),
        "model.parameters": sum(p.numel() for p in parameters.values() if not is_unmade(p)),
        "model.types": ", ".join(sorted({str(one.dtype) for one in parameters.values()})),
        "model.frozen": ", ".join(frozen),
    }
    for name, one in due.items():
        data = getattr(one, "data", None)  # an evaluation has some
        at = name if data is None else f"evaluate.{name}"
        found |= {f"{at}.{key}": value for key, value in _fields(one).items()}
        if data is not None:
            found |= described_data(at, DataSpec.of(data))
    described: dict[str, Plain] = public({name: plain(value) for name, value in found.items()})
    return described | {
        "callbacks": public(", ".join(sorted(texts))),
        "world_size": ranks.world_size,
        "torch": str(torch.__version__),
        "stretto": __version__,
    }


def compare_ranks(
    described: Mapping[str, Plain], step: TrainStep, callbacks: Sequence[Callback], ranks: Ranks
) -> None:
    """Compare the settings of all ranks, before any of them can wait for another.

    Raises:
        TrainingError: they differ.
    """
    shared = {
        key: str(one)
        for key, one in described.items()
        if key not in _OWN_OF_A_RANK and not key.startswith("model")
    }
    # A rank may have other callbacks, such as one that shows progress.
    shared["callbacks that change batches or listen to noise"] = as_text(
        [
            type(one)
            for one in callbacks
            if overrides(one, "transform_batch") or overrides(one, "on_noise")
        ]
    )
    # After a batch at which something is due, the ranks agree on whether to stop.
    due = [one for one in callbacks if one.every is not None and overrides(one, "on_due")]
    shared["times at which callbacks are due"] = as_text([(type(one), one.every) for one in due])
    groups = [group["params"] for one in step.optimizers for group in one.param_groups]
    place = {
        id(one): f"in parameter group {number}"
        for number, group in enumerate(groups)
        for one in group
    }
    for kind, named in (
        ("parameter", step.model.named_parameters()),
        ("buffer", step.model.named_buffers()),
    ):
        for number, (name, one) in enumerate(named):
            shape = "unknown shape" if is_unmade(one) else f"shape {list(one.shape)}"
            learns = "" if kind == "buffer" else f", requires_grad={one.requires_grad}"
            shared[f"{kind} {number} of the model"] = (
                f"{name!r} of {shape} and type {str(one.dtype).removeprefix('torch.')}, "
                f"{place.get(id(one), 'not in the optimizer')}{learns}"
            )
    check_agreement(shared, ranks, call="Trainer()")


def changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for everything that is not as it was saved.

    >>> list(changes({"world_size": 1, "clip_norm": 1.0}, {"world_size": 2, "clip_norm": 1.0}))
    ['world_size: 1 -> 2']
    """
    for name in {**present, **saved}:
        before, now = saved.get(name), present.get(name)
        if _respelt(before) != _respelt(now):
            yield f"{name}: {before} -> {now}"


def _respelt(value: Any) -> Any:
    """Return a text with its times as they print now; older checkpoints have '20000000tok'."""
    if not isinstance(value, str):
        return value
    return re.sub(r"\b[0-9]{5,180}(ba|sp|tok)\b", lambda found: str(Time(found[0])), value)


@final
class Setup:
    """The settings of a run: ranks compare them, checkpoints keep them, loggers get them.

    With a fingerprint of the data, they show what changes on a resume.

    Args:
        optimizer: the optimizers of the run as one, before anything is loaded.
        described: returns the settings, once the run is prepared.
    """

    def __init__(
        self, optimizer: Optimizer, described: Callable[[Run], Mapping[str, Plain]]
    ) -> None:
        restore_base_values(optimizer)  # an earlier run may have scheduled other values
        self._optimizer, self._described = optimizer, described
        self.settings: dict[str, Plain] = {}
        """By name; `read` fills it."""
        self.changes: list[str] = []
        """A line for each setting that is not as in the checkpoint that was loaded."""
        self.has_other_length = False
        """Whether the checkpoint that was loaded is of a run of another `max_duration`."""
        self.run_id = secrets.token_hex(8)
        """Of which run the checkpoints are: that of the checkpoint that was loaded."""
        self._built: list[tuple[str, int, str, Any]] = []
        """What the optimizer was built with: name, number of the group, key and value."""

    def read(self, run: Run) -> None:
        """Read the settings, before the run changes anything."""
        self._run = run
        if not self.settings:
            defaults = self._optimizer.defaults
            self._built = [one for one in _values_of(self._optimizer) if one[2] in defaults]
            self.settings |= self._described(run)
        self.settings["batch_size"] = plain(as_asked(run.prepared.policy))

    @cached_property
    def _samples(self) -> str | None:
        return samples_mark(self._run.spec)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the fingerprint."""
        return {**self.settings, "samples": self._samples, "run": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare with saved settings; keep hyperparameters that changed since.

        Raises:
            CheckpointError: the data are others.
        """
        saved, size = dict(state), "micro_batch_size"
        self.run_id = saved.pop("run", self.run_id)
        samples = saved.pop("samples")
        if "auto" in (saved.get(size), self.settings.get(size)):
            saved[size] = self.settings.get(size)  # it was found, or is found again
        if None not in (samples, self._samples) and samples != self._samples:
            why = "the first, middle or last sample is another one, so some would come twice"
            instead = "pass the same data in the same order, or start a new run from its weights"
            raise CheckpointError.cannot("continue with these data", why=why, instead=instead)
        length = "max_duration"
        self.has_other_length = _respelt(saved.get(length)) != self.settings.get(length)
        self._keep_changed(saved)
        self.changes = list(changes(saved, self.settings))
        if self._run.loader.has_dropped_state:
            self.changes.append("batch_size: begins afresh, and its former state is dropped")

    def _keep_changed(self, saved: Mapping[str, Any]) -> None:
        """Keep hyperparameters that changed since the checkpoint; restore the rest.

        Other values stay as loaded: a callback may have changed them during training. Groups are
        compared by their place, as their state is loaded: one may have another name now.
        """
        before = _by_key(saved.items())
        for name, present in _by_key((name, one) for name, *one in self._built).items():
            known = before.get(name, [])
            # An older version kept one value of groups of the same name. Then those built count.
            has_all = len(known) == len(present)
            for place, (number, key, value) in enumerate(present):
                if known and not (has_all and known[place] == plain(value)):
                    self._optimizer.param_groups[number][key] = value


def _values_of(optimizer: Optimizer) -> Iterator[tuple[str, int, str, Any]]:
    """Yield name in a description, number of the group, key and value."""
    names = unique(group_name(*one) for one in enumerate(optimizer.param_groups))
    for number, group in enumerate(optimizer.param_groups):
        at = "" if len(names) == 1 else f"@{names[number]}"
        for key, value in group.items():
            if key not in ("params", "param_names") and not key.startswith(INITIAL):
                yield f"optimizer.{key}{at}", number, key, value


def _by_key(described: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all groups, in their order, by `optimizer.key`."""
    found: dict[str, list[Any]] = {}
    for name, value in described:
        if name.startswith("optimizer."):
            found.setdefault(name.partition("@")[0], []).append(value)
    return found


def is_unmade(tensor: Tensor) -> bool:
    """Return whether a tensor gets its shape in the first step, as those of lazy layers do."""
    return is_lazy(tensor)  # whose type says that all parameters are lazy


def _fields(settings: Any) -> dict[str, Any]:
    """Return what a description has of settings."""
    names = [one.name for one in fields(settings) if one.name not in _NOT_DESCRIBED]
    found = {name: getattr(settings, name) for name in names}
    for name in {"every", "flush"} & found.keys():
        found[name] = parse_trigger(found[name])
    store = found.get("upload")
    if not (store is None or isinstance(store, (str, UrlStore))):
        found["upload"] = type(store)  # its repr may have a password
    return found
