"""Runs that are cut and go on, on another number of ranks and in another way each time."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("distributed_resume.py")

spec = importlib.util.spec_from_file_location("distributed_resume", SCRIPT)
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


Launch = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def launch(launch_ranks: Callable[..., Any]) -> Launch:
    """Resume the run in a folder, and return what each rank saw; one rank is this process."""

    def start(
        ranks: int, out: Path, *, fails: bool = False, **settings: Any
    ) -> list[dict[str, Any]]:
        out.mkdir(exist_ok=True)
        if ranks == 1:
            return [json.loads(json.dumps(script.train(out, **settings)))]
        done = launch_ranks(SCRIPT, json.dumps(settings), out, ranks=ranks, fails=fails)
        if fails:
            assert done.returncode, "no rank has failed"
            return []
        return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return start


@pytest.fixture(scope="module")
def unbroken(
    tmp_path_factory: pytest.TempPathFactory, launch: Launch
) -> tuple[dict[str, Any], list[Any]]:
    """What one process saw, and its ledger."""
    out = tmp_path_factory.mktemp("unbroken")
    (report,) = launch(1, out)
    return report, ledger(out)


def ledger(out: Path) -> list[tuple[str, ...]]:
    with (out / "run" / "ledger.csv").open() as file:
        return [
            (row["batch"], row["epoch"], row["sample"], row["size"]) for row in csv.DictReader(file)
        ]


def assert_close(one: dict[str, list[float]], two: dict[str, list[float]]) -> None:
    assert one.keys() == two.keys()
    for name, values in one.items():
        assert torch.allclose(
            torch.tensor(values, dtype=torch.float64),
            torch.tensor(two[name], dtype=torch.float64),
            rtol=0,
            atol=1e-12,
        ), name


# World size, way, and which rank gets SIGTERM in which batch.
LEGS: list[tuple[int, str, list[int] | None]] = [
    (1, "plain", [0, 2]),
    (2, "ddp", [1, 4]),
    (3, "ddp", [0, 6]),
    (1, "plain", [0, 8]),
    (2, "fsdp", [0, 10]),
    (3, "fsdp", [2, 12]),
    (4, "hsdp", [1, 14]),
    (1, "plain", None),
]


def test_any_number_of_ranks_goes_on_from_any_other(
    tmp_path: Path, launch: Launch, unbroken: tuple[dict[str, Any], list[Any]]
) -> None:
    """Plain, averaged, sharded: the state is the same to the last bit, each sample comes once."""
    expected, expected_ledger = unbroken
    seen: list[float] = []
    before: dict[str, Any] | None = None
    for world_size, parallel, stop in LEGS:
        ranks = launch(world_size, tmp_path, parallel=parallel, stop=stop)
        for number, rank in enumerate(ranks):
            assert rank["states"] == ranks[0]["states"]
            assert rank["clock"]["sample"] == ranks[0]["clock"]["sample"]
            assert rank["clock"]["run_nanoseconds"] == ranks[0]["clock"]["run_nanoseconds"]
            if before is not None:
                assert rank["states"][0] == before["states"][-1]
                assert rank["started"]["sample"] == before["clock"]["sample"]
            if stop is None:
                assert rank["stop_reason"] is None
            else:
                # It comes while the batch is computed, so that one is the last.
                assert rank["clock"]["batch"] == stop[1] + 1
                is_told = number == stop[0]
                reason = "received SIGTERM" + ("" if is_told else " on another rank")
                assert rank["stop_reason"] == reason
            seen += rank["samples"]
        before = ranks[0]
    assert before is not None
    assert sorted(seen) == sorted(expected["samples"])
    assert ledger(tmp_path) == expected_ledger
    assert_close(before["states"][-1], expected["states"][-1])


def test_three_ranks_go_on_to_the_last_bit(tmp_path: Path, launch: Launch) -> None:
    """In a ring of three the order of a sum depends on where in it a gradient lies."""
    settings: dict[str, Any] = {"parallel": "ddp", "micro_batch_size": "auto"}
    whole = launch(3, tmp_path / "whole", **settings)
    # They average in the backward pass by then, and begin with agreeing before it once more.
    for stop in ([0, 8], None):
        parts = launch(3, tmp_path / "parts", stop=stop, **settings)
    assert parts[0]["started"]["batch"] == 9
    assert parts[0]["states"][-1] == whole[0]["states"][-1]


def assert_resumed(
    ranks: list[dict[str, Any]], out: Path, unbroken: tuple[dict[str, Any], list[Any]]
) -> None:
    expected, expected_ledger = unbroken
    for rank in ranks:
        assert rank["resumed"]
        # When batch 6 was saved, the save of batch 3 had ended.
        assert rank["started"]["batch"] in (3, 6, 9)
        assert_close(rank["states"][-1], expected["states"][-1])
    assert ledger(out) == expected_ledger


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_rank_ends_the_others_and_all_resume(
    tmp_path: Path, launch: Launch, parallel: str, unbroken: tuple[dict[str, Any], list[Any]]
) -> None:
    settings: dict[str, Any] = {"parallel": parallel, "checkpoint_every": "3ba"}
    assert launch(2, tmp_path, fails=True, kill=[1, 9], **settings) == []
    assert_resumed(launch(2, tmp_path, **settings), tmp_path, unbroken)


def test_torchrun_starts_a_job_with_a_killed_rank_again(
    tmp_path: Path, torchrun: Callable[..., None], unbroken: tuple[dict[str, Any], list[Any]]
) -> None:
    """`torchrun --max-restarts`, and nobody's help."""
    settings = {"parallel": "ddp", "kill": [1, 9], "checkpoint_every": "3ba"}
    torchrun(SCRIPT, json.dumps(settings), tmp_path, max_restarts=1)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert_resumed(ranks, tmp_path, unbroken)
