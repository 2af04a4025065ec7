"""Pairs of ranks of which one runs out of memory; writes how each rank of each pair ended.

All pairs are forked from one process, since importing torch takes longer than training.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # what the first step imports; here once for all pairs
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from stretto.training import Callback, Run, Trainer

SECONDS = 100
"""The most that a rank may take, on a machine that is very busy."""
ROOM = 2
"""How many samples fit on the rank that is short of memory."""


class Case(NamedTuple):
    """One pair of ranks."""

    parallel: str
    place: str
    rank: int
    buffers: bool

    @property
    def name(self) -> str:
        """How the case is called."""
        return f"{self.parallel}-{self.place}-{self.rank}{'-buffers' if self.buffers else ''}"


CASES = [
    Case("ddp", "forward", 0, buffers=True),
    Case("ddp", "backward", 1, buffers=False),
    Case("fsdp", "forward", 1, buffers=False),
    Case("fsdp", "backward", 0, buffers=True),
]
FIRST = 3
"""The batch from which on memory is short."""


class Shortage:
    """Raises where more samples come than there is room for."""

    def __init__(self) -> None:
        self.room = 1000

    def check(self, tensor: Tensor) -> None:
        """Raise as CUDA does."""
        if len(tensor) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shortage: Shortage) -> Tensor:
        ctx.shortage = shortage
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.shortage.check(gradient)
        return gradient, None


class Limited(nn.Module):
    """Sits between layers, those before it have done their work when it raises."""

    def __init__(self, shortage: Shortage, place: str) -> None:
        super().__init__()
        self.shortage, self.place = shortage, place

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs."""
        if self.place == "forward":
            self.shortage.check(inputs)
            return inputs
        found: Tensor = _InBackward.apply(inputs, self.shortage)  # type: ignore[no-untyped-call]
        return found


class Events(Callback):
    """Makes memory short on a rank."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage

    def on_batch_start(self, run: Run, step: Any) -> None:
        """Begin with batch `FIRST`."""
        if step.timestamp.batch == FIRST:
            self.shortage.room = ROOM


def square(model: nn.Module, batch: Any) -> Tensor:
    """A loss."""
    loss: Tensor = (model(batch[0]) - 1).square().mean()
    return loss


def train(case: Case) -> None:
    """Train six batches of eight; on one rank two samples fit where four come."""
    torch.manual_seed(dist.get_rank())  # dropout differs between ranks
    data = torch.randn(48, 5, generator=torch.Generator().manual_seed(1)).double()
    shortage = Shortage()
    limit = Limited(shortage, case.place)
    norm = nn.BatchNorm1d(7) if case.buffers else nn.Identity()
    model = nn.Sequential(nn.Linear(5, 7), norm, nn.Dropout(0.2), limit, nn.Linear(7, 1)).double()
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    if case.parallel == "fsdp":
        for child in (model[0], model[4], model):
            fully_shard(child)
    trainer = Trainer(
        model,
        TensorDataset(data),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        loss=square,
        max_duration="6ba",
        batch_size=8,
        micro_batch_size=4,
        device="cpu",
        callbacks=[Events(shortage)] if case.rank == dist.get_rank() else [],
    )
    trainer.fit()


def rank_main(case: Case, rank: int, out: Path) -> None:
    """Be one rank of a pair."""
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out / case.name}.rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=SECONDS),
    )
    report: dict[str, Any] = {}
    try:
        train(case)
    except Exception as error:  # noqa: BLE001  whatever it is, the test reads it
        report["error"] = [type(error).__name__, str(error)]
    (out / f"{case.name}.{rank}.json").write_text(json.dumps(report))


def fork(case: Case, rank: int, out: Path) -> int:
    """Start a rank."""
    child = os.fork()
    if child:
        return child
    try:
        rank_main(case, rank, out)
    finally:
        os._exit(0)  # and not on through what the parent has still to do


def main(out: Path, *names: str) -> None:
    """Run all pairs, one after the other."""
    torch.set_num_threads(1)
    gc.freeze()  # or each child copies all of the memory as it looks for cycles
    for case in CASES:
        if names and case.name not in names:
            continue
        running = {fork(case, rank, out) for rank in range(2)}
        end = time.monotonic() + SECONDS
        while running:
            child, _ = os.waitpid(-1, os.WNOHANG)
            running.discard(child)
            time.sleep(0.005)
            if time.monotonic() > end:
                for one in running:  # it has written nothing, which the test finds
                    os.kill(one, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
