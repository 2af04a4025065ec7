"""What a checkpoint keeps of a run: named parts, each with a state."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.checkpoint import CheckpointReader, Shard, pack_optimizer, unpack_optimizer
from stretto.checkpoint.parts import check_tensor
from stretto.checkpoint.sharding import Box, LazyTensor, Tensors, replicas, shard_like
from stretto.distributed.strategy import Strategy
from stretto.errors import CheckpointError, StrettoError, TrainingError, cannot, shown
from stretto.run import Run
from stretto.runtime import TrainStep
from stretto.runtime.agreement import as_text
from stretto.runtime.compiled import Weights, known_as, plain_naming
from stretto.runtime.packing import packed, unpack
from stretto.runtime.random_state import RandomState
from stretto.runtime.ranks import Ranks
from stretto.training.callback import Callback, overrides, unique

if TYPE_CHECKING:
    from stretto.training.evaluate import Evaluations, TrainingWeights
    from stretto.training.logs.recorder import Recorder
    from stretto.training.stepper import Retry


MISFITS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions that a state from another run, model or version causes."""


@contextmanager
def in_part(where: object, name: str) -> Iterator[None]:
    """Add the checkpoint and the part of it to errors raised inside.

    Raises:
        StrettoError: the error raised inside, with the place added.
        CheckpointError: the part does not fit.
    """
    try:
        yield
    except StrettoError as error:
        raise error.recast(type(error), where=f"{name!r} in {where}") from error
    except (*MISFITS, RuntimeError) as error:
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        why = f"its {name!r} does not fit this run ({why})"
        instead = "build the run as it was then, or start from another checkpoint"
        raise CheckpointError.cannot(f"resume from {where}", why=why, instead=instead) from error


def unfit(path: Path, name: str, error: Exception) -> CheckpointError:
    """Return the error for an optimizer that fails in its first update after a resume."""
    return CheckpointError.cannot(
        f"update the weights with {name}",
        why=f"it cannot compute with its state from {path} ({type(error).__name__}: {error})",
        instead=f"resume with {name} built as it was then, or from another checkpoint",
    )


CALLBACKS = "callbacks"
"""The record of what the callbacks with a state are."""


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
    weights: TrainingWeights,
    retry: Retry,
    recorder: Recorder,
    callbacks: Mapping[str, Callback],
    evaluations: Evaluations,
    setup: Part,
    strategy: Strategy,
) -> dict[str, Part]:
    """Return the parts of a run by name, in the order in which they are restored."""

    def load_retry(state: Mapping[str, Any]) -> None:
        retry.load_state_dict(state)
        if retry.is_found and retry.largest is not None:
            run.set_micro_batch_size(retry.largest)

    def load_ended(state: Mapping[str, Any]) -> None:
        run.ended = str(state["why"])

    model = Weights(step.model)
    parts: dict[str, Part] = {"model": model}
    if weights.optimizers:
        parts["model"] = Functions(weights.for_inference, model.load_state_dict)
        parts["training_weights"] = weights
    for number, optimizer in enumerate(step.optimizers):
        name = f"optimizer_{number}" if number else "optimizer"
        parts[name] = optimizer_part(optimizer, step.model)
    texts = callback_texts(callbacks)
    return {
        **parts,
        "step": step,
        "retry": Functions(retry.state_dict, load_retry),
        "loader": Functions(partial(run.loader.state_dict, again=True), run.load_loader),
        "recorder": recorder,
        **callbacks,
        CALLBACKS: Functions(lambda: texts, lambda _: None),
        "evaluated": evaluations,
        "random": random_part(strategy),
        "skipped": run.skipped,
        "best": evaluations.best,
        "ended": Functions(lambda: {} if run.ended is None else {"why": run.ended}, load_ended),
        "position": Functions(run.clock, lambda _: None),
        "setup": setup,
    }


def optimizer_part(optimizer: Optimizer, model: nn.Module) -> Functions:
    """Return an optimizer as a part, which keeps the names of its parameters: torch goes by place.

    Raises (when it is loaded):
        CheckpointError: the same parameters were in other places.
    """

    def names() -> list[str]:
        plain = plain_naming(model)
        known = {id(one): plain(name) for name, one in model.named_parameters()}
        return [known.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]

    def load(state: Mapping[str, Any]) -> None:
        saved, present = state.get("parameters", names()), names()
        moved = [pair for pair in zip(saved, present, strict=False) if pair[0] != pair[1]]
        if moved and set(saved) <= {"", *map(plain_naming(model), dict(model.named_parameters()))}:
            what = f"load the saved state into {type(optimizer).__name__}"
            why = f"{moved[0][1]!r} is where {moved[0][0]!r} was"
            instead = "build the optimizers with the same parameters in the same order"
            raise CheckpointError.cannot(what, why=why, instead=instead)
        unpack_optimizer(optimizer, state)

    return Functions(
        lambda: {**pack_optimizer(optimizer), "parameters": names()}, load, is_lazy=True
    )


def callback_parts(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return callbacks by name; several of one type are numbered in their order."""
    given = list(callbacks)
    return dict(zip(unique(map(_kind, given)), given, strict=True))


def _kind(callback: Callback) -> str:
    return "callback_" + re.sub(r"\W", "_", type(callback).__qualname__, flags=re.ASCII)


def callback_texts(callbacks: Mapping[str, Callback]) -> dict[str, list[str]]:
    """Return type and `repr` of each callback that has a state, as they are built."""
    return {
        name: [_kind(one), as_text(one)]
        for name, one in callbacks.items()
        if overrides(one, "state_dict")
    }


def check_texts(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks of one type whose states a checkpoint could not tell apart.

    Raises:
        TrainingError: they have a state and no `repr`.
    """
    mute = [one for one in callbacks if type(one).__repr__ is object.__repr__]
    kinds = [type(one).__qualname__ for one in mute if overrides(one, "state_dict")]
    for name in (one for one in kinds if kinds.count(one) > 1):
        why = "several callbacks are of that type, and nothing tells them apart"
        instead = f"write {name}.__repr__ with the arguments that each was built with"
        raise TrainingError.cannot(f"save the state of each {name}", why=why, instead=instead)


def saved_names(
    saved: Mapping[str, list[str]], present: Mapping[str, list[str]]
) -> dict[str, str | None]:
    """Return by which name the state of each callback was saved; None: it was not.

    It is that of the same `repr`, else the only one that is left of its type.

    >>> saved_names({"c": ["c", "C(1)"], "c_2": ["c", "C(2)"]}, {"c": ["c", "C(2)"]})
    {'c': 'c_2'}

    Args:
        saved: `callback_texts` of the checkpoint.
        present: the same of the run.

    Raises:
        CheckpointError: several of one type have changed.
    """
    left, found = dict(saved), dict[str, str | None]()
    for name, own in present.items():
        same = next((other for other, one in left.items() if one == own), None)
        if same is not None:
            found[name] = same
            del left[same]
    changed = {name: own for name, own in present.items() if name not in found}
    for name, (kind, text) in changed.items():
        before = [other for other, one in left.items() if one[0] == kind]
        found[name] = before[0] if before else None
        if before and len(before) + sum(one[0] == kind for one in changed.values()) > 2:
            why = f"it may be that of {' or of '.join(left[one][1] for one in before)}"
            instead = "change one callback of a type at a time, or start a new run"
            raise CheckpointError.cannot(f"find the state of {text}", why=why, instead=instead)
    return found


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
    state: Any = part.state_dict()
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        instead = "return a dict with texts as keys; {} if there is no state"
        why = f"state_dict() returned {shown(state)}"
        raise error(cannot(f"save the state of {name!r}", why=why, instead=instead))
    for key, value in state.items():
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
    names: dict[str, str | None] = {name: name for name in parts}
    if CALLBACKS in checkpoint.records and CALLBACKS in parts:
        with in_part(where, CALLBACKS):
            texts = parts[CALLBACKS].state_dict()
            names |= saved_names(checkpoint.records[CALLBACKS], texts)
    lines = [f"{name}: its state is dropped" for name in saved if name not in names.values()]
    for name, part in parts.items():
        with in_part(where, name):
            stored = names[name]
            if stored in saved and stored is not None:
                part.load_state_dict(_stored_state(checkpoint, stored, part))
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
        name: LazyTensor(checkpoint.entry(group, name).shape, partial(read, name))
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
        found: dict[str, Any] = {"groups": ranks.dp_world_size}
        if ranks.world_size == 1:
            found["state"] = row[None]
        elif strategy.is_sharded:
            row = nn.functional.pad(row, (0, -row.numel() % _ROW_BYTES))
            found["state"] = Shard(row[None], (ranks.world_size, len(row)), (ranks.rank, 0))
        elif rows := ranks.gather(row, only_first=True):
            found["state"] = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return found

    def load(state: Mapping[str, Any]) -> None:
        rows = state["state"]
        saved, length = rows.shape
        groups = state.get("groups", saved)
        row = ranks.rank
        if (saved, groups) != (ranks.world_size, ranks.dp_world_size):
            row = ranks.dp_rank * (saved // groups) if ranks.dp_rank < groups else saved
        if row < saved:
            RandomState.from_row(rows.read(Box((row, 0), (1, length)))[0]).restore()

    return Functions(state, load, is_lazy=True)


def share_random_state(strategy: Strategy) -> None:
    """Give the ranks of a model group the random state of the first; every rank must call it.

    They compute one forward pass together, so all have to draw the same dropout.
    """
    ranks = strategy.ranks
    if ranks.dp_world_size == ranks.world_size:
        return
    row = RandomState.now().to_row() if ranks.is_loss_rank else None
    for group, state in ranks.gather((ranks.dp_rank, row)):
        if group == ranks.dp_rank and state is not None and row is None:
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
