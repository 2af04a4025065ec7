"""The time of further micro-batches, which one step in 50 tells without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, final

import torch

from stretto.data import MicroBatch

_EVERY, _OFFSET = 50, 25
"""One step of so many; not the first, which may be the only one that measures the noise."""


@final
class Further:
    """Times the micro-batches of a step after its first: by the host, on CUDA by events.

    Args:
        device: where steps run.
        ranks: data-parallel ranks. The last micro-batch of several also averages gradients, so it
            is left out.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.clock: Callable[[], int] = time.monotonic_ns
        self._device, self._ranks = device, ranks
        self._waiting: list[tuple[Any, Any, int]] = []

    def watched(
        self, batch: int, size: int | None, micro_batches: Sequence[MicroBatch]
    ) -> Iterator[MicroBatch] | Sequence[MicroBatch]:
        """Return the micro-batches of a step; iterating them takes the time if it is due.

        Only if all have the stated size: a larger batch then has more of the same.
        """
        if size is None or batch % _EVERY != _OFFSET or self._device.type not in ("cpu", "cuda"):
            return micro_batches
        last = len(micro_batches) - (1 if self._ranks == 1 else 2)
        if last < 1 or any(micro.num_samples != size for micro in micro_batches):
            return micro_batches
        return self._marked(micro_batches, last)

    def _marked(self, micro_batches: Sequence[MicroBatch], last: int) -> Iterator[MicroBatch]:
        first: Any = None
        for index, micro in enumerate(micro_batches):
            yield micro
            if index == 0:
                first = self._mark()
            elif index == last:
                samples = last * micro.num_samples * self._ranks
                self._waiting.append((first, self._mark(), samples))

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> float | None:
        """Return the mean seconds of a further sample since the last call; None: not measured."""
        done = [one for one in self._waiting if type(one[1]) is int or one[1].query()]
        self._waiting = [one for one in self._waiting if one not in done]
        seconds = [
            (end - first) * 1e-9 if type(end) is int else first.elapsed_time(end) * 1e-3
            for first, end, _ in done
        ]
        each = [one / samples for one, (*_, samples) in zip(seconds, done, strict=True)]
        return fmean(each) if each and min(each) > 0 else None
