"""Tensors over ranks: one process plays each rank in turn (torch's fake process group)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as Strided
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.checkpoint import Shard
from stretto.checkpoint.parts import tile
from stretto.checkpoint.sharding import Box, LazyTensor, replicate_like, shard_like, to_shard
from stretto.runtime.sharded import is_dtensor


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def spread(whole: Tensor, world_size: int, dim: int) -> DTensor:
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(whole, mesh, [Cut(dim)], src_data_rank=None)


SHAPES = [(5,), (1, 3), (3, 4), (2, 5, 3), (0, 2)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_shards_tile_the_whole_and_come_back(
    world_size: int, shape: tuple[int, ...], dim: int
) -> None:
    whole = torch.randn(shape)
    filled = torch.full(shape, torch.nan)
    for rank in range(world_size):
        with as_rank(rank, world_size):
            tensor = spread(whole, world_size, dim)
            piece = to_shard(tensor)
            if world_size == 1:
                assert type(piece) is Tensor
                filled.copy_(piece)
            else:
                assert isinstance(piece, Shard)
                assert piece.shape == shape
                assert piece.local.data_ptr() == tensor.to_local().data_ptr()
                filled[Box(piece.offset, tuple(piece.local.shape)).slices] = piece.local
            for stored in (whole, LazyTensor(shape, lambda part: reader(whole, part))):
                back = shard_like(tensor, stored)
                assert is_dtensor(back)
                assert back.placements == tensor.placements
                assert back.shape == tensor.shape
                assert back.stride() == tensor.stride()
                assert torch.equal(back.to_local(), tensor.to_local())
    assert torch.equal(filled, whole)


def reader(whole: Tensor, part: Box | None) -> Tensor:
    return whole if part is None else whole[part.slices]


def test_a_rank_reads_its_part_alone() -> None:
    asked: list[Box | None] = []
    whole = torch.arange(10.0).view(5, 2)

    def read(part: Box | None) -> Tensor:
        asked.append(part)
        return reader(whole, part)

    with as_rank(1, 2):
        reference = spread(whole, 2, 0)
        shard_like(reference, LazyTensor((5, 2), read))
        shard_like(torch.zeros(5, 2), LazyTensor((5, 2), read))
    assert asked == [Box((3, 0), (2, 2)), None]


def test_a_part_keeps_nothing_else_alive() -> None:
    whole = torch.arange(10.0)
    with as_rank(0, 2):
        part = shard_like(spread(whole, 2, 0), whole)
        assert is_dtensor(part)
        assert part.to_local().untyped_storage().nbytes() == 5 * whole.element_size()


def test_what_every_rank_has_is_whole() -> None:
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(3), mesh, [Replicate()], src_data_rank=None)
        assert type(to_shard(tensor)) is Tensor
        again = shard_like(tensor, torch.ones(3))
        assert is_dtensor(again)
        assert again.placements == (Replicate(),)
        again = replicate_like(
            spread(torch.ones(3), 2, 0), LazyTensor((2,), lambda _: torch.ones(2))
        )
        assert is_dtensor(again)
        assert again.placements == (Replicate(),)
        assert torch.equal(again.to_local(), torch.ones(2))


@pytest.mark.parametrize("rank", range(4))
def test_two_dimensions_come_back_as_they_were(rank: int) -> None:
    """Hybrid sharding: replicas of a sharded model."""
    whole = torch.arange(10.0).view(5, 2)
    with as_rank(rank, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        tensor = distribute_tensor(whole, mesh, [Replicate(), Cut(0)], src_data_rank=None)
        back = shard_like(tensor, whole)
        assert is_dtensor(back)
        assert back.placements == tensor.placements
        assert torch.equal(back.to_local(), whole.chunk(2)[rank % 2])
        # Nothing is gathered, and of two equal parts one is written.
        piece = to_shard(tensor)
        assert isinstance(piece, Shard)
        assert torch.equal(piece.local, whole.chunk(2)[rank]) if rank < 2 else not len(piece.local)
        assert (piece.shape, piece.offset) == ((5, 2), (3 * (rank % 2), 0))


def test_another_shape_is_left_for_torch_to_refuse() -> None:
    with as_rank(0, 2):
        given = shard_like(spread(torch.ones(4), 2, 0), torch.ones(3))
    assert type(given) is Tensor
    assert given.shape == (3,)


def test_a_parameter_gives_a_tensor_without_a_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    piece = to_shard(parameter)
    assert isinstance(piece, Tensor)
    assert not piece.requires_grad
    assert piece.data_ptr() == parameter.data_ptr()


MESHES = {
    "TP x FSDP2": ((2, 2), [Strided(0, split_factor=2), Cut(0)]),
    "rows and columns": ((2, 2), [Cut(0), Cut(1)]),
    "rows twice": ((2, 2), [Cut(0), Cut(0)]),
    "HSDP x TP": ((2, 2, 3), [Replicate(), Strided(1, split_factor=3), Cut(1)]),
    "columns, the rest copies": ((2, 3), [Replicate(), Cut(1)]),
    "rows, the rest copies": ((3, 2), [Cut(0), Replicate()]),
}


@pytest.mark.parametrize(("sizes", "placements"), MESHES.values(), ids=MESHES)
def test_boxes_of_any_mesh_tile_the_whole_and_come_back(
    sizes: tuple[int, ...], placements: list[Any]
) -> None:
    whole = torch.arange(7.0 * 11).view(7, 11)
    written: list[Box] = []
    world_size = math.prod(sizes)
    for rank in range(world_size):
        with as_rank(rank, world_size):
            mesh = init_device_mesh("cpu", sizes)
            local, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
            box = Box(tuple(offset), tuple(local))
            mine = whole[box.slices]
            tensor = DTensor.from_local(
                mine, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            assert torch.equal(shard_like(tensor, whole).to_local(), mine)  # type: ignore[attr-defined]
            piece = to_shard(tensor)
            assert isinstance(piece, Shard)
            if piece.local.numel():
                assert torch.equal(piece.local, mine)
                written.append(Box(piece.offset, tuple(piece.local.shape)))
    assert tile((7, 11), written)


def test_a_copy_on_other_ranks_is_written_once() -> None:
    """A layer that only FSDP2 cuts: each rank of a model group has the same part of it."""
    whole, lengths = torch.arange(6.0).view(3, 2), []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
            piece = to_shard(distribute_tensor(whole, mesh, [Cut(0)], src_data_rank=None))
            assert isinstance(piece, Shard)
            lengths.append(len(piece.local))
    assert lengths == [2, 0, 1, 0]


@pytest.mark.parametrize(
    ("shape", "boxes", "are_whole"),
    [
        ((), [((), ())], True),
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((4,), [((0,), (4,)), ((0,), (4,)), ((0,), (4,))], False),
        ((2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 1)), ((1, 1), (1, 1))], True),
        ((2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 1)), ((1, 0), (1, 1))], False),
        ((2, 2), [((0, 0), (2, 1)), ((0, 2), (2, 1))], False),
        ((2, 2), [((0,), (4,))], False),
        ((0, 3), [], True),
    ],
)
def test_boxes_that_leave_holes_or_overlap_are_found(
    shape: tuple[int, ...], boxes: list[Any], *, are_whole: bool
) -> None:
    assert tile(shape, [Box(*box) for box in boxes]) is are_whole
