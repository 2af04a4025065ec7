"""Any mesh trains, counts and saves as one process does."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("distributed_mesh.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("dp", "hsdp", "tpfsdp", "tp")
GROUPS = {"dp": 4, "hsdp": 4, "tpfsdp": 2, "tp": 1, "tprep": 2, "sp": 2, "cp": 2}
HOW = ("skip", "stop")
MORE = ("tprep", "sp", "cp")
"""Tensor parallelism with `replicate`, and over the sequence, too; a sequence that ranks share."""
ONE = [
    "train:one",
    "cut:one",
    "train:sp",
    "train:cp",
    "evaluate:one",
    "drop:one",
    "own:one",
    "count:one:14:3",
]
TWO = [
    *("train:dp", "train:spdp", "train:cpdp"),
    *(f"count:{kind}:{batches}" for kind in ("dp", "tp") for batches in (4, 14)),
    *(f"count:{kind}:14:{every}" for kind in ("dp", "tp") for every in (3, 4)),
]
FOUR = [
    *(f"train:{kind}" for kind in MORE),
    *(f"signal:{kind}:{3 - rank}" for rank, kind in enumerate(KINDS)),
    *(f"nan:{kind}:{3 - rank}:{how}" for rank, kind in enumerate(KINDS) for how in HOW),
    *(f"evaluate:{kind}" for kind in KINDS),
    *(f"drop:{kind}" for kind in KINDS),
    *(f"own:{kind}" for kind in KINDS),
    *(f"train:{kind}" for kind in KINDS),
    *(f"cut:{kind}" for kind in KINDS),
    *(f"count:{kind}:{batches}" for kind in KINDS for batches in (4, 14)),
    *(f"count:{kind}:14:{every}" for kind in KINDS for every in (3, 4)),
    "idle:hsdp",
    "idle:tpfsdp",
    "few:dp",
    "few:tp",
    "refused:all",
]
FOUR += [f"resume:{kind}:{saved}" for kind in KINDS for saved in ("one", *KINDS)]
FOUR += ["cut:tprep", "resume:tprep:hsdp", "resume:hsdp:tprep"]
LONG = re.compile(
    r"(train|cut):(tprep|sp|cp)|train:(sp|cp)dp|few:tp|idle:tpfsdp|drop:(dp|hsdp|tpfsdp)|own:(dp|tp)"
    r"|(nan|signal):(dp|hsdp|tp):.*|count:(dp|tpfsdp|tp):(4|14|14:4)|resume:(tprep:.*|.*:tprep)"
    r"|resume:(dp:dp|dp:hsdp|dp:tpfsdp|hsdp:one|hsdp:hsdp|hsdp:tp|tpfsdp:dp|tpfsdp:tpfsdp|tpfsdp:tp"
    r"|tp:one|tp:hsdp|tp:tp)"
)
"""What `make test` leaves out on several ranks: together it takes two minutes."""
Found = list["Jobs"]


class Jobs(dict[str, Any]):
    """What came of each job; a test of one that was left out is skipped."""

    def __missing__(self, job: str) -> Any:
        pytest.skip("takes long: make test-long")


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, launch_ranks: Callable[..., Any]
) -> dict[int, Found]:
    """What each rank of 1, 2 and 4 saw: starting them takes longer than the runs."""
    out = tmp_path_factory.mktemp("mesh")
    back = [f"resume:one:{kind}" for kind in ("one", *KINDS)] + ["idle:one"]
    several: dict[int, Any] = {}
    for ranks, jobs in ((1, ONE), (2, TWO), (4, FOUR), (1, back)):
        is_whole = ranks == 1 or os.environ.get("STRETTO_LONG")
        chosen = [job for job in jobs if is_whole or LONG.fullmatch(job) is None]
        launch_ranks(SCRIPT, out, *chosen, ranks=ranks)
        files = [out / f"{ranks}-{rank}.json" for rank in range(ranks)]
        new = [json.loads(file.read_text()) for file in files]
        earlier = several.get(ranks, [{}] * ranks)
        several[ranks] = [Jobs(a | b) for a, b in zip(earlier, new, strict=True)]
    return several


def check_like_one(ours: Any, one: Any) -> None:
    """Compare weights and the lines of metrics, of a resumed run its last ones."""
    assert ours["weights"] == pytest.approx(one["weights"], rel=0, abs=1e-12)
    lines = one["lines"][-len(ours["lines"]) :]
    assert len(ours["lines"]) > 5
    for line, expected in zip(ours["lines"], lines, strict=True):
        assert line == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_a_mesh_trains_like_one_process(found: dict[int, Found], kind: str) -> None:
    ranks = [rank[f"train:{kind}"] for rank in found[4]]
    for one in ranks:
        check_like_one(one, found[1][0][f"train:{kind if kind in ('sp', 'cp') else 'one'}"])
    assert [one["is_first"] for one in ranks] == [True, False, False, False]
    groups: dict[int, Any] = {}
    for one in ranks:
        assert groups.setdefault(one["group"], one["ids"]) == one["ids"]
    assert len(groups) == GROUPS[kind]
    ids = [number for steps in groups.values() for own in steps for number in own]
    assert sorted(ids) == sorted([*range(101)] * 2)


@pytest.mark.parametrize(
    ("kind", "ranks", "other"),
    [
        ("hsdp", 4, "dp"),
        ("tpfsdp", 2, "dp"),
        ("tp", 1, "one"),
        ("tprep", 2, "dp"),
        ("sp", 2, "spdp"),
        ("cp", 2, "cpdp"),
    ],
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


@pytest.mark.parametrize(
    ("kind", "saved"),
    [*product(("one", *KINDS), repeat=2), ("tprep", "hsdp"), ("hsdp", "tprep")],
)
def test_every_mesh_resumes_from_every_other(
    found: dict[int, Found], kind: str, saved: str
) -> None:
    for rank in found[1] if kind == "one" else found[4]:
        check_like_one(rank[f"resume:{kind}:{saved}"], found[1][0]["train:one"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_your_own_has_the_same_meshes(found: dict[int, Found], kind: str) -> None:
    ranks = [rank[f"own:{kind}"] for rank in found[4]]
    expected = found[1][0]["own:one"]
    groups: dict[int, Any] = {}
    for one in ranks:
        assert one["weights"] == pytest.approx(expected["weights"], rel=0, abs=1e-12)
        assert groups.setdefault(one["group"], one["ids"]) == one["ids"]
        assert one["sum"] == GROUPS[kind]
        assert one["seen"] == expected["seen"] == 202
        assert one["looks"] == ranks[0]["looks"] != []  # the seconds are those of the first rank
    assert sorted(number for own in groups.values() for number in own) == sorted(expected["ids"])
    assert [one["is_first"] for one in ranks] == [True, False, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_copies_what_it_owns(found: dict[int, Found], kind: str) -> None:
    ranks = [rank[f"count:{kind}:14:3"] for rank in found[4]]
    copied, whole = [one["copied"][0] for one in ranks], ranks[0]["whole"]
    assert whole <= sum(copied) <= 1.05 * whole
    parts = {"dp": 4, "hsdp": 2, "tpfsdp": 2, "tp": 1}[kind]  # what is not cut by tensors is whole
    assert max(copied) <= 1.05 * whole / parts + (200 if kind == "dp" else 0)


@pytest.mark.parametrize(("ranks", "kind"), [(2, "dp"), (2, "tp"), *((4, one) for one in KINDS)])
def test_a_step_takes_one_small_all_reduce(found: dict[int, Found], ranks: int, kind: str) -> None:
    short, long = (calls_of(found, ranks, f"{kind}:{batches}") for batches in (4, 14))
    assert max(int(one.split()[1]) for one in long if one.startswith("all_reduce")) <= 128
    more = long - short
    assert sum(more.values()) == 10
    assert all(one.startswith("all_reduce") for one in more)


@pytest.mark.parametrize(("ranks", "kind"), [(2, "dp"), (2, "tp"), *((4, one) for one in KINDS)])
def test_a_save_takes_one_more(found: dict[int, Found], ranks: int, kind: str) -> None:
    """Of 8 bytes, for 5 saves and 4; those of 16 wait for the disk, which is slower than a step."""
    many, fewer = (calls_of(found, ranks, f"{kind}:14:{every}") for every in (3, 4))
    more = many - fewer
    del more["all_reduce 16"]
    # To compare weights that should be equal, and for values that were logged.
    assert more == {"all_reduce 8": 1, "all_gather_object": 2}


def calls_of(found: dict[int, Found], ranks: int, job: str) -> Counter[str]:
    """Return how often the first rank has called each collective."""
    return Counter(found[ranks][0][f"count:{job}"]["calls"])


@pytest.mark.parametrize(("ranks", "kind"), [(2, "dp"), (2, "tp"), *((4, one) for one in KINDS)])
def test_state_does_not_grow_with_the_ranks(found: dict[int, Found], ranks: int, kind: str) -> None:
    one, several = (
        found[number][0][f"count:{name}:14:3"]["state_bytes"]
        for number, name in ((1, "one"), (ranks, kind))
    )
    assert several - one <= 100 * ranks


@pytest.mark.parametrize(("rank", "kind"), list(enumerate(KINDS)))
def test_a_signal_to_one_rank_ends_all(found: dict[int, Found], rank: int, kind: str) -> None:
    ends = [one[f"signal:{kind}:{3 - rank}"] for one in found[4]]
    assert {one["batch"] for one in ends} == {4}  # it is seen in the next step
    assert all("SIGTERM" in one["why"] for one in ends)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("rank", "kind"), list(enumerate(KINDS)))
def test_a_nan_on_one_rank_is_one_on_all(
    found: dict[int, Found], rank: int, kind: str, how: str
) -> None:
    ends = [one[f"nan:{kind}:{3 - rank}:{how}"] for one in found[4]]
    assert len({one["batch"] for one in ends}) == 1
    assert {one["skipped"] for one in ends} == {1 if how == "skip" else 0}
    assert all(one["text"].startswith("TrainingError") == (how == "stop") for one in ends)


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_counts_each_sample_once(found: dict[int, Found], kind: str) -> None:
    expected = found[1][0]["evaluate:one"]
    assert expected["validation/count/seen"] == 30
    for rank in found[4]:
        assert rank[f"evaluate:{kind}"] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_a_model_share_dropout(found: dict[int, Found], kind: str) -> None:
    """Each rank was seeded with its own number."""
    groups: dict[int, Any] = {}
    for rank in found[4]:
        whole, resumed = (rank[f"drop:{kind}"][name] for name in ("whole", "resumed"))
        assert groups.setdefault(whole["group"], whole["masks"]) == whole["masks"]
        assert 10 < len(resumed["masks"]) < len(whole["masks"])
        assert resumed["masks"] == whole["masks"][-len(resumed["masks"]) :]
        assert resumed["weights"] == pytest.approx(whole["weights"], rel=0, abs=1e-14)
    assert len(groups) == GROUPS[kind]
    first = ["".join(masks[:5]) for masks in groups.values()]
    assert len(set(first)) == len(first)
    if kind == "tp":  # one model group draws what one process does
        one = found[1][0]["drop:one"]["whole"]
        assert one["masks"] == groups[0]
        check_like_one(found[4][0]["drop:tp"]["whole"], one)


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
        words = (
            *("shares", "first", "left", "average", "average", "shares", "mesh=mesh", "ranks"),
            *("other", "data-parallel"),
        )
        for text, word in zip(rank["refused:all"], words, strict=True):
            assert word in text
