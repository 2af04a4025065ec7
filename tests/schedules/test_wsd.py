"""`WSD`: warm up, stay, decay."""

from __future__ import annotations

import math

import pytest
from tests.schedules.strategies import by_batch, values

from stretto.errors import ScheduleError
from stretto.schedules import WSD, Constant, Cosine, Linear, Periods
from stretto.timing import Horizon, Timestamp

RUN = Horizon("100ba")


@pytest.mark.parametrize("warmup", ["5%", "5ba", "0.05dur"])
@pytest.mark.parametrize("decay", ["20%", "20ba"])
def test_its_parts_are_parts_of_the_whole(warmup: str, decay: str) -> None:
    schedule = WSD(decay, 0.1, warmup=warmup)
    parts = Periods([("5ba", Linear(0, 1)), ("75ba", Constant()), ("20ba", Linear(1, 0.1))])
    assert values(schedule, RUN, by_batch(120)) == values(parts, RUN, by_batch(120))


def test_the_shapes() -> None:
    assert values(WSD("20ba", shape="cosine"), RUN, by_batch(101))[80:] == values(
        Cosine(), Horizon("20ba"), by_batch(21)
    )
    assert values(WSD("20ba", 0.1, shape="1-sqrt"), RUN, by_batch(101))[80:] == pytest.approx(
        [0.1 + 0.9 * (1 - math.sqrt(step / 20)) for step in range(21)]
    )


def test_megatrons_exponential_decay() -> None:
    """`coeff = 2 * 0.5 ** ratio - 1` between the largest and the least learning rate."""
    found = values(WSD("20ba", 0.1, shape="exponential"), RUN, by_batch(101))[80:]
    expected = [0.1 + 0.9 * (2.0 * 0.5 ** (step / 20) - 1.0) for step in range(21)]
    assert found == pytest.approx(expected, rel=1e-14)
    assert found[-1] == 0.1


def test_it_may_be_of_mixed_units() -> None:
    run = Horizon("10ep", dataset_num_samples=10, batch_sizes=4)
    bound = WSD("2ep", warmup="3ba").bind(run)  # batches 4, 4, 2
    places = ((0, 0), (1, 4), (3, 10), (24, 80), (25, 84))
    starts = [Timestamp(batch=batch, sample=sample) for batch, sample in places]
    assert [bound(now) for now in starts] == [0.0, 1 / 3, 1.0, 1.0, 0.8]


def test_without_a_decay_it_stays() -> None:
    assert set(values(WSD("0%"), RUN, by_batch(100))) == {1.0}


@pytest.mark.parametrize(("warmup", "decay"), [("90ba", "20ba"), ("0ba", "101ba"), ("50%", "51%")])
def test_it_fits_into_the_run(warmup: str, decay: str) -> None:
    with pytest.raises(ScheduleError, match="decay"):
        WSD(decay, warmup=warmup).bind(RUN)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ScheduleError, match="shape"):
        WSD("20%", shape="sqrt")  # type: ignore[arg-type]
