"""What a step of training is: the object that the trainer runs and the memory finder asks about."""

from stretto.runtime.step import SupervisedStep, TrainStep

__all__ = ["SupervisedStep", "TrainStep"]
