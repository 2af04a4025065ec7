from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.data import sample_seed
from stretto.data.indices import seed_generators
from stretto.runtime.random_state import kept_generators


@given(st.integers(), st.integers(0), st.integers(0), st.integers(0, 2), st.integers(1, 5))
def test_seeds_differ_wherever_anything_differs(
    seed: int, epoch: int, index: int, which: int, by: int
) -> None:
    place = [seed, epoch, index]
    one = sample_seed(*place)
    place[which] += by
    assert sample_seed(*place) != one
    assert 0 <= one < 2**64


def test_seeds_are_pinned_for_ever() -> None:
    assert sample_seed(0, 0, 0) == PINNED


PINNED = 14213398452810288432


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002


def test_generators_are_seeded_and_put_back() -> None:
    seed_generators(1)
    first = draws()
    with kept_generators():
        seed_generators(2)
        inner = draws()
    second = draws()
    seed_generators(1)
    assert (draws(), draws()) == (first, second)
    seed_generators(2)
    assert draws() == inner
