"""What torch's CUDA build allocates for a sharded model; run by `sharded_memory.py`.

It runs on a machine without a GPU, where the libraries below torch are stand-ins (tools/phantom).
Prints the bytes allocated and reserved at the peak of the first steps, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as data_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.memory.step import WholeStep

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.families

from tests.families.sharded import MODES, Case, model_of, step_of

STEPS = 3


def _reduced(_state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
    """Return the sum over ranks at once."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _Reducer:
    """A reducer that does not rebuild its buckets."""

    def __init__(self, reducer: object) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> object:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def main() -> None:
    """Run the case that the command line describes."""
    case = Case(*json.loads(sys.argv[1]))
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    model = model_of(case)
    if case.mode in MODES:
        mesh = init_device_mesh("cuda", (case.ranks,))
        MODES[case.mode](model, mesh)
        model.to_empty(device="cuda")
    else:
        model.to_empty(device="cuda")
        # The other ranks' shapes are all 0 here.
        patched: Any = data_parallel
        patched._verify_param_shape_across_processes = lambda *_: True
        views = case.mode.endswith("views")
        # Buckets are rebuilt in an order that rank 0 sends, which is all 0 here. So they have their
        # final sizes from the start.
        limits = [1 << 20, 25 << 20]
        patched._BucketCapacityConfig.compute_bucket_size_limits = lambda *_, **__: (limits, [])
        model = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=views)
        whole: Any = model
        whole.reducer = _Reducer(whole.reducer)
        model.register_comm_hook(None, _reduced)  # the fake group returns no future
    step = WholeStep(step_of(case, model))
    peaks = []
    for _ in range(steps):
        ids = torch.zeros(case.samples, case.length, dtype=torch.long, device="cuda")
        step.run(ids)
        del ids
        peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    stats = torch.cuda.memory_stats()
    allocated, reserved = peaks[-1]
    print(
        json.dumps(
            {
                "allocated": allocated,
                "reserved": reserved,
                "peaks": peaks,
                "retries": stats["num_alloc_retries"],
            }
        ),
        flush=True,
    )


main()
os._exit(0)  # the stand-ins cannot be unloaded
