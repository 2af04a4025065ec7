"""Any mesh trains, counts and saves as one process does."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("distributed_mesh.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("dp", "hsdp", "tpfsdp", "tp")
ONE = ["train:one", "cut:one"]
TWO = ["train:dp", *(f"count:{kind}:{batches}" for kind in ("dp", "tp") for batches in (4, 14))]
FOUR = [
    *(f"train:{kind}" for kind in KINDS),
    *(f"cut:{kind}" for kind in KINDS),
    *(f"stop:{kind}:{rank}" for rank, kind in enumerate(KINDS)),
    *(f"count:{kind}:{batches}" for kind in KINDS for batches in (4, 14)),
    *(f"count:{kind}:14:{every}" for kind in KINDS for every in (3, 4)),
    "idle:hsdp",
    "idle:tpfsdp",
    "few:dp",
    "few:tp",
    "refused:all",
]
FOUR += [f"resume:{kind}:{saved}" for kind in KINDS for saved in ("one", *KINDS)]
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, launch_ranks: Callable[..., Any]
) -> dict[int, Found]:
    """What each rank of 1, 2 and 4 saw: starting them takes longer than the runs."""
    out = tmp_path_factory.mktemp("mesh")
    back = [f"resume:one:{kind}" for kind in ("one", *KINDS)] + ["idle:one"]
    several: dict[int, Found] = {}
    for ranks, jobs in ((1, ONE), (2, TWO), (4, FOUR), (1, [*ONE[:1], *back])):
        launch_ranks(SCRIPT, out, *jobs, ranks=ranks)
        files = [out / f"{ranks}-{rank}.json" for rank in range(ranks)]
        several[ranks] = [json.loads(file.read_text()) for file in files]
    return several


def check_like_one(ours: Any, one: Any) -> None:
    """Compare weights and the lines of metrics, of a resumed run its last ones."""
    assert ours["weights"] == pytest.approx(one["weights"], rel=0, abs=1e-12)
    lines = one["lines"][-len(ours["lines"]) :]
    assert len(ours["lines"]) > 5
    for line, expected in zip(ours["lines"], lines, strict=True):
        assert line == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_trains_like_one_process(found: dict[int, Found], kind: str) -> None:
    ranks = [rank[f"train:{kind}"] for rank in found[4]]
    for one in ranks:
        check_like_one(one, found[1][0]["train:one"])
    assert [one["is_first"] for one in ranks] == [True, False, False, False]
    groups: dict[int, Any] = {}
    for one in ranks:
        assert groups.setdefault(one["group"], one["ids"]) == one["ids"]
    assert len(groups) == {"dp": 4, "hsdp": 4, "tpfsdp": 2, "tp": 1}[kind]
    ids = [number for steps in groups.values() for own in steps for number in own]
    assert sorted(ids) == sorted([*range(101)] * 2)


@pytest.mark.parametrize(
    ("kind", "ranks", "other"),
    [("hsdp", 4, "dp"), ("tpfsdp", 2, "dp"), ("tp", 1, "one")],
)
def test_noise_is_that_of_as_many_data_ranks(
    found: dict[int, Found], kind: str, ranks: int, other: str
) -> None:
    expected = found[ranks][0][f"train:{other}"]["noise"]
    for rank in found[4]:
        noise = rank[f"train:{kind}"]["noise"]
        assert len(noise) == len(expected) > 10
        for ours, theirs in zip(noise, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-10)


@pytest.mark.parametrize(("rank", "kind"), list(enumerate(KINDS)))
def test_one_rank_stops_all_after_the_same_batch(
    found: dict[int, Found], rank: int, kind: str
) -> None:
    assert [one[f"stop:{kind}:{rank}"]["batch"] for one in found[4]] == [3, 3, 3, 3]


@pytest.mark.parametrize(("kind", "saved"), list(product(("one", *KINDS), repeat=2)))
def test_every_mesh_resumes_from_every_other(
    found: dict[int, Found], kind: str, saved: str
) -> None:
    for rank in found[1] if kind == "one" else found[4]:
        check_like_one(rank[f"resume:{kind}:{saved}"], found[1][0]["train:one"])


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_copies_what_it_owns(found: dict[int, Found], kind: str) -> None:
    ranks = [rank[f"count:{kind}:14:3"] for rank in found[4]]
    copied, whole = [one["copied"][0] for one in ranks], ranks[0]["whole"]
    assert whole <= sum(copied) <= 1.05 * whole
    parts = {"dp": 4, "hsdp": 2, "tpfsdp": 2, "tp": 1}[kind]  # what is not cut by tensors is whole
    assert max(copied) <= 1.05 * whole / parts + (200 if kind == "dp" else 0)


@pytest.mark.parametrize(("ranks", "kind"), [(2, "dp"), (2, "tp"), *((4, one) for one in KINDS)])
def test_a_step_takes_one_small_all_reduce(found: dict[int, Found], ranks: int, kind: str) -> None:
    short, long = (found[ranks][0][f"count:{kind}:{batches}"]["calls"] for batches in (4, 14))
    assert max(map(int, long)) <= 128
    assert sum(long.values()) - sum(short.values()) == 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_takes_one_more(found: dict[int, Found], kind: str) -> None:
    """Of 8 bytes, for 5 saves and 4; those of 16 wait for the disk, which is slower than a step."""
    many, fewer = (found[4][0][f"count:{kind}:14:{every}"]["calls"] for every in (3, 4))
    assert many["8"] - fewer["8"] == 1
    assert many["128"] == fewer["128"]


@pytest.mark.parametrize("kind", ["hsdp", "tpfsdp"])
def test_ranks_without_samples_run_dummies(found: dict[int, Found], kind: str) -> None:
    check_like_one(found[4][0][f"idle:{kind}"], found[1][0]["idle:one"])


def test_too_many_ranks_are_refused_before_the_first_step(found: dict[int, Found]) -> None:
    for rank in found[4]:
        assert rank["few:dp"].startswith("PlanError")
        assert "start 2 ranks" in rank["few:dp"]
        assert rank["few:tp"] == "nothing is refused"  # one data rank


def test_what_would_train_wrongly_is_refused(found: dict[int, Found]) -> None:
    for rank in found[4]:
        assert all(one.startswith("TrainingError") for one in rank["refused:all"])
        words = ("average", "average", "shares", "mesh=mesh", "ranks", "other", "data-parallel")
        for text, word in zip(rank["refused:all"], words, strict=True):
            assert word in text
