"""Indices of samples as workers get them, and their random state."""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from stretto.ordering import FACTOR_1, FACTOR_2, MASK, SampleOrder, network

_FIRST_BLOCK = 1 << 10
_BLOCK = 1 << 15  # 0.06 us an index; larger blocks leave the cache, smaller ones pay for each call


@final
class IndexStream:
    """The indices that one rank reads, in order: place j is position `rank + j * world_size`.

    The first blocks are small, so the first batch does not wait.

    >>> stream = IndexStream(SampleOrder(6, shuffle=False), rank=1, world_size=2)
    >>> stream.take(0, 4), stream.tensor(4, 1)
    ([1, 3, 5, 1], tensor([3]))

    Args:
        order: the sample at each position.
        rank: whose stream it is.
        world_size: how many ranks there are.
        with_epoch: give `epoch * num_samples + index` instead of the index.
    """

    def __init__(
        self, order: SampleOrder, *, rank: int = 0, world_size: int = 1, with_epoch: bool = False
    ) -> None:
        self._order = order
        self._rank = rank
        self._world_size = world_size
        self._with_epoch = with_epoch
        self._length = _FIRST_BLOCK
        self._start = 0
        self._end = 0
        self._block = torch.empty(0, dtype=torch.int64)
        self._listed: list[int] | None = None

    def tensor(self, place: int, count: int) -> Tensor:
        """Return the indices at `count` places from `place` on."""
        if not self._start <= place <= place + count <= self._end:
            self._fill(place, count)
        return self._block[place - self._start : place - self._start + count]

    def take(self, place: int, count: int) -> list[int]:
        """Return the indices at `count` places from `place` on, as a list."""
        if not self._start <= place <= place + count <= self._end:
            self._fill(place, count)
        if self._listed is None:
            self._listed = self._block.tolist()
        return self._listed[place - self._start : place - self._start + count]

    def at(self, position: int) -> int:
        """Return the index at a position of the run, of any rank."""
        order = self._order
        before = order.epoch_of(position) * order.num_samples if self._with_epoch else 0
        return before + order[position]

    def _fill(self, place: int, count: int) -> None:
        kept = self._block[place - self._start :] if self._start <= place < self._end else None
        after = self._end if kept is not None else place
        missing = place + count - after
        fresh = self._generated(after, missing, max(self._length, missing))
        self._block = fresh if kept is None else torch.cat([kept, fresh])
        self._start, self._end = place, after + len(fresh)
        self._listed = None
        self._length = min(2 * self._length, _BLOCK)

    def _generated(self, place: int, least: int, most: int) -> Tensor:
        """Return `least` to `most` indices from `place` on; extra ones only from the same epoch."""
        order, world = self._order, self._world_size
        epoch, within = divmod(self._rank + place * world, order.num_samples)
        parts, count = [], 0
        while count < least:
            here = min(most - count, -((within - order.num_samples) // world))
            parts.append(self._indices(range(within, within + here * world, world), epoch))
            count += here
            crossed, within = divmod(within + here * world, order.num_samples)
            epoch += crossed
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _indices(self, within: range, epoch: int) -> Tensor:
        order = self._order
        before = epoch * order.num_samples if self._with_epoch else 0
        if not order.shuffle:
            return torch.arange(before + within.start, before + within.stop, within.step)
        block = torch.arange(within.start, within.stop, within.step)
        return permuted_block(block, order, epoch).add_(before)


def permuted_block(within: Tensor, order: SampleOrder, epoch: int) -> Tensor:
    """Return `order[epoch * num_samples + i]` for each `i` of an int64 tensor.

    The same permutation as `stretto.ordering`'s, in 64-bit integers that wrap around. In place
    where it can be: five times as fast as one expression per line.

    >>> order = SampleOrder(100, seed=3)
    >>> permuted_block(torch.arange(100), order, 2).tolist() == [order[200 + i] for i in range(100)]
    True
    """
    if order.group > 1:
        group = torch.div(within, order.group, rounding_mode="floor")
        inside = within - group * order.group
        groups = permuted_block(group, order.in_rows(order.group), epoch)
        return groups.mul_(order.group).add_(inside)
    num_samples, above, below, keys = network(order.num_samples, order.seed, epoch)
    result = within
    todo: Tensor | None = None
    while True:
        upper = torch.div(within, below, rounding_mode="floor")
        lower = within - upper * below
        for number, key in enumerate(keys):
            if number % 2:
                _move(lower, upper, key, below)
            else:
                _move(upper, lower, key, above)
        walked = upper.mul_(below).add_(lower)
        result = walked if todo is None else result.index_put_((todo,), walked)
        outside = walked >= num_samples
        if not outside.any():
            return result
        todo = outside.nonzero().squeeze(1) if todo is None else todo[outside]
        within = walked[outside]


def _move(half: Tensor, other: Tensor, key: int, size: int) -> None:
    mixed = other ^ key
    mixed.mul_(FACTOR_1)
    mixed.bitwise_xor_(mixed >> 15)
    mixed.mul_(FACTOR_2).bitwise_and_(MASK)
    mixed.mul_(size).bitwise_right_shift_(32)
    # (half + mixed) % size without a division: the sum is below twice the size.
    half.add_(mixed).sub_(size)
    half.add_((half >> 63).bitwise_and_(size))


class Bundle(NamedTuple):
    """Samples whose tensors are joined by dtype.

    A worker sends each tensor through shared memory and a file of its own: 128 samples of two
    tensors, fetched ahead by several workers, are more open files than a process may have.

    >>> bundle = Bundle.of([{"x": torch.ones(2)}, {"x": torch.zeros(1)}])
    >>> bundle.samples()
    [{'x': tensor([1., 1.])}, {'x': tensor([0.])}]
    """

    rest: bytes
    """The samples without their tensors."""
    joined: dict[torch.dtype, Tensor]
    """The elements of all tensors, by dtype."""
    shapes: list[tuple[torch.dtype, torch.Size]]
    """The tensors in the order of the samples."""

    @classmethod
    def of(cls, samples: list[Any]) -> Bundle:
        """Bundle some samples."""
        file = io.BytesIO()
        writer = _Writer(file)
        writer.dump(samples)
        parts: dict[torch.dtype, list[Tensor]] = {}
        for tensor in writer.tensors:
            parts.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        shapes = [(tensor.dtype, tensor.shape) for tensor in writer.tensors]
        joined = {dtype: torch.cat(some) for dtype, some in parts.items()}
        return cls(file.getvalue(), joined, shapes)

    def samples(self) -> list[Any]:
        """Return the samples; their tensors are views."""
        parts = {
            dtype: iter(joined.split([shape.numel() for one, shape in self.shapes if one == dtype]))
            for dtype, joined in self.joined.items()
        }
        tensors = [
            next(parts[dtype]) if len(shape) == 1 else next(parts[dtype]).view(shape)
            for dtype, shape in self.shapes
        ]
        samples: list[Any] = _Reader(self.rest, tensors).load()
        return samples


@final
class _Writer(pickle.Pickler):
    """Pickles samples without their plain tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a plain tensor; None for anything else."""
        if type(value) is not Tensor or value.requires_grad:
            return None
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


@final
class _Reader(pickle.Unpickler):
    """Unpickles samples with their tensors; the data come from this process's own worker."""

    def __init__(self, rest: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(rest))
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        """Return the tensor with a number."""
        tensor: Tensor = self._tensors[number]
        return tensor


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return a 64-bit seed for the randomness of one sample in one epoch.

    >>> sample_seed(7, 0, 42)
    17175792034451929803

    Args:
        seed: the seed of the run.
        epoch: the epoch, from 0.
        index: the sample's index in the data set.
    """
    digest = blake2b(f"{seed} {epoch} {index}".encode(), digest_size=8, person=b"stretto-sample")
    return int.from_bytes(digest.digest(), "little")


def seed_generators(seed: int) -> None:
    """Seed the generators of torch (CPU), Python and, if it is imported, NumPy.

    It seeds torch's CPU generator directly, in 1 us; `torch.manual_seed` takes 114.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the generators of the host; afterwards they go on as before.

    NumPy's gets another source of bits for the while, in 2 us; its state is copied in 170.
    """
    numpy = sys.modules.get("numpy")
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    bits = None if numpy is None else numpy.random.get_bit_generator()
    try:
        if numpy is not None:
            numpy.random.set_bit_generator(_spare_bits())
        seed_generators(seed)
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_bit_generator(bits)


@cache
def _spare_bits() -> Any:
    return sys.modules["numpy"].random.MT19937(0)
