"""Wrong settings of a run: the Trainer's, its parts', and checkpoints that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from stretto.batching import LinearRule
from stretto.batching.following import measured_value
from stretto.checkpoint import read_checkpoint, write_checkpoint
from stretto.optim import Hyperparameters, from_torch
from stretto.schedules import Linear
from stretto.timing import Horizon
from stretto.training import (
    Callback,
    Checkpointing,
    Evaluation,
    Loading,
    Logging,
    Run,
    Stepping,
    TensorBoardLogger,
    Trainer,
    prepare,
)
from stretto.training.algorithms import (
    ExponentialMovingAverage,
    LayerFreezing,
    SelectiveBackprop,
    SequenceLengthWarmup,
    StochasticDepth,
)
from stretto.training.checkpointing.records import LOCK, locked
from stretto.training.evaluation.metrics import check_merging, default_predict

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


class Logs(Callback):
    """Logs one value in each batch."""

    def __init__(self, name: str, value: Any, **reduce: Any) -> None:
        self.name, self.value, self.reduce = name, value, reduce

    def on_batch_end(self, run: Run, step: Any) -> None:
        run.log(self.name, self.value, **self.reduce)


def bare_run() -> Run:
    """A run of a loop that has neither schedules nor evaluations."""
    return prepare([1, 2], 1, max_duration="1ep")


class KeepsASet(Callback):
    """Has state that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


class Unmergeable:
    """A metric that computes no scalar and cannot be merged."""

    def update(self, outputs: Any) -> None: ...

    def compute(self) -> torch.Tensor:
        return torch.zeros(4)

    def reset(self) -> None: ...


def measured(metric: Any, predict: Any) -> Callable[[], object]:
    evaluation = Evaluation(DATA, metrics={"each": metric}, predict=predict)
    return lambda: trainer(evaluate=evaluation).evaluate()


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


def averaged() -> dict[str, Any]:
    model = nn.Linear(3, 1)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def in_use() -> None:
    with locked(Path("run")):
        Path("run", LOCK).write_text("process 7 on a.example\n")
        trainer(folder="run").fit()


CASES: list[tuple[str, Callable[[], object]]] = [
    ("training-model", lambda: trainer(model=nn.Linear)),
    ("training-optimizer", lambda: trainer(optimizer="adamw")),
    ("training-other-optimizer", lambda: trainer(optimizer=sgd())),
    ("training-loss", lambda: trainer(loss="mse")),
    ("training-folder-url", lambda: trainer(folder="s3://bucket/run")),
    ("training-resume-url", lambda: trainer().resume("gs://bucket/run")),
    ("training-on-signal", lambda: trainer().fit(on_signal="ignore")),  # type: ignore[arg-type]
    ("training-loss-shape", lambda: trainer(loss=lambda m, b: m(b[0])).fit()),
    ("training-loss-number", lambda: trainer(loss=lambda m, b: m(b[0]).mean().item()).fit()),
    (
        "training-nothing-to-learn",
        lambda: trainer(stepping=Stepping(loss_weight=lambda batch: 0)).fit(),
    ),
    ("training-callback-class", lambda: trainer(callbacks=[Callback])),
    ("training-callback-state", lambda: trainer(callbacks=[KeepsASet()])),
    ("training-log-name", lambda: trainer(callbacks=[Logs("loss", 1.0)]).fit()),
    ("training-log-text", lambda: trainer(callbacks=[Logs("a", "b")]).fit()),
    ("training-log-tensor", lambda: trainer(callbacks=[Logs("a", torch.ones(2))]).fit()),
    (
        "training-log-reduce",
        lambda: trainer(callbacks=[Logs("a", 1.0), Logs("a", 1.0, reduce="sum")]).fit(),
    ),
    ("training-run-gather", lambda: trainer().run.gather({1})),
    ("training-run-evaluate", lambda: bare_run().evaluate()),
    ("training-run-schedules", lambda: bare_run().hyperparameters),
    ("training-average", lambda: ExponentialMovingAverage(0.9, half_life="1ep")),
    ("training-same-name", lambda: trainer(evaluate=[Evaluation(DATA), Evaluation(DATA)])),
    ("training-taken-name", lambda: trainer(evaluate=Evaluation(DATA, name="log"))),
    ("training-duration", lambda: trainer(max_duration="2epochs")),
    ("training-duration-part", lambda: trainer(max_duration="50%")),
    ("training-no-tokens", lambda: trainer(max_duration="1Mtok")),
    ("training-micro-batch", lambda: trainer(micro_batch_size=0)),
    ("training-dropped", lambda: trainer(loading=Loading(last_batch="drop"), batch_size=64)),
    ("training-last-batch", lambda: trainer(loading=Loading(last_batch="wrap"))),  # type: ignore[arg-type]
    ("training-prefetch", lambda: trainer(loading=Loading(num_workers=0, prefetch_factor=2))),
    ("training-seed", lambda: trainer(loading=Loading(seed="now"))),  # type: ignore[arg-type]
    ("training-logger-name", lambda: Logging(loggers=["wandb"])),  # type: ignore[list-item]
    ("training-logger-class", lambda: Logging(loggers=[TensorBoardLogger])),  # type: ignore[list-item]
    ("training-log-every", lambda: trainer(log=Logging("soon"))),
    ("training-log-unsized", lambda: trainer(train_data=iter([]), log=Logging("0.5ep"))),
    ("training-folder-of-checkpoints", lambda: trainer(checkpoint=Checkpointing())),
    ("training-folder-twice", twice),
    ("training-folder-is-a-file", in_a_file),
    ("training-folder-in-use", in_use),
    ("training-monitor", lambda: trainer(folder="a", checkpoint=Checkpointing(monitor="loss"))),
    (
        "training-monitor-other",
        lambda: trainer(
            folder="a",
            evaluate=Evaluation(DATA),
            checkpoint=Checkpointing(monitor="validation/accuracy"),
        ),
    ),
    ("training-mode", lambda: Checkpointing(mode="best")),  # type: ignore[arg-type]
    ("training-non-finite", lambda: Stepping(non_finite="raise")),  # type: ignore[arg-type]
    ("training-spoiled", lambda: trainer(loss=lambda m, b: mean(m, b) * float("nan")).fit()),
    ("training-resume-without-folder", lambda: trainer().resume()),
    ("training-resume-nothing", lambda: trainer(folder="no/such/folder").resume()),
    ("training-resume-run-folder", lambda: trainer().resume("runs/a")),
    ("training-resume-other-model", lambda: resumed(**wider())),
    ("training-resume-other-seed", lambda: resumed(loading=Loading(seed=2))),
    ("training-resume-other-data", lambda: resumed(train_data=TensorDataset(torch.zeros(9, 3)))),
    ("training-resume-other-optimizer", lambda: resumed(**averaged())),
    ("training-clip-zero", lambda: trainer(clip_norm=0)),
    ("training-clip-text", lambda: trainer(clip_norm="1.0")),
    ("training-precision", lambda: trainer(precision="fp8")),
    ("training-reduction", lambda: Stepping(loss_reduction="none")),  # type: ignore[arg-type]
    ("training-shifts-labels", lambda: Stepping(shifts_labels=True)),
    ("training-weight", lambda: Stepping(loss_weight="words")),  # type: ignore[arg-type]
    ("training-device", lambda: trainer(device="teapot")),
    ("training-keep", lambda: Checkpointing(keep=0)),
    ("training-evaluate-once", lambda: Evaluation(iter([torch.zeros(2, 3)]))),
    ("training-evaluate-metric", lambda: Evaluation(DATA, metrics={"loss": mean})),
    (
        "training-evaluate-shape",
        lambda: trainer(
            evaluate=Evaluation(DATA, metrics={"each": lambda m, b: m(b[0])})
        ).evaluate(),
    ),
    ("training-evaluate-class", lambda: Evaluation(DATA, metrics={"each": Unmergeable})),  # type: ignore[dict-item]
    ("training-evaluate-kind", lambda: Evaluation(DATA, metrics={"each": "f1"})),  # type: ignore[dict-item]
    (
        "training-evaluate-batch",
        lambda: trainer(evaluate=Evaluation(DATA, metrics={"each": Unmergeable()})),
    ),
    (
        "training-evaluate-logits",
        lambda: default_predict(lambda **_: 1, {"labels": torch.zeros(2)}),
    ),
    ("training-evaluate-tuple", measured(Unmergeable(), lambda m, b: m(b[0]))),
    ("training-evaluate-value", measured(Unmergeable(), lambda m, b: (m(b[0]),))),
    ("training-evaluate-ranks", lambda: check_merging({"each": Unmergeable()})),
    ("training-evaluate-key", lambda: measured_value("test/f1/of", {"test/loss": 1, "test/f1": 1})),
    ("training-evaluate-size", lambda: Evaluation(DATA, batch_size=0)),
    ("training-evaluate-every", lambda: trainer(evaluate=Evaluation(DATA, "0ep"))),
    ("training-freezing", lambda: LayerFreezing([])),
    ("training-freezing-layer", lambda: trainer(callbacks=[LayerFreezing(["head"])]).fit()),
    (
        "training-freezing-stretch",
        lambda: trainer(callbacks=[LayerFreezing([""], start="2ep", end="1ep")]).fit(),
    ),
    ("training-backprop", lambda: SelectiveBackprop(mean, keep=1.0)),
    ("training-lengths", lambda: SequenceLengthWarmup(8, 4, over="1ep")),
    ("training-depth", lambda: StochasticDepth(["blocks.0"], rate=1.0)),
    ("training-depth-block", lambda: trainer(callbacks=[StochasticDepth(["blocks.0"])]).fit()),
    ("optim-name", lambda: Hyperparameters(sgd(), {"learning_rate": Linear(1, 0)}, RUN)),
    ("optim-index", lambda: Hyperparameters(sgd(), {"lr.1": Linear(1, 0)}, RUN)),
    ("optim-group", lambda: Hyperparameters(sgd(), {"lr@head": Linear(1, 0)}, RUN)),
    ("optim-not-a-mapping", lambda: Hyperparameters(sgd(), Linear(1, 0), RUN)),  # type: ignore[arg-type]
    ("optim-rule", lambda: Hyperparameters(sgd(), {}, RUN, rule="linear")),  # type: ignore[arg-type]
    ("optim-rule-number", lambda: Hyperparameters(sgd(), {}, RUN, rule=256)),  # type: ignore[arg-type]
    ("optim-rule-key", lambda: Hyperparameters(sgd(), {}, RUN, rule={"root": 256})),
    (
        "optim-rule-size",
        lambda: Hyperparameters(sgd(), {}, RUN, rule=LinearRule(8)).apply(
            trainer().timer.timestamp
        ),
    ),
    ("optim-scheduler", lambda: from_torch(None)),  # type: ignore[arg-type]
    ("training-scale", lambda: trainer(scale_schedule=-2)),
    ("optim-interval", lambda: from_torch(lambda optimizer: None, every="0ba")),
    ("optim-plateau", lambda: Hyperparameters(sgd(), {"lr": from_torch(ReduceLROnPlateau)}, RUN)),
    ("checkpoint-none", lambda: read_checkpoint(Path("runs/a"))),
    ("checkpoint-manifest", lambda: damaged("manifest.json", "{}")),
    ("checkpoint-damaged", lambda: damaged("state.json", "{}")),
    ("checkpoint-not-json", lambda: write_checkpoint(Path("a"), {}, {"callback": {1, 2}})),
]
