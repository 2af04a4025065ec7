from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import PlanError
from stretto.planning import plan
from stretto.report import plan_table
from stretto.timing import Horizon

NUMBERS = st.integers(0, 195).map(lambda digits: 10**digits + 7)


@pytest.mark.parametrize("run", ["1e198sp", "1e198ba", "1e199ep", f"{10**199 + 1}/{10**60}ep"])
def test_a_run_longer_than_any_is_refused(run: str) -> None:
    with pytest.raises(PlanError, match="digits"):
        plan(Horizon(run, dataset_num_samples=5120), 8)


@given(NUMBERS, NUMBERS, st.integers(0, 150), NUMBERS, st.sampled_from(["ep", "sp", "tok", "ba"]))
def test_what_is_planned_can_be_written_down(
    samples: int, size: int, digits: int, above: int, unit: str
) -> None:
    length = f"{above}/{10**digits}ep" if unit == "ep" else f"{above}{unit}"
    horizon = Horizon(length, dataset_num_samples=samples, tokens_per_sample=3, last_batch="carry")
    try:
        planned = plan(horizon, {"0%": size, "30%": size + 1}, triggers={"evaluate": "1/7ep"})
    except PlanError as error:
        if "200 digits" not in str(error):
            raise
        return
    assert json.loads(json.dumps(planned.to_json()))["stages"]
    assert plan_table(planned)
