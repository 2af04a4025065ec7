"""The gradient noise scale: from what batch size on larger batches bring little, measured."""

from stretto.batching.noise_scale import Interval
from stretto.noise.estimator import NoiseEstimator, NoiseSums, NoiseTerms, noise_terms
from stretto.noise.measure import MicroGradients

__all__ = [
    "Interval",
    "MicroGradients",
    "NoiseEstimator",
    "NoiseSums",
    "NoiseTerms",
    "noise_terms",
]
