"""Callbacks that change how a model is trained, each in units of time; and one that reports."""

from stretto.training.algorithms.moving_average import ExponentialMovingAverage
from stretto.training.algorithms.speedups import (
    LayerFreezing,
    SelectiveBackprop,
    SequenceLengthWarmup,
    StochasticDepth,
)
from stretto.training.algorithms.watching import EarlyStopping, NoiseReport

__all__ = [
    "EarlyStopping",
    "ExponentialMovingAverage",
    "LayerFreezing",
    "NoiseReport",
    "SelectiveBackprop",
    "SequenceLengthWarmup",
    "StochasticDepth",
]
