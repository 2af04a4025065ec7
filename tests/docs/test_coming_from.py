"""Each row of the tables of equivalents: our side is executed, the other one if it is installed."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

import stretto
from stretto import Horizon, Timestamp, Trainer, batching, schedules
from stretto.config import parse_run_file
from stretto.data import DataSpec
from stretto.schedules import as_schedule
from stretto.training import algorithms

PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming-from").glob("*.md"))
ROW = re.compile(r"^\| `(?P<theirs>.+)` \| `(?P<ours>.+)` \|$", re.MULTILINE)
ROWS = [
    pytest.param(path.stem, match["theirs"], match["ours"], id=f"{path.stem}: {match['theirs']}")
    for path in PAGES
    for match in ROW.finditer(path.read_text(encoding="utf-8"))
]
IS_ARGUMENTS = re.compile(r"\w+=")
NEEDED = {"max_duration": "4ep", "data": {"target": "mine:Data"}, "batch_size": 8}
OURS = {
    **{name: getattr(stretto, name) for name in stretto.__all__},
    **{name: getattr(batching, name) for name in batching.__all__},
    **{name: getattr(schedules, name) for name in schedules.__all__},
    **{name: getattr(algorithms, name) for name in algorithms.__all__},
    "data": TensorDataset(torch.randn(16, 4), torch.randn(16, 1)),
}


def trainer(tmp_path: Path, **changed: Any) -> Trainer:
    model = torch.nn.Linear(4, 1)
    settings: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loss": torch.nn.MSELoss(),
        "max_duration": "100ep",
        "batch_size": 8,
        "evaluate": OURS["data"],
        "folder": tmp_path / "run",
        "log": stretto.Logging(console=False),
    }
    return Trainer(model, OURS["data"], **{**settings, **changed})


def theirs_of(page: str, code: str) -> Any:
    """Evaluate the other side; None if its package is not installed, or it is no Python."""
    names: dict[str, Any] = {}
    if page == "torch":
        names = dict(vars(torch.optim.lr_scheduler))
        names["optimizer"] = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return eval(code, names)
    package = {"hugging-face": "transformers"}.get(page, page)
    if page in ("megatron", "torchtitan") or find_spec(package) is None:
        return None
    if page == "composer":
        importlib.import_module("tests.integrations.torchvision_operators")
        for part in ("optim", "algorithms"):
            names |= vars(importlib.import_module(f"composer.{part}"))
        return eval(f"dict({code})", names)
    if page == "hugging-face":
        settings = eval(f"dict({code})")
        return importlib.import_module("transformers").TrainingArguments(
            "out", use_cpu=True, report_to=[], **settings
        )
    if page == "lightning":
        lightning = importlib.import_module("lightning")
        names = dict(vars(importlib.import_module("lightning.pytorch.callbacks")))
        return lightning.Trainer(logger=False, accelerator="cpu", **eval(f"dict({code})", names))
    if page == "accelerate":
        accelerate = importlib.import_module("accelerate")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return eval(code, dict(vars(accelerate)))
    raise AssertionError(f"{page} is not known")


def ours_of(code: str, tmp_path: Path) -> Any:
    """Execute our side: arguments of a `Trainer`, lines of a run file, or an expression."""
    if IS_ARGUMENTS.match(code):
        return trainer(tmp_path, **eval(f"dict({code})", dict(OURS)))
    if re.match(r"\{?\w+: ", code):
        return parse_run_file(yaml.safe_dump({**NEEDED, **yaml.safe_load(code)}))
    return eval(code, {**OURS, "trainer": trainer(tmp_path)})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "theirs", "ours"), ROWS)
def test_a_row(
    page: str, theirs: str, ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    peer, own = theirs_of(page, theirs), ours_of(ours, tmp_path)
    if page != "torch":
        return
    factor = as_schedule(own).bind(Horizon("100ep", dataset_num_samples=10))
    for epoch in range(100):
        now = Timestamp(epoch=epoch, sample=10 * epoch, batch=epoch)
        assert factor(now) == pytest.approx(peer.optimizer.param_groups[0]["lr"], abs=1e-9)
        peer.optimizer.step()
        peer.step()


HOSTS = {
    "accelerate": "accelerate:Accelerator",
    "composer": "composer:Trainer",
    "hugging-face": "transformers:TrainingArguments",
    "lightning": "lightning:Trainer",
}
GIVEN = re.compile(r"(\w+)=")


@pytest.mark.parametrize("page", HOSTS)
def test_arguments_that_a_page_names_exist(page: str) -> None:
    package, _, host = HOSTS[page].partition(":")
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    if page == "composer":
        importlib.import_module("tests.integrations.torchvision_operators")
    adapter = importlib.import_module(f"stretto.integrations.{page.replace('-', '')}")
    known = {*signature(adapter.attach).parameters} | {
        *signature(getattr(importlib.import_module(package), host)).parameters,
        *signature(DataSpec).parameters,
    }
    text = next(one for one in PAGES if one.stem == page).read_text(encoding="utf-8")
    said = text.partition("## Move to ours")[0].partition("Refused:")[0]
    named = {name for code in re.findall(r"`([^`\n]+)`", said) for name in GIVEN.findall(code)}
    assert named - known == set()


def test_every_page_has_rows() -> None:
    pages = {str(row.values[0]) for row in ROWS}
    assert {path.stem for path in PAGES} - pages == {"index", "torchtune"}
