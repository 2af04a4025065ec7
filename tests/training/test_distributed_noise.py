"""The noise of a gradient that several real processes share, with gloo between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.noise import NoiseSums

SCRIPT = Path(__file__).with_name("distributed_noise.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

Rank = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, launch_ranks: Callable[..., Any]) -> list[Rank]:
    """What two ranks saw, in all scenarios."""
    out = tmp_path_factory.mktemp("noise")
    launch_ranks(SCRIPT, out)
    return [json.loads((out / f"noise{rank}.json").read_text()) for rank in (0, 1)]


def steps(ranks: list[Rank], scenario: str) -> Iterator[tuple[list[Any], list[list[Any]]]]:
    """For each step what was measured, and the groups of each rank."""
    mine, other = (rank[scenario] for rank in ranks)
    assert mine["terms"] == other["terms"], "ranks must know the same, to the last bit"
    assert mine["terms"], "nothing was measured"
    for terms, *groups in zip(mine["terms"], mine["groups"], other["groups"], strict=True):
        yield terms, groups


def expected(groups: list[tuple[int, list[float]]], num_samples: int) -> tuple[float, ...]:
    """The terms of groups, each with its units and its mean gradient; and |G|^2."""
    sizes = [units for units, _ in groups]
    gradients = [torch.tensor(g, dtype=torch.float64) * units for units, g in groups if units]
    whole = torch.stack(gradients).sum(0) / sum(sizes)
    kept = [units for units in sizes if units]
    squares = [float((g / n).square().sum()) for g, n in zip(gradients, kept, strict=True)]
    square = float(whole.square().sum())
    found = NoiseSums.of(squares, kept, square).signals(num_samples)
    assert found.noise_numerator is not None
    assert found.noise_denominator is not None
    return found.noise_numerator, found.noise_denominator, square


@pytest.mark.parametrize("scenario", ["samples", "one pass", "an empty share", "tokens"])
def test_the_groups_are_the_micro_batches_of_all_ranks(ranks: list[Rank], scenario: str) -> None:
    sizes = ranks[0][scenario]["sizes"]
    for size, (terms, groups) in zip(sizes, steps(ranks, scenario), strict=True):
        assert terms == pytest.approx(expected(groups[0] + groups[1], size), rel=1e-9)


@pytest.mark.parametrize("scenario", ["sharded", "sharded, tokens"])
def test_of_a_sharded_model_the_groups_go_over_the_ranks(ranks: list[Rank], scenario: str) -> None:
    for terms, groups in steps(ranks, scenario):
        joint = []
        for pair in zip_longest(*groups):
            units = sum(one[0] for one in pair)
            mean = sum(n * torch.tensor(g, dtype=torch.float64) for n, g in pair if n) / units
            joint.append((units, mean.tolist()))
        assert terms == pytest.approx(expected(joint, 13), rel=1e-9)


def test_a_single_pass_of_a_sharded_model_is_cut_in_two(ranks: list[Rank]) -> None:
    for terms, groups in steps(ranks, "sharded, one pass"):
        assert sorted(units for rank in groups for units, _ in rank) == [6, 7]
        assert terms[2] == pytest.approx(expected(groups[0] + groups[1], 13)[2], rel=1e-9)
        assert terms[0] > 0


def test_of_a_sample_on_each_rank_of_a_sharded_model_there_are_two_groups(
    ranks: list[Rank],
) -> None:
    for terms, groups in steps(ranks, "sharded, a sample each"):
        assert [units for rank in groups for units, _ in rank] == [1, 1]
        assert terms == pytest.approx(expected(groups[0] + groups[1], 2), rel=1e-9)


def test_two_processes_with_uneven_shares_are_unbiased(ranks: list[Rank]) -> None:
    outcome = ranks[0]["truth"]
    assert outcome == ranks[1]["truth"]
    assert outcome["steps"] == 1200
    assert all(abs(errors) < 2 for errors in outcome["away"])


def test_measuring_changes_no_bit(ranks: list[Rank]) -> None:
    for rank in ranks:
        plain, measured = rank["unchanged"]["weights"]
        assert plain == measured


def test_of_a_step_that_failed_nothing_gets_into_the_next(ranks: list[Rank]) -> None:
    for rank in ranks:
        whole, again = rank["failed"]["weights"]
        # torch rounds in another order after a forward pass without a backward pass.
        for one, other in zip(whole, again, strict=True):
            assert other == pytest.approx(one, rel=1e-12)


def test_ranks_decide_alike(ranks: list[Rank]) -> None:
    mine, other = (rank["followed"] for rank in ranks)
    assert mine == other
    assert len(set(mine["sizes"])) > 2
