"""A function of one kind is not taken for one of another."""

from __future__ import annotations

import pytest

from stretto.batching import as_policy
from stretto.errors import BatchSizeError


def test_an_increment_function_is_no_size_function() -> None:
    with pytest.raises(BatchSizeError) as caught:
        as_policy(lambda epoch, current_batch_size: 5)
    assert "IncreaseFunction" in str(caught.value.message.instead)
