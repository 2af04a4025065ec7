"""Ranks forked from one process, set up unlike, broken or stuck; prints what each of them said."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a rank would import at its first step
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stretto.distributed import shard_blocks
from stretto.errors import TrainingError
from stretto.runtime import TrainStep
from stretto.schedules import Linear
from stretto.training import (
    Callback,
    Checkpointing,
    Evaluation,
    Loading,
    Logging,
    Run,
    Stepping,
    Trainer,
)

LIMIT_SECONDS = 60
DATA = TensorDataset(torch.randn(60, 5, generator=torch.Generator().manual_seed(1)))


class Forked:
    """Runs `work(rank)` on forked ranks.

    Args:
        work: the error that it raises, or what it returns, is what the rank says.
        number: how many ranks there are.
        stuck: the one that is not waited for.
        is_first_kept: whether the first rank outlives its work, for the others need its store.
    """

    def __init__(
        self,
        work: Callable[[int], object],
        *,
        number: int = 2,
        stuck: int | None = None,
        is_first_kept: bool = True,
    ) -> None:
        # Rank 0 has the store: with one here, its thread might hold a lock while a rank is forked,
        # and that rank would wait for it forever.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._stuck = stuck
        self._ranks, self._pipes = [], []
        for rank in range(number):
            read, write = os.pipe()
            process = os.fork()
            if not process:
                os.environ |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(number),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_USE_AGENT_STORE": "False",
                }
                torch.set_num_threads(1)
                try:
                    said = str(work(rank))
                except Exception as error:  # noqa: BLE001  the test judges it
                    said = f"{type(error).__name__}: {error}"
                os.write(write, said.encode())
                if rank == 0 and is_first_kept:
                    signal.pause()
                os._exit(0)
            os.close(write)
            self._pipes.append(read)
            self._ranks.append(process)

    def said(self) -> list[str]:
        """Wait for all that are not stuck, end them, and return what each has said."""
        waited = {pipe for rank, pipe in enumerate(self._pipes) if rank != self._stuck}
        end = time.monotonic() + LIMIT_SECONDS
        while waited and time.monotonic() < end:
            waited -= set(select.select(waited, [], [], 0.1)[0])
        for one in self._ranks:
            os.kill(one, signal.SIGKILL)
            os.waitpid(one, 0)
        return [os.read(pipe, 2**16).decode() or "no answer" for pipe in self._pipes]


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


def doubled(model: nn.Module, batch: Any) -> torch.Tensor:
    return 2 * square(model, batch)


class OnTime(Callback):
    """Is due on a rank alone, where the others would not wait."""

    every = "2ba"

    def on_due(self, run: Run) -> None: ...


class Halved(Callback):
    def transform_batch(self, run: Run, batch: Any) -> Any:
        del run
        return [batch[0] / 2]


class Faster(Callback):
    def on_batch_start(self, run: Run, step: Any) -> None:
        if step.timestamp.batch == 2:
            run.optimizers[0].param_groups[0]["lr"] = 0.3


class Buffered(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("seen", torch.zeros(2))


def make(folder: Path | None = None, **settings: Any) -> Trainer:
    model = settings.pop("model", None) or nn.Linear(5, 1)
    rate = settings.pop("rate", 0.1)
    defaults: dict[str, Any] = {
        "train_data": DATA,
        "optimizer": torch.optim.SGD(model.parameters(), lr=rate),
        "loss": square,
        "max_duration": "6ba",
        "batch_size": 8,
        "folder": folder,
        "device": "cpu",
    }
    return Trainer(model, **defaults | settings)


SHORT = TensorDataset(DATA.tensors[0][:40])
# What rank 1 alone has, and which setting the error names, with both values.
UNLIKE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "seed": (lambda: {"loading": Loading(seed=3)}, "seed is 0 on rank 0 and 3 on rank 1"),
    "length": (lambda: {"max_duration": "7ba"}, "max_duration is 6ba on rank 0 and 7ba"),
    "batch": (lambda: {"batch_size": 16}, "batch_size is Fixed(8) on rank 0 and Fixed(16)"),
    "micro": (
        lambda: {"micro_batch_size": "auto"},
        "micro_batch_size is None on rank 0 and auto",
    ),
    "data": (lambda: {"train_data": SHORT}, "data.num_samples is 60 on rank 0 and 40 on rank 1"),
    "rate": (lambda: {"rate": 0.2}, "optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1"),
    "schedule": (
        lambda: {"schedules": {"lr": Linear(end=0.5)}},
        "schedules.lr is missing on rank 0",
    ),
    "loss": (lambda: {"loss": doubled}, "loss is __main__.square on rank 0 and __main__.doubled"),
    "clip": (
        lambda: {"device": "cpu", "clip_norm": 2.0},
        "clip_norm is None on rank 0 and 2.0 on rank 1",
    ),
    "log": (
        lambda: {"log": Logging("3ba")},
        "log.every is Every('10ba') on rank 0 and Every('3ba')",
    ),
    "evaluation": (
        lambda: {"evaluate": Evaluation(DATA)},
        "evaluate.validation.every is missing on rank 0",
    ),
    "no checkpoint": (
        lambda: {"checkpoint": None},
        "checkpoint.every is Every('2ba') on rank 0 and missing on",
    ),
    "checkpoint": (
        lambda: {"checkpoint": Checkpointing("3ba")},
        "checkpoint.every is Every('2ba') on rank 0 and Every('3ba') on rank 1",
    ),
    "callback": (lambda: {"callbacks": [Halved()]}, "is [] on rank 0 and ["),
    "due": (
        lambda: {"callbacks": [OnTime()]},
        "times at which callbacks are due is [] on rank 0 and [",
    ),
    "rate of a step": (
        lambda: {"callbacks": [Faster()]},
        "lr in batch 3 is 0.1 on rank 0 and 0.3 on rank 1",
    ),
    "shape": (
        lambda: {"model": nn.Linear(5, 2)},
        "parameter 0 of the model is 'weight' of shape [1, 5] and type float32",
    ),
    "type": (lambda: {"model": nn.Linear(5, 1).double()}, "and type float64, in parameter group 0"),
    "buffer": (lambda: {"model": Buffered(5, 1)}, "buffer 0 of the model is missing on rank 0"),
}


def unlike(name: str, folder: Path) -> list[str]:
    """What the ranks say if rank 1 is set up as `UNLIKE` has it."""

    def work(rank: int) -> str:
        odd = UNLIKE[name][0]() if rank == 1 else {}
        make(folder, **{"checkpoint": Checkpointing("2ba")} | odd).fit()
        return "trained"

    return Forked(work).said()


def resumed_alone(folder: Path, rank_alone: int) -> list[str]:
    """What the ranks say if one of them resumes and the other does not."""

    def work(rank: int) -> str:
        run = make(folder, checkpoint=Checkpointing("2ba"))
        if rank == rank_alone:
            run.resume("auto")
        run.fit()
        return "trained"

    return Forked(work).said()


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter([(one,) for one in DATA.tensors[0][: self.length]])


def ending_apart(rank: int) -> None:
    """Train on streams that begin alike; one ends before the other."""
    data = DataLoader(Numbers(40 + 20 * rank), batch_size=4)
    make(train_data=data, max_duration="1ep").fit()


class Stop(Callback):
    """Stops its process, as `kill -STOP` does."""

    def on_batch_end(self, run: Run, step: Any) -> None:
        del step
        if run.timer.batch == 3:
            os.kill(os.getpid(), signal.SIGSTOP)


class Exchange(Callback):
    """Logs on both ranks and on one alone; at the end, calls every collective."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"lines": []}

    def on_batch_end(self, run: Run, step: Any) -> None:
        run.log("mean", torch.tensor(float(run.rank)), weight=1 + run.rank)
        run.log("samples", step.local_num_samples, reduce="sum")
        if run.rank == 1:
            run.log("alone", run.timer.batch, reduce="last")

    def on_log(self, run: Run, record: Any) -> None:
        names = ("mean", "samples", "alone")
        self.seen["lines"].append([record[name] for name in names])

    def on_fit_end(self, run: Run) -> None:
        run.barrier()
        own = torch.tensor([run.rank, 5])
        for reduce in ("sum", "mean", "max", "min"):
            pair = run.all_reduce(run.rank + 1.0, reduce), run.all_reduce(own, reduce).tolist()
            self.seen[reduce] = pair
        self.seen["gather"] = [str(one) for one in run.gather((run.rank, own))]
        self.seen["broadcast"] = run.broadcast({"from": run.rank})


def exchanged(rank: int) -> str:
    """What two ranks log together, and tell each other."""
    del rank
    exchange = Exchange()
    make(callbacks=[exchange], log=Logging("3ba")).fit()
    return json.dumps(exchange.seen)


class StopAt(Callback):
    """Stops the run on the last rank, after an evaluation; only it has the callback."""

    def on_evaluation_end(self, run: Run, name: str, metrics: Any) -> None:
        run.stop("enough", is_final=False)


def stopping(rank: int) -> int:
    """Return how many batches are trained."""
    callbacks = [StopAt()] if rank else []
    trainer = make(callbacks=callbacks, evaluate=Evaluation(DATA, "4ba"))
    trainer.fit()
    return trainer.timer.batch


class Skip(TrainStep):
    """Skips batch 3 on rank 1 alone."""

    def __init__(self) -> None:
        self.model = nn.Linear(5, 1)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1)]
        self.steps = 0

    def forward_backward(self, batch: Any, weight: float) -> torch.Tensor:
        loss = square(self.model, batch)
        (loss * weight).backward()
        return loss

    def update(self) -> Any:
        self.steps += 1
        if self.steps == 3 and os.environ["RANK"] == "1":
            return self.SKIPPED
        self.optimizers[0].step()
        return {}


def skipping(last: str) -> Callable[[int], None]:
    def work(rank: int) -> None:
        Trainer(Skip(), DATA, max_duration=last, batch_size=8, device="cpu").fit()

    return work


class HostReads(TorchDispatchMode):
    """Counts tensors that are read on the host."""

    count = 0

    def __torch_dispatch__(self, function: Any, *rest: Any) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            # Positions of samples are numbers of the host, whatever the device is.
            files = [frame.filename for frame in traceback.extract_stack()]
            self.count += not any(name.endswith("/data/indices.py") for name in files)
        _, arguments, options = (*rest, None)[:3]
        return function(*arguments, **(options or {}))


def reading(rank: int) -> list[int]:
    """Return the reads of a short and of a long run."""
    found = []
    for length in ("20ba", "60ba"):
        trainer = make(
            max_duration=length, micro_batch_size=1, log=Logging("100ba", console=False),
            device="cpu", clip_norm=1.0,
        )  # fmt: skip
        with HostReads() as reads:  # type: ignore[no-untyped-call]
            trainer.fit()
        found.append(reads.count)
    return found


def evaluating_apart(rank: int) -> None:
    """Evaluate on streams that begin alike; one ends before the other."""
    data = DataLoader(Numbers(40 + 20 * rank), batch_size=4)
    make(evaluate=Evaluation(data, "6ba", batch_size=4)).evaluate()


def stopped(model: nn.Module, batch: Any) -> torch.Tensor:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return square(model, batch)


def stuck() -> dict[str, Forked]:
    """Three ranks of which rank 1 is stuck, by where it is stuck."""
    wait = Stepping(rank_timeout="8s")

    def callback(rank: int) -> None:
        make(callbacks=[Stop()] if rank == 1 else [], stepping=wait).fit()

    def metric(rank: int) -> None:
        del rank
        make(evaluate=Evaluation(DATA, "2ba", {"other": stopped}), stepping=wait).fit()

    def sharded(rank: int) -> None:
        model = shard_blocks(nn.Linear(5, 1), device="cpu")
        make(model=model, callbacks=[Stop()] if rank == 1 else [], stepping=wait).fit()

    works = {"callback": callback, "metric": metric, "sharded": sharded}
    return {name: Forked(work, number=3, stuck=1) for name, work in works.items()}


def one_more() -> dict[str, Forked]:
    """Two ranks of which one builds a Trainer more, by which one it is."""
    wait = Stepping(rank_timeout="8s")

    def work_of(alone: int) -> Callable[[int], float]:
        def work(rank: int) -> float:
            first, began = make(stepping=wait), time.monotonic()
            with suppress(TrainingError):
                if rank == alone:
                    make(stepping=wait)
                first.fit()
                return -1.0
            return time.monotonic() - began

        return work

    return {str(alone): Forked(work_of(alone), is_first_kept=False) for alone in range(2)}


class Break(Callback):
    def on_batch_end(self, run: Run, step: Any) -> None:
        if os.environ["RANK"] == "1" and run.timer.batch == 3:
            raise ValueError("a callback is broken")


def broken(model: nn.Module, batch: Any) -> torch.Tensor:
    if os.environ["RANK"] == "1":
        raise ValueError("a metric is broken")
    return square(model, batch)


# The other rank waits for the sum of measurements; for the sum of gradients.
FAULTS: list[tuple[str, str]] = [
    ("metric", "ddp"),
    ("callback", "ddp"),
    ("callback", "fsdp"),
    ("callback", "tp"),
]


def raising(fault: str, parallel: str) -> Callable[[int], None]:
    def work(rank: int) -> None:
        del rank
        dist.init_process_group("gloo")
        model, mesh = nn.Linear(5, 1), None
        if parallel == "fsdp":
            fully_shard(model)
        if parallel == "tp":
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
        faults: dict[str, dict[str, Any]] = {
            "metric": {"evaluate": Evaluation(DATA, "2ba", {"broken": broken})},
            "callback": {"callbacks": [Break()]},
        }
        make(model=model, mesh=mesh, **faults[fault]).fit()

    return work


def main(out: Path) -> None:
    waiting, more = stuck(), one_more()
    said = {name: unlike(name, out / "unlike") for name in UNLIKE}
    said["no difference"] = Forked(
        lambda rank: make(loading=Loading(num_workers=rank)).fit()
    ).said()
    said["exchange"] = Forked(exchanged).said()
    said["stopped"] = Forked(stopping).said()
    said |= {f"skip {last}": Forked(skipping(last)).said() for last in ("3ba", "6ba")}
    said["evaluated"] = Forked(evaluating_apart).said()
    said |= {" ".join(fault): Forked(raising(*fault)).said() for fault in FAULTS}
    said["reads"] = Forked(reading).said()
    said["stream"] = Forked(ending_apart).said()
    said |= {f"resumed {rank}": resumed_alone(out / "alone", rank) for rank in range(2)}
    said |= {f"stuck {name}": run.said() for name, run in waiting.items()}
    said |= {f"one more {name}": run.said() for name, run in more.items()}
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
