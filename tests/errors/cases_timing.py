"""Wrong input at the clock: times, conversions, horizons, timers, triggers."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from stretto.timing import At, Every, Horizon, Time, Timer, Timestamp, convert


def _move(**counts: Any) -> None:
    Timer(Horizon("9ba")).advance(**counts)


def _end_epoch(*, counted: int, carried: int) -> None:
    timer = Timer(Horizon("2ep", dataset_num_samples=100, last_batch="carry"))
    timer.advance(counted)
    timer.end_epoch(carried=carried)


def _resume() -> None:
    state = Timestamp(epoch=2, sample=205, sample_in_epoch=5).to_state()
    Timer(Horizon("3ep", dataset_num_samples=90)).load_state_dict(state)


def _axis(run: str, *times: str, **facts: Any) -> object:
    return Horizon(run, **facts).common_axis(map(Time, times))


def _wrong(call: Callable[..., object], *values: object, **named: object) -> Callable[[], object]:
    """Call with values that a type checker would refuse."""
    return lambda: call(*values, **named)


CASES: list[tuple[str, Callable[[], object]]] = [
    # How a time is written.
    ("timing-text-empty", lambda: Time("")),
    ("timing-text-without-unit", lambda: Time("5")),
    ("timing-text-suffix-without-unit", lambda: Time("2B")),
    ("timing-text-without-number", lambda: Time("ep")),
    ("timing-text-not-finite", lambda: Time("nandur")),
    ("timing-text-plus", lambda: Time("+5ep")),
    ("timing-text-point-first", lambda: Time(".5ep")),
    ("timing-text-space", lambda: Time("90 ep")),
    ("timing-text-comma", lambda: Time("1,000sp")),
    ("timing-text-unit-long", lambda: Time("3epoch")),
    ("timing-text-unit-case", lambda: Time("3EP")),
    ("timing-text-unit-typo", lambda: Time("3tokn")),
    ("timing-text-unit-unknown", lambda: Time("3weeks")),
    ("timing-text-parts-order", lambda: Time("30m1h")),
    ("timing-text-parts-too-large", lambda: Time("1h60m")),
    ("timing-text-not-whole", lambda: Time("0.5ba")),
    ("timing-text-by-zero", lambda: Time("1/0ep")),
    ("timing-text-exponent", lambda: Time("1e999ep")),
    ("timing-text-digits", lambda: Time("9" * 201 + "ep")),
    ("timing-text-too-long", lambda: Time("9" * 1000)),
    # Other values.
    ("timing-number-without-unit", lambda: Time(0.5)),
    ("timing-value-of-other-type", _wrong(Time, None)),
    ("timing-second-unit", lambda: Time("90ep", "ba")),
    ("timing-unknown-unit", lambda: Time(90, "epochs")),
    ("timing-amount-nan", lambda: Time(float("nan"), "ep")),
    ("timing-amount-boolean", lambda: Time(True, "ep")),
    ("timing-amount-endless", lambda: Time(Decimal("1e999999999"), "ep")),
    ("timing-amount-not-whole", lambda: Time(2.5, "ba")),
    ("timing-amount-digits", lambda: Time("1ep") * 10**300),
    ("timing-int-of-fraction", lambda: int(Time("0.5ep"))),
    # Arithmetic.
    ("timing-units-compare", lambda: Time("1ep") < Time("1ba")),
    ("timing-units-add", lambda: Time("1ep") + Time("1h")),
    ("timing-units-multiply", lambda: Time("1ep") * Time("1ba")),
    ("timing-add-float", lambda: Time("1ep") + 0.5),  # type: ignore[operator]
    ("timing-compare-text", lambda: Time("1ep") < "2ep"),  # type: ignore[operator]
    ("timing-divide-not-whole", lambda: Time("5ba") / 2),
    # Conversion.
    ("timing-convert-no-samples", lambda: convert("1ep", "sp")),
    ("timing-convert-no-tokens", lambda: convert("1ep", "tok")),
    ("timing-convert-no-batch-size", lambda: convert("5ba", "sp")),
    ("timing-convert-no-run", lambda: convert("10%", "ep")),
    ("timing-convert-seconds", lambda: convert("1h", "ba")),
    (
        "timing-convert-share-of-epochs",
        lambda: convert("0.1dur", "ba", max_training_duration="90ep", batch_size=128),
    ),
    (
        "timing-convert-share-of-hours",
        lambda: convert("0.1dur", "ba", max_training_duration="10h", batch_size=128),
    ),
    ("timing-convert-count", lambda: convert("1ep", "sp", dataset_num_samples=0)),
    ("timing-convert-count-type", _wrong(convert, "1ep", "sp", dataset_num_samples="50")),
    # Horizons.
    ("timing-run-of-itself", lambda: Horizon("0.5dur")),
    ("timing-run-not-positive", lambda: Horizon("0ep")),
    ("timing-run-part-of-epoch", lambda: Horizon("1.5ep")),
    ("timing-last-batch", _wrong(Horizon, "1ep", last_batch="skip")),
    (
        "timing-tokens-contradict",
        lambda: Horizon("1ep", dataset_num_samples=8, tokens_per_sample=2, dataset_num_tokens=15),
    ),
    ("timing-batch-size", lambda: Horizon("1ep", batch_sizes=0)),
    ("timing-batch-size-type", _wrong(Horizon, "1ep", batch_sizes=32.0)),
    (
        "timing-drop-everything",
        lambda: Horizon("1ep", dataset_num_samples=8, batch_sizes=9, last_batch="drop"),
    ),
    ("timing-axis-no-samples", lambda: _axis("2ep", "1ep", "5sp")),
    ("timing-axis-no-batch-size", lambda: _axis("9ba", "10%", "5sp", "1ep")),
    ("timing-axis-seconds", lambda: _axis("2ep", "1h", "1ep")),
    # The clock.
    ("timing-clock-backwards", lambda: _move(samples=-1)),
    ("timing-clock-not-whole", lambda: _move(samples=1.5)),
    ("timing-clock-seconds", lambda: _move(samples=1, seconds=float("nan"))),
    ("timing-epoch-too-short", lambda: _end_epoch(counted=90, carried=0)),
    ("timing-epoch-too-much-carried", lambda: _end_epoch(counted=90, carried=91)),
    ("timing-resume-other-data", _resume),
    ("timing-state-count", lambda: Timestamp.from_state({"epoch": -1})),
    ("timing-state-unknown", lambda: Timestamp.from_state({**Timestamp().to_state(), "step": 1})),
    ("timing-timestamp-share", lambda: Timestamp().get("dur")),
    # Triggers.
    ("timing-every-zero", lambda: Every("0ep")),
    ("timing-at-the-start", lambda: At("0ep")),
    ("timing-at-nothing", At),
    ("timing-trigger-part-of-epoch", lambda: Every("10%").bind(Horizon("2ep"))),
]
