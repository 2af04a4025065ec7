"""`stretto find-batch-size`: the answer, the table, the picture; for devices that are not here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.memory import Answer
from stretto.memory.answer import Cost
from stretto.memory.limits import MemoryLimit
from stretto.memory.step import WholeStep

FOUND = Answer(8, "phantom", None, MemoryLimit(1000, "as stated"), 10, Cost())
Stretto = Callable[..., Any]

WIDE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Vectors(TensorDataset):
    def __init__(self):
        super().__init__(torch.randn(64, 512))


class Wide(nn.Sequential):
    def __init__(self, width=1024, reads=False):
        if reads:
            torch.zeros(()).item()
        super().__init__(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, 512))

    @staticmethod
    def loss(model, batch):
        return model(batch[0]).square().mean()
"""
RUN = """\
max_duration: 2ep
model: {target: cli_wide:Wide}
data: {target: cli_wide:Vectors}
optimizer: {target: torch.optim:AdamW}
batch_size: 8
"""


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli_wide.py").write_text(WIDE)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_wide", raising=False)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answer without a GPU and without a phantom; return what was asked."""
    questions: list[dict[str, Any]] = []

    def answer(step: Any, batch: Any, **how: Any) -> Answer:
        questions.append({**how, "step": WholeStep.of(step), "batch": batch})
        limit = MemoryLimit(1000, "as stated")
        peaks = {how["maximum"]: 900}
        return Answer(how["maximum"], "phantom", None, limit, 10, Cost(), peaks=peaks)

    monkeypatch.setattr("stretto.cli.finding.find_batch_size", answer)
    return questions


def test_a_gpu_that_is_not_here(wide: Path, stretto: Stretto, asked: list[dict[str, Any]]) -> None:
    said = stretto("find-batch-size", "run.yaml", "model.width=200000000", "--gpu", "h100")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0].split() == ["batch", "size", "peak", "headroom"]
    assert "micro-batch: 64 samples (phantom), all there are; more would fit" in lines
    assert asked[0]["gpu"] == "h100"
    assert asked[0]["step"].device.type == "meta"  # 820 GB of weights


def test_the_phantom_finds_the_modules_of_the_working_folder(
    wide: Path, stretto: Stretto, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its processes get the entries of this path that name a folder, and not the empty one.
    paths: list[list[str]] = []

    def answer(*_: Any, **__: Any) -> Answer:
        paths.append(list(sys.path))
        return FOUND

    monkeypatch.setattr("stretto.cli.finding.find_batch_size", answer)
    assert stretto("find-batch-size", "run.yaml", "--gpu", "h100").code == 0
    assert paths[0][-1] == str(wide)


def test_without_the_phantom_its_setup_is_named(
    wide: Path, stretto: Stretto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "stretto.memory.phantom.setup_problem", lambda: "run 'phantomgpu setup' once"
    )
    said = stretto("find-batch-size", "run.yaml", "--gpu", "h100")
    assert (said.code, said.out) == (2, "")
    assert "phantomgpu setup" in said.err


NOISY = """

from stretto import BatchSizePolicy
from stretto.batching import Bound


class Noisy(BatchSizePolicy):
    def bind(self, horizon):
        return Bound(decide=lambda now, state, signals: (8, state), reads=frozenset({"noise"}))
"""


@pytest.mark.parametrize(
    "measured",
    [
        RUN.replace("batch_size: 8", "batch_size: {NoiseScale: {start: 8, maximum: 64}}"),
        RUN.replace(
            "batch_size: 8",
            "batch_size: {PeriodSizes: [[1ep, 8], [rest, {NormTest: {start: 8, maximum: 64}}]]}",
        ),
        RUN + "callbacks: [{target: stretto.training.algorithms:NoiseReport}]",
        RUN.replace("batch_size: 8", "batch_size: {target: cli_wide:Noisy}"),
    ],
    ids=["policy", "period", "callback", "policy of yours"],
)
def test_a_run_that_measures_noise_keeps_one_more_gradient(
    wide: Path, stretto: Stretto, measured: str, asked: list[dict[str, Any]]
) -> None:
    (wide / "cli_wide.py").write_text(WIDE + NOISY)
    (wide / "measured.yaml").write_text(measured)
    stretto("find-batch-size", "run.yaml")
    stretto("find-batch-size", "measured.yaml")
    assert [one["measures_noise"] for one in asked] == [False, True]


def test_callbacks_are_neither_made_nor_missed(wide: Path, stretto: Stretto) -> None:
    """One of them may write over the log of a run that is under way."""
    (wide / "cli_wide.py").write_text(
        WIDE
        + "\n\nfrom stretto import Callback\nclass Loud(Callback):\n"
        + "    def __init__(self):\n        open('log.txt', 'w')\n"
    )
    elsewhere = "[{target: cli_wide:Loud}, {target: only_where_it_trains:Other}]"
    (wide / "run.yaml").write_text(RUN + f"callbacks: {elsewhere}")
    said = stretto("find-batch-size", "run.yaml", "--maximum", "8")
    assert (said.code, said.err) == (0, "")
    assert not (wide / "log.txt").exists()


def test_as_json(wide: Path, stretto: Stretto) -> None:
    found = json.loads(stretto("find-batch-size", "run.yaml", "--multiple-of", "24", "--json").out)
    assert (found["size"], found["too_large"], found["certainty"]) == (48, None, "tried")
    assert 0 < found["cost"]["real_steps"] <= 5


def test_all_samples_there_are_is_the_most(wide: Path, stretto: Stretto) -> None:
    said = stretto("find-batch-size", "run.yaml", "--power-of-two")
    assert "micro-batch: 64 samples (tried), all there are; more would fit\n" in said.out


def test_a_model_that_reads_values_while_it_is_built(
    wide: Path, stretto: Stretto, asked: list[dict[str, Any]]
) -> None:
    assert stretto("find-batch-size", "run.yaml", "model.reads=true", "--gpu", "l4").code == 0
    assert asked[0]["step"].device.type == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device-memory 80G", "write for example 80GiB or 80GB"),
        ("--gpu abacus", "gpu='abacus'"),
        ("--world-size 8", "--gpu h100"),
        ("--margin all", "read 'all' as memory"),
        ("--device-memory 1GiB", "add gpu='h100'"),
        ("optimizer=null", "there is no 'optimizer'"),
        ("device=nonsense", "device='nonsense'"),
    ],
)
def test_mistakes(arguments: str, message: str, wide: Path, stretto: Stretto) -> None:
    words = arguments.split()
    assigned = [word for word in words if "=" in word]
    said = stretto("find-batch-size", "run.yaml", *assigned, *(w for w in words if "=" not in w))
    assert said.code == 2
    assert message in said.err


@pytest.mark.long  # tests/training/stepping/test_fitting.py finds a size under a real limit too
@pytest.mark.slow
def test_here_under_a_real_limit(wide: Path, limited: Callable[..., str]) -> None:
    code = """
        import sys
        from stretto.cli import main
        import torch, stretto.memory, stretto.training
        leave(200 * 2**20)
        main(["find-batch-size", "run.yaml", "--maximum", "20000", "--json", *sys.argv[1:]])
    """
    for arguments in ([], ["--power-of-two"]):
        found = json.loads(limited(code, *arguments, folder=wide))
        assert found["certainty"] == "tried"
        assert "RLIMIT_DATA" in found["limit"]
        assert found["size"] > 2_000


def test_ranks_of_gpus_that_are_not_here(
    wide: Path, stretto: Stretto, asked: list[dict[str, Any]]
) -> None:
    ask = ("find-batch-size", "run.yaml", "--gpu", "a100-80", "--maximum", "64", "--json")
    one = stretto(*ask, "--world-size", "4", "--method", "halve")
    assert (json.loads(one.out)["size"], json.loads(one.out)["ranks"]) == (64, 4)
    assert [(how["world_size"], how["method"]) for how in asked] == [(4, "halve")]
    assert "ranks" not in json.loads(stretto(*ask).out)
    assert stretto(*ask, "--world-size", "many").code != 0
    assert stretto(*ask, "--method", "guess").code != 0
