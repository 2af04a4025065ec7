"""State of any object as JSON and tensors: what a checkpoint can hold without pickle."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from stretto.errors import StrettoError, TrainingError, cannot, shown

_KIND = "__kind__"
_MOST = 2**63


@final
class PackingError(ValueError):
    """A value that no checkpoint can hold; the message names its key and its type."""


def pack(state: Any, tensors: dict[str, Tensor] | None = None, *, name: str = "") -> Any:
    """Return `state` as JSON; `unpack` gives it back.

    A subclass of a plain type comes back as the plain type: an `OrderedDict` as a dict.

    >>> pack({"step": 3, "bytes": b"x"})
    {'step': 3, 'bytes': {'__kind__': 'bytes', 'base64': 'eA=='}}
    >>> tensors = {}
    >>> pack({"average": [torch.ones(2)]}, tensors)
    {'average': [{'__kind__': 'tensor', 'name': 'average.0'}]}
    >>> tensors
    {'average.0': tensor([1., 1.])}

    Args:
        state: None, bools, numbers, texts, bytes, tensors, and lists, tuples and dicts of them.
        tensors: where tensors are put, by name, as they are; None: they become part of the JSON.
        name: that of `state`, from which names of tensors begin.

    Raises:
        PackingError: something in it is of another type.
    """
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    if isinstance(state, (list, tuple)):
        items = [pack(item, tensors, name=_key(name, at)) for at, item in enumerate(state)]
        return items if isinstance(state, list) else {_KIND: "tuple", "items": items}
    if isinstance(state, dict):
        named = [(key, pack(item, tensors, name=_key(name, key))) for key, item in state.items()]
        if all(isinstance(key, str) and key != _KIND for key in state):
            return dict(named)
        keys = [pack(key, name=_key(name, key)) for key in state]
        return {_KIND: "dict", "items": [[k, v] for k, (_, v) in zip(keys, named, strict=True)]}
    if isinstance(state, bytes):
        return {_KIND: "bytes", "base64": _text(state)}
    if isinstance(state, Tensor):
        return _packed_tensor(state, tensors, name)
    raise PackingError(f"{name or 'it'} is of type {type(state).__name__}")


def as_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state exactly as reading it from a JSON file returns it.

    >>> from stretto.batching import Tokens
    >>> type(as_json({"size": Tokens(8)})["size"])
    <class 'int'>

    Raises:
        TrainingError: something in it is no JSON value.
    """
    try:
        found: dict[str, Any] = json.loads(json.dumps(state))
    except TypeError as error:
        instead = "keep numbers, texts, None, and lists and dicts of them"
        raise TrainingError.cannot("save a state", why=str(error), instead=instead) from None
    return found


def packed(
    state: Any, what: str, error: type[StrettoError], tensors: dict[str, Tensor] | None = None
) -> Any:
    """Return `pack(state, tensors)` of what a user has given.

    Args:
        state: what is to be saved.
        what: what it is called in the error.
        error: the type of the error.
        tensors: see `pack`.

    Raises:
        StrettoError: one of that type, if no checkpoint can hold the state.
    """
    try:
        return pack(state, tensors)
    except RecursionError:
        why = "it contains itself, or is nested too deeply"
    except PackingError as unpackable:
        why = f"{unpackable}, which a checkpoint cannot hold"
    instead = "return plain values, tensors, and lists, tuples and dicts of them from state_dict()"
    raise error(cannot(f"save {what}", why=why, instead=instead))


def unpack(packed: Any, tensor: Callable[[str], Tensor] | None = None) -> Any:
    """Return what `pack` was given.

    >>> unpack(pack((1, b"x")))
    (1, b'x')

    Args:
        packed: what it returned.
        tensor: returns a tensor by its name, if tensors were put elsewhere.
    """
    if isinstance(packed, list):
        return [unpack(item, tensor) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed.get(_KIND)
    if kind is None:
        return {key: unpack(item, tensor) for key, item in packed.items()}
    if kind == "bytes":
        return base64.b64decode(packed["base64"])
    if kind == "tensor" and "name" in packed:
        if tensor is None:
            raise ValueError(f"the tensor {packed['name']!r} is missing")
        return tensor(packed["name"])
    if kind == "tensor":
        content = torch.tensor(list(base64.b64decode(packed["base64"])), dtype=torch.uint8)
        return content.view(getattr(torch, packed["dtype"])).reshape(packed["shape"])
    items = [unpack(item, tensor) for item in packed["items"]]
    return tuple(items) if kind == "tuple" else dict(items)


def _packed_tensor(value: Tensor, tensors: dict[str, Tensor] | None, name: str) -> dict[str, Any]:
    if value.is_meta or value.is_quantized or value.layout is not torch.strided:
        raise PackingError(f"{name or 'it'} is a tensor that is sparse, quantized or meta")
    if tensors is not None:
        while name in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
            name += "_"
        tensors[name] = value.detach()
        return {_KIND: "tensor", "name": name}
    content = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return {
        _KIND: "tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "base64": _text(bytes(content.view(torch.uint8).tolist())),
    }


def _key(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def number(record: Mapping[str, Any], key: str) -> float:
    """Return a number of a record; nan and inf are allowed.

    >>> number({"sum": 0.5}, "sum")
    0.5

    Raises:
        LookupError: it is missing.
        ValueError: it is not a number.
    """
    value = record[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, int) and abs(value) >= _MOST):
        raise ValueError(f"{key!r} is {shown(value)}, and not a number")
    return float(value)


def count(record: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    """Return a count of a record.

    >>> count({"splits": 2}, "splits")
    2

    Raises:
        LookupError: it is missing.
        ValueError: it is not an integer, or less than `least`.
    """
    value = record[key]
    if type(value) is not int or not least <= value < _MOST:
        raise ValueError(f"{key!r} is {shown(value)}, and not a count")
    return value


def count_or_none(record: Mapping[str, Any], key: str, *, least: int = 0) -> int | None:
    """Return a count of a record that may be None.

    >>> count_or_none({"size": None}, "size")

    Raises:
        LookupError: it is missing.
        ValueError: it is neither.
    """
    return None if record[key] is None else count(record, key, least=least)
