"""The complete state of a run: capture it and restore it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.checkpoint import (
    CheckpointReader,
    LazyTensor,
    Shard,
    TensorSlice,
    pack_optimizer,
    shard_like,
    unpack_optimizer,
)
from stretto.checkpoint.parts import check_tensor
from stretto.checkpoint.sharding import Tensors, replicas
from stretto.distributed.strategy import Strategy
from stretto.errors import CheckpointError, StrettoError, TrainingError
from stretto.run import Run
from stretto.runtime import TrainStep
from stretto.runtime.packing import count, packed, unpack
from stretto.runtime.random_state import RandomState
from stretto.training.callback import Callback
from stretto.training.checkpointing.records import section
from stretto.training.describe import BuiltWith, changes, gone, samples_mark
from stretto.training.evaluation.evaluate import Best, Evaluator
from stretto.training.logs.recorder import Recorder
from stretto.training.stepping.stepper import Stepper

GROUP = "callbacks"
"""The group of their tensors in a checkpoint."""


def check_states(callbacks: Iterable[Callback]) -> None:
    """Check before the run that the state of every callback can be saved.

    Raises:
        TrainingError: a state cannot be saved; the message names the callback and the key.
    """
    for callback in callbacks:
        _, tensors = _packed(callback, TrainingError)
        for name, tensor in tensors.items():
            try:
                check_tensor(name, tensor)
            except CheckpointError as error:
                raise error.recast(TrainingError, where=f"state of {_kind(callback)}") from None


def pack_states(callbacks: Iterable[Callback]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return a record of each callback, and the tensors that the records name.

    Raises:
        CheckpointError: a state cannot be saved.
    """
    records: list[dict[str, Any]] = []
    everything: dict[str, Tensor] = {}
    for number, callback in enumerate(callbacks):
        state, tensors = _packed(callback, CheckpointError)
        records.append({"type": _kind(callback), "state": state})
        everything |= {f"{number}.{name}": tensor for name, tensor in tensors.items()}
    return records, everything


def restore_states(
    callbacks: Iterable[Callback],
    records: Iterable[Mapping[str, Any]],
    stored: Mapping[str, LazyTensor],
) -> list[str]:
    """Restore the saved state of each callback; several of one type are matched in order.

    Args:
        callbacks: the callbacks of the resumed run.
        records: the records of `pack_states`.
        stored: the tensors. Each is sharded like the tensor of the same name in the present state
            of the callback.

    Returns:
        The types of saved callbacks with state that the run does not have.
    """
    left = list(enumerate(records))
    for callback in callbacks:
        found = next((one for one in left if one[1]["type"] == _kind(callback)), None)
        if found is not None:
            left.remove(found)
            number, record = found
            present = _packed(callback, CheckpointError)[1]

            def tensor(name: str, number: int = number, present: Any = present) -> Tensor:
                saved = stored[f"{number}.{name}"]
                return shard_like(present[name], saved) if name in present else saved.read(None)

            callback.load_state_dict(unpack(record["state"], tensor))
    return [str(record["type"]) for _, record in left if record["state"]]


def _packed(callback: Callback, error: type[StrettoError]) -> tuple[Any, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    state = callback.state_dict()
    return packed(state, f"the state of {_kind(callback)}", error, tensors), tensors


def _kind(callback: Callback) -> str:
    return type(callback).__qualname__


_RANDOM = "random"
_STEP = "step"
"""The name of the state of the step in a checkpoint."""


@final
class RunState:
    """Captures the state of a run as tensors and JSON, and restores it.

    Args:
        step: the model, its optimizers and further state.
        run: the clock, the position in the data, the state of the batch size policy and what was
            skipped.
        recorder: the losses since the last log, and the lengths of its files.
        stepper: the micro-batch size that was found.
        callbacks: callbacks with their state.
        evaluators: when they last ran.
        best: the best evaluation so far.
        setup: the settings of the run.
        built: the hyperparameters that the optimizers were built with.
        strategy: which part of the state this rank writes.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        run: Run,
        recorder: Recorder,
        stepper: Stepper,
        callbacks: Sequence[Callback],
        evaluators: Sequence[Evaluator],
        best: Best,
        setup: Mapping[str, Any],
        built: BuiltWith,
        strategy: Strategy,
    ) -> None:
        self._step = step
        self._model = step.model
        self._run = run
        self._recorder = recorder
        self._stepper = stepper
        self._callbacks = callbacks
        self._evaluators = evaluators
        self._best = best
        self._setup = setup
        self._built = built
        self._ranks = ranks = strategy.ranks
        self._part_of_state = strategy.part_of_state
        self.is_sharded = ranks.world_size > 1 and strategy.is_sharded
        """Whether every rank has tensors to write."""

    @cached_property
    def _samples(self) -> str | None:
        """A fingerprint of a few samples."""
        return samples_mark(self._run.spec)

    @property
    def _optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by their names in a checkpoint."""
        several = enumerate(self._step.optimizers)
        return {f"optimizer_{number}" if number else "optimizer": one for number, one in several}

    @property
    def files(self) -> list[Path]:
        """The files of the run that a checkpoint refers to."""
        return self._recorder.files

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Return tensors by group and name, and the rest as JSON. Every rank must call it."""
        packed = {name: pack_optimizer(one) for name, one in self._optimizers.items()}
        # Communication comes first, because the rest can fail on a single rank.
        self._check_replicas()
        random = self._random_rows()
        groups = {"model": self._model.state_dict()}
        groups |= {name: state for name, (state, _) in packed.items()}
        step: Any = None
        callbacks: list[dict[str, Any]] = []
        failure: CheckpointError | None = None
        try:
            callbacks, kept = pack_states(self._callbacks)
            step, own = _pack_step(self._step)
            groups |= {name: group for name, group in ((GROUP, kept), (_STEP, own)) if group}
        except CheckpointError as error:
            failure = error
        tensors = {
            group: {name: self._part_of_state(tensor) for name, tensor in named.items()}
            for group, named in groups.items()
        }
        tensors |= {} if random is None else {_RANDOM: {"state": random}}
        recorder = self._recorder.state_dict()
        if failure is not None:
            raise failure
        records = {
            **{name: record for name, (_, record) in packed.items()},
            _STEP: step,
            "loader": self._run.loader.state_dict(),
            "recorder": recorder,
            "callbacks": callbacks,
            "evaluated": {one.name: one.measured_at for one in self._evaluators},
            "skipped": self._run.skipped.state_dict(),
            "best": self._best.state_dict(),
            "setup": dict(self._setup),
            "samples": self._samples,
            **self._stepper.state_dict(),
        }
        return tensors, records

    def _check_replicas(self) -> None:
        """Refuse to save if ranks that should have the same weights do not; all must call it.

        Raises:
            TrainingError: they differ, on every rank.
        """
        if self._ranks.world_size == 1:
            return
        found: dict[str, tuple[int, int]] = {}
        for rank, text in enumerate(self._ranks.gather(json.dumps(replicas(self._model)))):
            for part, total in json.loads(text).items():
                first, expected = found.setdefault(part, (rank, total))
                if total != expected:
                    raise TrainingError.cannot(
                        f"save the run at {self._run.timer.timestamp.get('sp')}",
                        why=f"the weights of rank {first} and rank {rank} differ",
                        instead="resume from an earlier checkpoint with a step that updates all "
                        "ranks alike: from averaged gradients, and of all parameters",
                    )

    def _random_rows(self) -> Tensor | Shard | None:
        """Return what this rank writes of the random state, a row for each rank."""
        row, ranks = RandomState.now().to_row(), self._ranks
        if ranks.world_size == 1:
            return row[None]
        if self.is_sharded:  # each rank writes its own
            length = -ranks.least(-row.numel())
            row = torch.nn.functional.pad(row, (0, length - row.numel()))
            return Shard(row[None], (ranks.world_size, length), 0, ranks.rank)
        rows = ranks.collect(row)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else None

    def restore(self, checkpoint: CheckpointReader, path: Path, *, is_own: bool) -> list[str]:
        """Restore the result of `capture`.

        Args:
            checkpoint: an open checkpoint.
            path: its path, for messages.
            is_own: whether it is in this run's folder, whose files are then continued.

        Returns:
            One line for each setting that has changed.

        Raises:
            CheckpointError: it has another model, optimizer or data, or its records are invalid.
        """
        records = checkpoint.records
        with section(path, "model"):
            self._restore_model(checkpoint, path)
        for name, optimizer in self._optimizers.items():
            with section(path, name):
                unpack_optimizer(optimizer, stored_tensors(checkpoint, name), records[name])
        with section(path, _STEP):
            restore_step(self._step, checkpoint)
        self._stepper.resumed_from = path
        left = self._restore_records(checkpoint, path, is_own=is_own)
        saved = records.get("samples")
        if None not in (saved, self._samples) and saved != self._samples:
            raise CheckpointError.cannot(
                f"resume from {path}",
                why="the first, middle or last sample of the data is another one, so samples would "
                "be seen twice or never",
                instead="pass the same data in the same order, or start a new run from its weights",
            )
        with section(path, "setup"):
            setup = records.get("setup", {})
            self._built.keep_changed(setup)
            if self._has_the_size_found(records):
                setup = {**setup, "micro_batch_size": self._setup["micro_batch_size"]}
            lines = [*changes(setup, self._setup), *map(gone, left)]
        if self._run.loader.has_dropped_state:
            lines.append("batch_size: begins afresh, and what the one before kept is dropped")
        return lines

    def _has_the_size_found(self, records: Mapping[str, Any]) -> bool:
        """Return whether the given micro-batch size is the one that was found before."""
        given = self._setup["micro_batch_size"]
        if records.get("setup", {}).get("micro_batch_size") != "auto":
            return False
        return bool(given == (records.get("retry") or {}).get("largest"))

    def _restore_model(self, checkpoint: CheckpointReader, path: Path) -> None:
        own = self._model.state_dict()
        state = {
            name: shard_like(own[name], stored) if name in own else stored.read(None)
            for name, stored in stored_tensors(checkpoint, "model").items()
        }
        try:
            self._model.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError.cannot(
                f"resume from {path}",
                why="its weights are another model's "
                f"({textwrap.shorten(str(error), 300, placeholder=' ...')})",
                instead="build the model that it was saved from, or choose a new folder",
            ) from None

    def _restore_records(
        self, checkpoint: CheckpointReader, path: Path, *, is_own: bool
    ) -> list[str]:
        """Restore the records; return the types of saved callbacks that the run lacks."""
        records = checkpoint.records
        with section(path, "retry"):
            self._stepper.load_state_dict(records)
        retry = self._stepper.retry
        if retry.is_found and retry.largest is not None:
            self._run.set_micro_batch_size(retry.largest)
        with section(path, "loader"):
            for name in records["loader"]["clock"]:
                count(records["loader"]["clock"], name)
            self._run.load_loader(records["loader"])
        with section(path, "recorder"):
            self._recorder.load_state_dict(records["recorder"], is_own=is_own)
        with section(path, "callbacks"):
            tensors = stored_tensors(checkpoint, GROUP)
            left = restore_states(self._callbacks, records["callbacks"], tensors)
        with section(path, "evaluated"):
            evaluated = dict(records["evaluated"])
            for one in self._evaluators:
                one.measured_at = count({one.name: -1} | evaluated, one.name, least=-1)
        with section(path, _RANDOM):
            rank = self._ranks.rank
            if rank < checkpoint.shape(_RANDOM, "state")[0]:
                row = checkpoint.part(_RANDOM, "state", 0, rank, 1)[0]
                RandomState.from_row(row).restore()
        with section(path, "skipped"):
            self._run.skipped.load_state_dict(records.get("skipped", {"count": 0, "in_a_row": 0}))
        self._best.start_over()
        with section(path, "best"):
            if is_own and "best" in records:
                self._best.load_state_dict(records["best"])
                self._best.confirm(self._run.timer.sample)  # the checkpoint that is being restored
        return left


def restore_step(step: TrainStep, checkpoint: CheckpointReader) -> None:
    """Restore the state of a step from a checkpoint."""
    tensors = stored_tensors(checkpoint, _STEP)
    record = checkpoint.records[_STEP]
    step.load_state_dict(unpack(record, lambda name: tensors[name].read(None)))


def _pack_step(step: TrainStep) -> tuple[Any, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    what = f"the state of {type(step).__qualname__}"
    return packed(step.state_dict(), what, CheckpointError, tensors), tensors


def stored_tensors(checkpoint: CheckpointReader, group: str) -> dict[str, LazyTensor]:
    """Return the tensors of a group; each rank reads only what it needs."""

    def reader(name: str) -> Callable[[TensorSlice | None], Tensor]:
        def read(part: TensorSlice | None) -> Tensor:
            if part is None:
                return checkpoint.tensor(group, name)
            return checkpoint.part(group, name, *part)

        return read

    return {
        name: LazyTensor(checkpoint.shape(group, name), reader(name))
        for name in checkpoint.names(group)
    }
