"""One of two ranks in runs at the edges; writes what it saw. A test starts it."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from stretto.data import DataSpec
from stretto.errors import TrainingError
from stretto.training import Callback, Checkpointing, Evaluation, Logging, Run, Trainer
from stretto.training.algorithms import NoiseReport

RANK = int(os.environ.get("RANK", "0"))
DATA = TensorDataset(torch.randn(40, 5, generator=torch.Generator().manual_seed(1)).double())


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


def trainer(model: nn.Module, parameters: Any, data: Any = DATA, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_duration": "10ba", "batch_size": 8, "loss": square}
    return Trainer(
        model,
        data,
        optimizer=torch.optim.SGD(parameters, lr=0.1),
        device="cpu",
        **{**defaults, **settings},
    )


class StopFirst(Callback):
    """Asks on one rank alone, when the ranks have agreed already; too late at the last batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_batch_end(self, run: Run, step: Any) -> None:
        if RANK == 0 and run.timer.batch == self.batch:
            run.stop("enough")


def stopped(at: int) -> dict[str, Any]:
    model = nn.Linear(5, 1).double()
    run = trainer(model, model.parameters(), evaluate=Evaluation(DATA), callbacks=[StopFirst(at)])
    run.fit()
    return {"batch": run.timer.batch, "reason": run.stop_reason, "after": len(run.evaluate())}


class Signal(Callback):
    """Sends SIGTERM to the first rank alone."""

    def on_batch_start(self, run: Run, step: Any) -> None:
        if RANK == 0 and step.timestamp.batch == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def signalled() -> tuple[int, str | None, Any]:
    model = nn.Linear(5, 1).double()
    run = trainer(model, model.parameters(), callbacks=[Signal()])
    try:
        run.fit()
    except SystemExit as end:
        return run.timer.batch, run.stop_reason, end.code
    return run.timer.batch, run.stop_reason, None


class FailAtEnd(Callback):
    """Fails at the end of the first rank alone."""

    def on_fit_end(self, run: Run) -> None:
        if RANK == 0:
            raise ZeroDivisionError


def failing() -> str:
    model = nn.Linear(5, 1).double()
    try:
        trainer(model, model.parameters(), callbacks=[FailAtEnd()]).fit()
    except (ZeroDivisionError, TrainingError) as error:
        return type(error).__name__
    return "nothing"


def dummies() -> list[float]:
    """Batches of 3 in micro-batches of 1: one rank has a dummy; half the model is not optimized."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)).double()
    trainer(
        model, model[1].parameters(), batch_size=3, micro_batch_size=1, max_duration="4ba"
    ).fit()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


class Tally(nn.Module):
    """A layer, and a loss, that count in a buffer how often each sample was seen."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(9, dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen[batch[:, 0].long()] += 1
        return batch * self.weight


class TallyLoss(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(9, dtype=torch.int64))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen[batch[0][:, 0].long()] += 1
        loss: torch.Tensor = model(batch[0]).square().mean()
        return loss


class Real(Callback):
    """Counts the samples that are no dummies."""

    def __init__(self) -> None:
        self.seen = [0] * 9

    def on_batch_end(self, run: Run, step: Any) -> None:
        for micro in step.micro_batches:
            if micro.weight:
                self.seen[int(micro.batch[0][0, 0])] += 1


def traces() -> dict[str, Any]:
    """What buffers of a model and of a loss have learned, beside the samples of this rank."""
    data, found = TensorDataset(torch.arange(9.0).double()[:, None]), dict[str, Any]()
    runs: dict[str, dict[str, Any]] = {
        "uneven": {"batch_size": 3},
        "measured": {"batch_size": 3, "stepping": {"measure_noise": 1}},
        "idle": {"batch_size": 1, "idle_ranks": True},
        "without": {"batch_size": 3, "stepping": {"loss_weight": lambda batch: 1}},
    }
    for name, settings in runs.items():
        for kind in ("replicated", "sharded"):
            model, loss, real = Tally(), TallyLoss(), Real()
            if kind == "sharded":
                fully_shard(model)
            callbacks = [real, NoiseReport()] if name == "measured" else [real]
            given: dict[str, Any] = {
                "micro_batch_size": 1,
                "max_duration": "9sp",
                "callbacks": callbacks,
            }
            run = trainer(model, model.parameters(), data, loss=loss, **given, **settings)
            run.fit()
            seen = {"model": model.seen.tolist(), "loss": loss.seen.tolist(), "real": real.seen}
            found[f"{name}, {kind}"] = seen
    return found


class Unlike(nn.Module):
    """Rows of a table whose gradient is sparse, times complex weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        rows = self.table((batch[:, 0].abs() * 5).long() % 6)
        return torch.view_as_real(rows @ torch.diag(self.turn.real) * self.turn)


def unlike() -> list[float]:
    """As above, of a model whose gradients are of kinds that no two of them can be added."""
    model = Unlike()
    run = {"batch_size": 3, "micro_batch_size": 1, "max_duration": "4ba"}
    trainer(model, model.parameters(), **run).fit()
    weights = [torch.view_as_real(p) if p.is_complex() else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in weights]).tolist()


class Block(Callback):
    """Puts a file where checkpoints belong, when the run has begun."""

    def on_fit_start(self, run: Run) -> None:
        if RANK == 0:
            assert run.folder is not None
            (run.folder / "checkpoints").write_text("")


def unwritable(folder: Path) -> dict[str, Any]:
    """Checkpoints cannot be written: the run goes on without them."""
    model = nn.Linear(5, 1).double()
    run = trainer(
        model,
        model.parameters(),
        folder=folder,
        checkpoint=Checkpointing("4ba"),
        callbacks=[Block()],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit()
    return {"batch": run.timer.batch, "warnings": len(caught)}


def statistics() -> dict[str, float]:
    """What batch normalisation has seen differs between ranks; they measure with the first's."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    run = trainer(model, model.parameters(), evaluate=Evaluation(DATA))
    run.fit()
    measured = run.evaluate()["validation/loss"]
    model.eval()
    with torch.no_grad():
        return {"measured": measured, "expected": square(model, DATA.tensors).item()}


class Clock(Callback):
    """Sees at which batches something was due by the clock on the wall."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, int]] = []

    def on_log(self, run: Run, record: Any) -> None:
        self.batches.append(("log", run.timer.batch))

    def on_evaluation_end(self, run: Run, name: str, metrics: Any) -> None:
        self.batches.append((name, run.timer.batch))

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self.batches.append((path.name, run.timer.batch))


def wall_clock(folder: Path) -> list[tuple[str, int]]:
    """Each rank has a clock of its own; what is due, and the end, must come on all at once."""
    model = nn.Linear(5, 1).double()
    clock = Clock()
    trainer(
        model,
        model.parameters(),
        max_duration="0.3s",
        log=Logging("0.01s"),
        evaluate=Evaluation(DATA, "0.05s"),
        checkpoint=Checkpointing("0.1s"),
        callbacks=[clock],
        folder=folder,
    ).fit()
    return clock.batches


class Own:
    """The samples of this rank alone: 27 of the first, 13 of the second, in batches of 6."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        own = DATA.tensors[0][:27] if RANK == 0 else DATA.tensors[0][27:]
        yield from ([part] for part in own.split(6))


def sharded(folder: Path) -> dict[str, Any]:
    """Streams of the ranks' own, uneven: cut and resumed, and in a single batch of all samples."""

    def run(length: str, *, batch_size: int = 9, resume: bool = False, name: str = "") -> Any:
        torch.manual_seed(2)
        model = nn.Linear(5, 1).double()
        one = trainer(
            model,
            model.parameters(),
            data=DataSpec(Own(), sharded=True),
            batch_size=batch_size,
            micro_batch_size=4,
            max_duration=length,
            folder=folder / name if name else None,
            checkpoint=Checkpointing("100ba") if name else None,
            evaluate=Evaluation(DataSpec(Own(), sharded=True)),
        )
        if resume:
            one.resume()
        one.fit()
        return one, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    straight, weights = run("2ep")
    run("3ba", name="cut")
    run("7ba", name="cut", resume=True)
    whole, all_at_once = run("3ep", batch_size=40)
    return {
        "clock": straight.timer.timestamp[:4],
        "weights": weights,
        "resumed": run("2ep", name="cut", resume=True)[1],
        "all at once": all_at_once,
        "loss": whole.evaluate()["validation/loss"],
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    report = {
        "stopped": stopped(3),
        "too late": stopped(10),
        "failing": failing(),
        "signalled": signalled(),
        "dummies": dummies(),
        "traces": traces(),
        "unlike": unlike(),
        "unwritable": unwritable(out / "run"),
        "statistics": statistics(),
        "wall clock": wall_clock(out / "clock"),
        "sharded": sharded(out),
    }
    (out / f"rank{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
    sys.stdout.flush()
    # torch 2.13 with gloo sometimes aborts while the interpreter exits; everything is written.
    os._exit(0)
