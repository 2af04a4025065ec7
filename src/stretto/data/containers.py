"""Batches of any structure: their items, their number of samples, and views of samples.

A batch is a tree: tensors and arrays are its leaves, tuples, lists, mappings, dataclasses and
registered pytree nodes its containers. A leaf is *per sample* if its first dimension is the number
of samples; so is a sequence of that length, unless its items are themselves per sample. Anything
else (a scalar, a name, a tensor with a first dimension of 1) belongs to the whole batch. Nothing in
a batch is changed, and nothing that a batch is made of is asked whether it is true.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Sized
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
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
    if isinstance(node, (Tensor, str, bytes, torch.Size)):
        return None
    if kind is not dict and kind in _pytree.SUPPORTED_NODES:
        registered = _pytree.SUPPORTED_NODES[kind]
        children, context = registered.flatten_fn(node)
        return Container(children, lambda items: registered.unflatten_fn(items, context))
    if isinstance(node, Mapping):
        # The views of some mappings are not in the order of their keys.
        return Container([node[key] for key in node], lambda items: _mapping_like(node, items))
    if isinstance(node, (list, tuple)):
        return Container(node, lambda items: _sequence_like(node, items))
    if _is_record(node):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        values = [getattr(node, name) for name in names]
        return Container(values, lambda items: _record_like(node, names, items))
    return None


def named(node: Any) -> Mapping[str, Any]:
    """Return a container's items by name: of a mapping, a named tuple or a dataclass; else nothing.

    >>> named({"input_ids": 1}), named([1])
    ({'input_ids': 1}, {})
    """
    if type(node) is dict:
        return node
    if isinstance(node, Mapping):  # asked for what it lacks, a mapping may add it
        return {key: node[key] for key in node}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return dict(zip(node._fields, node, strict=True))
    if _is_record(node):
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

    An object that stretto cannot take apart moves itself by `to(device)`, as tensors do.

    >>> move_batch({"x": torch.ones(2)}, "cpu")["x"].device.type
    'cpu'
    """
    # Some containers have a `to` that moves them in place, as Hugging Face encodings.
    if isinstance(batch, PackedSequence) or (
        opened(batch) is None and not isinstance(batch, Tensor)
    ):
        own = getattr(batch, "to", None)
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


def count_rows(batch: Any, num_samples: int) -> int:
    """Return the first dimension of what is computed from a batch: its samples, unless packed.

    >>> count_rows(torch.zeros(4, 3), 4), count_rows(torch.zeros(1, 9), 4)
    (4, 1)
    """
    container = opened(batch)
    items = [batch] if container is None else container.items
    sizes = [len(one) for one in items if isinstance(one, Tensor) and one.ndim]
    return num_samples if num_samples in sizes or not sizes else sizes[0]


def take_samples(batch: Any, part: slice | list[int], num_samples: int | None = None) -> Any:
    """Return some samples of a batch as a batch of the same kind; of a slice, tensors are views.

    >>> batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": 0.5}
    >>> take_samples(batch, slice(1, None, 2))
    {'x': tensor([1, 3]), 'names': ['b', 'd'], 'scale': 0.5}

    Args:
        batch: the batch; it is not changed.
        part: which samples, as a slice with positive step or by their places.
        num_samples: the number of samples; by default, counted.

    Raises:
        DataError: no leaf of the batch has that many samples, or its leaves contradict each other.
    """
    whole = count_samples(batch) if num_samples is None else num_samples
    found: list[Any] = []
    result = _cut(batch, part, whole, found, is_root=True)
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
        try:
            if type(first) is np.ndarray:
                return np.concatenate(batches)
            return torch.cat(list(batches))
        except (RuntimeError, TypeError, ValueError) as error:
            why = f"{type(first).__name__}: {error}"
            instead = "pad all to one length, or use a map-style data set"
            raise DataError.cannot("join batches to one", why=why, instead=instead) from error
    if lengths[0] is not None:
        return first
    if all(_is_per_sample(one, count) for one, count in zip(batches, counts, strict=True)):
        return _sequence_like(first, [item for one in batches for item in one])
    containers = [opened(one) for one in batches]
    if containers[0] is None:
        return first
    items = [container.items for container in containers if container is not None]
    joined = [join_samples(each, counts) for each in zip(*items, strict=True)]
    return containers[0].rebuilt(joined)


def _cut(
    node: Any,
    part: slice | list[int],
    num_samples: int,
    found: list[Any],
    *,
    is_root: bool = False,
) -> Any:
    """Return `part` of what is per sample in a batch, which is also added to `found`."""
    length, kind = _length(node), type(node)
    if length not in (None, num_samples, 1):
        raise not_cut(num_samples, f"a {kind.__name__} in it has {length} as its first dimension")
    if length == num_samples:
        found.append(node)
        return _rows(node, part, num_samples)
    if length is not None:
        return node
    if _is_per_sample(node, num_samples, is_root=is_root):
        found.append(node)
        items = list(node)
        places = range(num_samples)[part] if isinstance(part, slice) else part
        return _sequence_like(node, [items[place] for place in places])
    if kind is dict:
        return {key: _cut(item, part, num_samples, found) for key, item in node.items()}
    if kind is list or kind is tuple:
        return kind([_cut(item, part, num_samples, found) for item in node])
    container = opened(node)
    _check_attributes(node, container.items if container else (), num_samples)
    if container is not None:
        return container.rebuilt([_cut(item, part, num_samples, found) for item in container.items])
    is_array = kind in _WHOLE or isinstance(node, (Tensor, np.ndarray))
    if not is_array and isinstance(node, Sized) and len(node) == num_samples:
        raise not_cut(num_samples, f"{kind.__name__} in it has that length, and is no sequence")
    return node


def _rows(node: Any, part: slice | list[int], num_samples: int) -> Any:
    """Return some samples of a tensor or array; not all kinds of them can be cut."""
    if isinstance(node, PackedSequence):
        raise not_cut(num_samples, "a PackedSequence in it holds steps, not samples")
    try:
        return node[part]
    except (RuntimeError, TypeError) as error:  # nested or sparse
        why = f"a {type(node).__name__} in it cannot be sliced"
        raise not_cut(num_samples, why) from error


def _check_attributes(node: Any, items: Sequence[Any], num_samples: int) -> None:
    """Refuse an object with a tensor of all samples that is none of its items."""
    known = {id(item) for item in items}
    for name, value in getattr(node, "__dict__", {}).items():
        if id(value) not in known and _length(value) == num_samples:
            raise not_cut(num_samples, f"{type(node).__name__}.{name} holds a value for each")


def _is_per_sample(node: Any, num_samples: int, *, is_root: bool = False) -> bool:
    """Return whether a sequence has one item per sample; not if its items are per sample."""
    if isinstance(node, (str, bytes, torch.Size)) or not isinstance(node, Sequence):
        return False
    if hasattr(node, "_fields") or len(node) != num_samples:
        return False
    lengths = [_first_length(item) for item in node]
    # Beside a tensor of all samples, names, None or a scalar are fields. A tensor of another length
    # is a sample, but not in the batch itself, which was counted by its first tensor.
    return num_samples not in lengths or not (is_root or {*lengths} <= {num_samples, None})


_PLAIN = frozenset({str, int, float, bool, type(None)})
_WHOLE = _PLAIN | {bytes, torch.Size}
_NO_ARRAYS = _WHOLE | {list, tuple, dict}


def _length(node: Any) -> int | None:
    """Return the first dimension of a tensor or array; None if there is none."""
    kind = type(node)
    if kind is Tensor or isinstance(node, Tensor):  # the second is slow: torch overrides it
        return node.size(0) if node.dim() else None
    if kind is PackedSequence:
        return int(node.batch_sizes[0])
    # A property of the type, not an item of a mapping or a field that is called so.
    is_array = kind not in _NO_ARRAYS and hasattr(getattr(kind, "shape", None), "__get__")
    if not is_array or not hasattr(kind, "__getitem__"):
        return None
    is_container = isinstance(node, (Mapping, list, tuple)) or _is_record(node)
    shape = node.shape
    is_shape = isinstance(shape, torch.Size if is_container else tuple)  # of a TensorDict
    return int(shape[0]) if is_shape and len(shape) else None


def _first_length(batch: Any) -> int | None:
    lengths = map(_length, nodes(batch))
    return next((length for length in lengths if length is not None), None)


def _is_flat_list(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and all(opened(item) is None for item in node)


def _is_record(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _mapping_like(node: Mapping[Any, Any], items: list[Any]) -> Any:
    """Return a mapping with other items, and all else that `node` has."""
    pairs = dict(zip(node, items, strict=True))
    kind: Any = type(node)
    if kind is dict:
        return pairs
    if kind is MappingProxyType:
        return kind(pairs)
    before = [node[key] for key in pairs]
    try:
        if isinstance(node, dict) or hasattr(kind, "__copy__"):
            result = copy.copy(node)
            if getattr(node, "__dict__", None) is node:  # items are attributes, too
                result.__dict__ = result  # type: ignore[assignment]
        else:
            # A shallow copy would share its storage; the items in it are replaced, not copied.
            replaced = dict(zip(map(id, before), items, strict=True))
            items = [replaced[id(one)] for one in before]  # one object may be there twice
            result = copy.deepcopy(node, replaced)
        if isinstance(result, MutableMapping):
            for key, item in zip(pairs, items, strict=True):
                result[key] = item
        if not all(map(is_, (node[key] for key in pairs), before)):
            for key, item in zip(pairs, before, strict=True):
                node[key] = item  # type: ignore[index]
            raise TypeError("its copy has the same items")
    except Exception as error:
        raise _not_made(kind, f"{type(error).__name__}: {error}") from error
    return _checked(result, [result[key] for key in pairs], items)


def _sequence_like(node: Any, items: list[Any]) -> Any:
    """Return a sequence with other items, and all else that `node` has."""
    kind: Any = type(node)
    if kind is list or kind is tuple:
        return kind(items)
    try:
        if isinstance(node, tuple):
            result = tuple.__new__(kind, items)
            vars(result).update(vars(node)) if hasattr(node, "__dict__") else None
        elif isinstance(node, list):
            result = copy.copy(node)
            result[:] = items
        else:
            result = kind(items)
    except Exception as error:
        raise _not_made(kind, f"{type(error).__name__}: {error}") from error
    return _checked(result, list(result), items)


def _checked(result: Any, found: list[Any], items: list[Any]) -> Any:
    """Return what was made, if it has these very items."""
    if len(found) != len(items) or not all(map(is_, found, items)):
        raise _not_made(type(result), "a new one has other items")
    return result


def _record_like(node: Any, names: list[str], items: list[Any]) -> Any:
    """Return a dataclass with other fields; nothing is computed anew from them."""
    result = copy.copy(node)  # not `replace`, which calls __post_init__
    for name, item in zip(names, items, strict=True):
        object.__setattr__(result, name, item)
    return result


def _not_made(kind: type, why: str) -> DataError:
    return DataError.cannot(
        f"make a {kind.__name__} of other items",
        why=why,
        instead="pass DataSpec(data, split_batch=...), or give the class a __copy__",
    )
