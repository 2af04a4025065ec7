"""Timestamps that have no counts that only the run knows."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
from collections.abc import Callable
from fractions import Fraction
from operator import add, and_, eq, floordiv, ge, gt, le, lt, mod, mul, ne, sub, truediv
from typing import Any

import pytest

from stretto.timing import Horizon, Time, Timer, Timestamp
from stretto.timing.epochs import UnknownCountError, known_counts, unknown_counters

WALL = {"run_nanoseconds", "job_nanoseconds", "epoch_nanoseconds", "batch_nanoseconds"}
TOKENS = {"token", "token_in_epoch"}
EPOCHS = {"epoch", "batch_in_epoch", "sample_in_epoch", "token_in_epoch"}


@pytest.mark.parametrize(
    ("facts", "unknown"),
    [
        ({}, WALL | TOKENS | EPOCHS),
        ({"dataset_num_samples": 9}, WALL | TOKENS),
        ({"dataset_num_samples": 9, "tokens_per_sample": 2}, WALL),
    ],
)
def test_what_only_the_run_knows(facts: dict[str, int], unknown: set[str]) -> None:
    assert unknown_counters(Horizon("9ba", **facts)) == unknown  # type: ignore[arg-type]


def isinstance_int(count: object) -> bool:
    return isinstance(count, int)


OPERATIONS: list[Callable[[Any], object]] = [
    *(lambda count, one=one: one(count, 3) for one in (lt, le, gt, ge, eq, ne)),
    *(lambda count, one=one: one(count, 3) for one in (add, sub, mul, truediv, floordiv, mod)),
    *(lambda count, one=one: one(3, count) for one in (add, sub, floordiv, pow, divmod, and_, eq)),
    *(int, float, bool, hash, str, repr, abs, round, range, len, list, copy.copy, copy.deepcopy),
    *(math.floor, math.sqrt, math.log, operator.index, operator.neg, isinstance_int, Fraction),
    lambda count: f"{count:,}",
    lambda count: f"%d{''}" % count,
    lambda count: count.bit_length(),
    lambda count: count.real,
    lambda count: count in (0, 1),
    lambda count: {count: 1},
    lambda count: max(count, 1),
    lambda count: sorted([1, count]),
    lambda count: 8 if count else 16,
    lambda count: count or 8,
    lambda count: [8, 16][count],
    lambda count: sum([count]),
    lambda count: Time(count, "tok"),
    pickle.dumps,
]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "read",
    [
        lambda known: known.token,
        lambda known: known[3],
        lambda known: next(one for at, one in enumerate(known) if at == 3),
        lambda known: known._asdict()["token"],
        lambda known: Timestamp(*known).token,
        lambda known: known._replace(sample=1).token,
        lambda known: Timer.at(known, Horizon("9ba")).token,
    ],
)
def test_a_hidden_count_refuses_every_operation_however_it_is_read(
    read: Callable[[Timestamp], int], operation: Callable[[int], object]
) -> None:
    known = known_counts(Timestamp(sample=3, token=9), TOKENS)
    assert (known.sample, Timer.at(known, Horizon("9ba")).sample) == (3, 3)
    with pytest.raises(UnknownCountError) as caught:
        operation(read(known))
    assert (caught.value.name, caught.value.unit) == ("token", "tok")


def test_a_timer_reads_none() -> None:
    known = known_counts(Timestamp(sample=3, token=9), TOKENS)
    for read in (
        lambda: Timer.at(known, Horizon("9ba")).get("tok"),
        lambda: json.dumps(known.to_state()),
    ):
        with pytest.raises((UnknownCountError, TypeError)):
            read()
