"""`stretto find-batch-size`: the answer, the table, the picture; for devices that are not here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


CPU = ("--maximum", "1000000")


def test_for_a_device_that_is_not_here(wide: Path, stretto: Stretto) -> None:
    said = stretto("find-batch-size", "run.yaml", "--device-memory", "1GiB", *CPU)
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0].split() == ["batch", "size", "peak", "headroom"]
    (chosen,) = [line for line in lines if "the largest that fits" in line]
    answer = next(line for line in lines if line.startswith("largest micro-batch that fits: "))
    assert f" {chosen.split()[0]} samples (estimate)" in answer
    assert "0 real ones" in said.out


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
        RUN.replace("batch_size: 8", "batch_size: {noise_scale: 1, start: 8, maximum: 64}"),
        RUN.replace(
            "batch_size: 8",
            "batch_size: {periods: [{duration: 1ep, size: 8}, "
            "{duration: rest, norm_test: 0.5, start: 8, maximum: 64}]}",
        ),
        RUN + "callbacks: [{target: stretto.training.algorithms:NoiseReport}]",
        RUN.replace("batch_size: 8", "batch_size: {target: cli_wide:Noisy}"),
    ],
    ids=["policy", "period", "callback", "policy of yours"],
)
def test_a_run_that_measures_noise_keeps_one_more_gradient(
    wide: Path, stretto: Stretto, measured: str
) -> None:
    (wide / "cli_wide.py").write_text(WIDE + NOISY)
    (wide / "measured.yaml").write_text(measured)
    arguments = ("--device-memory", "25MB", *CPU, "--json")
    plain = json.loads(stretto("find-batch-size", "run.yaml", *arguments).out)
    found = json.loads(stretto("find-batch-size", "measured.yaml", *arguments).out)
    assert found["size"] < plain["size"]


def test_callbacks_are_neither_made_nor_missed(wide: Path, stretto: Stretto) -> None:
    """One of them may write over the log of a run that is under way."""
    (wide / "cli_wide.py").write_text(
        WIDE
        + "\n\nfrom stretto import Callback\nclass Loud(Callback):\n"
        + "    def __init__(self):\n        open('log.txt', 'w')\n"
    )
    elsewhere = "[{target: cli_wide:Loud}, {target: only_where_it_trains:Other}]"
    (wide / "run.yaml").write_text(RUN + f"callbacks: {elsewhere}")
    said = stretto("find-batch-size", "run.yaml", "--device-memory", "1GiB", *CPU)
    assert (said.code, said.err) == (0, "")
    assert not (wide / "log.txt").exists()


def test_as_json(wide: Path, stretto: Stretto) -> None:
    arguments = ("run.yaml", "--device-memory", "1GiB", *CPU, "--multiple-of", "64", "--json")
    found = json.loads(stretto("find-batch-size", *arguments).out)
    assert found["size"] % 64 == 0
    assert found["too_large"] == found["size"] + 64
    assert found["certainty"] == "estimate"
    assert found["peak_bytes"] <= found["limit_bytes"] - found["reserve_bytes"]
    assert found["cost"]["fake_steps"] <= 20
    assert {row["size"] for row in found["peaks"]} >= {found["size"], found["too_large"]}


def test_a_model_larger_than_this_machine(wide: Path, stretto: Stretto) -> None:
    # 200 million times 1,024 weights: 820 GB, and four times that to train them.
    arguments = ("run.yaml", "model.width=200000000", "--device-memory", "8TiB", *CPU, "--json")
    found = json.loads(stretto("find-batch-size", *arguments).out)
    assert found["size"] > 1_000
    said = stretto("find-batch-size", *arguments[:2], "--device-memory", "1TiB", *CPU)
    assert (said.code, said.out) == (2, "")
    assert "cannot fit 1 sample into 1.00 TiB (as stated): a step needs" in said.err


def test_a_gpu_that_is_not_here(wide: Path, stretto: Stretto) -> None:
    said = stretto("find-batch-size", "run.yaml", "--gpu", "l4", "--method", "estimate")
    assert "(estimate)" in said.out
    assert "CUDA" in said.out


def test_all_samples_there_are_is_the_most(wide: Path, stretto: Stretto) -> None:
    said = stretto("find-batch-size", "run.yaml", "--device-memory", "1GiB", "--power-of-two")
    assert "\nmicro-batch: 64 samples (estimate), all there are; more would fit\n" in said.out


def test_a_model_that_reads_values_while_it_is_built(wide: Path, stretto: Stretto) -> None:
    arguments = ("run.yaml", "model.reads=true", "--device-memory", "1GiB", *CPU)
    assert "(estimate)" in stretto("find-batch-size", *arguments).out


def test_the_picture(wide: Path, stretto: Stretto) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("run.yaml", "--device-memory", "1GiB", *CPU, "--plot", "memory.svg")
    said = stretto("find-batch-size", *arguments)
    assert (said.code, said.err) == (0, "drew memory.svg\n")
    assert Path("memory.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device-memory 80G", "may be 1000 or 1024; write 80GiB or 80GB"),
        ("--method guess", "method='guess'"),
        ("--gpu abacus", "gpu='abacus'"),
        ("--world-size 8", "--gpu h100"),
        ("--margin all --device-memory 1GiB", "read 'all' as memory"),
        ("--device-memory 1GiB --method try", "device_memory is for an estimate"),
        ("--plot memory.doc", "does not say what kind of picture"),
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


@pytest.mark.slow
def test_here_under_a_real_limit(wide: Path, limited: Callable[..., str]) -> None:
    code = """
        import sys
        from stretto.cli import main
        import torch, stretto.memory, stretto.training
        leave(200 * 2**20)
        main(["find-batch-size", "run.yaml", "--maximum", "20000", "--json", *sys.argv[1:]])
    """
    for arguments, certainty in (([], "tried"), (["--method", "halve"], "tried")):
        found = json.loads(limited(code, *arguments, folder=wide))
        assert found["certainty"] == certainty
        assert "RLIMIT_DATA" in found["limit"]
        assert found["size"] > 2_000


def test_ranks_of_gpus_that_are_not_here(wide: Path, stretto: Stretto) -> None:
    asked = ("find-batch-size", "run.yaml", "--gpu", "a100", "--method", "estimate")
    table = stretto(*asked, "--world-size", "2,4", "--maximum", "64")
    assert table.code == 0, table.err
    assert [line.split()[:3] for line in table.out.splitlines()[1:]] == [
        ["2", "64", "128"],
        ["4", "64", "256"],
    ]
    one = stretto(*asked, "--world-size", "4", "--maximum", "64", "--json")
    assert (json.loads(one.out)["size"], json.loads(one.out)["ranks"]) == (64, 4)
    fewest = stretto(*asked, "--micro-batch-size", "8", "--json")
    assert json.loads(fewest.out)["num_ranks"] == 1
    assert stretto(*asked, "--world-size", "many").code != 0
