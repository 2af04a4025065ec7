"""`NormTest`: the batch grows where its gradient is not sure enough of its direction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast, final

from stretto.batching.averages import RatioAverage, checked_window
from stretto.batching.following import (
    FollowingPolicy,
    checked_bounds,
    checked_number,
    rounded_size,
)
from stretto.batching.policy import BatchSizePolicy, PolicyState, Signals
from stretto.timing import Horizon, Timestamp


@final
@dataclass(frozen=True, slots=True)
class NormTest(BatchSizePolicy):
    """Grows where the variance of the batch's gradient exceeds `eta^2` times its squared norm.

    The test is `tr(Sigma) / B <= eta^2 |G_B|^2`; a batch that fails it grows to the size
    `tr(Sigma) / (eta^2 |G_B|^2)`, and never shrinks (Byrd et al. 2012, "Sample size selection in
    optimization methods for machine learning", equations 3.7 and 3.12; on several ranks Lau et al.
    2024, arXiv 2412.21124). `|G_B|^2` holds the noise of the gradient as well. It is taken as
    `|G|^2 + tr(Sigma) / B`, both averaged over `window` steps, so that batches of other sizes
    count as if they were of this one. Where nothing but noise is left, a batch grows by
    `1 / eta^2` each time, up to the maximum; else up to `(1 / eta^2 - 1) tr(Sigma) / |G|^2`.

    >>> from stretto import Horizon, Signals, Timestamp
    >>> bound = NormTest(8, 256, eta=0.5, window=4).bind(Horizon("1ep"))
    >>> state, seen = bound.start(), Signals(noise_numerator=20.0, noise_denominator=1.0)
    >>> for batch in range(20):
    ...     size, state = bound.decide(Timestamp(batch=batch), state, seen)
    >>> size
    60

    Args:
        start: the first size.
        maximum: the size is never above it.
        eta: how large the error of the gradient may be beside it, below 1.
        window: how many measured steps are averaged.

    Raises:
        BatchSizeError: a size is not an integer of at least 2, `start` is above `maximum`, `eta`
            is not between 0 and 1, or `window` cannot be.
    """

    start: int
    maximum: int
    eta: float = field(default=0.9, kw_only=True)
    window: int = field(default=20, kw_only=True)

    def __post_init__(self) -> None:
        _, first, most = checked_bounds(self.start, self.maximum, follows_noise=True)
        object.__setattr__(self, "start", first)
        object.__setattr__(self, "maximum", most)
        eta = checked_number(self.eta, "the eta of a norm test", below=1.0)
        object.__setattr__(self, "eta", eta)
        object.__setattr__(self, "window", checked_window(self.window))

    def bind(self, horizon: Horizon) -> BoundNormTest:
        """Return the policy on one run."""
        del horizon
        return BoundNormTest(self)


@final
@dataclass(frozen=True, slots=True)
class BoundNormTest(FollowingPolicy):
    """A norm test on one run; remembers the size and the averages."""

    policy: NormTest

    @property
    def reads(self) -> frozenset[str]:
        """The noise of the gradient."""
        return frozenset({"noise"})

    @property
    def bounds(self) -> tuple[int, int]:
        """The first size and the maximum."""
        return self.policy.start, self.policy.maximum

    def start(self) -> PolicyState:
        """Return the first size, with nothing measured."""
        return {"size": self.policy.start, **RatioAverage().to_state()}

    def told(self, state: PolicyState) -> Mapping[str, float]:
        """Return the least size that passes the test, once enough steps were measured."""
        average, eta = RatioAverage.from_state(state), self.policy.eta
        if average.ratio is None or not average.is_over_enough(self.policy.window):
            return {}
        return {"norm_test": average.ratio * (1.0 - eta * eta) / eta / eta}

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size, grown where it fails the test."""
        del timestamp
        window, (least, most) = self.policy.window, self.bounds
        # The bounds of this run; it may have been resumed with others.
        size = rounded_size(cast(int, state["size"]), least, most)
        average = RatioAverage.from_state(state).extended(
            signals.noise_numerator,
            signals.noise_denominator,
            window=window,
            num_samples=signals.num_samples,
        )
        if average.numerator > 0 and average.is_over_enough(window):
            # In units of the noise, so that nothing overflows or vanishes.
            gradient = 1.0 / size + max(average.denominator, 0.0) / average.numerator
            eta = self.policy.eta
            needed = min(1.0 / gradient / eta / eta, most)  # eta^2 might be too small for a float
            size = rounded_size(math.ceil(needed), size, most)
        return size, {"size": size, **average.to_state()}
