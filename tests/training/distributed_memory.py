"""Pairs of ranks of which one runs out of memory; prints how each rank of each pair ended."""

from __future__ import annotations

import functools
import gc
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.training.forked_ranks import Forked
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from stretto.training import Callback, Run, Trainer

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


def train(case: Case, rank: int, out: Path) -> None:
    """Train six batches of eight; on one rank two samples fit where four come."""
    met = f"file://{out / case.name}.rendezvous"  # which needs no rank to stay
    dist.init_process_group("gloo", init_method=met, rank=rank, world_size=2)
    torch.manual_seed(rank)  # dropout differs between ranks
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
        callbacks=[Events(shortage)] if case.rank == rank else [],
    )
    trainer.fit()


def main(out: Path) -> None:
    """Run all pairs, one after the other."""
    gc.freeze()  # or each child copies all of the memory as it looks for cycles
    said = {}
    for case in CASES:
        work = functools.partial(train, case, out=out)
        said[case.name] = Forked(work, is_first_kept=False).said()
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
