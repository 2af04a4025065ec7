"""Megatron's batch size settings: equal to its calculators at every step."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import BatchSizePolicy, LinearRamp, PiecewiseConstant, from_megatron
from stretto.errors import StrettoError
from stretto.planning import plan
from stretto.timing import Horizon

STEPS = 60
"""Batches of each run here."""


def calculators(name: str) -> list[Any]:
    """Return that class of each Megatron Core on the path; its module is loaded on its own."""
    found = []
    for number, folder in enumerate(sys.path):
        path = Path(folder) / "megatron" / "core" / "num_microbatches_calculator.py"
        if path.is_file():
            spec = importlib.util.spec_from_file_location(f"calculators_{number}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found.append(getattr(module, name, None))
    return [one for one in found if one is not None]


STEPPED = calculators("StepBatchsizeNumMicroBatchesCalculator")
RAMPED = calculators("RampupBatchsizeNumMicroBatchesCalculator")


def batches(policy: BatchSizePolicy) -> list[tuple[int, int]]:
    """Return where each batch begins, and its size."""
    planned = plan(Horizon.endless(f"{STEPS}ba"), policy)
    return [(batch.timestamp.sample, batch.size) for batch in planned.batches()]


def size_at(steps: Sequence[tuple[int, int]], each: int, sample: int) -> int:
    """Return what the text says of a position, as Megatron reads it."""
    return max((at // each, size) for at, size in steps if at // each <= sample)[1]


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]], int | None]:
    """Texts of a schedule, their thresholds and sizes, and a sequence length."""
    each = draw(st.none() | st.sampled_from([1, 7, 128, 4096]))
    apart = st.integers(1, 400).map(lambda samples: samples * (each or 1))
    rest = st.integers(0, (each or 1) - 1)
    steps, at = [(0, draw(st.integers(1, 64)))], 0
    for _ in range(draw(st.integers(0, 4))):
        at += draw(apart)
        steps.append((at + draw(rest), draw(st.integers(1, 64))))
        at += each or 1
    parts = []
    for tick, size in draw(st.permutations(steps)):
        thousands = draw(st.booleans()) and float(f"{tick / 1000}") * 1000 == tick
        parts.append(f"{tick / 1000}K:{size}" if thousands else f"{tick}:{size}")
    return draw(st.sampled_from([" ", ",", ", "])).join(parts), steps, each


@given(texts())
def test_sizes_of_a_text(written: tuple[str, list[tuple[int, int]], int | None]) -> None:
    text, steps, each = written
    got = batches(from_megatron(text, seq_length=each))
    assert got == [(sample, size_at(steps, each or 1, sample)) for sample, _ in got]
    for calculator in STEPPED:
        theirs = calculator(1, 1, False, 1, text, each)
        for sample, size in got:
            theirs.update(sample, consistency_check=True)
            assert theirs.get_current_global_batch_size() == size


@given(
    st.integers(1, 64), st.integers(1, 16), st.integers(1, 9), st.integers(1, 3000), st.booleans()
)
def test_sizes_of_three_numbers(
    start: int, increment: int, levels: int, samples: int, is_text: bool
) -> None:
    final = start + increment * levels
    numbers = [start, increment, samples]
    ramp = " ".join(map(str, numbers)) if is_text else numbers
    got = batches(from_megatron(ramp, global_batch_size=final))
    for sample, size in got:
        passed = min(Fraction(levels), Fraction(levels * sample, samples))
        assert size == start + increment * int(passed)
        for calculator in RAMPED:
            theirs = calculator(final, 1, 1, False, 1, start, increment, samples)
            theirs.update(sample, consistency_check=True)
            late = size - theirs.get_current_global_batch_size()
            # They divide as floats, so at a border itself they may be one step behind.
            assert late == 0 or (late == increment and passed.denominator == 1)


@pytest.mark.parametrize(
    ("text", "seq_length", "policy"),
    [
        (
            "0:768 250B:1536 500B:3072 750B:6144",
            None,
            "0sp:768 250Bsp:1536 500Bsp:3072 750Bsp:6144",
        ),
        ("0:768 250B:1536", 4096, "0sp:768 61035156sp:1536"),
        ("250b:1.5k, 0:768", None, "0sp:768 250Bsp:1500"),
        ("0:8 1.001B:16", None, "0sp:8 1001000000sp:16"),
        ("0:8", 4096, "0sp:8"),
    ],
)
def test_a_text(text: str, seq_length: int | None, policy: str) -> None:
    assert from_megatron(text, seq_length=seq_length) == PiecewiseConstant(policy)


def test_their_floats_read_a_threshold_one_too_low() -> None:
    for calculator in STEPPED:
        assert calculator._parse_numeric_value("1.001B") == 1_000_999_999


@pytest.mark.parametrize("ramp", [[32, 32, 5_000_000], (32, 32, 5_000_000), "32 32 5000000"])
def test_three_numbers(ramp: Any) -> None:
    found = from_megatron(ramp, global_batch_size=1024)
    assert found == LinearRamp(32, 1024, "5_000_000sp", increment=32)


@pytest.mark.parametrize(
    ("ramp", "arguments", "match"),
    [
        ([8, 8, 160], {}, "three numbers and global_batch_size"),
        ([8, 8], {"global_batch_size": 16}, "three numbers"),
        ([8, 8, 160], {"global_batch_size": 16, "seq_length": 128}, "three numbers"),
        ([8, 8, 0], {"global_batch_size": 16}, "not longer than 0"),
        ([8, 8, 160], {"global_batch_size": 20}, "16 or 24"),
        ("0:8 10:16", {"global_batch_size": 16}, "text with colons"),
        ("0:8 16", {}, "'16' is not '<time>:<size>'"),
        ("10:8 20:16", {}, "the first one does not start at 0"),
        ("0:8 130:16 140:32", {"seq_length": 128}, "'1sp' does not come after '1sp'"),
        ("0:8 1.5:16", {}, "whole numbers"),
        ("0:8 1K:0", {}, "less than 1"),
        ("0tok:8", {}, "unknown unit"),
        ("0:8", {"seq_length": 0}, "sequence length"),
        ("0:8 nan:16", {}, "number"),
        ("", {}, "text with colons"),
        (5, {}, "text with colons"),
    ],
    ids=repr,
)
def test_what_is_neither_is_refused(ramp: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(StrettoError, match=match):
        from_megatron(ramp, **arguments)


def test_the_calls_that_the_refusal_names_work() -> None:
    with pytest.raises(StrettoError) as refusal:
        from_megatron("0:768", global_batch_size=8)
    calls = re.findall(r"from_megatron\(.+?\)", str(refusal.value))
    assert [type(eval(call)) for call in calls] == [PiecewiseConstant, LinearRamp]


def test_a_pasted_text_is_answered_with_what_to_write() -> None:
    why = "times need a unit, as in '0tok:768, 250Btok:1536'; from_megatron reads it"
    with pytest.raises(StrettoError, match=why):
        PiecewiseConstant("0:768, 250B:1536")
    assert str(PiecewiseConstant("0tok:768, 250Btok:1536")) == "0tok:768 250Btok:1536"
