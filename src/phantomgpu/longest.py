"""Longest samples first: what a script's loaders give, in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import chain, islice
from typing import Any

LOOKED_AT = 2000
"""Samples that are looked at, and batches if a sampler makes them of different sizes."""
NOBODY = "no DataLoader was asked"
NOTES = [NOBODY]
"""For the report."""
_SEEN: dict[int, tuple[Any, dict[int, int]]] = {}


def start() -> None:
    """Let every DataLoader that knows its samples begin with the longest ones."""
    from torch.utils import data

    plain = data.DataLoader.__iter__

    def iterate(loader: Any) -> Any:
        before, sizes = loader.batch_sampler, {}
        if before is not None and not isinstance(loader.dataset, data.IterableDataset):
            sizes = sizes_of(loader.dataset)
        else:
            note(f"not possible for {type(loader.dataset).__name__}: it is iterable or not batched")
        if not sizes:
            return plain(loader)
        # A loader refuses another sampler; its iterator keeps the one that it begins with.
        object.__setattr__(loader, "batch_sampler", Ordered(before, sizes))
        try:
            return plain(loader)
        finally:
            object.__setattr__(loader, "batch_sampler", before)

    data.DataLoader.__iter__ = iterate  # type: ignore[method-assign]


class Ordered:
    """Batches as large as a sampler's, with the longest samples; or its own, in another order."""

    def __init__(self, batches: Any, sizes: dict[int, int]) -> None:
        self.batches, self.sizes = batches, sizes

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        rest = iter(self.batches)
        first = [list(batch) for batch in islice(rest, LOOKED_AT)]
        if len({len(batch) for batch in first[:-1]}) > 1:  # such as batches of so many tokens
            yield from sorted(first, key=self.cost, reverse=True)
            yield from rest
            return
        longest = iter(sorted(self.sizes, key=self.sizes.__getitem__, reverse=True))
        for batch in chain(first, rest):
            found = list(islice(longest, len(batch)))
            yield found if len(found) == len(batch) else batch

    def cost(self, batch: list[int]) -> int:
        """Return the elements of a batch, padded to its longest sample."""
        return len(batch) * max(self.sizes.get(one, 0) for one in batch)


def note(text: str) -> None:
    """Say it in the report, once."""
    if NOTES == [NOBODY]:
        NOTES.clear()
    if text not in NOTES:
        NOTES.append(text)


def sizes_of(data: Any) -> dict[int, int]:
    """Return how many elements samples have, from a column of lengths or from the samples."""
    if id(data) in _SEEN:
        return _SEEN[id(data)][1]
    columns = getattr(data, "column_names", None) or ()
    sizes: dict[int, int] = {}
    try:
        total = len(data)
        names = [name for name in ("length", "lengths") if name in columns]
        step = max(1, total // LOOKED_AT)
        found = data[names[0]] if names else ()
        shown = range(0, total, step)[:LOOKED_AT]
        sizes = dict(enumerate(found)) if names else {at: elements(data[at]) for at in shown}
        most = max(sizes.values())
        note(f"looked at {len(sizes)} of {total} samples; the longest has {most} elements")
    except Exception as error:  # noqa: BLE001  a data set may raise anything
        note(f"not possible for {type(data).__name__}: {error!r}")
    _SEEN[id(data)] = data, sizes
    return sizes


def elements(sample: Any) -> int:
    """Return how many numbers or characters a sample has."""
    if hasattr(sample, "numel"):
        return int(sample.numel())
    if callable(getattr(sample, "values", None)):
        sample = list(sample.values())
    if isinstance(sample, list | tuple) and sample and not isinstance(sample[0], int | float):
        return sum(map(elements, sample))
    return len(sample) if isinstance(sample, Sized) else 1
