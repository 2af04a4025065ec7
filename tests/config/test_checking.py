"""A plan refuses what training refuses before its first step."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stretto.cli import main
from stretto.config.run import read_run_file
from stretto.config.training import build_trainer
from stretto.errors import StrettoError

PROJECT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from stretto.training import Callback


class Points(TensorDataset):
    def __init__(self, count=40, split="train"):
        inputs = torch.arange(count * 2, dtype=torch.float32).reshape(count, 2) / count
        super().__init__(inputs, inputs.sum(1, keepdim=True))


class Stream:
    def __init__(self, split="train"):
        self.inputs = torch.ones(9, 2)

    def __iter__(self):
        yield self.inputs, self.inputs.sum(1, keepdim=True)


class Line(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    @staticmethod
    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def entropy(model, batch):
    return torch.tensor(3.25)


class Cb(Callback):
    def __init__(self, n=1):
        self.n = n


def collate(samples):
    return torch.utils.data.default_collate(samples)


def wrap(model):
    return model


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
FILE: dict[str, Any] = {
    "max_duration": "2ep",
    "model": {"target": "strict_project:Line"},
    "data": {"target": "strict_project:Points"},
    "optimizer": {"target": "torch.optim:SGD", "lr": 0.01},
    "schedules": {"lr": {"Cosine": {"warmup": "10%"}}},
    "batch_size": {"DoublingRamp": {"start": 4, "end": 16, "over": "50%"}},
    "evaluate": {"every": "1ep", "metrics": {"entropy": {"target": "strict_project:entropy"}}},
    "checkpoint": {"every": "1ep"},
    "log": {"every": "10sp", "loggers": []},
}


def with_(**values: Any) -> dict[str, Any]:
    """The run file with values at other paths; None takes a key away."""
    changed = copy.deepcopy(FILE)
    for path, value in values.items():
        inner, *_, last = changed, *path.split("__")
        for part in path.split("__")[:-1]:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return changed


CASES = {
    "ok": with_(),
    "lrr": with_(schedules__lrr=0.5),
    "wd typo": with_(schedules__weight_decy=0.5),
    "wd ok": with_(schedules__weight_decay=0.5),
    "betas of sgd": with_(schedules={"betas.0": 0.5}),
    "momentum": with_(schedules__momentum=0.5),
    "betas.5": with_(optimizer={"target": "torch.optim:AdamW"}, schedules={"betas.5": 1.0}),
    "nesterov": with_(schedules__nesterov=0.5),
    "lr@1": with_(schedules={"lr@1": 0.5}),
    "lr@0": with_(schedules={"lr@0": 0.5}),
    "lr@head": with_(schedules={"lr@head": 0.5}),
    "groups": with_(optimizer__groups={"w": {"parameters": "weight"}}, schedules={"lr@w": 0.5}),
    "group none": with_(optimizer__groups={"w": {"parameters": "zzz"}}),
    "group rest": with_(optimizer__groups={"w": {"parameters": "."}}, schedules={"lr@rest": 0.5}),
    "opt arg": with_(optimizer__lrr=0.1),
    "opt value": with_(optimizer__momentum=-1),
    "opt betas": with_(optimizer={"target": "torch.optim:AdamW", "betas": [0.9, 1.5]}),
    "opt class": with_(optimizer__target="torch.optim:AdamQ"),
    "opt module": with_(optimizer__target="torch.optmi:SGD"),
    "opt str": with_(optimizer__lr="fast"),
    "opt sgd nesterov": with_(optimizer__nesterov=True),
    "model arg": with_(model__width=3),
    "model class": with_(model__target="strict_project:Lin"),
    "model not": with_(model__target="strict_project:entropy"),
    "loss arg": with_(loss={"target": "strict_project:entropy", "k": 1}),
    "loss name": with_(loss={"target": "strict_project:entropi"}),
    "no loss": with_(model={"target": "torch.nn:Linear", "in_features": 2, "out_features": 1}),
    "data arg": with_(data__cnt=3),
    "data stated arg": with_(data__cnt=3, data__num_samples=40),
    "collate": with_(loading__collate_fn={"target": "strict_project:colate"}),
    "workers": with_(loading__num_workers=-1),
    "prefetch": with_(loading__prefetch_factor=2),
    "prefetch0": with_(loading__prefetch_factor=0, loading__num_workers=1),
    "pin": with_(loading__pin_memory="yes"),
    "micro": with_(micro_batch_size=0),
    "micro big": with_(micro_batch_size=1000),
    "callbacks": with_(callbacks=[{"target": "strict_project:Cb", "m": 1}]),
    "callback name": with_(callbacks=[{"target": "strict_project:Cbb"}]),
    "freezing": with_(callbacks=[{"target": "stretto.training:LayerFreezing", "layers": ["head"]}]),
    "eval metric": with_(evaluate__metrics={"e": {"target": "strict_project:entropi"}}),
    "eval data": with_(evaluate__data={"target": "strict_project:Points", "cnt": 1}),
    "eval every": with_(evaluate__every="0ep"),
    "eval tok": with_(evaluate__every="10tok"),
    "eval name": with_(evaluate__name="log"),
    "eval name2": with_(evaluate__name="checkpoint"),
    "checkpoint tok": with_(checkpoint__every="1tok"),
    "checkpoint keep": with_(checkpoint__keep=0),
    "monitor": with_(checkpoint__monitor="validation/acc"),
    "upload": with_(checkpoint__upload="nope://x"),
    "log every": with_(log__every="1tok"),
    "flush": with_(log__flush="1tok"),
    "flush dur": with_(log__flush="10%"),
    "logger": with_(log__loggers=["tensorbord"]),
    "logger2": with_(log__loggers=[{"target": "strict_project:Nope"}]),
    "mesh1": with_(mesh={"dp": 1}),
    "compile": with_(compile="yes"),
    "device": with_(device="cudaa"),
    "device2": with_(device="cuda:9"),
    "precision": with_(precision="fp8"),
    "clip": with_(clip_norm=0),
    "parallel": with_(parallel={"target": "strict_project:nope"}),
    "parallel arg": with_(parallel={"target": "strict_project:wrap", "k": 1}),
    "fsdp": with_(parallel="fsdp"),
    "loss_weight": with_(stepping__loss_weight={"target": "strict_project:nope"}),
    "tokens": with_(stepping__loss_weight="tokens"),
    "noise": with_(stepping__measure_noise=0),
    "timeout": with_(stepping__rank_timeout="1ep"),
    "shifts": with_(stepping__shifts_labels=True),
    "step": with_(step={"target": "strict_project:nope"}),
    "step2": with_(step={"target": "strict_project:Line"}),
    "schedule tok": with_(schedules={"lr": {"Cosine": {"warmup": "10tok"}}}),
    "schedule long": with_(schedules={"lr": {"Cosine": {"warmup": "50ep"}}}),
    "plateau": with_(
        batch_size={"Plateau": {"metric": "validation/acc", "start": 4, "maximum": 16}}
    ),
    "noise never": with_(
        batch_size={"NoiseScale": {"start": 4, "maximum": 16}}, stepping__measure_noise=None
    ),
    "max tok": with_(max_duration="100tok"),
    "dataset": with_(data={"target": "strict_project:Stream"}),
    "dataset ep": with_(
        data={"target": "strict_project:Stream"}, schedules={"lr": {"Cosine": {"warmup": "10ba"}}}
    ),
    "batch big": with_(batch_size=1000),
    "rule": with_(rule={"sqrt": 256}),
    "rule target": with_(rule={"target": "strict_project:nope"}),
    "upload only": with_(checkpoint={"every": "1ep", "upload": 5}),
    "step of ours": with_(step={"target": "stretto.runtime:SupervisedStep"}),
    "adafactor": with_(optimizer={"target": "torch.optim:Adafactor", "lr": 0.01}),
    "torch loss": with_(loss={"target": "torch.nn:MSELoss"}),
    "torch loss bad": with_(loss={"target": "torch.nn:MSELoss", "reductoin": "mean"}),
    "loss instance": with_(loss={"target": "torch.nn:CrossEntropyLoss"}),
    "dup": with_(schedules={"betas": 0.5}, optimizer={"target": "torch.optim:AdamW"}),
    "last": with_(last_batch="cut"),
    "group by number": with_(
        optimizer__groups={"w": {"parameters": "weight"}}, schedules={"lr@1": 0.5}
    ),
    "group arg": with_(optimizer__groups={"w": {"parameters": "weight", "momentum": -1}}),
    "no group of ours": with_(
        optimizer={"target": "strict_project:make_sgd", "groups": {"w": {"parameters": "weight"}}},
        schedules={"lr@v": 0.5},
    ),
    "group of ours": with_(
        optimizer={"target": "strict_project:make_sgd", "groups": {"w": {"parameters": "weight"}}},
        schedules={"lr@w": 0.5},
    ),
    "fails when imported": with_(model={"target": "broken_project:Line"}),
    "needs what is not here": with_(model={"target": "needing_project:Line"}),
}
LEFT = {
    "group none": "optimizer.groups",
    "group rest": "optimizer.groups",
    "no loss": "has a loss",
    "upload": "checkpoint.upload",
    "device": "device",
    "device2": "device",
    "needs what is not here": "no module 'not_installed_here'",
}
"""What only training can tell, and what a plan says of it."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "strict_project.py").write_text(PROJECT)
    (tmp_path / "broken_project.py").write_text(f"{PROJECT}\nraise RuntimeError\n")
    (tmp_path / "needing_project.py").write_text(f"import not_installed_here\n{PROJECT}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("strict_project", None)


@pytest.mark.filterwarnings("ignore::stretto.errors.PlanWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_as_strict_as_the_run(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(yaml.dump(CASES[name]))
    refusal = None
    try:
        build_trainer(read_run_file("run.yaml"), folder=folder / "run")
    except StrettoError as error:
        refusal = error
    if refusal is None or name in LEFT:
        assert planned() == 0
        assert LEFT.get(name, "") in capsys.readouterr().err
    else:
        assert planned() == 2


def planned() -> object:
    """The exit code of a plan of the run file."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "run.yaml"])
    return ended.value.code
