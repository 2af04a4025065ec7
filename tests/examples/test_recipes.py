"""Published recipes as files: their plans have the numbers of the publications."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stretto.config.plans import build_plan
from stretto.config.run import read_run_file
from stretto.planning import Plan

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
FILES = sorted(FOLDER.glob("*.yaml"))
MI = 2**20
"""A "million" tokens of a batch in publications that count sequences in powers of two."""

TOTALS: dict[str, dict[str, Any]] = {
    "bloom-176b": {"samples": 220_000_000, "tokens": 450_560_000_000},
    "consilience-40b": {"batches": 325_000},
    "deepseek-v2": {"tokens": 8.1e12},
    "deepseek-v2-lite": {"tokens": 5.7e12},
    "deepseek-v3": {"tokens": 14.8e12},
    "falcon-mamba-7b": {"tokens": 5.5e12},
    "glm-4.5": {"tokens": 23e12},
    "gpt-3-175b": {"tokens": 300e9},
    "kimi-k2": {"tokens": 15.5e12},
    "ling-plus": {"tokens": 9e12},
    "llama3-405b": {"tokens": 15.6e12},
    "lucie-7b": {"samples": 762_144_586},
    "marin-8b": {"batches": 1_400_000},
    "marin-32b": {"batches": 192_000},
    "mimo-7b": {"tokens": 23.784e12},
    "minimax-01": {"tokens": 11.4e12},
    "modded-nanogpt": {"batches": 1285, "tokens": 423 * 131_072 + 424 * 262_144 + 438 * 393_216},
    "modernbert-base": {"tokens": 1.719e12},
    "mt-nlg-530b": {"tokens": 270e9},
    "nemotron-4-340b": {"tokens": 8e12},
    "olmo-1b-batch-warmup": {"tokens": 658e9},
    "olmo-2-7b": {"batches": 928_646, "tokens": 3.895e12},
    "palm-540b": {"batches": 255_000, "tokens": 776e9},
    "pythia-12b": {"batches": 143_000, "tokens": 299_892_736_000},
    "smollm3-3b": {"batches": 4_720_000, "tokens": 11.136e12},
}
BORDERS = [
    # (recipe, time, what, in the last batch before it, in the first batch from it on)
    ("bloom-176b", "9_765_625sp", "size", 2032, 2048),
    ("bloom-176b", "183_105sp", "lr", 6e-5, 6e-5),
    ("bloom-176b", "200_000_000sp", "lr", 6e-6, 6e-6),
    ("consilience-40b", "549_755_813_888tok", "size", 32_766, 32_768),
    ("deepseek-v2", "225Btok", "size", 6912, 9216),
    ("deepseek-v2", "2000ba", "lr", 2.4e-4, 2.4e-4),
    ("deepseek-v2", "60%", "lr", 2.4e-4, 2.4e-4 * 0.316),
    ("deepseek-v2", "90%", "lr", 2.4e-4 * 0.316, 2.4e-4 * 0.316**2),
    ("deepseek-v2-lite", "80%", "lr", 4.2e-4, 4.2e-4 * 0.316),
    ("deepseek-v2-lite", "90%", "lr", 4.2e-4 * 0.316, 4.2e-4 * 0.316**2),
    ("deepseek-v3", "469Btok", "size", 12_288, 15_360),
    ("deepseek-v3", "2000ba", "lr", 2.2e-4, 2.2e-4),
    ("deepseek-v3", "10Ttok", "lr", 2.2e-4, 2.2e-4),
    ("deepseek-v3", "14.3Ttok", "lr", 2.2e-5, 2.2e-5),
    ("deepseek-v3", "14.633Ttok", "lr", 2.2e-5, 7.3e-6),
    ("deepseek-v3", "10Ttok", "mtp_weight", 0.3, 0.1),
    ("deepseek-v3", "14.3Ttok", "router_bias_speed", 0.001, 0.0),
    ("falcon-mamba-7b", "50Btok", "size", 1920, 2048),
    ("falcon-mamba-7b", "5000Btok", "lr", 6.4e-4, 6.4e-4),
    ("glm-4.5", "500Btok", "tokens", 60 * MI, 64 * MI),
    ("gpt-3-175b", "12Btok", "tokens", 3.168e6, 3.2e6),
    ("gpt-3-175b", "375Mtok", "lr", 0.6e-4, 0.6e-4),
    ("gpt-3-175b", "260Btok", "lr", 0.6e-5, 0.6e-5),
    ("kimi-k2", "500ba", "lr", 2e-4, 2e-4),
    ("kimi-k2", "10Ttok", "lr", 2e-4, 2e-4),
    ("ling-plus", "60%", "lr", 2.4e-4, 1.2e-4),
    ("llama3-405b", "252Mtok", "tokens", 4 * MI, 8 * MI),
    ("llama3-405b", "252Mtok", "sequence_length", 4096, 8192),
    ("llama3-405b", "2.87Ttok", "tokens", 8 * MI, 16 * MI),
    ("llama3-405b", "8000ba", "lr", 8e-5, 8e-5),
    ("lucie-7b", "10_000_000sp", "size", 960, 1024),
    ("lucie-7b", "2_000_000sp", "lr", 3e-4, 3e-4),
    ("marin-8b", "660_001ba", "size", 1024, 3072),
    ("marin-8b", "660_001ba", "lr", 1e-3, 1.7e-3),
    ("marin-8b", "1_320_001ba", "size", 3072, 4096),
    ("marin-32b", "18_500ba", "size", 8192, 7680),
    ("marin-32b", "21_010ba", "size", 7680, 8192),
    ("marin-32b", "159_999ba", "size", 8192, 1024),
    ("marin-32b", "160_000ba", "size", 1024, 8192),
    ("mimo-7b", "168Btok", "size", 2304, 2560),
    ("mimo-7b", "84Btok", "lr", 1.07e-4, 1.07e-4),
    ("mimo-7b", "10.284Ttok", "lr", 1.07e-4, 1.07e-4),
    ("mimo-7b", "17.784Ttok", "lr", 3e-5, 3e-5),
    ("mimo-7b", "21.784Ttok", "sequence_length", 8192, 32_768),
    ("mimo-7b", "23.284Ttok", "lr", 3e-5, 3e-5),
    ("minimax-01", "500ba", "lr", 2e-4, 2e-4),
    ("minimax-01", "69Btok", "tokens", 16 * MI, 32 * MI),
    ("minimax-01", "790Btok", "tokens", 32 * MI, 64 * MI),
    ("minimax-01", "4.7Ttok", "tokens", 64 * MI, 128 * MI),
    ("minimax-01", "7.2Ttok", "lr", 2e-4, 1.3e-4),
    ("minimax-01", "10.4Ttok", "lr", 1.3e-4, 1.3e-4),
    ("modded-nanogpt", "423ba", "tokens", 131_072, 262_144),
    ("modded-nanogpt", "847ba", "tokens", 262_144, 393_216),
    ("modded-nanogpt", "423ba", "lr", 1.0, 1.52),
    ("modded-nanogpt", "508ba", "lr", 1.52, 1.52),
    ("modded-nanogpt", "1270ba", "lr", 0.152, 0.15),
    ("modernbert-base", "50Btok", "size", 4607, 4608),
    ("modernbert-base", "3Btok", "lr", 8e-4, 8e-4),
    ("modernbert-base", "1669Btok", "lr", 8e-4, 8e-4 * (1 - 94**-1)),
    ("mt-nlg-530b", "12Btok", "size", 1888, 1920),
    ("mt-nlg-530b", "1Btok", "lr", 5e-5, 5e-5),
    ("nemotron-4-340b", "200Btok", "size", 768, 1536),
    ("nemotron-4-340b", "400Btok", "size", 1536, 2304),
    ("olmo-1b-batch-warmup", "168Btok", "size", 1024, 2048),
    ("olmo-1b-batch-warmup", "503Btok", "size", 2048, 4096),
    ("olmo-2-7b", "8_388_608_000tok", "lr", 3e-4, 3e-4),
    ("palm-540b", "50_000ba", "size", 512, 1024),
    ("palm-540b", "115_000ba", "size", 1024, 2048),
    ("palm-540b", "10_000ba", "lr", 1e-2, 1e-2),
    ("palm-540b", "40_000ba", "lr", 5e-3, 5e-3),
    ("pythia-12b", "1430ba", "lr", 1.2e-4, 1.2e-4),
    ("smollm3-3b", "2000ba", "lr", 2e-4, 2e-4),
    ("smollm3-3b", "4_248_000ba", "lr", 2e-4, 2e-4),
]
ENDS = [
    # (recipe, the learning rate of the last batch)
    ("deepseek-v3", 7.3e-6),
    ("glm-4.5", 2.5e-5),
    ("kimi-k2", 2e-5),
    ("lucie-7b", 3e-5),
    ("mimo-7b", 1e-5),
    ("minimax-01", 3e-5),
    ("modded-nanogpt", 0.15),
    ("falcon-mamba-7b", 6.4e-4 / 256),
    ("pythia-12b", 1.2e-5),
    ("palm-540b", 255_000**-0.5),
]


@cache
def planned(name: str) -> Plan:
    return build_plan(read_run_file(FOLDER / f"{name}.yaml"))


def values(plan: Plan, batch: int) -> dict[str, float]:
    at = plan.at(f"{batch}ba")
    after = plan.timestamp_at_batch(batch + 1)
    return {**at.values, "size": at.size, "tokens": after.token - at.timestamp.token}


def test_there_are_at_least_twenty_and_each_is_held_to_its_publication() -> None:
    assert len(FILES) >= 20
    assert {path.stem for path in FILES} == {*TOTALS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_has_its_source_and_an_exact_plan(path: Path) -> None:
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert "https://" in "".join(comments), "no source"
    plan = planned(path.stem)
    assert plan.is_exact
    assert not plan.warnings


@pytest.mark.parametrize("name", TOTALS)
def test_totals(name: str) -> None:
    plan, stated = planned(name), TOTALS[name]
    assert plan.end is not None
    end = {"batches": plan.end.batch, "samples": plan.num_samples, "tokens": plan.end.token}
    for unit, total in stated.items():
        if isinstance(total, int):
            assert end[unit] == total
        assert end[unit] == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "time", "what", "before", "after"),
    BORDERS,
    ids=[f"{name} {what} {time}" for name, time, what, *_ in BORDERS],
)
def test_borders(name: str, time: str, what: str, before: float, after: float) -> None:
    plan = planned(name)
    first = plan.at(time).timestamp.batch
    near = 0 if before != after and what != "lr" else 3e-3
    assert values(plan, first - 1)[what] == pytest.approx(before, rel=near)
    assert values(plan, first)[what] == pytest.approx(after, rel=near)


@pytest.mark.parametrize(("name", "rate"), ENDS)
def test_the_last_learning_rate(name: str, rate: float) -> None:
    plan = planned(name)
    assert plan.num_batches is not None
    assert plan.values_at(plan.num_batches - 1)["lr"] == pytest.approx(rate, rel=1e-3)


def test_a_plan_says_when_the_learning_rate_begins_to_fall() -> None:
    plan = planned("deepseek-v3")
    words = {(one.name, one.what): one.at for one in plan.changes}
    fall = words["lr", "begins to fall"]
    assert plan.at("10Ttok").timestamp == fall
    assert 0 <= fall.token - 10 * 10**12 < 15_360 * 4096
    assert words["lr", "warm-up ends"].batch == 2000
    assert words["lr", "changes to 7.3e-06"] == plan.at("14.633Ttok").timestamp


def test_lucie_has_753_851_full_steps() -> None:
    plan = planned("lucie-7b")
    assert plan.num_batches is not None
    last = plan.at(f"{plan.num_batches - 1}ba")
    assert (plan.num_batches - (last.size < last.decided), last.decided) == (753_851, 1024)


def test_olmo_has_43_percent_fewer_steps() -> None:
    path = FOLDER / "olmo-1b-batch-warmup.yaml"
    constant = build_plan(read_run_file(path, ["batch_size=1024"])).num_batches
    steps = planned("olmo-1b-batch-warmup").num_batches
    assert constant is not None
    assert steps is not None
    assert round(100 * (1 - steps / constant), 1) == 43.1


def test_olmo_learning_rate_follows_the_root_of_the_size() -> None:
    plan = planned("olmo-1b-batch-warmup")
    for time in ("168Btok", "503Btok"):
        first = plan.at(time).timestamp.batch
        ratio = plan.values_at(first)["lr"] / plan.values_at(first - 1)["lr"]
        assert ratio == pytest.approx(2**0.5, rel=1e-4)


def test_falcon_mamba_keeps_the_rate_over_the_root_of_the_size() -> None:
    plan = planned("falcon-mamba-7b")
    during = [stage for stage in plan.stages if stage.first.token < 50e9]
    for stage in during:
        assert stage.values["lr"].first / stage.size**0.5 == pytest.approx(6.4e-4 / 2048**0.5)


def test_llama_has_rows_of_8192_from_252_million_tokens_on() -> None:
    plan = planned("llama3-405b")
    before = plan.at("0tok")
    after = plan.at("252Mtok")
    assert (before.size, before.row, after.size, after.row) == (1024, 1, 2048, 2)
    assert 0 <= after.timestamp.token - 252_000_000 < 4 * MI


def test_a_recipe_is_planned_without_torch_and_not_trained() -> None:
    code = (
        "import sys\nfrom stretto.cli.app import app\n"
        "app(sys.argv[1:], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    path = str(FOLDER / "deepseek-v3.yaml")
    said = subprocess.run(
        [sys.executable, "-c", code, "plan", path], capture_output=True, text=True, check=True
    )
    assert "lr: warm-up ends at batch 2,000; begins to fall" in said.stdout
    refused = subprocess.run(
        [sys.executable, "-m", "stretto", "train", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "there is no 'model'" in refused.stderr


def test_recipes_are_planned_where_torch_is_not_installed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from stretto.cli.app import app\n"
        "for recipe in sys.argv[1:]: app(['plan', '--json', recipe], standalone_mode=False)"
    )
    command = [sys.executable, "-c", code, *map(str, FILES)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no module 'torch' here" in done.stderr
