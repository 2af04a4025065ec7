"""Rank 0 of many in one process, the script unchanged."""

from __future__ import annotations

import os

_KEPT: list[object] = []


def start() -> None:
    """Play the part of torchrun: a store that a script's `init_process_group` joins.

    The stand-in NCCL needs no other rank. Gloo connects to the others only when it is used.
    """
    from torch import distributed

    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        return  # a process that the script started
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    _KEPT.append(store)
    os.environ |= {
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "phantomgpu",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_GLOO_LAZY_INIT": "1",
    }
