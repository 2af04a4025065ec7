"""Names of what is scheduled."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.errors import ScheduleError
from stretto.schedules.names import Name, find_name, parse_name

ADAM: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False, "foreach": None}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("lr", Name("lr")),
        ("weight_decay@head", Name("weight_decay", group="head")),
        ("betas.1@blocks.0", Name("betas", 1, "blocks.0")),
        ("lr@0", Name("lr", group="0")),
    ],
)
def test_a_name_has_a_key_an_index_and_a_group(text: str, name: Name) -> None:
    assert parse_name(text) == name


@pytest.mark.parametrize("text", ["", "learning rate", "betas.", "betas.x", "betas[0]", "lr@", "0"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="parameter"):
        parse_name(text)


def test_momentum_is_the_first_beta_only_where_there_is_no_momentum() -> None:
    assert find_name("momentum@head", ADAM) == Name("betas", 0, "head")
    assert find_name("momentum", {**ADAM, "momentum": 0.9}) == Name("momentum")


@pytest.mark.parametrize("text", ["amsgrad", "foreach", "eps", "momentum"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="number"):
        find_name(text, {key: value for key, value in ADAM.items() if key != "betas"})
