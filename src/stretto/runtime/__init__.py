"""The base of all layers: the step, random state, out-of-memory handling, state as JSON."""

from stretto.runtime.ranks import Ranks
from stretto.runtime.step import SupervisedStep, TrainStep

__all__ = ["Ranks", "SupervisedStep", "TrainStep"]
