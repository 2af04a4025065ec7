"""`find_num_ranks`: how few ranks a micro-batch needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from stretto.errors import FitError, samples_text, shown
from stretto.memory.amounts import margin_of, show_bytes
from stretto.memory.examples import resize_batch
from stretto.memory.finding.finder import MARGIN_OF_CUDA
from stretto.memory.finding.space import context_bytes, memory_limit
from stretto.memory.measuring.limits import MemoryLimit
from stretto.memory.prediction.cuda.gpu import gpu_named
from stretto.memory.prediction.cuda.sharding import Shard
from stretto.memory.prediction.predict import predict
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep
from stretto.timing.grammar import checked_whole

MOST_RANKS = 4096
"""The default largest number of ranks."""


class RanksRow(NamedTuple):
    """What a rank needs if there are so many."""

    ranks: int
    peak: int
    """Bytes, those of NCCL included."""
    fits: bool


@final
@dataclass(frozen=True, slots=True)
class RanksAnswer:
    """How few ranks a micro-batch needs; `str(answer)` prints all of it."""

    num_ranks: int
    micro_batch_size: int
    limit: MemoryLimit
    """Bytes of a device, less those of the CUDA context."""
    reserve: int
    """Bytes of the limit that stay free on purpose."""
    rows: Sequence[RanksRow]
    """Each number of ranks that was asked about."""

    def __str__(self) -> str:
        samples = samples_text(self.micro_batch_size)
        lines = [f"{'ranks':>6}  {'peak of a rank':>14}"]
        lines += [
            f"{row.ranks:>6,}  {show_bytes(row.peak):>14}{'' if row.fits else '  too much'}"
            for row in self.rows
        ]
        lines.append(f"fewest ranks for micro-batches of {samples}: {self.num_ranks:,}")
        lines.append(f"in {self.limit}, {show_bytes(self.reserve)} of it left free")
        return "\n".join(lines)


def find_num_ranks(
    step: TrainStep | WholeStep,
    batch: Any,
    micro_batch_size: int,
    *,
    device_memory: str | int,
    shard: str | Shard = "fsdp",
    gpu: str | None = None,
    context: str | int | None = None,
    margin: str | int | None = None,
    accumulation: int = 1,
    measures_noise: bool = False,
    maximum: int = MOST_RANKS,
) -> RanksAnswer:
    """Return the fewest ranks, a power of two, on which a micro-batch fits.

    The ranks and their GPUs are simulated in this process; see `predict`. The model may be on the
    meta device.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(8192, 8192), torch.nn.Linear(8192, 8192))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> find_num_ranks(step, torch.ones(2, 8192), 4, device_memory="3GiB").num_ranks
    2

    Args:
        step: the training step.
        batch: a micro-batch of any size, or a function that makes one of a given size.
        micro_batch_size: samples of a micro-batch on one rank.
        device_memory: the memory of each device, such as `"80GiB"`.
        shard: how the model is spread over the ranks; see `predict`.
        gpu: the kind of GPU. Default: `"h100"`.
        context: what the CUDA context takes of the memory. Default: that of the kind.
        margin: memory that stays free, in percent or bytes. Default: 1 percent.
        accumulation: micro-batches per step.
        measures_noise: whether the gradient of each micro-batch is kept apart before it is
            accumulated.
        maximum: the largest number of ranks.

    Raises:
        FitError: it does not fit on any number of ranks, or the step cannot be followed.
        ConfigError: an amount of memory cannot be read.
    """
    what = f"find how few ranks will do for micro-batches of {shown(micro_batch_size)}"
    instead = "write a positive number of samples"
    micro_batch_size = checked_whole(micro_batch_size, FitError, what, instead)
    whole = WholeStep.of(step, accumulation=accumulation, measures_noise=measures_noise)
    kind = gpu_named(gpu)
    limit = memory_limit(whole, device_memory)
    taken = context_bytes(whole, kind, context, limit, is_here=False)
    limit = limit._replace(bytes=limit.bytes - taken)
    reserve = margin_of(MARGIN_OF_CUDA if margin is None else margin, limit.bytes)
    make: Callable[[int], Any] = batch if callable(batch) else lambda n: resize_batch(batch, n)
    rows: list[RanksRow] = []
    ranks = _fewest(shard)
    while ranks <= maximum:
        found = predict(
            whole,
            make,
            device="cuda",
            gpu=kind.name,
            world_size=None if ranks == 1 else ranks,
            shard=shard,
        )
        left = limit.bytes - found.communication_bytes
        fits = found.fits(micro_batch_size, (left, left - reserve))
        peak = found.peak(micro_batch_size) + found.communication_bytes
        rows.append(RanksRow(ranks, peak, fits))
        if fits:
            return RanksAnswer(ranks, micro_batch_size, limit, reserve, rows)
        if len(rows) > 2 and rows[-1].peak > 0.98 * rows[-2].peak:
            break  # more ranks do not help: what is left is not spread
        ranks *= 2
    raise FitError.cannot(
        f"fit micro-batches of {micro_batch_size} samples into {limit}",
        why=f"a step needs {show_bytes(rows[-1].peak)} on each of {rows[-1].ranks:,} ranks",
        instead="make the micro-batch smaller, or checkpoint activations",
    )


def _fewest(shard: str | Shard) -> int:
    """Return the smallest number of ranks that a strategy allows."""
    group = shard.removeprefix("hsdp:") if isinstance(shard, str) else ""
    return max(1, int(group)) if group.isdecimal() else 1
