"""Data: any batches, cut into exact ones; the position is kept in samples."""

from stretto.data.containers import count_samples, move_batch, take_samples
from stretto.data.indices import sample_seed
from stretto.data.lengths import count_lengths
from stretto.data.loader import StepLoader
from stretto.data.spec import DataSpec
from stretto.data.step import MicroBatch, Step
from stretto.data.tokens import count_target_tokens, count_tokens

__all__ = [
    "DataSpec",
    "MicroBatch",
    "Step",
    "StepLoader",
    "count_lengths",
    "count_samples",
    "count_target_tokens",
    "count_tokens",
    "move_batch",
    "sample_seed",
    "take_samples",
]
