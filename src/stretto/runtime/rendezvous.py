"""How the processes that `torchrun` has started meet.

All attempts of a job of torchrun share one key-value store, which keeps the entries of dead
processes, such as their addresses, so a new process may try to reach a dead one (torch 2.13, gloo;
pytorch#135712). Counts of restarts differ between nodes. So the processes of an attempt agree on a
new name and use only keys under it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from stretto.errors import TrainingError, first_line

_KEY = "stretto"
_WAIT_SECONDS = 0.01
_PATIENCE_SECONDS = 300


def join_group(backend: str, timeout: timedelta | None = None) -> None:
    """Make the default process group of all that `torchrun` has started.

    Args:
        backend: of torch.distributed.
        timeout: how long a process waits for the others; None: as torch sets it.

    Raises:
        TrainingError: some of them did not come.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own: dict[str, Any] = {}
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(address, port, world_size, is_master=False)
            patience = _PATIENCE_SECONDS if timeout is None else timeout.total_seconds()
            name = agree_on_name(store, rank, world_size, patience=patience)
            own = {"store": PrefixStore(name, store), "rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=timeout, **own)
    except dist.DistError as error:
        what, instead = f"begin on {world_size} ranks", "look for the error of one that is missing"
        raise TrainingError.cannot(what, why=first_line(error), instead=instead) from error


def agree_on_name(
    store: Store,
    rank: int,
    world_size: int,
    *,
    patience: float = _PATIENCE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> str:
    """Return a new name, the same in all processes of this attempt.

    Each process writes who it is. Rank 0 proposes a name to the processes that it sees, and those
    that are among them agree. A dead process never agrees; its entry is replaced by a live one.

    Raises:
        TrainingError: some process did not come in time.
    """
    own, others = uuid.uuid4().hex, range(1, world_size)
    store.set(f"{_KEY}/here/{rank}", own)
    deadline = clock() + patience
    proposed: list[str] = []
    name = ""
    while True:
        if rank == 0 and store.check([f"{_KEY}/here/{other}" for other in others]):
            seen = [own, *(store.get(f"{_KEY}/here/{other}").decode() for other in others)]
            if seen != proposed:
                proposed, name = seen, f"{_KEY}/{uuid.uuid4().hex}"
                store.set(f"{_KEY}/proposal", json.dumps([name, *seen]))
            if store.check([f"{name}/yes/{other}" for other in others]):
                store.set(f"{name}/agreed", "")
                return name
        elif rank and store.check([f"{_KEY}/proposal"]):
            name, *proposed = map(str, json.loads(store.get(f"{_KEY}/proposal")))
            if own in proposed:
                store.set(f"{name}/yes/{rank}", "")
                if store.check([f"{name}/agreed"]):
                    return name
        if clock() > deadline:
            what, why = f"begin on {world_size} ranks", f"one is late by {patience:g} s"
            instead = "look for its error; if it needs longer, raise rank_timeout"
            raise TrainingError.cannot(what, why=why, instead=instead)
        sleep(_WAIT_SECONDS)
