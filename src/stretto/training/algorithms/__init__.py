"""Callbacks that change how a model is trained, each in units of time; and one that reports."""

from stretto.training.algorithms.early_stopping import EarlyStopping
from stretto.training.algorithms.layer_freezing import LayerFreezing
from stretto.training.algorithms.moving_average import ExponentialMovingAverage
from stretto.training.algorithms.noise_report import NoiseReport
from stretto.training.algorithms.selective_backprop import SelectiveBackprop
from stretto.training.algorithms.sequence_length import SequenceLengthWarmup
from stretto.training.algorithms.stochastic_depth import StochasticDepth

__all__ = [
    "EarlyStopping",
    "ExponentialMovingAverage",
    "LayerFreezing",
    "NoiseReport",
    "SelectiveBackprop",
    "SequenceLengthWarmup",
    "StochasticDepth",
]
