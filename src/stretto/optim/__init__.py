"""Hyper-parameters of an optimizer as functions of time, and torch's schedulers among them."""

from stretto.optim.from_torch import TorchSchedule, from_torch
from stretto.optim.hyperparameters import Hyperparameters

__all__ = ["Hyperparameters", "TorchSchedule", "from_torch"]
