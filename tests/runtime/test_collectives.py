"""What the processes of a group tell each other, on two processes."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.runtime.gradients import (
    all_gather_rows,
    all_gather_texts,
    all_same,
    all_sum,
    is_started,
    marks,
)


def work(rank: int, folder: Path, results: Any) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    assert is_started()
    group = dist.new_group([0, 1])
    rows = all_gather_rows(torch.tensor([rank, 2**40 + rank]))
    sums = all_sum([*marks(7), *marks(rank)], group)
    found = {
        "texts": all_gather_texts("ab\u00e9" * rank, group),
        "rows": [row.tolist() for row in rows],
        "sums": all_sum([2.0**53 - 2 if rank else 1.0, 0.5]),
        "same": [all_same(sums[:2], 2), all_same(sums[2:], 2)],
    }
    results.put(found)
    dist.destroy_process_group()


def test_all_processes_get_the_same_in_order(
    fork_server: ForkServerContext, tmp_path: Path
) -> None:
    results = fork_server.Queue()
    processes = [fork_server.Process(target=work, args=(at, tmp_path, results)) for at in (0, 1)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert found[0] == found[1]
    assert found[0] == {
        "texts": ["", "ab\u00e9"],
        "rows": [[0, 2**40], [1, 2**40 + 1]],
        "sums": [2.0**53 - 1, 1.0],
        "same": [True, False],
    }
