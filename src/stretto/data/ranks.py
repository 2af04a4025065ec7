"""This rank's part of the data, and what ranks must exchange without a Trainer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stretto.batching import checked_size
from stretto.data.fetch import Part
from stretto.errors import DataError
from stretto.planning import Prepared, check_least
from stretto.planning.plan import plan_prepared
from stretto.runtime.gradients import (
    all_gather_rows,
    all_gather_texts,
    all_same,
    all_sum,
    is_started,
    marks,
)
from stretto.timing import Timestamp
from stretto.timing.grammar import whole


def part_of(rank: int | None, world_size: int | None, micro_batch_size: int | None) -> Part:
    """Return this rank's part; values of None come from torch.distributed, if it is started.

    >>> part_of(None, None, 8)
    Part(rank=0, world_size=1, micro_batch_size=8)

    Raises:
        DataError: only one of rank and world size is given, or the rank is not below the world
            size.
        BatchSizeError: the world size or the micro-batch size is not an integer of at least 1.
    """
    if (rank is None) != (world_size is None):
        raise DataError.bad("rank", rank, f"world_size is {world_size}", "pass both, or neither")
    if rank is None or world_size is None:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_started() else (0, 1)
    world_size = checked_size(world_size, "a world size")
    number = whole(rank)
    if number is None or not 0 <= number < world_size:
        why = f"ranks are integers from 0 to {world_size - 1}"
        raise DataError.bad("rank", rank, why, "pass the rank of this process")
    if micro_batch_size is not None:
        micro_batch_size = checked_size(micro_batch_size, "a micro-batch size")
    return Part(number, world_size, micro_batch_size)


def check_shares(
    part: Part,
    run: Prepared,
    timestamp: Timestamp,
    decide: Callable[[], int],
) -> None:
    """Refuse a run with a batch after `timestamp` that is too small to be shared.

    Args:
        part: this rank's part.
        run: the run.
        timestamp: where the run continues.
        decide: returns the next size.

    Raises:
        PlanError: a later stage has fewer samples than there are ranks. If sizes are decided during
            the run: the smallest one (at the start) or the next one has.
    """
    if run.sizes is not None:
        plan_prepared(
            run,
            world_size=part.world_size,
            micro_batch_size=part.micro_batch_size,
            resume_at=timestamp,
        )
    else:
        size = decide() if timestamp.batch else None
        check_least(run.bound_policy, world_size=part.world_size, size=size)


def is_all(part: Part) -> bool:
    """Return whether the connected processes are exactly the ranks that share a batch.

    There are more processes if, for example, several hold parts of one model.
    """
    return is_started() and dist.get_world_size() == part.world_size


def gathered(part: Part, values: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the values of every rank, in their order. Every process must call it.

    Args:
        part: this rank's.
        values: integers, equally many on every rank.

    Raises:
        DataError: the ranks are not connected, or several processes of one rank have different
            values. All of them raise it.
    """
    if part.world_size == 1:
        return [tuple(values)]
    _check_started(part)
    rows = all_gather_rows(torch.tensor((part.rank, *values), dtype=torch.int64))
    return [row[1:] for row in _of_ranks(part, [tuple(row.tolist()) for row in rows])]


def gathered_texts(part: Part, text: str) -> list[str]:
    """Return the texts of every rank, in their order. Every process must call it.

    Raises:
        DataError: as `gathered`.
    """
    if part.world_size == 1:
        return [text]
    _check_started(part)
    rows = [tuple(json.loads(one)) for one in all_gather_texts(json.dumps((part.rank, text)))]
    return [row[1] for row in _of_ranks(part, rows)]


def _of_ranks(part: Part, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the row of each rank from those of all processes; a row starts with the rank."""
    found = sorted(set(rows))
    if [row[0] for row in found] != list(range(part.world_size)):
        why = f"the {len(rows)} processes are other ranks, or those of a rank read other streams"
        instead = "pass the rank and world_size of the processes that share a batch"
        raise DataError.bad("world_size", part.world_size, why, instead)
    return found


def agreed(part: Part, tokens: int, seconds: float, decision: object) -> tuple[int, float]:
    """Return the tokens of all ranks, and the seconds of rank 0. Every process must call it.

    If several processes hold parts of one model, every rank has equally many processes.

    Args:
        part: this rank's.
        tokens: the tokens of its share.
        seconds: the seconds that it measured.
        decision: what decides the next batch size; its `repr` must be the same on every rank.

    Raises:
        DataError: the ranks are not connected or would decide differently, or the processes do not
            divide evenly into ranks. All of them raise it.
    """
    _check_started(part)
    copies, odd = divmod(dist.get_world_size(), part.world_size)
    if odd or not copies:
        why = f"torch.distributed has {dist.get_world_size()} processes"
        instead = "call loader.finish(tokens=..., seconds=...) with those of all ranks"
        raise DataError.bad("world_size", part.world_size, why, instead)
    own = [
        tokens,
        seconds if dist.get_rank() == 0 else 0.0,
        *marks(zlib.crc32(repr(decision).encode())),
    ]
    total, measured, *sums = all_sum(own)
    if is_all(part) and not all_same(sums, part.world_size):
        raise DataError.cannot(
            "follow signals that are not the same on every rank",
            why="each would decide another batch size",
            instead="sum them over the ranks before finish() and note_metric()",
        )
    return int(total) // copies, measured


def _check_started(part: Part) -> None:
    if not is_started():
        why = "torch.distributed is not started"
        instead = (
            "call init_process_group(), or finish(tokens=..., seconds=...) with all ranks' sums"
        )
        raise DataError.bad("world_size", part.world_size, why, instead)
