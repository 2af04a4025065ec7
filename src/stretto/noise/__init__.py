"""The gradient noise scale: from what batch size on larger batches bring little, measured."""

from stretto.batching.adaptive.averages import Interval
from stretto.noise.estimator import NoiseEstimator
from stretto.noise.measure import MicroGradients
from stretto.noise.terms import NoiseSums, NoiseTerms, noise_terms

__all__ = [
    "Interval",
    "MicroGradients",
    "NoiseEstimator",
    "NoiseSums",
    "NoiseTerms",
    "noise_terms",
]
