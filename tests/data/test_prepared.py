"""The run that a loader follows; what it binds is counted in `tests/planning/test_prepare.py`."""

from __future__ import annotations

import pytest
from tests.data.records import loader_with

from stretto import Horizon
from stretto.errors import DataError
from stretto.planning import bind_run

DATA = range(64)
HORIZON = Horizon("2ep", dataset_num_samples=64)


@pytest.mark.parametrize(
    ("run", "options", "match"),
    [
        (bind_run(HORIZON, 8), {"max_duration": "3ep"}, "the run has its own max_duration"),
        (bind_run(HORIZON, 8), {"last_batch": "drop"}, "the run has its own last_batch"),
        (bind_run(Horizon("9ba", dataset_num_samples=9), 8), {}, "prepared for 9"),
        (8, {}, "length"),
    ],
)
def test_a_loader_refuses_a_run_that_is_not_its_own(
    run: object, options: dict[str, str], match: str
) -> None:
    with pytest.raises(DataError, match=match):
        loader_with(DATA, run, **options)
