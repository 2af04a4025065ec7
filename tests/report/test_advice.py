"""Advice from the log of a run: what it tells, and what it does not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stretto.batching import as_policy
from stretto.cli.app import main
from stretto.report import page, read_advice
from stretto.run_folder import EVENTS, METRICS

START = {"event": "start", "text": "start", "utc": "2026-01-01T00:00:00+00:00", "attempt": 1}
FACTS = {"machine": "cpu x 1", "optimizer": "AdamW", "micro_batch_size": None}


def line(number: int, size: int, seconds: float | None, **more: float) -> dict[str, float]:
    clock = {"ep": 0, "ba": 10 * number, "sp": 1000 * number, "tok": 0, "dur": number / 20}
    own = {"sec": number, "loss": 1.0, "batch_size": size, "micro_batch_size": size}
    timed = {} if seconds is None else {"step_seconds": seconds}
    return {**clock, **own, **timed, **more}


def run(folder: Path, lines: list[dict[str, float]], *resumes: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    at = {"ep": 0, "ba": 0, "sp": 0, "tok": 0, "dur": 0, "sec": 0}
    events = [{**START, **at, "facts": FACTS}, *({**START, **at, **one} for one in resumes)]
    for name, records in ((METRICS, lines), (EVENTS, events)):
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


def steps(fixed: float, noise: dict[int, float], size: int = 16) -> list[dict[str, float]]:
    """A run of 20 lines that had three sizes early on and `size` later; a sample takes 1 ms."""
    found = []
    for number in range(20):
        own = {3: 8, 5: 64}.get(number, size)
        scale = noise[max(one for one in noise if one <= number)]
        known = {
            "noise_scale": scale,
            "noise_scale_low": 0.8 * scale,
            "noise_scale_high": 1.3 * scale,
        }
        found.append(line(number, own, (fixed + own) / 1000, **known))
    return found


def test_the_best_size_is_the_root_of_price_times_noise(tmp_path: Path) -> None:
    advice = read_advice(run(tmp_path, steps(64, {0: 25})))
    assert advice.is_known
    assert advice.best(25) == pytest.approx(40, rel=0.1)
    assert list(advice.plan) == ["0%"]
    assert advice.noise == pytest.approx((25, 20, 32.5))
    text = str(advice)
    assert "64 ms + 1 ms a sample (3 sizes from 8 to 64" in text
    assert "batch 16  now" in text
    assert "times as fast" in text
    assert "not known: whether the noise scale is the right one for AdamW" in text


@pytest.mark.parametrize(("known", "has_half"), [(15, True), (9, False)])
def test_a_noise_scale_that_is_not_known_to_the_end_is_told(
    tmp_path: Path, known: int, has_half: bool
) -> None:
    lines = steps(64, {0: 25})
    for one in lines[known:]:
        for name in ("noise_scale", "noise_scale_low", "noise_scale_high"):
            del one[name]
    said = f"{read_advice(run(tmp_path, lines))}\n"
    at = f"{(known - 1) / 20:.0%}"
    assert f"not known: the noise scale after {at} of the run, where it was 25\n" in said
    assert ("over the last half" in said) == has_half
    assert "NoiseReport" not in said


def test_a_size_near_the_best_is_kept(tmp_path: Path) -> None:
    advice = read_advice(run(tmp_path, steps(64, {0: 25}, size=36)))
    assert "no other size is 3 percent faster" in str(advice)
    assert "times as fast" not in str(advice)


def test_noise_that_grows_much_makes_a_plan_that_a_run_reads(tmp_path: Path) -> None:
    growing = {number: 4.0 * 1.6**number for number in range(20)}
    advice = read_advice(run(tmp_path, steps(64, growing)))
    assert advice.gain > 0.03
    sizes = list(advice.plan.values())
    assert sizes == sorted(sizes)
    assert len(sizes) == 4  # 256 is as far beyond 64 as it looks
    assert str(as_policy(advice.policy)) == str(as_policy(advice.plan))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(1, 16, None, noise_scale=20)], "not known: the seconds of a step"),
        ([line(1, 16, 0.08, noise_scale=20)], "one batch size"),
        ([line(1, 16, 0.08), line(2, 32, 0.096)], "not known: the noise scale"),
    ],
    ids=["no time", "one size", "no noise"],
)
def test_too_little_says_what_is_not_known(
    tmp_path: Path, lines: list[dict[str, float]], said: str
) -> None:
    advice = read_advice(run(tmp_path, lines))
    assert not advice.is_known
    assert advice.plan == {}
    assert said in str(advice)
    assert "times as fast" not in str(advice)


def test_a_part_too_small_to_be_seen_is_bounded_as_for_the_policy(tmp_path: Path) -> None:
    seconds = [0.0645 * (1 + 0.02 * (-1) ** number) for number in range(20)]
    noise = {"noise_scale": 80.0, "sample_seconds": 0.001}
    lines = [line(number, 64, one, **noise) for number, one in enumerate(seconds)]
    advice = read_advice(run(tmp_path, lines))
    assert advice.cost is not None
    assert advice.cost.unknown is not None
    assert advice.best(80) == pytest.approx(math.sqrt(6.4 * 80), rel=0.1)
    text = str(advice)
    assert "the seconds fit any a / b from 0 to" in text
    assert "compared with a / b = 6.4 samples, the limit" in text


def test_rows_of_another_machine_or_setting_do_not_mix(tmp_path: Path) -> None:
    lines = steps(64, {0: 25})
    for change in ({"facts": {**FACTS, "machine": "cpu x 2"}}, {"facts": FACTS, "changes": ["lr"]}):
        resumed = {"event": "resume", "ba": 100, **change}
        advice = read_advice(run(tmp_path, lines, resumed))
        assert advice.cost is not None
        assert list(advice.cost.sizes) == [16]
    same = read_advice(run(tmp_path, lines, {"event": "resume", "ba": 100, "facts": FACTS}))
    assert same.cost is not None
    assert list(same.cost.sizes) == [8, 16, 64]


def test_rows_of_other_micro_batches_do_not_mix(tmp_path: Path) -> None:
    lines = [{**one, "micro_batch_size": 8} for one in steps(64, {0: 25})]
    lines[3]["micro_batch_size"] = 4
    facts = {"facts": {**FACTS, "micro_batch_size": "8"}}
    advice = read_advice(run(tmp_path, lines, {"event": "resume", **facts}))
    assert advice.cost is not None
    assert list(advice.cost.sizes) == [16, 64]


def test_the_command_prints_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", steps(64, {0: 25}))
    for command in (["advise"], ["report"]):
        with pytest.raises(SystemExit, match="0"):
            main([*command, str(folder)])
        assert "within 5 percent of the best" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["advise", str(folder), "--write", str(tmp_path / "sizes.yaml"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (tmp_path / "sizes.yaml").read_text() == f'batch_size: "{found["batch_size"]}"\n'
    assert any(name == "advice" for name, _ in page.read(folder).facts)
    little = run(tmp_path / "little", [line(1, 16, 0.08)])
    with pytest.raises(SystemExit, match="2"):
        main(["advise", str(little), "--write", str(tmp_path / "no.yaml")])
    assert not (tmp_path / "no.yaml").exists()


@pytest.mark.parametrize("is_page", [False, True], ids=["advise", "report"])
def test_only_what_the_same_command_has_written_is_replaced(
    is_page: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", steps(64, {0: 25}))
    path = tmp_path / ("page.html" if is_page else "run.yaml")
    verb, option = ("report", "--html") if is_page else ("advise", "--write")
    for theirs in ("max_duration: 2ep\n", 'batch_size: "8"\nseed: 1\n', "<title>mine</title>"):
        path.write_text(theirs)
        with pytest.raises(SystemExit, match="2"):
            main([verb, str(folder), option, str(path)])
        assert "name a new file" in capsys.readouterr().err
        assert path.read_text() == theirs
    path.write_text("")
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            main([verb, str(folder), option, str(path)])
    assert path.read_text() != ""
    assert {one.name for one in tmp_path.iterdir()} == {"run", path.name}
