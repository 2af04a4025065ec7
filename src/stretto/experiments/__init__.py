"""Experiments that train many short runs. No other package imports them."""

from stretto.experiments.branches import BranchPoint
from stretto.experiments.critical_batch_size import Branch, CriticalBatchSize

__all__ = ["Branch", "BranchPoint", "CriticalBatchSize"]
