"""A `Seesaw` or its relative on one run: the size and the learning rate at any time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import final

from stretto.batching.decay import Decay
from stretto.batching.policy import Hold, TimedPolicy
from stretto.timing import Timestamp, TimeUnit

_SLACK = 1e-9
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
        return self.decay.top * _power(1 / self.factor, _steps(cut, self.factor))

    def size_at(self, timestamp: Timestamp) -> int:
        """Return the size: that without the growth, times the growth, rounded and bounded."""
        return self.grown(self.sizes.size_at(timestamp), self.decay.cut_at(timestamp))

    def grown(self, size: int, cut: float) -> int:
        """Return what becomes of `size` once the schedule is cut to the part `cut` of its peak."""
        grown = min(math.floor(size * self._growth(cut)), self.maximum)
        return max(self.multiple_of, grown - grown % self.multiple_of)

    def _growth(self, cut: float) -> Fraction:
        if cut >= 1:
            return Fraction(1)
        if self.factor is None:
            return Fraction(min((1 + _SLACK) / cut, self.maximum) if cut else self.maximum)
        steps = _steps(cut, self.factor)
        most = math.ceil(math.log(self.maximum, self.factor))  # any size is the maximum then
        return self.factor ** (most if steps is None else min(steps, most))


@final
@dataclass(frozen=True, slots=True)
class BoundCoupledSizes(TimedPolicy):
    """The batch sizes of the pair on one run."""

    coupling: BoundCoupling

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
    return max(0, math.floor(-math.log(cut) / math.log(factor) + _SLACK))


def _power(base: Fraction, exponent: int | None) -> float:
    return 0.0 if exponent is None else float(base) ** exponent
