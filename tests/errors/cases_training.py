"""Wrong settings of a run: the Trainer's, its parts', and checkpoints that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from stretto.checkpoint import read_checkpoint, write_checkpoint
from stretto.optim import Hyperparameters, from_torch
from stretto.run_folder import LOCK, locked
from stretto.schedules import Linear
from stretto.timing import Horizon
from stretto.training import (
    Callback,
    Checkpointing,
    Stepping,
    Trainer,
)
from stretto.training.algorithms import (
    LayerFreezing,
    StochasticDepth,
)
from stretto.training.metrics import check_merging, default_predict

DATA = TensorDataset(torch.zeros(20, 3))
RUN = Horizon("10ba")


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).mean()
    return loss


def trainer(**settings: Any) -> Trainer:
    model = nn.Linear(3, 1)
    defaults: dict[str, Any] = {
        "model": model,
        "train_data": DATA,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": mean,
        "max_duration": "2ep",
        "batch_size": 4,
    }
    return Trainer(**{**defaults, **settings})


class Unmergeable:
    """A metric that computes no scalar and cannot be merged."""

    def update(self, outputs: Any) -> None: ...

    def compute(self) -> torch.Tensor:
        return torch.zeros(4)

    def reset(self) -> None: ...


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def damaged(name: str, content: str) -> object:
    write_checkpoint(Path("checkpoint"), {"model": {}}, {})
    Path("checkpoint", name).write_text(content)
    return read_checkpoint(Path("checkpoint"))


def resumed(**settings: Any) -> None:
    """Go on with the checkpoint of a run in other circumstances."""
    trainer(folder="run", checkpoint=Checkpointing()).fit()
    trainer(folder="run", **settings).resume()


def twice() -> None:
    for _ in range(2):
        trainer(folder="run").fit()


def in_a_file() -> None:
    Path("file").write_text("")
    trainer(folder="file").fit()


def wider() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def in_use() -> None:
    with locked(Path("run")):
        Path("run", LOCK).write_text("process 7 on a.example\n")
        trainer(folder="run").fit()


CASES: list[tuple[str, Callable[[], object]]] = [
    ("training-model", lambda: trainer(model=nn.Linear)),
    ("training-optimizer", lambda: trainer(optimizer="adamw")),
    ("training-other-optimizer", lambda: trainer(optimizer=sgd())),
    ("training-loss", lambda: trainer(loss="mse")),
    ("training-callback-class", lambda: trainer(callbacks=[Callback])),
    ("training-folder-twice", twice),
    ("training-folder-is-a-file", in_a_file),
    ("training-folder-in-use", in_use),
    ("training-resume-nothing", lambda: trainer(folder="no/such/folder").resume()),
    ("training-resume-run-folder", lambda: trainer().resume("runs/a")),
    ("training-resume-other-model", lambda: resumed(**wider())),
    ("training-evaluate-sets", lambda: trainer(evaluate=[DATA])),
    ("training-clip-flag", lambda: trainer(clip_norm=True)),
    ("training-clip-zero", lambda: trainer(clip_norm=0)),
    ("training-clip-text", lambda: trainer(clip_norm="1.0")),
    ("training-precision", lambda: trainer(precision="fp8")),
    ("training-reduction", lambda: Stepping(loss_reduction="none")),  # type: ignore[arg-type]
    ("training-weight", lambda: Stepping(loss_weight="words")),  # type: ignore[arg-type]
    ("training-keep", lambda: Checkpointing(keep=0)),
    (
        "training-evaluate-logits",
        lambda: default_predict(lambda **_: 1, {"labels": torch.zeros(2)}),
    ),
    ("training-evaluate-ranks", lambda: check_merging({"each": Unmergeable()})),
    ("training-freezing-layer", lambda: trainer(callbacks=[LayerFreezing(["head"])]).fit()),
    (
        "training-freezing-stretch",
        lambda: trainer(callbacks=[LayerFreezing([""], start="2ep", end="1ep")]).fit(),
    ),
    ("training-depth-block", lambda: trainer(callbacks=[StochasticDepth(["blocks.0"])]).fit()),
    ("optim-not-a-mapping", lambda: Hyperparameters(sgd(), Linear(1, 0), RUN)),  # type: ignore[arg-type]
    ("optim-rule", lambda: Hyperparameters(sgd(), {}, RUN, rule="linear")),  # type: ignore[arg-type]
    ("optim-rule-key", lambda: Hyperparameters(sgd(), {}, RUN, rule={"root": 256})),
    ("optim-scheduler", lambda: from_torch(None)),  # type: ignore[arg-type]
    ("training-scale", lambda: trainer(scale_schedule=-2)),
    ("checkpoint-none", lambda: read_checkpoint(Path("runs/a"))),
    ("checkpoint-manifest", lambda: damaged("manifest.json", "{}")),
    ("checkpoint-damaged", lambda: damaged("state.json", "{}")),
    ("checkpoint-not-json", lambda: write_checkpoint(Path("a"), {}, {"callback": {1, 2}})),
]
