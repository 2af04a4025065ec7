"""Which ranks share out the samples on a mesh, in any order of its dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto import prepare
from stretto.distributed import Mesh
from stretto.errors import TrainingError

NUMBERS = torch.utils.data.TensorDataset(torch.arange(64))


@contextmanager
def rank_of(world_size: int, rank: int) -> Iterator[None]:
    """Be one of many ranks; torch's fake group answers for the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("names", "shape", "data"),
    [
        (("dp", "tp"), (4, 2), ("dp",)),
        (("tp", "dp"), (2, 4), ("dp",)),
        (("dp_replicate", "tp", "dp_shard"), (2, 2, 2), ("dp_replicate", "dp_shard")),
        (("pp", "replicate", "shard"), (2, 2, 2), ("replicate", "shard")),
        (("pp", "dp", "cp", "tp"), (1, 2, 2, 2), ("dp",)),
        (("fsdp",), (8,), ("fsdp",)),
    ],
    ids=lambda value: "x".join(map(str, value)),
)
def test_groups(names: tuple[str, ...], shape: tuple[int, ...], data: tuple[str, ...]) -> None:
    groups: dict[int, list[int]] = {}
    counting, peers = [], []
    for rank in range(8):
        with rank_of(8, rank):
            mesh = Mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
            run = prepare(
                NUMBERS,
                16,
                max_duration="1ep",
                mesh=mesh,
                optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1),
            )
            step = run.begin()
            assert step is not None
            assert (run.rank, run.world_size) == (mesh.dp_rank, mesh.dp_world_size)
            assert run.is_first_rank == (rank == 0)
        own = groups.setdefault(mesh.dp_rank, step.micro_batches[0].batch[0].tolist())
        assert own == step.micro_batches[0].batch[0].tolist()
        counting += [rank] if mesh.is_loss_rank else []
        peers.append(mesh.peers)
    sizes = dict(zip(names, shape, strict=True))
    num_groups = torch.Size([sizes[name] for name in data]).numel()
    assert sorted(groups) == list(range(num_groups))
    assert len({one for own in groups.values() for one in own}) == 16  # each sample once
    assert len(counting) == num_groups
    assert counting[0] == 0
    # Those that average a gradient: one rank of each group, with the same part of the model.
    places = list(product(*map(range, shape)))
    others = [axis for axis, name in enumerate(names) if name not in data]
    for rank, place in enumerate(places):
        same = [all(place[axis] == one[axis] for axis in others) for one in places]
        assert peers[rank] == {number for number, is_same in enumerate(same) if is_same}


def test_no_data_dimension_means_one_group() -> None:
    with rank_of(4, 2):
        mesh = Mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), data=())
    assert (mesh.dp_rank, mesh.dp_world_size, mesh.is_loss_rank) == (0, 1, False)
    assert mesh.peers == frozenset({2})


@pytest.mark.parametrize(
    ("names", "more", "word"),
    [
        (("tp",), {}, "data-parallel"),
        (None, {}, "data-parallel"),
        (("tp",), {"data": ("dp",)}, "dp"),
    ],
    ids=["no name of data", "no names", "another name"],
)
def test_a_mesh_without_data_ranks_is_refused(
    names: tuple[str, ...] | None, more: dict[str, Any], word: str
) -> None:
    with rank_of(4, 0), pytest.raises(TrainingError) as caught:
        Mesh(init_device_mesh("cpu", (4,), mesh_dim_names=names), **more)
    assert word in str(caught.value)


def parts() -> list[DeviceMesh]:
    """Return meshes of only some of four ranks."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [whole["dp"], DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("dp",))]


@pytest.mark.parametrize("number", [0, 1], ids=["a dimension", "half of the ranks"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_mesh_of_some_ranks_is_refused(number: int, rank: int) -> None:
    with rank_of(4, rank):
        with pytest.raises(TrainingError) as caught:
            prepare(NUMBERS, 16, max_duration="1ep", mesh=parts()[number])
        assert "ranks" in caught.value.message.why
