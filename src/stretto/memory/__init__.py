"""The largest micro-batch that fits into memory, known before anything runs out of it."""

from stretto.memory.batches import resize_batch
from stretto.memory.curve import MemoryCurve, Peak
from stretto.memory.predict import Certainty, Prediction, predict
from stretto.memory.probe import Probe, probe
from stretto.memory.recognise import is_out_of_memory
from stretto.memory.recording import Place
from stretto.memory.step import TrainingStep

__all__ = [
    "Certainty",
    "MemoryCurve",
    "Peak",
    "Place",
    "Prediction",
    "Probe",
    "TrainingStep",
    "is_out_of_memory",
    "predict",
    "probe",
    "resize_batch",
]
