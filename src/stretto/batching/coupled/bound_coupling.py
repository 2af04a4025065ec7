"""A `Seesaw` or its relative on one run: the size and the learning rate at any time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import final

from stretto.batching.coupled.decay import Decay
from stretto.batching.policy import Hold, TimedPolicy
from stretto.timing import Timestamp, TimeUnit

SLACK = 1e-9
"""By which part a cut may fall short: 0.1 ** 2 is a little more than 0.01."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCoupling:
    """The pair on one run."""

    decay: Decay
    sizes: TimedPolicy
    """The sizes without the growth."""
    factor: Fraction | None
    """By how much the batch grows at once; None: continuously."""
    smooth: bool
    maximum: int
    multiple_of: int
    reference: int
    power: float

    def rate(self, timestamp: Timestamp) -> float:
        """Return the factor of the learning rate, which the power of the size is part of."""
        return self.base(timestamp) * math.pow(self.size_at(timestamp) / self.reference, self.power)

    def base(self, timestamp: Timestamp) -> float:
        """Return the factor that it would be at a constant batch of the reference size."""
        cut = self.decay.cut_at(timestamp)
        if self.smooth or self.factor is None or self.decay.is_before_peak(timestamp):
            return self.decay.value(timestamp)
        return self.decay.top * _fallen(self.factor, _steps(cut, self.factor))

    def size_at(self, timestamp: Timestamp) -> int:
        """Return the size: that without the growth, times the growth, rounded and bounded."""
        return self.grown(self.sizes.size_at(timestamp), self.decay.cut_at(timestamp))

    def grown(self, size: int, cut: float) -> int:
        """Return what becomes of `size` once the schedule is cut to the part `cut` of its peak."""
        grown = min(self._grown(size, cut), self.maximum)
        return max(self.multiple_of, grown - grown % self.multiple_of)

    def _grown(self, size: int, cut: float) -> int:
        if cut >= 1:
            return size
        if self.factor is None:
            growth = min((1 + SLACK) / cut, self.maximum) if cut else self.maximum
            return math.floor(size * Fraction(growth))
        steps, enough = _steps(cut, self.factor), math.log(self.maximum) / _log(self.factor)
        steps = math.ceil(enough if steps is None else min(steps, enough))
        bits = 128 + self.maximum.bit_length()
        below, above = (size * power >> bits for power in _powers(self.factor, steps, bits))
        # They differ where the product is a whole number: after few steps, whose power is short.
        return below if below == above else math.floor(size * self.factor**steps)


@final
@dataclass(frozen=True, slots=True)
class BoundCoupledSizes(TimedPolicy):
    """The batch sizes of the pair on one run."""

    coupling: BoundCoupling

    @property
    def is_coupled(self) -> bool:
        """The learning rate goes by them."""
        return True

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The least of the sizes without the growth, rounded, and the maximum."""
        without, grown = self.coupling.sizes.bounds, self.coupling.grown
        return None if without is None else (grown(without[0], 1.0), grown(without[1], 0.0))

    @property
    def units(self) -> frozenset[TimeUnit]:
        """The unit that the schedule is read on, and those of the sizes before it decays."""
        return self.coupling.sizes.units | {self.coupling.decay.axis.unit}

    def size_at(self, timestamp: Timestamp) -> int:
        """Return the size."""
        return self.coupling.size_at(timestamp)

    def holds_until(self, timestamp: Timestamp, state: object) -> Hold | None:
        """Return a hold until the schedule has fallen enough for another size."""
        coupling = self.coupling
        inner = coupling.sizes.holds_until(timestamp, {})
        if inner is None:
            return None
        del state
        size = coupling.sizes.size_at(timestamp)
        now = coupling.size_at(timestamp)
        tick = coupling.decay.next_change(timestamp, lambda cut: coupling.grown(size, cut) > now)
        return inner if tick is None else inner & Hold(((coupling.decay.axis, tick),))


def _steps(cut: float, factor: Fraction) -> int | None:
    """How often the factor goes into a cut; None where there is nothing left."""
    if cut <= 0:
        return None
    return max(0, math.floor(-math.log(cut) / _log(factor) + SLACK))


def _log(factor: Fraction) -> float:
    return math.log1p(float(factor - 1))  # a float has 7 digits more of 1e-7 than of 1 + 1e-7


def _powers(factor: Fraction, exponent: int, bits: int) -> tuple[int, int]:
    """Return whole numbers that `factor ** exponent * 2 ** bits` lies between, both close to it.

    The exact power of 1.0001 up to 64 times the size has 170,000 digits, and takes 30 ms.
    """
    below = above = 1 << bits
    low = below * factor.numerator // factor.denominator
    high = low + 1
    while exponent:
        if exponent & 1:
            below, above = below * low >> bits, (above * high >> bits) + 1
        low, high = low * low >> bits, (high * high >> bits) + 1
        exponent >>= 1
    return below, above


def _fallen(factor: Fraction, steps: int | None) -> float:
    """What is left of 1 after so many divisions by the factor."""
    return 0.0 if steps is None else float(Fraction(1 << 128, _powers(factor, steps, 128)[0]))
