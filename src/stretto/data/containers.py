"""Batches of any structure: their items, their number of samples, and views of samples.

A batch is a tree: tensors and arrays are its leaves, tuples, lists, mappings, dataclasses and
registered pytree nodes its containers. A leaf is *per sample* if its first dimension is the number
of samples; so is a list or tuple of that length, unless its items are themselves per sample.
Anything else (a scalar, a name, a tensor with a first dimension of 1) belongs to the whole batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from stretto.errors import DataError


class Container(NamedTuple):
    """A container taken apart."""

    items: Sequence[Any]
    rebuilt: Callable[[list[Any]], Any]
    """Returns a container of the same kind with other items."""


def opened(node: Any) -> Container | None:
    """Return a container's items; None if `node` is a leaf.

    >>> opened((1, 2)).items, opened("text")
    ((1, 2), None)
    """
    kind = type(node)
    if kind is list or kind is tuple:
        return Container(node, kind)
    if isinstance(node, (Tensor, str, bytes)) or hasattr(node, "shape"):
        return None
    if isinstance(node, Mapping):
        return Container(list(node.values()), lambda items: _mapping_like(node, items))
    if isinstance(node, (list, tuple)):
        return Container(node, lambda items: _sequence_like(node, items))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if field.init]
        return Container(
            [getattr(node, name) for name in names],
            lambda items: dataclasses.replace(node, **dict(zip(names, items, strict=True))),
        )
    registered = _pytree.SUPPORTED_NODES.get(kind)
    if registered is None:
        return None
    children, context = registered.flatten_fn(node)
    return Container(children, lambda items: registered.unflatten_fn(items, context))


def named(node: Any) -> Mapping[str, Any]:
    """Return a container's items by name: of a mapping, a named tuple or a dataclass; else nothing.

    >>> named({"input_ids": 1}), named([1])
    ({'input_ids': 1}, {})
    """
    if isinstance(node, Mapping):
        return node
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return dict(zip(node._fields, node, strict=True))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return {}


def nodes(batch: Any) -> Iterator[Any]:
    """Yield a batch and all that is in it; a container comes before its items.

    >>> list(nodes([1, {"x": 2}]))
    [[1, {'x': 2}], 1, {'x': 2}, 2]
    """
    yield batch
    kind = type(batch)
    if kind is Tensor or kind in _PLAIN:
        return
    container = opened(batch)
    for item in container.items if container else ():
        yield from nodes(item)


def mapped(function: Callable[[Tensor], Tensor], node: Any) -> Any:
    """Return a batch with `function` applied to each of its tensors.

    >>> mapped(torch.Tensor.double, {"x": torch.ones(1)})
    {'x': tensor([1.], dtype=torch.float64)}
    """
    if isinstance(node, Tensor):
        return function(node)
    container = opened(node)
    if container is None:
        return node
    return container.rebuilt([mapped(function, item) for item in container.items])


def move_batch(batch: Any, device: torch.device | str, *, non_blocking: bool = True) -> Any:
    """Return a batch with its tensors on `device`.

    It calls the batch's own `to` method if there is one, as in Hugging Face encodings.

    >>> move_batch({"x": torch.ones(2)}, "cpu")["x"].device.type
    'cpu'
    """
    own = None if isinstance(batch, Tensor) else getattr(batch, "to", None)
    if callable(own):
        return own(device)
    return mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking), batch)


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor.

    If there is no tensor, it is the length of the first list.

    >>> count_samples({"x": torch.zeros(8, 3), "names": ["a"] * 8})
    8

    Raises:
        DataError: the batch has neither.
    """
    found = _first_length(batch)
    if found is None:
        found = next((len(node) for node in nodes(batch) if _is_flat_list(node)), None)
    if found is None:
        raise DataError.cannot(
            f"count the samples of a batch of type {type(batch).__name__}",
            why="it has neither a tensor with a first dimension nor a list",
            instead="pass DataSpec(data, get_num_samples_in_batch=...)",
        )
    return found


def may_hold(batch: Any, num_samples: int) -> bool:
    """Return whether any tensor, array or list in a batch has that many samples.

    >>> may_hold([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], 2), may_hold(torch.zeros(3), 2)
    (True, False)
    """
    if _length(batch) == num_samples:
        return True
    if isinstance(batch, (list, tuple)) and len(batch) == num_samples:
        return True
    container = opened(batch)
    for item in container.items if container else ():  # noqa: SIM110  hot, and a generator is slow
        if may_hold(item, num_samples):
            return True
    return False


def take_samples(batch: Any, part: slice, num_samples: int | None = None) -> Any:
    """Return some samples of a batch as a batch of the same kind; tensors are views.

    >>> batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": 0.5}
    >>> take_samples(batch, slice(1, None, 2))
    {'x': tensor([1, 3]), 'names': ['b', 'd'], 'scale': 0.5}

    Args:
        batch: the batch; it is not changed.
        part: which samples, as a slice with positive step.
        num_samples: the number of samples; by default, counted.

    Raises:
        DataError: no leaf of the batch has that many samples, or its leaves contradict each other.
    """
    whole = count_samples(batch) if num_samples is None else num_samples
    found: list[Any] = []
    result = _cut(batch, part, whole, found)
    if not found:
        raise not_cut(whole, f"nothing in it has {whole} as its first dimension or its length")
    return result


def not_cut(num_samples: int, why: str) -> DataError:
    """Return the error for a batch that cannot be cut."""
    instead = "pass DataSpec(data, split_batch=...), or a map-style data set with a collate_fn"
    return DataError.cannot(f"cut a batch of {num_samples} samples", why=why, instead=instead)


def join_samples(batches: Sequence[Any], counts: Sequence[int]) -> Any:
    """Return batches as one of the same kind, the reverse of `take_samples`.

    What is not per sample is that of the first batch.

    >>> two, one = {"x": torch.zeros(2), "n": ["a", "b"]}, {"x": torch.ones(1), "n": ["c"]}
    >>> join_samples([two, one], [2, 1])
    {'x': tensor([0., 0., 1.]), 'n': ['a', 'b', 'c']}

    Args:
        batches: the batches; they are not changed.
        counts: the number of samples of each.

    Raises:
        DataError: samples of different batches have different shapes.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    lengths = [_length(one) for one in batches]
    if lengths == list(counts):
        shapes = {tuple(one.shape[1:]) for one in batches}
        if len(shapes) > 1:
            why = f"their samples have different shapes, such as {sorted(shapes)}"
            instead = "pad all to one length, or use a map-style data set"
            raise DataError.cannot("join batches to one", why=why, instead=instead)
        return torch.cat(list(batches)) if isinstance(first, Tensor) else np.concatenate(batches)
    if lengths[0] is not None:
        return first
    if all(_is_per_sample(one, count) for one, count in zip(batches, counts, strict=True)):
        return type(first)(item for one in batches for item in one)
    containers = [opened(one) for one in batches]
    if containers[0] is None:
        return first
    items = [container.items for container in containers if container is not None]
    joined = [join_samples(each, counts) for each in zip(*items, strict=True)]
    return containers[0].rebuilt(joined)


def _cut(node: Any, part: slice, num_samples: int, found: list[Any]) -> Any:
    """Return `part` of what is per sample in a batch, which is also added to `found`."""
    length, kind = _length(node), type(node)
    if length not in (None, num_samples, 1):
        raise not_cut(num_samples, f"a tensor in it has the shape {tuple(node.shape)}")
    if length == num_samples or (length is None and _is_per_sample(node, num_samples)):
        found.append(node)
        return node[part]
    if length is not None:
        return node
    if kind is dict:
        return {key: _cut(item, part, num_samples, found) for key, item in node.items()}
    if kind is list or kind is tuple:
        return kind([_cut(item, part, num_samples, found) for item in node])
    container = opened(node)
    if container is None:
        return node
    return container.rebuilt([_cut(item, part, num_samples, found) for item in container.items])


def _is_per_sample(node: Any, num_samples: int) -> bool:
    """Return whether a list has one item per sample; not if its items are per sample."""
    if not isinstance(node, (list, tuple)) or hasattr(node, "_fields"):
        return False
    if len(node) != num_samples:
        return False
    return any(_first_length(item) != num_samples for item in node)


_PLAIN = frozenset({str, int, float, bool, type(None)})
_NO_ARRAYS = _PLAIN | {list, tuple, dict}


def _length(node: Any) -> int | None:
    """Return the first dimension of a tensor or array; None if there is none."""
    kind = type(node)
    if kind is Tensor or isinstance(node, Tensor):  # the second is slow: torch overrides it
        return node.size(0) if node.dim() else None
    if kind in _NO_ARRAYS:
        return None
    shape = getattr(node, "shape", None)
    return int(shape[0]) if isinstance(shape, tuple) and shape else None


def _first_length(batch: Any) -> int | None:
    lengths = map(_length, nodes(batch))
    return next((length for length in lengths if length is not None), None)


def _is_flat_list(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and all(opened(item) is None for item in node)


def _mapping_like(node: Mapping[Any, Any], items: list[Any]) -> Any:
    pairs = zip(node, items, strict=True)
    if type(node) is dict:
        return dict(pairs)
    if not isinstance(node, MutableMapping):
        return type(node)(dict(pairs))  # type: ignore[call-arg]
    # A copy keeps the rest of a mapping, such as a default factory.
    result = copy.copy(node)
    for key, item in pairs:
        result[key] = item
    return result


def _sequence_like(node: Sequence[Any], items: list[Any]) -> Any:
    make: Callable[[list[Any]], Any] = getattr(type(node), "_make", type(node))
    return make(items)
