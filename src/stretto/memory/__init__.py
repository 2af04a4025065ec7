"""The largest micro-batch that fits into memory, known before anything runs out of it."""

from stretto.memory.batches import resize_batch
from stretto.memory.curve import MemoryCurve, Peak
from stretto.memory.finder import find_batch_size
from stretto.memory.predict import Certainty, Prediction, predict
from stretto.memory.probe import Probe, probe
from stretto.memory.recognise import is_out_of_memory
from stretto.memory.recording import Place
from stretto.memory.release import attempt, release_memory
from stretto.memory.result import Answer
from stretto.memory.rewind import RandomState, Rewind
from stretto.memory.sandbox import sandbox
from stretto.memory.search import Found, Sizes, search
from stretto.memory.trial import Trials, trials

__all__ = [
    "Answer",
    "Certainty",
    "Found",
    "MemoryCurve",
    "Peak",
    "Place",
    "Prediction",
    "Probe",
    "RandomState",
    "Rewind",
    "Sizes",
    "Trials",
    "attempt",
    "find_batch_size",
    "is_out_of_memory",
    "predict",
    "probe",
    "release_memory",
    "resize_batch",
    "sandbox",
    "search",
    "trials",
]
