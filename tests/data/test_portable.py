from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.data.portable import from_json, to_json
from stretto.errors import DataError

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
KEYS = st.one_of(st.text(), st.integers(), st.just("__kind__"))
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_plain_values_come_back(value: Any) -> None:
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bool])
def test_tensors_come_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [2, 3]]).to(dtype)
    back = from_json(json.loads(json.dumps(to_json({"x": (tensor,)}))))["x"][0]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_other_things_are_refused() -> None:
    with pytest.raises(DataError, match="holds a set"):
        to_json({"x": {1, 2}})
