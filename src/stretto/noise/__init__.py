"""The gradient noise scale: from what batch size on larger batches bring little, measured."""

from stretto.batching.noise_scale import GradientNoise
from stretto.noise.meter import NoiseMeter, NoiseSums

__all__ = ["GradientNoise", "NoiseMeter", "NoiseSums"]
