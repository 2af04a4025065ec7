"""Runs on several ranks: models that are spread otherwise than they can be trained."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.distributed.strategy import strategy_for
from stretto.runtime.agreement import check_agreement
from stretto.runtime.rank_monitor import RankMonitor
from stretto.runtime.ranks import Ranks


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


def spread(shard: Callable[[Two], Any], *, device: str = "cpu") -> None:
    """One of four ranks (torch's fake group) has a model that `shard` has spread."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = Two()
        shard(model)
        ranks = Ranks(torch.device(device))
        strategy_for(model, ranks).of(ranks).place(model)
    finally:
        dist.destroy_process_group()


def over_some(model: Two) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    fully_shard(model, mesh=mesh["inner"])


def lost(said: str = "Connection closed by peer [127.0.0.1]:416") -> None:
    with RankMonitor(0, 2).watch():
        raise RuntimeError(said)


def late(*gave_up: int) -> None:
    """Rank 0 waits in vain; these ranks have given up as well."""
    store = HashStore()
    for rank in gave_up:
        store.set(f"here/{rank}", "")
    with RankMonitor(0, 3, store=store, timeout=timedelta(seconds=0.3)).watch():
        raise RuntimeError("Timed out waiting 300ms for recv operation to complete")


def unlike(name: str, call: str = "Trainer()") -> None:
    """One of two ranks, of which the other says what it says in another setting or call."""

    def gathered(found: list[Any], own: Any, *, group: Any) -> None:
        del group
        other = [text.replace("fit", "resume").replace("8", "9") for text in own]
        found[:] = [own, tuple(other)]

    ranks = Ranks()
    ranks.world_size = 2
    with patch.object(dist, "all_gather_object", gathered):
        check_agreement({name: "8"}, ranks, call=call)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("ranks-lost", lost),
    ("ranks-late", lambda: late(2)),
    ("ranks-all-wait", lambda: late(1, 2)),
    ("ranks-unknown", lambda: lost("Timed out waiting 300ms for recv operation to complete")),
    ("ranks-unlike", lambda: unlike("loading.seed")),
    ("ranks-apart", lambda: unlike("position in sp", "fit()")),
    ("ranks-parts-sharded", lambda: spread(lambda model: fully_shard(model.body))),
    (
        "ranks-left-out",
        lambda: spread(
            lambda model: fully_shard(model, ignored_params=set(model.head.parameters()))
        ),
    ),
    ("ranks-some", lambda: spread(over_some)),
    ("ranks-device", lambda: spread(fully_shard, device="cuda")),
]
