"""Longest samples: what a script's loaders give, instead of all others.

The longest batch is given again and again: in the first step, the optimizer has no state yet, and
nobody knows how many batches make a step, or how many a loader makes beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import chain, islice
from typing import Any

LOOKED_AT = 2000
"""Samples that are looked at, and batches if a sampler makes them of different sizes."""
NOBODY = "no DataLoader was asked"
NOTES: dict[str, None] = {}
"""For the report; in the order in which they were made."""
_SEEN: dict[int, tuple[Any, dict[int, int]]] = {}


def start() -> None:
    """Let every DataLoader that knows its samples give the longest ones, in each batch."""
    from torch.utils import data

    NOTES[NOBODY] = None
    plain = data.DataLoader.__iter__

    def iterate(loader: Any) -> Any:
        NOTES.pop(NOBODY, None)
        before = loader.batch_sampler
        if before is None:
            NOTES["not possible without batches: batch_size is None"] = None
        sizes = sizes_of(loader.dataset) if before is not None else {}
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
    """As many batches as a sampler's, each of the longest samples; or its own longest."""

    def __init__(self, batches: Any, sizes: dict[int, int]) -> None:
        self.batches, self.sizes = batches, sizes

    def __iter__(self) -> Iterator[list[int]]:
        rest = iter(self.batches)
        first = [list(batch) for batch in islice(rest, LOOKED_AT)]
        if len({len(batch) for batch in first[:-1]}) > 1:  # such as batches of so many tokens
            largest = max(first, key=self.padded)
            yield from (largest for _ in chain(first, rest))
            return
        longest = sorted(self.sizes, key=self.sizes.__getitem__, reverse=True)
        for batch in chain(first, rest):
            yield longest[: len(batch)] if len(batch) <= len(longest) else batch

    def padded(self, batch: list[int]) -> int:
        """Return the elements of a batch, padded to its longest sample."""
        return len(batch) * max(self.sizes.get(one, 0) for one in batch)


def sizes_of(data: Any) -> dict[int, int]:
    """Return how many elements samples have, from a column of lengths or from the samples."""
    if id(data) in _SEEN:
        return _SEEN[id(data)][1]
    sizes: dict[int, int] = {}
    try:
        total = len(data)
        columns = {"length", "lengths"} & {*(getattr(data, "column_names", None) or ())}
        if columns:
            sizes = dict(enumerate(data[min(columns)]))
        else:
            shown = range(0, total, max(1, total // LOOKED_AT))[:LOOKED_AT]
            sizes = {at: elements(data[at]) for at in shown}
        most = max(sizes.values())
        said = f"looked at {len(sizes)} of {total} samples; the longest has {most} elements"
    except Exception as error:  # noqa: BLE001  a data set may raise anything
        said = f"not possible for {type(data).__name__}: {error!r}"
    NOTES[said] = None
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
