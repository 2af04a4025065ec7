"""Pictures of plans: what is drawn, and that a file comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.batching import LinearRamp
from stretto.errors import ConfigError, MissingPackageError, PlanError, StrettoError
from stretto.planning import Plan, plan
from stretto.report import pictures
from stretto.report.pictures import draw
from stretto.schedules import Cosine, StepDecay
from stretto.timing import Horizon

HORIZON = Horizon("2ep", dataset_num_samples=100, tokens_per_sample=4)


def make_plan(policy: Any = "0ep:10 1ep:20", **options: Any) -> Plan:
    return plan(HORIZON, policy, schedules={"lr": Cosine()}, **options)


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf", ".PNG"])
def test_draws_a_plan(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "pictures" / f"plan{ending}"
    draw(make_plan(world_size=2, micro_batch_size=4), path)
    heads = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert path.read_bytes().startswith(heads[ending.lower()])


def test_a_picture_says_what_it_shows(tmp_path: Path) -> None:
    planned = plan(
        HORIZON,
        "0ep:10 1ep:20",
        micro_batch_size=4,
        world_size=2,
        schedules={"lr": Cosine(), "weight_decay": StepDecay("1ep"), "lr@head": 0.5},
    )
    # Letters as text, and not as outlines, so that they can be read here.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pictures.STYLE, "svg.fonttype", "none")
        draw(planned, tmp_path / "plan.svg", unit="tok")
    text = (tmp_path / "plan.svg").read_text()
    for said in (
        "run of 2ep", "15 batches", "batch size",
        "micro-batches of a rank", "learning rate", "learning rate of head", "weight decay",
        ">tokens<",
    ):  # fmt: skip
        assert said in text, said


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    draw(make_plan(), str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").exists()
    with pytest.raises(StrettoError, match="name the folder of a run"):
        draw(str(tmp_path / "run"), str(tmp_path / "run.svg"))


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        draw(make_plan(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("policy", [7, "0ep:7 1ep:8", LinearRamp(5, 60, "1ep")])
def test_draws_sizes_near_and_far(policy: Any, tmp_path: Path) -> None:
    draw(make_plan(policy), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda p: draw(make_plan(), p / "x.gif"), ConfigError, "let it end in .png"),
        (lambda p: draw(make_plan(), p / "x"), ConfigError, "let it end in .png"),
        (lambda p: draw(make_plan(), p / "x.png", unit="sec"), PlanError, "sec"),
        (lambda p: draw(make_plan(), p / "x.png", unit="s"), StrettoError, "unit"),
        (lambda p: draw(plan(Horizon("1h"), 8), p / "x.png"), PlanError, "without an end"),
    ],
)
def test_what_cannot_be_drawn(
    draw: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        draw(tmp_path)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"exists|directory"):
        draw(make_plan(), tmp_path / "file" / "plan.png")


def test_matplotlib_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises((MissingPackageError, ImportError), match="matplotlib"):
        draw(make_plan(), tmp_path / "plan.png")


def test_draws_a_run_beside_its_plan(tmp_path: Path) -> None:
    (tmp_path / "ledger.csv").write_text(
        "batch,epoch,sample,token,size,tokens,micro_batches,sec,decided_size,lr\n"
        "0,0,0,0,8,8,1,0.0,8,0.5\n1,0,8,8,8,8,1,0.1,8,0.25\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pictures.STYLE, "svg.fonttype", "none")
        draw(tmp_path, tmp_path / "run.svg", unit="ba")
    text = (tmp_path / "run.svg").read_text()
    for said in ("batch size", "learning rate", ">batches<"):
        assert said in text, said
