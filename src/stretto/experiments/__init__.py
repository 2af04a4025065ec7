"""Experiments that train many short runs; nothing else in stretto needs them."""

from stretto.experiments.branches import BranchPoint
from stretto.experiments.critical_batch_size import Branch, CriticalBatchSize

__all__ = ["Branch", "BranchPoint", "CriticalBatchSize"]
