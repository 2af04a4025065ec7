"""Callbacks that change how a model is trained, each in units of time; and one that reports.

`freeze`, `truncate`, `select`, `drop_layers` and `scale` are the same without a clock.
"""

from stretto.training.algorithms.functions import drop_layers, freeze, select, truncate
from stretto.training.algorithms.moving_average import ExponentialMovingAverage
from stretto.training.algorithms.speedups import (
    LayerFreezing,
    SelectiveBackprop,
    SequenceLengthWarmup,
    StochasticDepth,
)
from stretto.training.algorithms.watching import EarlyStopping, NoiseReport
from stretto.training.settings import scale

__all__ = [
    "EarlyStopping",
    "ExponentialMovingAverage",
    "LayerFreezing",
    "NoiseReport",
    "SelectiveBackprop",
    "SequenceLengthWarmup",
    "StochasticDepth",
    "drop_layers",
    "freeze",
    "scale",
    "select",
    "truncate",
]
