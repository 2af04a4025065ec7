"""Runs on several real processes, with gloo between them."""

from __future__ import annotations

import csv
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from stretto.errors import PlanWarning
from stretto.training import Trainer

SCRIPT = Path(__file__).with_name("distributed_run.py")
EDGES = Path(__file__).with_name("distributed_edges.py")

# Each process imports torch: seconds on a quiet machine, a minute on a busy one.
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


Launch = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def launch(launch_ranks: Callable[..., Any]) -> Launch:
    """Train on some ranks, and return what each saw; one rank is this process."""

    def start(ranks: int, out: Path, **settings: Any) -> list[dict[str, Any]]:
        out.mkdir(exist_ok=True)
        if ranks == 1:
            runpy.run_path(str(SCRIPT))["main"](settings, out)
        else:
            launch_ranks(SCRIPT, json.dumps(settings), out, ranks=ranks)
        return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return start


RAMP = {"batch_size": "0sp:7 50sp:13", "max_duration": "2ep", "micro_batch_size": 3}


@pytest.mark.parametrize(
    ("by_tokens", "last_batch"), [(False, "carry"), (True, "keep")], ids=["samples", "tokens"]
)
def test_two_ranks_train_like_one(
    tmp_path: Path, launch: Launch, by_tokens: bool, last_batch: str
) -> None:
    """Uneven shares, uneven micro-batches and token weights: the gradient is one big batch's."""
    given = {"by_tokens": by_tokens, "last_batch": last_batch, **RAMP}
    (one,) = launch(1, tmp_path / "one", **given)
    two = launch(2, tmp_path / "two", **given)
    assert ledger(tmp_path / "two") == ledger(tmp_path / "one")
    expected = torch.tensor(one["weights"])
    for rank in two:
        assert torch.allclose(torch.tensor(rank["weights"]), expected, rtol=0, atol=1e-12)
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-12)
        assert rank["clock"]["sample"] == one["clock"]["sample"]
        assert rank["clock"]["run_nanoseconds"] == two[0]["clock"]["run_nanoseconds"]
    assert sorted(two[0]["samples"] + two[1]["samples"]) == sorted(one["samples"])


def ledger(out: Path) -> list[tuple[str, ...]]:
    with (out / "run" / "ledger.csv").open() as file:
        rows = csv.DictReader(file)
        return [(row["batch"], row["sample"], row["size"], row["epoch"]) for row in rows]


def test_two_ranks_at_the_edges(tmp_path: Path, launch_ranks: Callable[..., Any]) -> None:
    """What one rank alone wants, has or fails at leaves neither of them waiting."""
    launch_ranks(EDGES, tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))

    alone = runpy.run_path(str(EDGES))["unlike"]()
    for rank in (first, second):
        assert rank["unlike"] == pytest.approx(alone, rel=1e-12)

    assert first["stopped"] == {"batch": 4, "reason": "enough", "after": 1}
    assert second["stopped"] == first["stopped"]
    assert first["too late"] == {"batch": 10, "reason": "enough", "after": 1}
    assert second["too late"]["batch"] == 10
    assert (first["failing"], second["failing"]) == ("ZeroDivisionError", "TrainingError")
    assert first["signalled"] == [4, "received SIGTERM", 143]
    assert second["signalled"] == [4, "received SIGTERM on another rank", 143]

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)).double()
    data = TensorDataset(torch.randn(40, 5, generator=torch.Generator().manual_seed(1)).double())
    with pytest.warns(PlanWarning, match="no optimizer has"):
        Trainer(
            model,
            data,
            optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1),
            loss=lambda model, batch: model(batch[0]).square().mean(),
            max_duration="4ba",
            batch_size=3,
        ).fit()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for rank in (first, second):
        weights = torch.tensor(rank["dummies"], dtype=torch.float64)
        assert torch.allclose(weights, expected, rtol=0, atol=1e-12)
    assert first["dummies"] == second["dummies"]

    for rank in (first, second):
        for name, seen in rank["traces"].items():
            assert seen["loss"] == seen["real"], name
            # DDP copies the buffers of rank 0 to the others.
            if rank is first or "sharded" in name:
                assert seen["model"] == seen["real"], name

    assert first["unwritable"] == {"batch": 10, "warnings": 3}
    assert second["unwritable"] == {"batch": 10, "warnings": 0}
    assert first["wall clock"] == second["wall clock"]
    assert {"log", "validation"} < {what for what, _ in first["wall clock"]}

    torch.manual_seed(2)
    line = nn.Linear(5, 1).double()
    Trainer(
        line,
        data,
        optimizer=torch.optim.SGD(line.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        max_duration="3ep",
        batch_size=40,
    ).fit()
    expected = torch.cat([p.detach().flatten() for p in line.parameters()])
    with torch.no_grad():
        loss = line(data.tensors[0]).square().mean().item()
    for rank in (first, second):
        assert rank["sharded"]["clock"] == [2, 10, 80, 0]
        assert rank["sharded"]["resumed"] == first["sharded"]["weights"]
        assert rank["sharded"]["all at once"] == pytest.approx(expected.tolist(), rel=1e-12)
        assert rank["sharded"]["loss"] == pytest.approx(loss, rel=1e-12)

    for rank in (first, second):
        assert rank["statistics"]["measured"] == pytest.approx(first["statistics"]["expected"])
