"""Noise in normalisation layers that several processes share: as if one had all the samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("distributed_norm_layers.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

Outcomes = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., Any]
) -> list[Outcomes]:
    """What one process saw, and what each of two ranks did."""
    out = tmp_path_factory.mktemp("norms")
    for ranks in (1, 2):
        torchrun(SCRIPT, out, ranks=ranks)
    names = ("alone", "0", "1")
    return [json.loads((out / f"norms-{name}.json").read_text()) for name in names]


@pytest.mark.parametrize(
    "scenario",
    ["samples", "one pass", "an empty share", "tokens", "found", "sharded", "sharded, tokens"],
)
def test_ranks_measure_what_one_process_does(outcomes: list[Outcomes], scenario: str) -> None:
    alone, mine, other = (one[scenario] for one in outcomes)
    assert mine["terms"] == other["terms"], "ranks must know the same, to the last bit"
    assert len(mine["terms"]) == len(alone["terms"]) >= 5
    for found, true in zip(mine["terms"], alone["terms"], strict=True):
        assert found == pytest.approx(true, rel=1e-8)


def test_micro_batches_make_no_difference(outcomes: list[Outcomes]) -> None:
    for one in outcomes:
        for scenario in ("one pass", "found", "sharded"):
            pairs = zip(one["samples"]["terms"], one[scenario]["terms"], strict=True)
            assert all(terms == pytest.approx(true, rel=1e-8) for terms, true in pairs)


def test_measuring_changes_no_bit(outcomes: list[Outcomes]) -> None:
    for one in outcomes:
        assert one["samples"]["weights"] == one["not measured"]["weights"]


def test_ranks_decide_alike(outcomes: list[Outcomes]) -> None:
    alone, mine, other = (one["followed"] for one in outcomes)
    assert mine == other
    assert mine["sizes"] == alone["sizes"]
    assert len(set(mine["sizes"])) > 2


def test_all_ranks_refuse_what_is_not_the_layers_alone(outcomes: list[Outcomes]) -> None:
    for one in outcomes:
        assert "more flows into the gradients of their weights" in one["refused"]["error"]
