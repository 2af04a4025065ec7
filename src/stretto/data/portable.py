"""State of other people's objects as JSON: what `json` keeps, and tensors, bytes and tuples."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from stretto.errors import DataError, cannot

_KIND = "__kind__"


def to_json(value: Any) -> Any:
    """Return `value` as JSON keeps it; `from_json` gives it back.

    >>> to_json({"step": 3, "bytes": b"x"})
    {'step': 3, 'bytes': {'__kind__': 'bytes', 'base64': 'eA=='}}

    Raises:
        DataError: something in it is of another kind.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if type(value) is tuple:
        return {_KIND: "tuple", "items": [to_json(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key != _KIND for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {_KIND: "dict", "items": [[to_json(k), to_json(v)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Tensor):
        data = {"items": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
        return {_KIND: "tensor", **data}
    raise DataError(
        cannot(
            f"save the position in the data: its state holds a {type(value).__name__}",
            why="a checkpoint keeps numbers, texts, lists, mappings, bytes and tensors",
            instead="return only those from the state_dict of the data",
        )
    )


def from_json(value: Any) -> Any:
    """Return what `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: from_json(item) for key, item in value.items()}
    if kind == "bytes":
        return base64.b64decode(value["base64"])
    if kind == "tensor":
        return torch.tensor(value["items"], dtype=getattr(torch, value["dtype"]))
    items = [from_json(item) for item in value["items"]]
    return tuple(items) if kind == "tuple" else dict(items)
