from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.errors import DataError
from stretto.runtime.packing import PackingError, pack, packed, unpack

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
KEYS = st.one_of(st.text(), st.integers(), st.just("__kind__"), st.tuples(st.integers(), st.text()))
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)
    ),
    max_leaves=8,
)
DTYPES = [
    torch.uint8,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
]


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(pack(value, tensors, name="0"))
    return unpack(json.loads(text), tensors.__getitem__)


@given(VALUES)
def test_plain_values_come_back(value: Any) -> None:
    assert unpack(json.loads(json.dumps(pack(value)))) == value
    assert there_and_back(value) == value


def test_a_number_that_is_not_finite_comes_back() -> None:
    assert unpack(json.loads(json.dumps(pack([math.inf, -math.inf])))) == [math.inf, -math.inf]
    assert math.isnan(unpack(json.loads(json.dumps(pack(math.nan)))))


def bits(tensor: Tensor) -> list[int]:
    return list(tensor.contiguous().flatten().view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (), (0, 5)], ids=str)
def test_tensors_come_back_in_the_json_or_beside_it(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype).t() if len(shape) else None
    tensor = torch.ones((), dtype=dtype) if tensor is None else tensor
    for back in (
        unpack(json.loads(json.dumps(pack({"x": (tensor,)}))))["x"][0],
        there_and_back({"x": (tensor,)})["x"][0],
    ):
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert bits(back) == bits(tensor)


def test_two_tensors_never_have_one_name() -> None:
    back = there_and_back({"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}})
    assert (back["a.b"].item(), back["a"]["b"].item()) == (1, 2)


def test_a_subclass_comes_back_as_the_plain_type() -> None:
    back = there_and_back(OrderedDict(shape=torch.Size([2]), flag=True))
    assert back == {"shape": (2,), "flag": True}
    assert type(back) is dict
    assert type(back["shape"]) is tuple


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"seen": [0, {1, 2}]}, "seen.1 is of type set"),
        (object(), "it is of type object"),
        ({"rows": torch.eye(2).to_sparse()}, "rows is a tensor that is sparse"),
    ],
    ids=["set", "object", "sparse"],
)
def test_what_cannot_be_packed_is_refused_by_its_key(value: Any, said: str) -> None:
    with pytest.raises(PackingError, match=said):
        pack(value)
    with pytest.raises(DataError, match=said):
        packed(value, "the position in the data", DataError)
