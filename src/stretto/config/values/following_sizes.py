"""Batch sizes that follow what the run measures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stretto.batching import BatchSizePolicy, NoiseScale, NormTest, Plateau
from stretto.config.values.fields import Count, Number
from stretto.config.values.sizes import WrittenSizes


class FollowingSizes(WrittenSizes):
    """Sizes that have no end of their own."""

    maximum: Count
    """The size is never above it."""

    start: Count
    """The first size."""

    @property
    def _largest(self) -> int:
        return self.maximum

    @property
    def _smallest(self) -> tuple[str, int]:
        return "start", self.start


class NoisySizes(FollowingSizes):
    """Sizes that follow the noise of the gradient."""

    start: Count
    """The size until the noise is known."""
    minimum: Count | None = None
    """The size is never below it; left out, `start`."""
    window: Count = 100
    """How many measured steps the noise is averaged over."""
    confidence: Number = 0.9
    """The probability with which the interval holds that the size stays in."""

    @property
    def _smallest(self) -> tuple[str, int]:
        return ("start", self.start) if self.minimum is None else ("minimum", self.minimum)


class NoiseScaleSizes(NoisySizes):
    """Follows a part of the gradient noise scale."""

    noise_scale: Number
    """Which part of the noise scale the batch is, such as 0.3; with a power, of that power."""
    power: Number = 1.0
    """Which power of the noise scale the batch follows: 0.5 is its square root."""

    def _written(self) -> BatchSizePolicy:
        return NoiseScale(
            self.start,
            self.maximum,
            c=self.noise_scale,
            power=self.power,
            minimum=self.minimum,
            window=self.window,
            confidence=self.confidence,
        )


class NormTestSizes(NoisySizes):
    """The smallest size that passes the norm test."""

    norm_test: Number
    """The largest error of the batch's gradient, as a part of its norm; below 1."""

    def _written(self) -> BatchSizePolicy:
        return NormTest(
            self.start,
            self.maximum,
            eta=self.norm_test,
            minimum=self.minimum,
            window=self.window,
            confidence=self.confidence,
        )


class PlateauSizes(FollowingSizes):
    """Grows when a metric has stopped improving."""

    plateau: Annotated[str, Field(examples=["validation/loss"])]
    """Which metric: the name of an evaluation and what it measures."""
    factor: Number = 2.0
    """By how much it grows at once."""
    patience: Count = 2
    """After how many evaluations without improvement."""
    threshold: Number = 1e-4
    """By which part of the best value another must be better."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more of the metric is better."""

    def _written(self) -> BatchSizePolicy:
        return Plateau(
            self.plateau,
            start=self.start,
            maximum=self.maximum,
            factor=self.factor,
            patience=self.patience,
            threshold=self.threshold,
            mode=self.mode,
        )
