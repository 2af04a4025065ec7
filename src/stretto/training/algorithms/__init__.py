"""Callbacks that change how a model is trained, each in units of time."""

from stretto.training.algorithms.layer_freezing import LayerFreezing
from stretto.training.algorithms.selective_backprop import SelectiveBackprop
from stretto.training.algorithms.sequence_length import SequenceLengthWarmup
from stretto.training.algorithms.stochastic_depth import StochasticDepth

__all__ = ["LayerFreezing", "SelectiveBackprop", "SequenceLengthWarmup", "StochasticDepth"]
