from __future__ import annotations

import pytest

from stretto.batching import (
    AtLeast,
    AtMost,
    BatchSizePolicy,
    DoublingRamp,
    Fixed,
    Hysteresis,
    LinearRamp,
    Monotone,
    MultipleOf,
    PeriodSizes,
    PowerOfTwo,
    SizeFunction,
    StagedRamp,
    Steps,
    as_policy,
)
from stretto.errors import BatchSizeError, TimeError
from stretto.timing import Time, Timestamp


def mine(timestamp: Timestamp, current: int | None) -> int:
    return 8


RAMP = {"ramp": "double", "start": 8, "end": 64, "over": "40%"}


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        (64, Fixed(64)),
        ("64", Fixed(64)),
        (" 1_024 ", Fixed(1024)),
        (Fixed(8), Fixed(8)),
        ("0tok:768 250Btok:1536", Steps({"0tok": 768, "250Btok": 1536})),
        ({"0tok": 768, "250Btok": 1536}, Steps({"0tok": 768, "250Btok": 1536})),
        ({Time("0ep"): 8}, Steps("0ep:8")),
        (mine, SizeFunction(mine)),
        (RAMP, DoublingRamp(8, 64, "40%")),
        (
            {"ramp": "linear", "start": 8, "end": 64, "over": "1ep", "increment": 8},
            LinearRamp(8, 64, "1ep", increment=8),
        ),
        ({"ramp": "stages", "sizes": [8, 64], "over": "1ep"}, StagedRamp([8, 64], "1ep")),
        ({"size": 64, "monotone": True}, Monotone(Fixed(64))),
        ({"steps": "0ep:8 1ep:16"}, Steps("0ep:8 1ep:16")),
        ({"steps": {"0ep": 8, "1ep": 16}}, Steps("0ep:8 1ep:16")),
        (
            {"periods": [{"duration": "10%", "size": 8}, {"duration": "rest", **RAMP}]},
            PeriodSizes([("10%", 8), ("rest", DoublingRamp(8, 64, "40%"))]),
        ),
        (
            {"at_most": 32, "hysteresis": 1.5, "power_of_two": "up", **RAMP},
            AtMost(Hysteresis(PowerOfTwo(DoublingRamp(8, 64, "40%"), "up"), 1.5), 32),
        ),
        (
            {**RAMP, "at_least": 16, "multiple_of": 8},
            AtLeast(MultipleOf(DoublingRamp(8, 64, "40%"), 8), 16),
        ),
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
        ("0", "use 0 as a batch size"),
        (-8, "use -8 as a batch size"),
        (8.0, "use 8.0 as a batch size"),
        (True, "use True as a batch size"),
        (None, "use None as a batch size"),
        (Fixed, "use <class"),
        ([8, 16], r"use \[8, 16\] as a batch size"),
        ("auto", "micro_batch_size='auto'"),
        ({}, "no key says what the size is"),
        ({"rmap": "double"}, "use the key 'rmap': .* did you mean 'ramp'"),
        ({"at_most": 8}, "no key says what the size is"),
        ({**RAMP, "size": 8}, "cannot combine 'ramp' and 'size'"),
        ({**RAMP, "ramp": "dubble"}, "use 'dubble' as a ramp: .* did you mean 'double'"),
        ({**RAMP, "ramp": ["double"]}, r"use \['double'\] as a ramp"),
        ({**RAMP, "ende": 8}, "use the key 'ende': .* did you mean 'end'"),
        ({**RAMP, "increment": 8}, "use the key 'increment'"),
        ({"ramp": "double", "start": 8, "end": 64}, "it has no 'over'"),
        ({"size": 8, "starts": 8}, "use the key 'starts'"),
        ({"size": 8, "monotone": 1}, "use 1 as monotone"),
        ({"size": 8, "power_of_two": True}, "use rounding=True"),
        ({"periods": 8}, "as periods: it is not a list"),
        ({"periods": "8"}, "as periods: it is not a list"),
        ({"periods": [8]}, "use 8 as a period"),
        ({"periods": [{"duration": "1ep"}]}, "no key says what the size is"),
        ({8: 16}, "8 is not a time"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_not_one_is_refused(written: object, match: str) -> None:
    with pytest.raises(BatchSizeError, match=match):
        as_policy(written)


def test_a_key_that_was_meant_as_a_time_is_refused_as_one() -> None:
    with pytest.raises(TimeError, match="3epoch"):
        as_policy({"0ep": 8, "3epoch": 16})


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ({**RAMP, "multiple_of": 24, "at_most": 50}, "turn 50 into 48; write 48"),
        ({**RAMP, "at_least": 3, "power_of_two": "up"}, "turn 3 into 4; write 4"),
        ({**RAMP, "power_of_two": "up", "multiple_of": 6}, "no multiple of 6 is a power of two"),
        (
            {"noise_scale": 0.3, "start": 8, "maximum": 100, "multiple_of": 128},
            "use maximum=100: .* lead to 128",
        ),
    ],
)
def test_bounds_that_the_rounding_beside_them_breaks(written: object, match: str) -> None:
    with pytest.raises(BatchSizeError, match=match):
        as_policy(written)
