"""What a checkpoint keeps of a run: named parts, each with a state."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from torch import Tensor, nn

from stretto.checkpoint import (
    Box,
    CheckpointReader,
    LazyTensor,
    Shard,
    pack_optimizer,
    shard_like,
    unpack_optimizer,
)
from stretto.checkpoint.parts import check_tensor
from stretto.checkpoint.sharding import Tensors, replicas
from stretto.distributed.ranks import Ranks
from stretto.distributed.strategy import Strategy
from stretto.errors import CheckpointError, StrettoError, TrainingError
from stretto.run import Run
from stretto.runtime import TrainStep
from stretto.runtime.compiled import Weights, known_as
from stretto.runtime.packing import packed, unpack
from stretto.runtime.random_state import RandomState
from stretto.training.callback import Callback
from stretto.training.checkpointing.records import section
from stretto.training.describe import BuiltWith, changes, samples_mark

if TYPE_CHECKING:
    from stretto.training.evaluation.evaluate import Best, Evaluator
    from stretto.training.logs.recorder import Recorder
    from stretto.training.stepping.retry import Retry


class Part(Protocol):
    """Anything whose state a checkpoint keeps; the state is what `Callback.state_dict` may be."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state. Every rank calls it."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore the state; a tensor is sharded like that of the same name in the present one."""


class Functions(NamedTuple):
    """A part that is made of two functions."""

    state_dict: Callable[[], Mapping[str, Any]]
    load_state_dict: Callable[[Mapping[str, Any]], object]
    is_lazy: bool = False
    """Whether it gets each tensor of its state as a `LazyTensor`."""


def parts_of(
    step: TrainStep,
    run: Run,
    *,
    retry: Retry,
    recorder: Recorder,
    callbacks: Iterable[Callback],
    evaluators: Sequence[Evaluator],
    best: Best,
    setup: Part,
    strategy: Strategy,
) -> dict[str, Part]:
    """Return the parts of a run by name, in the order in which they are restored."""

    def load_retry(state: Mapping[str, Any]) -> None:
        retry.load_state_dict(state)
        if retry.is_found and retry.largest is not None:
            run.set_micro_batch_size(retry.largest)

    def load_evaluated(state: Mapping[str, Any]) -> None:
        for one in evaluators:
            one.measured_at = state["at"].get(one.name, -1)

    parts: dict[str, Part] = {"model": Weights(step.model)}
    for number, optimizer in enumerate(step.optimizers):
        name = f"optimizer_{number}" if number else "optimizer"
        pack, unpack = partial(pack_optimizer, optimizer), partial(unpack_optimizer, optimizer)
        parts[name] = Functions(pack, unpack, is_lazy=True)
    return {
        **parts,
        "step": step,
        "retry": Functions(retry.state_dict, load_retry),
        "loader": Functions(run.loader.state_dict, run.load_loader),
        "recorder": recorder,
        **callback_parts(callbacks),
        "evaluated": Functions(
            lambda: {"at": {one.name: one.measured_at for one in evaluators}}, load_evaluated
        ),
        "random": random_part(strategy),
        "skipped": run.skipped,
        "best": best,
        "position": Functions(run.clock, lambda _: None),
        "setup": setup,
    }


def callback_parts(callbacks: Iterable[Callback]) -> dict[str, Part]:
    """Return callbacks by name; several of one type are numbered in their order."""
    parts: dict[str, Part] = {}
    seen: Counter[str] = Counter()
    for callback in callbacks:
        kind = "callback_" + re.sub(r"\W", "_", type(callback).__qualname__, flags=re.ASCII)
        seen[kind] += 1
        parts[kind if seen[kind] == 1 else f"{kind}_{seen[kind]}"] = callback
    return parts


def check_states(parts: Mapping[str, Part]) -> None:
    """Check before the run that the state of every part can be saved.

    Raises:
        TrainingError: a state cannot be saved; the message names the part and the key.
    """
    for name, part in parts.items():
        for key, tensor in _split(name, part, TrainingError)[0].items():
            try:
                check_tensor(key, tensor)
            except CheckpointError as error:
                raise error.recast(TrainingError, where=f"state of {name!r}") from None


def _split(name: str, part: Part, error: type[StrettoError]) -> tuple[dict[str, Any], Any]:
    """Return the tensors of a state by name, and the rest as JSON."""
    tensors: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in part.state_dict().items():
        (tensors if isinstance(value, (Tensor, Shard)) else rest)[key] = value
    return tensors, packed(rest, f"the state of {name!r}", error, tensors)


def capture(
    parts: Mapping[str, Part], part_of_state: Callable[[Tensor], Tensor | Shard]
) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors by part and name, and the rest as JSON. Every rank must call it.

    Args:
        parts: the parts by name.
        part_of_state: returns what this rank writes of a tensor.

    Raises:
        CheckpointError: a state cannot be saved.
    """
    groups: dict[str, dict[str, Tensor | Shard]] = {}
    records: dict[str, Any] = {}
    failure: CheckpointError | None = None
    for name, part in parts.items():
        try:
            tensors, record = _split(name, part, CheckpointError)
        except CheckpointError as error:
            failure = failure or error  # later: ranks may communicate for the other parts
            continue
        if tensors:
            groups[name] = {
                key: one if isinstance(one, Shard) else part_of_state(one)
                for key, one in tensors.items()
            }
        if record:
            records[name] = record
    if failure is not None:
        raise failure
    return groups, records


def only_shards(tensors: Tensors) -> Tensors:
    """Return what a rank other than the first writes."""
    return {
        group: {name: one for name, one in named.items() if isinstance(one, Shard)}
        for group, named in tensors.items()
    }


def restore(parts: Mapping[str, Part], checkpoint: CheckpointReader, where: object) -> list[str]:
    """Restore the result of `capture`.

    Args:
        parts: the parts by name.
        checkpoint: an open checkpoint.
        where: its path, for messages.

    Returns:
        One line for each part that is only in the run or only in the checkpoint.

    Raises:
        CheckpointError: a part does not fit.
    """
    saved = dict.fromkeys((*checkpoint.records, *checkpoint.groups))
    lines = [f"{name}: its state is dropped" for name in saved if name not in parts]
    for name, part in parts.items():
        with section(where, name):
            if name in saved:
                part.load_state_dict(_stored_state(checkpoint, name, part))
            elif part.state_dict():
                lines.append(f"{name}: begins afresh")
    return lines


def _stored_state(checkpoint: CheckpointReader, name: str, part: Part) -> dict[str, Any]:
    """Return the state of a part; each rank reads only what it needs of each tensor."""
    stored = stored_tensors(checkpoint, name)
    is_lazy = isinstance(part, Functions) and part.is_lazy
    present = _split(name, part, CheckpointError)[0] if stored and not is_lazy else {}

    def read(key: str) -> Any:
        saved = stored.pop(key)
        if is_lazy:
            return saved
        own = known_as(key, present)
        return shard_like(present[own], saved) if own in present else saved.read(None)

    state: dict[str, Any] = unpack(checkpoint.records.get(name, {}), read)
    return state | {key: read(key) for key in tuple(stored)}


def stored_tensors(checkpoint: CheckpointReader, group: str) -> dict[str, LazyTensor]:
    """Return the tensors of a group, to be read as far as needed."""

    def read(name: str, part: Box | None) -> Tensor:
        if part is None:
            return checkpoint.tensor(group, name)
        return checkpoint.part(group, name, part)

    return {
        name: LazyTensor(checkpoint.shape(group, name), partial(read, name))
        for name in checkpoint.names(group)
    }


_ROW_BYTES = 2**14
"""Rows of random state have a multiple of this length, so that ranks need not agree on one. With
NumPy's state, a row has 10,725 bytes."""


def random_part(strategy: Strategy) -> Functions:
    """Return the random state of all ranks as a tensor with a row for each.

    On another mesh, each model group takes the row of the first rank of that group; groups that
    were not there keep their own. So ranks that share a model keep a common state if they had one.
    """
    ranks = strategy.ranks

    def state() -> dict[str, Any]:
        row = RandomState.now().to_row()
        found: dict[str, Any] = {"groups": strategy.world_size}
        if ranks.world_size == 1:
            found["state"] = row[None]
        elif strategy.is_sharded:
            row = nn.functional.pad(row, (0, -row.numel() % _ROW_BYTES))
            found["state"] = Shard(row[None], (ranks.world_size, len(row)), (ranks.rank, 0))
        elif rows := ranks.collect(row):
            found["state"] = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return found

    def load(state: Mapping[str, Any]) -> None:
        rows = state["state"]
        saved, length = rows.shape
        groups = state.get("groups", saved)
        row = ranks.rank
        if (saved, groups) != (ranks.world_size, strategy.world_size):
            row = strategy.rank * (saved // groups) if strategy.rank < groups else saved
        if row < saved:
            RandomState.from_row(rows.read(Box((row, 0), (1, length)))[0]).restore()

    return Functions(state, load, is_lazy=True)


def share_random_state(strategy: Strategy) -> None:
    """Give the ranks of a model group the random state of the first; every rank must call it.

    They compute one forward pass together, so all have to draw the same dropout.
    """
    ranks = strategy.ranks
    if strategy.world_size == ranks.world_size:
        return
    row = RandomState.now().to_row() if strategy.counts else None
    for group, state in ranks.gather((strategy.rank, row)):
        if group == strategy.rank and state is not None and row is None:
            RandomState.from_row(state).restore()


def check_replicas(model: nn.Module, ranks: Ranks) -> None:
    """Refuse to save if ranks that should have the same weights do not; all must call it.

    Raises:
        TrainingError: they differ, on every rank.
    """
    if ranks.world_size == 1:
        return
    found: dict[str, tuple[int, int]] = {}
    for rank, text in enumerate(ranks.gather(json.dumps(replicas(model)))):
        for part, total in json.loads(text).items():
            first, expected = found.setdefault(part, (rank, total))
            if total != expected:
                why = f"the weights of rank {first} and rank {rank} differ"
                instead = "resume from an earlier one with a step that updates all ranks alike"
                raise TrainingError.cannot("write a checkpoint", why=why, instead=instead)


@final
class Setup:
    """The settings of a run and a fingerprint of its data, to see what changes on resume.

    Args:
        run: the run.
        described: its settings.
        built: the hyperparameters that the optimizers were built with.
    """

    def __init__(self, run: Run, described: Mapping[str, Any], built: BuiltWith) -> None:
        self.changes: list[str] = []
        """A line for each setting that is not as in the checkpoint that was loaded."""
        self.run_id = secrets.token_hex(8)
        """Of which run the checkpoints are: that of the checkpoint that was loaded."""
        self._run = run
        self._described = described
        self._built = built

    @cached_property
    def _samples(self) -> str | None:
        return samples_mark(self._run.spec)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the fingerprint."""
        return {**self._described, "samples": self._samples, "run": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare with saved settings; keep hyperparameters that changed since.

        Raises:
            CheckpointError: the data are others.
        """
        saved, size = dict(state), "micro_batch_size"
        self.run_id = saved.pop("run", self.run_id)
        samples = saved.pop("samples")
        if "auto" in (saved.get(size), self._described.get(size)):
            saved[size] = self._described.get(size)  # it was found, or is found again
        if None not in (samples, self._samples) and samples != self._samples:
            why = "the first, middle or last sample is another one, so some would come twice"
            instead = "pass the same data in the same order, or start a new run from its weights"
            raise CheckpointError.cannot("continue with these data", why=why, instead=instead)
        self._built.keep_changed(saved)
        self.changes = list(changes(saved, self._described))
        if self._run.loader.has_dropped_state:
            self.changes.append("batch_size: begins afresh, and its former state is dropped")
