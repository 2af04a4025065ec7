"""The largest batch for each length of its sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from stretto.errors import FitError, cannot
from stretto.memory.curve import MAXIMUM, MemoryCurve, evaluate, newton
from stretto.memory.fit import fit, settled
from stretto.memory.predict import SIZES, predict
from stretto.memory.step import TrainingStep
from stretto.memory.tracer import Tracer


class LengthRow(NamedTuple):
    """What fits at one length."""

    length: int
    largest: int | None
    """The largest size that fits; None where not even one sample does."""
    peak: int | None
    """What it needs, in bytes."""


@final
class MemorySurface:
    """The peak of allocated bytes for every size and every length; made by `predict_lengths`."""

    def __init__(
        self, step: TrainingStep, make_batch: Callable[[int, int], Any], lengths: Sequence[int]
    ) -> None:
        self._step = step
        self._make_batch = make_batch
        self._tracer = Tracer(step, make_batch)
        self._lengths: tuple[int, ...] = ()
        self._curves: list[MemoryCurve] = []
        for length in lengths:
            self._add(length)

    @property
    def num_steps(self) -> int:
        """How many fake steps it took."""
        return self._tracer.num_steps

    def curve(self, length: int) -> MemoryCurve:
        """Return the curve for sequences of that length."""
        if length in self._lengths:
            return self._curves[self._lengths.index(length)]
        model = self._curves[0]
        columns = zip(*(curve.allocations for curve in self._curves), strict=True)
        allocations = [
            column[0]._replace(
                bytes=tuple(
                    evaluate(self._lengths, newton(self._lengths, values), length)
                    for values in zip(*(one.bytes for one in column), strict=True)
                )
            )
            for column in columns
        ]
        return dataclasses.replace(model, allocations=allocations)

    def peak(self, size: int, length: int) -> int:
        """Return the bytes that a batch of that size and length needs at once."""
        return self.curve(length).peak(size)

    def table(
        self, lengths: Sequence[int], limit: int, *, maximum: int = MAXIMUM
    ) -> list[LengthRow]:
        """Return, for each length, the largest size that needs at most `limit` bytes.

        Each row is verified by a fake step of its size and length.
        """
        return [self._row(length, limit, maximum) for length in lengths]

    def _row(self, length: int, limit: int, maximum: int) -> LengthRow:
        curve = self.curve(length)
        size = curve.largest(limit, maximum=maximum)
        if size is None:
            return LengthRow(length, None, None)
        if self._tracer.record(size, length).peak == curve.peak(size):
            return LengthRow(length, size, curve.peak(size))
        # It bends otherwise than was thought: this length gets a prediction of its own.
        alone = predict(self._step, lambda size: self._make_batch(size, length))
        size = alone.largest(limit, maximum=maximum)
        return LengthRow(length, size, None if size is None else alone.peak(size))

    def _add(self, length: int) -> None:
        """Record steps of a length."""
        first, second = (self._tracer.record(size, length) for size in SIZES)
        if not self._curves:
            first = settled(first, second) or self._tracer.record(SIZES[0], length)
        curve = fit([first, second])
        if self._curves and [e[:2] for e in curve.events] != [
            e[:2] for e in self._curves[0].events
        ]:
            raise FitError(
                cannot(
                    f"fit the memory of sequences of {self._lengths[0]} and {length} tokens",
                    why="the step does not allocate the same tensors for both",
                    instead="predict each length by itself",
                )
            )
        self._lengths = (*self._lengths, length)
        self._curves.append(curve)


def predict_lengths(
    step: TrainingStep, make_batch: Callable[[int, int], Any], lengths: Sequence[int]
) -> MemorySurface:
    """Return what a step needs for any size of its batch and any length of its sequences.

    Six fake steps give the whole surface: the bytes of each allocation are a polynomial in the
    size whose coefficients are polynomials in the length, of degree two for attention by hand.

    >>> import torch
    >>> from stretto.examples.tiny_gpt import TinyGPT
    >>> model = TinyGPT(1, 16, context=64)
    >>> step = TrainingStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean())
    >>> batches = lambda size, length: torch.zeros(size, length, dtype=torch.long)
    >>> surface = predict_lengths(step, batches, [16, 32, 64])
    >>> [row.largest for row in surface.table([16, 32, 64], 2**24)]
    [417, 208, 104]

    Args:
        step: what is trained, and how.
        make_batch: returns a micro-batch of so many samples, of so long sequences.
        lengths: three lengths to record, the longest among them.

    Raises:
        FitError: the step cannot be taken on fake tensors, or not alike for all lengths.
    """
    return MemorySurface(step, make_batch, sorted(set(lengths)))
