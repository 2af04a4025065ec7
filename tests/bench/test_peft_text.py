"""The rows of PEFT's text comparison, and how they are asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from published import packages, peft_text
from published.rows import Row

STEPS = [{"length": length, "allocated": 1000 + 10 * length} for length in (500, 187, 86, 700, 400)]
ROW = Row("some", {"reserved": 5.0}, {"adapter": None, "train": {}, "trainable": 3})


def answering(answer: dict[str, Any] | None) -> subprocess.Popen[str]:
    """A worker that gives one answer, or ends."""
    code = "input()" if answer is None else f"input(); print({json.dumps(answer)!r})"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)


def measured(answer: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    with answering(answer) as process:
        monkeypatch.setattr(peft_text, "worker", lambda: process)
        return peft_text.measure(ROW)


def test_every_published_row_is_there_and_one_is_fitted() -> None:
    rows = peft_text.FAMILY.rows
    assert len({row.name for row in rows}) == len(rows) == 63
    assert [row.name for row in rows if row.fitted] == [peft_text.FITTED]
    for row in rows:
        method = row.name.partition("/")[0]
        assert set(row.published) == {"reserved", "mean allocated"}
        assert 6.4e9 < row.published["mean allocated"] < row.published["reserved"] < 40e9
        assert (row.settings["adapter"] is None) == (method == "full-finetuning")
        assert 0 < row.settings["trainable"] <= 3_212_749_824
    assert set(peft_text.CAUSES) <= {row.name for row in rows}


def test_batches_are_sorted_as_in_a_bucket_and_one_is_the_longest() -> None:
    lengths = [length for group in peft_text.GROUPS for length in group]
    assert lengths.count(max(lengths)) == lengths.count(peft_text.LONGEST) == 1
    assert all(list(group) == sorted(group, reverse=True) for group in peft_text.GROUPS)
    assert min(lengths) < peft_text.MEAN_LENGTH < max(lengths)


def test_a_row_is_answered_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured({"trainable": 3, "reserved": 7, "steps": STEPS}, monkeypatch)
    assert found == {"reserved": 7, "mean allocated": 1000 + 10 * peft_text.MEAN_LENGTH}


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ({"trainable": 4, "reserved": 7, "steps": STEPS}, "4 parameters"),
        ({"problem": "KeyError: 1"}, "KeyError"),
        (None, "ended"),
    ],
    ids=["other parameters", "a failure", "no answer"],
)
def test_a_row_that_is_not_the_published_one_is_no_figure(
    answer: dict[str, Any] | None, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=word):
        measured(answer, monkeypatch)


def test_packages_are_installed_once(tmp_path: Path) -> None:
    made = tmp_path / "some"
    made.mkdir()
    (made / "requirements.txt").write_text("one==1\n\ntwo==2")
    assert packages.installed("some", ("one==1",), ("two==2",), tmp_path) == made
    with pytest.raises(subprocess.CalledProcessError):  # no longer complete
        packages.installed("some", ("../no/such/file.whl",), (), tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not (packages.FOLDER / "peft_text").exists(), reason="needs peft of 2026")
def test_a_row_has_the_same_bytes_after_other_rows() -> None:
    by_name = {row.name: row for row in peft_text.FAMILY.rows}

    def asked(name: str) -> dict[str, Any]:
        settings = {**by_name[name].settings, "groups": [[200]], "layers": 2}
        process = peft_text.worker()
        assert process.stdin
        assert process.stdout
        print(json.dumps(settings), file=process.stdin, flush=True)
        found: dict[str, Any] = json.loads(process.stdout.readline())
        return {key: found[key] for key in ("reserved", "trainable", "steps")}

    first = asked(peft_text.FITTED)
    assert asked("vera/llama-3.2-3B-default")["trainable"] < first["trainable"]
    assert asked(peft_text.FITTED) == first
