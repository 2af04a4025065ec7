"""Find the largest micro-batch that fits into memory, before anything runs out of it."""

from stretto.memory.finding.finder import find_batch_size
from stretto.memory.finding.num_ranks import RanksAnswer, find_num_ranks
from stretto.memory.finding.result import Answer
from stretto.memory.measuring.probe import Probe, probe
from stretto.memory.measuring.sandbox import sandbox
from stretto.memory.measuring.trial import Trials, trials
from stretto.memory.prediction.certainty import Certainty
from stretto.memory.prediction.cuda.prediction import CudaPrediction
from stretto.memory.prediction.curve import MemoryCurve, Peak
from stretto.memory.prediction.predict import Prediction, predict
from stretto.memory.prediction.recording import Place

__all__ = [
    "Answer",
    "Certainty",
    "CudaPrediction",
    "MemoryCurve",
    "Peak",
    "Place",
    "Prediction",
    "Probe",
    "RanksAnswer",
    "Trials",
    "find_batch_size",
    "find_num_ranks",
    "predict",
    "probe",
    "sandbox",
    "trials",
]
