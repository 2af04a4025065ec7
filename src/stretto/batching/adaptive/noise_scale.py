"""`NoiseScale` and `NormTest`: the batch follows the measured noise of the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast, final

from stretto.batching.adaptive.averages import (
    LARGEST,
    STEADY,
    RatioAverage,
    checked_confidence,
    checked_window,
)
from stretto.batching.adaptive.following import (
    FollowingPolicy,
    checked_bounds,
    checked_number,
    rounded_size,
)
from stretto.batching.policy import BatchSizePolicy, PolicyState
from stretto.batching.signals import Signals
from stretto.batching.written import WAYS, written
from stretto.schedules.fields import fill
from stretto.timing import Horizon, Timestamp


@dataclass(frozen=True, slots=True)
class _FollowsNoise(BatchSizePolicy):
    """A policy that follows the averages of the measured noise."""

    start: int
    maximum: int
    minimum: int | None = field(default=None, kw_only=True)
    window: int = field(default=100, kw_only=True)
    confidence: float = field(default=0.9, kw_only=True)

    def __post_init__(self) -> None:
        least, first, most = checked_bounds(
            self.start, self.maximum, self.minimum, follows_noise=True
        )
        fill(self, start=first, maximum=most, minimum=least, window=checked_window(self.window))
        fill(self, confidence=checked_confidence(self.confidence))


@written(WAYS, "noise_scale", "c")
@final
@dataclass(frozen=True, slots=True)
class NoiseScale(_FollowsNoise):
    """Follows `c * B_noise`, where `B_noise = tr(Sigma) / |G|^2` is the gradient noise scale.

    Far below the noise scale, twice the batch needs about half the steps; far above it, about as
    many as before (McCandlish et al. 2018, arXiv 1812.06162, section 2.2). Both terms are averaged
    over `window` steps and divided at the end, with Fieller's interval around the ratio.

    The size stays as long as it lies within what the ends of the interval give, so that chance
    alone moves it little. Where it does not, it moves to what the noise scale gives; or, where that
    is not known to within a factor of 3, to the nearer end. The wrappers round it, or hold it back
    further: `PowerOfTwo(NoiseScale(8, 256))`.

    With a `power` it follows `c * B_noise ** power`. The root, `power=0.5`, costs least where a
    step costs as much as `c ** 2` samples: the same progress takes `1 + B_noise / B` steps and
    `B + B_noise` samples, and `c ** 2 * steps + samples` is least at `B = c * sqrt(B_noise)`.

    >>> from stretto import Horizon, Timestamp
    >>> from stretto.batching import Signals
    >>> bound = NoiseScale(8, 256, c=0.5, window=20).bind(Horizon("1ep"))
    >>> state = bound.start()
    >>> for batch in range(40):
    ...     seen = Signals(noise_numerator=90.0 + batch % 3, noise_denominator=1.0)
    ...     size, state = bound.decide(Timestamp(batch=batch), state, seen)
    >>> size
    45

    Args:
        start: the size until the noise is known.
        maximum: the size is never above it.
        c: which part of the noise scale the batch is; with a `power`, of that power of it.
        power: the power of the noise scale that the batch follows, above 0 and at most 1.
        minimum: the size is never below it; left out, `start`.
        window: how many measured steps the averages are over.
        confidence: the probability with which the interval holds the true noise scale.

    Raises:
        BatchSizeError: a size is not an integer of at least 2, `start` is not from `minimum` to
            `maximum`, `c` is not a positive number, or `power`, `window` or `confidence` cannot be.
    """

    c: float = field(default=1.0, kw_only=True)
    power: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        _FollowsNoise.__post_init__(self)
        c = checked_number(self.c, "the part of the noise scale that the batch is")
        power = checked_number(self.power, "the power of the noise scale", at_most=1.0)
        fill(self, c=c, power=power)

    def bind(self, horizon: Horizon) -> BoundNoiseScale:
        """Return the policy on one run."""
        del horizon
        return BoundNoiseScale(self, cast(int, self.minimum))


@final
@dataclass(frozen=True, slots=True)
class BoundNoiseScale(FollowingPolicy):
    """The noise scale on one run; remembers the size and the averages."""

    policy: NoiseScale
    minimum: int
    is_norm_test: bool = False
    """Whether it also reports the size that passes the norm test: its part of the noise scale."""

    @property
    def reads(self) -> frozenset[str]:
        """The noise of the gradient."""
        return frozenset({"noise"})

    @property
    def bounds(self) -> tuple[int, int]:
        """The minimum and the maximum."""
        return self.minimum, self.policy.maximum

    def start(self) -> PolicyState:
        """Return the first size, with nothing measured."""
        return {"size": self.policy.start, **RatioAverage().to_state()}

    def log_values(self, state: PolicyState) -> Mapping[str, float]:
        """Return what is known: the noise scale, and each end of its interval."""
        confidence, average = self.policy.confidence, RatioAverage.from_state(state)
        if not average.is_over_enough(self.policy.window):
            return {}
        interval, found = average.interval(confidence), {}
        if average.ratio is not None and interval.is_within(STEADY):
            found["noise_scale"] = average.ratio
            if self.is_norm_test:
                found["norm_test"] = self._wanted(average.ratio)
        if interval.lower > 0:
            found["noise_scale_low"] = interval.lower
        if interval.upper < math.inf:
            found["noise_scale_high"] = interval.upper
        return found

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size, moved where the noise is surely another one."""
        del timestamp
        average = RatioAverage.from_state(state).extended(
            signals.noise_numerator,
            signals.noise_denominator,
            window=self.policy.window,
            num_samples=signals.num_samples,
        )
        # The bounds of this run; it may have been resumed with others.
        size = rounded_size(cast(int, state["size"]), self.minimum, self.policy.maximum)
        size = self._moved(size, average)
        return size, {"size": size, **average.to_state()}

    def _moved(self, size: int, average: RatioAverage) -> int:
        if not average.is_over_enough(self.policy.window):
            return size
        interval = average.interval(self.policy.confidence)
        lowest, highest = self._wanted(interval.lower), self._wanted(interval.upper)
        if lowest <= size <= highest:
            return size
        wanted = lowest if size < lowest else highest
        if interval.is_within(STEADY) and average.ratio is not None:
            wanted = self._wanted(average.ratio)
        return rounded_size(wanted, self.minimum, self.policy.maximum)

    def _wanted(self, noise_scale: float) -> float:
        # An end of the interval may be below zero by a rounding error.
        return self.policy.c * math.pow(max(noise_scale, 0.0), self.policy.power)


@written(WAYS, "norm_test", "eta")
@final
@dataclass(frozen=True, slots=True)
class NormTest(_FollowsNoise):
    """Keeps the variance of the batch's gradient at `eta^2` times its squared norm.

    The norm test is `tr(Sigma) / B <= eta^2 |G_B|^2` (Byrd et al. 2012, "Sample size selection in
    optimization methods for machine learning", Mathematical Programming 134:127, equation 3.7; De
    et al. 2017, arXiv 1610.05792; Bollapragada et al. 2018, arXiv 1710.11258; on several ranks Lau
    et al. 2024, arXiv 2412.21124). The norm of a batch's gradient contains its noise, so on average
    `|G_B|^2 = |G|^2 + tr(Sigma) / B`, and the smallest batch that passes has
    `(1 / eta^2 - 1) tr(Sigma) / |G|^2` samples: that part of the gradient noise scale.

    A single test is noisy. So the size follows the averages of `window` steps with a confidence
    interval, as `NoiseScale` does: it stays while it may be the smallest size that passes, and
    otherwise it moves there. It shrinks as well, down to `minimum`. The batches of the papers never
    shrink; `Monotone(NormTest(8, 256))` is the same here.

    >>> from stretto import Horizon, Timestamp
    >>> from stretto.batching import Signals
    >>> bound = NormTest(8, 256, eta=0.5, window=20).bind(Horizon("1ep"))
    >>> state = bound.start()
    >>> for batch in range(40):
    ...     seen = Signals(noise_numerator=20.0 + batch % 3, noise_denominator=1.0)
    ...     size, state = bound.decide(Timestamp(batch=batch), state, seen)
    >>> size
    63

    Args:
        start: the size until the noise is known.
        maximum: the size is never above it.
        eta: the largest error of the batch's gradient, as a part of its norm; below 1.
        minimum: the size is never below it; left out, `start`.
        window: how many measured steps the averages are over.
        confidence: the probability with which the interval holds the true noise scale.

    Raises:
        BatchSizeError: a size is not an integer of at least 2, `start` is not from `minimum` to
            `maximum`, `eta` is not between 0 and 1, or `window` or `confidence` cannot be.
    """

    eta: float = field(default=0.9, kw_only=True)

    def __post_init__(self) -> None:
        _FollowsNoise.__post_init__(self)
        fill(self, eta=checked_number(self.eta, "the eta of a norm test", below=1.0))

    def bind(self, horizon: Horizon) -> BoundNoiseScale:
        """Return the policy on one run."""
        del horizon
        part = (1.0 - self.eta * self.eta) / self.eta / self.eta
        policy = NoiseScale(
            self.start,
            self.maximum,
            c=min(part, LARGEST),
            minimum=self.minimum,
            window=self.window,
            confidence=self.confidence,
        )
        return BoundNoiseScale(policy, cast(int, self.minimum), is_norm_test=True)
