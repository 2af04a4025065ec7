"""Records of modded-nanogpt: what is read from their logs, and what is changed in their scripts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from published import nanogpt
from published.nanogpt import EDITS, MIB, edited, peak_of, script_of, write_tokens
from published.rows import SOURCE, Row

SCRIPT = """\
import torch
torch._inductor.config.coordinate_descent_tuning = True # faster
train_steps = 1000
for step in range(train_steps + 1):
    pass
print0(f"peak memory allocated: {torch.cuda.max_memory_allocated() // 1024 // 1024} MiB "
       f"reserved: {torch.cuda.max_memory_reserved() // 1024 // 1024} MiB", console=True)
"""
RULE = "=" * 100 + "\n"
LOG = f"""\
{SCRIPT}{RULE}Running PyTorch 2.7.0
{RULE}step:0/1000
peak memory allocated: 12 MiB reserved: 34 MiB
"""


@pytest.mark.parametrize("log", [LOG, RULE + LOG])
def test_a_log_begins_with_its_script(log: str) -> None:
    assert script_of(log) == SCRIPT


@pytest.mark.parametrize("log", ["", "step:0/1000\n", RULE + "step:0\n" + RULE])
def test_a_log_without_a_script_is_refused(log: str) -> None:
    with pytest.raises(ValueError, match="script"):
        script_of(log)


def test_the_peak_is_the_last_line_and_not_the_code_that_prints_it() -> None:
    assert peak_of(LOG) == {"allocated": 12 * MIB, "reserved": 34 * MIB}
    assert peak_of("peak memory consumption: 7 MiB\n") == {"allocated": 7 * MIB}
    with pytest.raises(ValueError, match="peak memory"):
        peak_of(SCRIPT)


def test_edits_change_what_they_say() -> None:
    script = edited(SCRIPT, ["steps", "tuning"])
    assert "for step in (0, 1, 2, 3, train_steps):" in script
    assert "coordinate_descent_tuning = False # faster" in script
    assert len(script.splitlines()) == len(SCRIPT.splitlines())


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_that_matches_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        edited("import torch\n# coordinate_descent_tuning = True\n", [name])


def test_every_row_names_its_edits() -> None:
    assert {edit for row in nanogpt.ROWS for edit in row.settings["edits"]} <= set(EDITS)
    assert len({row.name for row in nanogpt.ROWS}) == len(nanogpt.ROWS)


def test_a_log_of_other_figures_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / nanogpt.FOLDER / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text(LOG)
    monkeypatch.setenv(SOURCE, str(tmp_path))
    with pytest.raises(ValueError, match="the log says"):
        nanogpt.measure(Row("one", {"allocated": 1.0 * MIB}, {"log": "log.txt", "edits": []}))


def test_tokens_have_the_header_of_the_records(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", train=5000, validation=3000)
    for name, count in (("train_000001", 5000), ("val_000000", 3000)):
        file = tmp_path / f"data/fineweb_{name}.bin"
        assert list(np.fromfile(file, np.int32, 3)) == [20240520, 1, count]
        tokens = np.fromfile(file, np.uint16, offset=1024)
        assert len(tokens) == count
        assert tokens[0] == nanogpt.BEGINS
        assert 1 < (tokens == nanogpt.BEGINS).sum() < count / 50
