"""The gradient noise scale: from what batch size on larger batches bring little, measured."""

from stretto.batching.noise_scale import Interval
from stretto.noise.estimator import NoiseEstimator, NoiseSums, NoiseTerms, noise_terms
from stretto.noise.meter import NoiseMeter

__all__ = [
    "Interval",
    "NoiseEstimator",
    "NoiseMeter",
    "NoiseSums",
    "NoiseTerms",
    "noise_terms",
]
