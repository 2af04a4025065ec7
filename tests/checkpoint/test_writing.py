from __future__ import annotations

import os
import stat
import threading
import warnings
from pathlib import Path

import pytest
import torch

from stretto.checkpoint import (
    Shard,
    checkpoint_path,
    export_weights,
    open_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from stretto.checkpoint.sharding import HostCopies
from stretto.checkpoint.writing import (
    abandon_checkpoint,
    begin_checkpoint,
    encode_records,
    finish_checkpoint,
    write_part,
)
from stretto.errors import CheckpointError

WHOLE = torch.arange(8.0).reshape(4, 2)


def part(offset: int, length: int, **others: torch.Tensor) -> dict[str, torch.Tensor | Shard]:
    return {"weight": Shard(WHOLE[offset : offset + length], (4, 2), (offset, 0)), **others}


def write_parts(path: Path, *parts: dict[str, torch.Tensor | Shard]) -> None:
    begin_checkpoint(path)
    for rank, one in enumerate(parts):
        staged = HostCopies().take({"model": one})
        write_part(path, staged, rank=rank, world_size=len(parts))
    finish_checkpoint(path, {}, world_size=len(parts))


def test_parts_of_ranks_make_a_whole_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a"
    begin_checkpoint(path)
    for rank, (offset, length) in reversed(list(enumerate([(0, 1), (1, 3), (4, 0)]))):
        # What every rank has whole is taken from the first.
        staged = HostCopies().take({"model": part(offset, length, count=torch.tensor(rank))})
        write_part(path, staged, rank=rank, world_size=3)
    finish_checkpoint(path, {"epoch": 1}, world_size=3)
    found = read_checkpoint(path)
    assert torch.equal(found.tensors["model"]["weight"], WHOLE)
    assert found.tensors["model"]["count"] == 0
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "model-00000-of-00003.safetensors",
        "model-00001-of-00003.safetensors",  # the third has nothing to write
        "state.json",
    ]


def test_a_tensor_that_no_rank_has_anything_of_keeps_its_type(tmp_path: Path) -> None:
    empty = torch.empty(0, 3, dtype=torch.float16)
    parts: list[dict[str, torch.Tensor | Shard]] = [{"w": Shard(empty, (0, 3), (0, 0))}] * 2
    write_parts(tmp_path / "a", *parts)
    found = open_checkpoint(tmp_path / "a").tensor("model", "w")
    assert (found.shape, found.dtype) == ((0, 3), torch.float16)


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, 2), part(3, 1)],
        [part(0, 2), part(1, 3)],
        [part(0, 2), part(2, 1)],
        [part(0, 4), part(0, 4)],
        [part(0, 2), {"weight": Shard(WHOLE[2:], (5, 2), (2, 0))}],
        [part(0, 2), {"weight": Shard(WHOLE[2:], (4, 2), (0, 2))}],
    ],
    ids=["hole", "overlap", "short", "twice", "shape", "dimension"],
)
def test_parts_that_do_not_make_a_whole_are_refused(
    parts: list[dict[str, torch.Tensor | Shard]], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="shards"):
        write_parts(tmp_path / "a", *parts)
    assert not (tmp_path / "a").exists()


def test_a_part_that_is_missing_is_an_error(tmp_path: Path) -> None:
    begin_checkpoint(tmp_path / "a")
    write_part(tmp_path / "a", HostCopies().take({"model": part(0, 2)}), rank=0, world_size=2)
    with pytest.raises(CheckpointError, match=r"part-00001\.json"):
        finish_checkpoint(tmp_path / "a", {}, world_size=2)


def test_an_unfinished_one_can_be_given_up_or_begun_again(tmp_path: Path) -> None:
    staged = HostCopies().take({"model": {"w": torch.ones(2)}})
    for _ in range(2):
        begin_checkpoint(tmp_path / "runs" / "a")
        write_part(tmp_path / "runs" / "a", staged)
    abandon_checkpoint(tmp_path / "runs" / "a")
    assert list((tmp_path / "runs").iterdir()) == []
    abandon_checkpoint(tmp_path / "runs" / "a")  # nothing to do


def test_what_stands_in_the_way_of_an_unfinished_one_is_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("")
    (tmp_path / "a.tmp").symlink_to(tmp_path / "elsewhere")
    write_checkpoint(tmp_path / "a", {}, {})
    assert (tmp_path / "elsewhere" / "file").exists()
    (tmp_path / "b.tmp").write_text("")
    write_checkpoint(tmp_path / "b", {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "elsewhere"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", {}, {"epoch": 1})
    (tmp_path / "b").write_text("mine")
    for name in ("a", "b"):
        with pytest.raises(CheckpointError, match="exists"):
            write_checkpoint(tmp_path / name, {}, {"epoch": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert read_checkpoint(tmp_path / "a").records == {"epoch": 1}


def test_a_thread_writes_while_the_run_goes_on(tmp_path: Path) -> None:
    weight, counts = torch.ones(1000), [1]
    staged = HostCopies().take({"model": {"weight": weight}})
    records = encode_records({"counts": counts})
    begin_checkpoint(tmp_path / "a")

    def work() -> None:
        write_part(tmp_path / "a", staged)
        finish_checkpoint(tmp_path / "a", records)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thread = threading.Thread(target=work)
        thread.start()
        weight.zero_()
        counts.append(2)
        thread.join(60)
    found = read_checkpoint(tmp_path / "a")
    assert bool(found.tensors["model"]["weight"].all())
    assert found.records == {"counts": [1]}


@pytest.mark.parametrize("group", ["", "..", "a/b", "a-b", "é", "model.safetensors"])
def test_a_group_that_cannot_name_a_file_is_refused(group: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="underscores"):
        write_checkpoint(tmp_path / "a", {group: {}}, {})
    assert list(tmp_path.iterdir()) == []


def test_records_that_are_not_json_are_refused(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for records in ({"a": object()}, {"a": deep}, {(1, 2): 3}):
        with pytest.raises(CheckpointError, match="JSON"):
            write_checkpoint(tmp_path / "a", {}, records)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o002, 0o027])
def test_all_files_have_the_mode_that_the_umask_gives(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        path = checkpoint_path(tmp_path, 1)
        write_checkpoint(path, {"model": {"weight": torch.ones(2)}}, {})
        export_weights(path, tmp_path / "hf", "hf")
    finally:
        os.umask(before)
    files = [*path.iterdir(), *(tmp_path / "hf").iterdir()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~mask}
