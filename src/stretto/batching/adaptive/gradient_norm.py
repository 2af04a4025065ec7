"""`NormTest`: the batch is large enough for the error of its gradient to be small beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast, final

from stretto.batching.adaptive.averages import LARGEST, checked_confidence, checked_window
from stretto.batching.adaptive.following import checked_bounds, checked_number
from stretto.batching.adaptive.noise_scale import BoundNoiseScale, NoiseScale
from stretto.batching.policy import BatchSizePolicy
from stretto.batching.written import WAYS, written
from stretto.timing import Horizon


@written(WAYS, "norm_test", "eta")
@final
@dataclass(frozen=True, slots=True)
class NormTest(BatchSizePolicy):
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

    start: int
    maximum: int
    eta: float = field(default=0.9, kw_only=True)
    minimum: int | None = field(default=None, kw_only=True)
    window: int = field(default=100, kw_only=True)
    confidence: float = field(default=0.9, kw_only=True)

    def __post_init__(self) -> None:
        least, first, most = checked_bounds(
            self.start, self.maximum, self.minimum, follows_noise=True
        )
        values = {
            "start": first,
            "maximum": most,
            "minimum": least,
            "eta": checked_number(self.eta, "the eta of a norm test", below=1.0),
            "window": checked_window(self.window),
            "confidence": checked_confidence(self.confidence),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

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
