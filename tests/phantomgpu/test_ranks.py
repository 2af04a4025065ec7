"""One rank of many: any of them, and what the others would have said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.phantomgpu.test_runs import reason, run, train

import phantomgpu
from phantomgpu.errors import RunFailedError, SetupNeededError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(reason is not None, reason=str(reason)),
]


def member(world: int) -> None:
    """Use the default group, a mesh, and point-to-point messages from any rank."""
    import os

    import torch
    from torch import distributed as dist

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    assert (local, os.environ["GROUP_RANK"]) == (rank % 8, str(rank // 8))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    mesh = dist.device_mesh.init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("pp", "tp"))
    assert [*(mesh.get_coordinate() or ())] == [rank // 2, rank % 2]
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": rank}] * world
    numbers = torch.arange(3, device="cuda")
    assert (numbers == numbers.clone()).tolist() == [True] * 3
    group = mesh["pp"].get_group()
    peers = dist.get_process_group_ranks(group)
    x = torch.ones(64, device="cuda")
    other = peers[(peers.index(rank) + 1) % len(peers)]
    ops = [dist.P2POp(dist.isend, x, other, group=group), dist.P2POp(dist.irecv, x, other, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("rank", "world"), [(3, 8), (13, 512)])
def test_any_rank(rank: int, world: int) -> None:
    report = run(member, world, ranks=world, rank=rank)
    assert report.fits, report.problem
    assert report.rank == rank
    assert f"rank {rank} of {world}" in str(report)


def test_a_rank_beyond_the_last() -> None:
    with pytest.raises(ValueError, match="rank is 8; write 0 to 7"):
        run(member, 8, ranks=8, rank=8)


def staged() -> None:
    """A pipeline whose first stage learns from the last what to expect, and it from the first."""
    import torch
    from torch import distributed as dist
    from torch.distributed import pipelining

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    said: list[Any] = [{"sizes": [3, 5]} if rank == world - 1 else None]
    dist.broadcast_object_list(said, src=world - 1)
    assert said == [{"sizes": [3, 5]}]
    is_last = rank == world - 1
    part = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256 << rank))
    part = part.to(device)
    stage = pipelining.PipelineStage(part, rank, world, device)
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters())
    x, y = torch.ones(64, 256, device=device), torch.ones(64, 256 << rank, device=device)
    for _ in range(9):
        schedule.step(*([] if rank else [x]), target=y if is_last else None)
        optimizer.step()
        optimizer.zero_grad()


def test_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "6")
    report = run(staged, ranks=2, every_stage=True)
    assert report.fits, report.problem
    assert [rank for rank, _, _ in report.stages] == [0, 1]
    assert report.rank == 1
    assert report.peers == [0]
    assert report.stages[1][1:] == (report.peak_allocated, report.peak_reserved)
    assert report.stages[1][1] > report.stages[0][1]
    assert not report.unknown
    assert report.nccl == 2 * 136 << 20  # of 24 channels, 544 MiB for a communicator of two


def test_a_rank_that_others_do_not_send_to() -> None:
    report = run(train, 8, ranks=4, every_stage=True)
    assert [rank for rank, _, _ in report.stages] == [0, 3]
    assert any("no rank sent to another: only ranks 0 and 3" in note for note in report.notes)


SCRIPT = """
import os, torch
from torch import distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
x = torch.ones(64, 64, device="cuda")
dist.all_to_all_single(torch.empty_like(x), x)
model = torch.nn.Linear(64, 64).cuda()
model(x).sum().backward()
torch.optim.SGD(model.parameters()).step()
"""


def test_one_rank_of_those_that_torchrun_starts(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(file)]
    report = phantomgpu.run(torchrun, gpu="h100", ranks=4, rank=2)
    assert report.fits, report.problem
    assert report.rank == 2
    assert report.nccl == (688 + 3 * 447) << 20
    with pytest.raises(SetupNeededError, match="write --ranks 4"):
        phantomgpu.run(torchrun, gpu="h100")


def test_several_machines() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "train.py"]
    with pytest.raises(RunFailedError, match="leave it and its options out"):
        phantomgpu.run(command, gpu="h100", ranks=16)
