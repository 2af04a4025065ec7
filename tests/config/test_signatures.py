"""What a plan knows of torch without importing it is what torch itself says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.checking import check_values, describe_target
from stretto.errors import ConfigError

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
STRICTER = {("ASGD", "alpha"), ("Muon", "eps")}
"""Negative values of these make no sense, and torch takes them."""


def defaults(name: str) -> dict[str, Any]:
    signature = describe_target(f"torch.optim:{name}").signature
    assert signature is not None
    return {key: one.default for key, one in signature.parameters.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_defaults_of_an_optimizer_are_read_from_its_source(name: str) -> None:
    signature = inspect.signature(OPTIMIZERS[name])
    assert defaults(name) == {key: one.default for key, one in signature.parameters.items()}


@pytest.mark.parametrize("name", torch.nn.modules.__all__)
def test_modules_take_what_their_source_says(name: str) -> None:
    kind = getattr(torch.nn, name)
    told, asked = describe_target(f"torch.nn:{name}"), inspect.signature(kind)
    assert told.signature is not None
    assert told.is_class == isinstance(kind, type)
    kinds = {key: one.kind for key, one in asked.parameters.items()}
    assert {key: one.kind for key, one in told.signature.parameters.items()} == kinds


NUMBERS = st.sampled_from([-1e30, -1.0, -0.1, 0.0, 1e-9, 0.5, 0.999, 1.0, 1.5, 1e30, -1, 0, 1, 2])
VALUES = NUMBERS | st.booleans() | st.lists(NUMBERS, min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(data=st.data())
def test_a_plan_refuses_the_values_that_torch_refuses(name: str, data: st.DataObject) -> None:
    own = defaults(name)
    keys = st.sampled_from([key for key, one in own.items() if one is not None][1:])
    values: dict[str, Any] = data.draw(st.dictionaries(keys, VALUES, max_size=3))
    try:
        OPTIMIZERS[name]([torch.zeros(2, 2, requires_grad=True)], **values)
        is_made = True
    except (ValueError, TypeError, RuntimeError, IndexError, KeyError):
        is_made = False
    try:
        check_values(f"torch.optim:{name}", own, values)
        is_refused = False
    except (ConfigError, ValueError, TypeError, RuntimeError, IndexError):
        is_refused = True
    if not is_made:
        assert is_refused
    if is_refused and is_made:
        # It would fail at the first step, or is one of those that make no sense.
        several = any(
            isinstance(value, tuple) != isinstance(own[key], tuple) or len(value) != len(own[key])
            if isinstance(value, tuple)
            else isinstance(own[key], tuple)
            for key, value in values.items()
        )
        assert several or any((name, key) in STRICTER for key in values)
