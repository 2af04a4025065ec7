"""A run's ledger against its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import DataError
from stretto.planning import Plan, plan
from stretto.report.run import FIRST, compare
from stretto.run_folder import LEDGER_COLUMNS, read_ledger
from stretto.schedules import Linear
from stretto.timing import Horizon

HEADER = ",".join(LEDGER_COLUMNS)


def make_plan(tokens_per_sample: int | None = 3) -> Plan:
    horizon = Horizon("2ep", dataset_num_samples=20, tokens_per_sample=tokens_per_sample)
    return plan(horizon, "0ep:8 1ep:16", schedules={"lr": Linear(1, 0)}, base={"lr": 0.1})


def write_ledger(folder: Path, planned: Plan, *, batches: int = 99) -> list[list[str]]:
    """Write what a run that follows its plan would write; return the rows."""
    rows = [[*LEDGER_COLUMNS, "lr"]]
    for batch in list(planned.batches())[:batches]:
        at, size = batch.timestamp, batch.size
        counts = (at.batch, at.epoch, at.sample, at.token, size, 3 * size, batch.accumulation)
        rows.append([*map(str, counts), "0.5", str(size), repr(batch.values["lr"])])
    save(folder, rows)
    return rows


def save(folder: Path, rows: list[list[str]]) -> None:
    (folder / "ledger.csv").write_text("".join(",".join(row) + "\n" for row in rows))


def test_reads_counts_and_values(tmp_path: Path) -> None:
    write_ledger(tmp_path, make_plan())
    rows = list(read_ledger(str(tmp_path)))
    assert rows[1].counts == {
        "batch": 1, "epoch": 0, "sample": 8, "token": 24, "size": 8, "tokens": 24,
        "micro_batches": 1, "decided_size": 8,
    }  # fmt: skip
    assert rows[1].values == {"lr": pytest.approx(0.08)}


def test_agrees_with_the_run_that_follows_it(tmp_path: Path) -> None:
    write_ledger(tmp_path, make_plan())
    comparison = compare(make_plan(), tmp_path)
    assert comparison.agrees
    assert str(comparison) == (
        "all 5 batches as planned (size, epoch, sample, micro_batches, token, tokens, lr)"
    )


def test_tokens_are_compared_where_the_plan_knows_them(tmp_path: Path) -> None:
    write_ledger(tmp_path, make_plan())
    comparison = compare(make_plan(tokens_per_sample=None), tmp_path)
    assert comparison.agrees
    assert "tokens" not in comparison.compared


def test_a_run_that_goes_on_agrees_so_far(tmp_path: Path) -> None:
    write_ledger(tmp_path, make_plan(), batches=3)
    comparison = compare(make_plan(), tmp_path)
    assert comparison.agrees
    assert str(comparison).startswith("the first 3 of 5 batches as planned")
    assert str(comparison).endswith("the run is not at its end")


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("size", "7", "batch 2: size 7, planned 4"),
        ("sample", "17", "batch 2: sample 17, planned 16"),
        ("token", "1", "batch 2: token 1, planned 48"),
        ("tokens", "1", "batch 2: tokens 1, planned 12"),
        ("lr", "0.0600001", "batch 2: lr 0.0600001, planned 0.06"),
        ("batch", "3", "batch 2: batch 3, planned 2"),
        ("micro_batches", "2", "batch 2: micro_batches 2, planned 1"),
    ],
)
def test_says_where_a_run_left_its_plan(column: str, value: str, said: str, tmp_path: Path) -> None:
    rows = write_ledger(tmp_path, make_plan())
    rows[3][rows[0].index(column)] = value
    save(tmp_path, rows)
    comparison = compare(make_plan(), tmp_path)
    assert not comparison.agrees
    assert said in str(comparison)


def test_rounding_is_no_difference(tmp_path: Path) -> None:
    rows = write_ledger(tmp_path, make_plan())
    rows[3][-1] = repr(float(rows[3][-1]) * (1 + 1e-15))
    save(tmp_path, rows)
    assert compare(make_plan(), tmp_path).agrees


def test_batches_beyond_the_plan_are_differences(tmp_path: Path) -> None:
    rows = write_ledger(tmp_path, make_plan())
    save(tmp_path, [*rows, ["5", "2", "40", "120", "16", "48", "1", "0.5", "16", "0.0"]])
    assert "batch 5: size 16, planned no batch" in str(compare(make_plan(), tmp_path))


def test_lists_the_first_differences_only(tmp_path: Path) -> None:
    rows = write_ledger(tmp_path, make_plan())
    save(tmp_path, [rows[0], *([*row[:4], "1", "1", *row[6:]] for row in rows[1:])])
    assert len(compare(make_plan(), tmp_path).differences) == FIRST


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file or directory"),
        ("", "does not name the columns"),
        ("a,b\n1,2\n", "does not name the columns"),
        (f"{HEADER}\n", "it holds no batch"),
        (f"{HEADER}\n0,0,0,0,x,0,1,0.5,8\n", "line 2 is not"),
        (f"{HEADER}\n0,0,0\n", "line 2 is not"),
        ("\xff", "does not name the columns|it is not a text"),
    ],
)
def test_what_is_no_ledger(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "ledger.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        compare(make_plan(), tmp_path)
