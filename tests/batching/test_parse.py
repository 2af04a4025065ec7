from __future__ import annotations

import pytest

from stretto.batching import (
    AsManyAsFit,
    BatchSizePolicy,
    Fixed,
    PiecewiseConstant,
    SizeFunction,
    as_policy,
)
from stretto.errors import BatchSizeError
from stretto.timing import Time, Timestamp


def mine(timestamp: Timestamp, current: int | None) -> int:
    return 8


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        (64, Fixed(64)),
        ("64", Fixed(64)),
        (" 1_024 ", Fixed(1024)),
        (Fixed(8), Fixed(8)),
        ("0tok:768 250Btok:1536", PiecewiseConstant({"0tok": 768, "250Btok": 1536})),
        ({"0tok": 768, "250Btok": 1536}, PiecewiseConstant({"0tok": 768, "250Btok": 1536})),
        ({Time("0ep"): 8}, PiecewiseConstant("0ep:8")),
        ("auto", AsManyAsFit()),
        (mine, SizeFunction(mine)),
    ],
    # A function by its name: its repr holds an address, and workers must agree on ids.
    ids=lambda value: getattr(value, "__name__", repr(value))[:40],
)
def test_policies_as_they_are_written(written: object, policy: BatchSizePolicy) -> None:
    assert as_policy(written) == policy


@pytest.mark.parametrize(
    ("written", "match"),
    [
        (0, "use 0 as a batch size"),
        ("0", "use '0' as a batch size"),
        (-8, "use -8 as a batch size"),
        (8.0, "use 8.0 as a batch size"),
        (True, "use True as a batch size"),
        (None, "use None as a batch size"),
        (Fixed, "use <class"),
        ([8, 16], r"use \[8, 16\] as a batch size"),
        ({}, "none"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_not_one_is_refused(written: object, match: str) -> None:
    with pytest.raises(BatchSizeError, match=match):
        as_policy(written)
