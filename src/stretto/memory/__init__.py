"""Find the largest micro-batch that fits into memory, before anything runs out of it."""

from stretto.memory.answer import Answer, Certainty
from stretto.memory.examples import UnequalSamples
from stretto.memory.finder import find_batch_size
from stretto.memory.sandbox import sandbox
from stretto.memory.seconds import measure_step
from stretto.memory.trial import Trials, trials

__all__ = [
    "Answer",
    "Certainty",
    "Trials",
    "UnequalSamples",
    "find_batch_size",
    "measure_step",
    "sandbox",
    "trials",
]
