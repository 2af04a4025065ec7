"""The state of callbacks in a checkpoint: JSON records and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from stretto.checkpoint import LazyTensor, shard_like
from stretto.checkpoint.tensor_file import check_tensor
from stretto.errors import CheckpointError, StrettoError, TrainingError
from stretto.runtime.packing import packed, unpack
from stretto.training.callback import Callback

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
