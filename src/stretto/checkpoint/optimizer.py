"""The state of a torch optimizer as named tensors and JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stretto.errors import CheckpointError, cannot


def pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, and the rest of it as JSON.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> weight.sum().backward(); optimizer.step()
    >>> tensors, record = pack_optimizer(optimizer)
    >>> list(tensors), record["param_groups"][0]["lr"]
    (['0.momentum_buffer'], 0.1)
    """
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            key = f"{index}.{name}"
            if isinstance(value, Tensor):
                tensors[key] = value
            else:
                values[key] = value
    groups = []
    for number, group in enumerate(state["param_groups"]):
        plain = {}
        for name, value in group.items():
            if isinstance(value, Tensor):
                tensors[f"group.{number}.{name}"] = value
            elif isinstance(value, tuple):
                plain[name] = {"tuple": list(value)}
            else:
                plain[name] = value
        groups.append(plain)
    kind = type(optimizer).__name__
    return tensors, {"type": kind, "values": values, "param_groups": groups}


def unpack_optimizer(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], record: Mapping[str, Any]
) -> None:
    """Give an optimizer the state that `pack_optimizer` returned.

    Raises:
        CheckpointError: it was another optimizer's.
    """
    if record["type"] != type(optimizer).__name__:
        raise _other(optimizer, f"it was saved from {record['type']}")
    state: dict[int, dict[str, Any]] = {}
    groups = [
        {name: _value(value) for name, value in group.items()} for group in record["param_groups"]
    ]
    for key, value in (*tensors.items(), *record["values"].items()):
        head, name = key.split(".", 1)
        if head == "group":
            number, name = name.split(".", 1)
            groups[int(number)][name] = value
        else:
            state.setdefault(int(head), {})[name] = value
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise _other(optimizer, str(error)) from error


def _other(optimizer: Optimizer, why: str) -> CheckpointError:
    return CheckpointError(
        cannot(
            f"give the saved state to {type(optimizer).__name__}",
            why=why,
            instead="resume with the optimizer and the parameters that it was saved from",
        )
    )


def _value(value: Any) -> Any:
    return tuple(value["tuple"]) if isinstance(value, dict) and "tuple" in value else value
