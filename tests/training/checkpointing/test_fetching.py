"""Ranks that fetch one checkpoint: those that see one folder share the files out."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.threaded_ranks import on_threads

from stretto.checkpoint import Shard, UrlStore, checkpoint_path, read_checkpoint
from stretto.checkpoint.manifest import DamagedError
from stretto.checkpoint.sharding import HostCopies
from stretto.checkpoint.writing import begin_checkpoint, finish_checkpoint, write_part
from stretto.runtime import Ranks
from stretto.training.checkpointing.copies import fetch

RANKS = 4
NAME = "checkpoint-000000000640-0a1b2c3d"
WEIGHT = torch.arange(24.0).reshape(8, 3)


class Counted:
    """A store that notes what is fetched."""

    def __init__(self, url: Path) -> None:
        self.inner, self.files = UrlStore(str(url)), list[str]()
        self.cuts = 0

    def write(self, name: str, folder: Path) -> None:
        raise AssertionError

    def list(self) -> list[str]:
        return self.inner.list()

    def open(self, name: str, file: str, target: Path) -> None:
        self.files.append(file)
        self.inner.open(name, file, target)
        if self.cuts and "safetensors" in file:
            self.cuts -= 1
            target.write_bytes(target.read_bytes()[:-3])

    def keep(self, names: Collection[str]) -> None:
        raise AssertionError


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A bucket with a checkpoint that four ranks wrote."""
    path = checkpoint_path(tmp_path / "written", 640)
    begin_checkpoint(path)
    for rank in range(RANKS):
        rows = Shard(WEIGHT[2 * rank : 2 * rank + 2], (8, 3), (2 * rank, 0))
        write_part(path, HostCopies().take({"model": {"w": rows}}), rank=rank, world_size=RANKS)
    finish_checkpoint(path, {"epoch": 1}, world_size=RANKS)
    shutil.copytree(path, tmp_path / "bucket" / NAME)
    return tmp_path / "bucket"


def fetch_on(
    folders: list[Path], bucket: Path, *, cuts: int = 0, sees: Collection[int] = ()
) -> tuple[list[Any], list[list[str]]]:
    """Return the result or error of each rank, and what it fetched."""
    stores = [Counted(bucket) for _ in folders]
    stores[1].cuts = cuts
    manifest = (bucket / NAME / "manifest.json").read_text()

    def work(ranks: Ranks) -> Path:
        store, folder = stores[ranks.rank], folders[ranks.rank]
        return fetch(store, NAME, manifest, folder, ranks, needs=ranks.rank not in sees)

    return on_threads([work] * RANKS), [sorted(store.files) for store in stores]


def own(rank: int) -> str:
    return f"model-{rank:05d}-of-{RANKS:05d}.safetensors"


def test_ranks_of_one_folder_fetch_what_they_wrote(bucket: Path, tmp_path: Path) -> None:
    results, files = fetch_on([tmp_path / "run"] * RANKS, bucket)
    assert files == [[own(0), "state.json"], [own(1)], [own(2)], [own(3)]]
    assert set(results) == {checkpoint_path(tmp_path / "run", 640)}
    assert torch.equal(read_checkpoint(results[0]).tensors["model"]["w"], WEIGHT)
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["checkpoint-000000000640"]


def test_each_node_fetches_each_file_once(bucket: Path, tmp_path: Path) -> None:
    nodes = [tmp_path / node for node in "aabb"]
    results, files = fetch_on(nodes, bucket)
    for node in (0, 2):
        assert sorted(files[node] + files[node + 1]) == [*map(own, range(RANKS)), "state.json"]
        assert len(files[node]) in (2, 3)
        assert torch.equal(read_checkpoint(results[node]).tensors["model"]["w"], WEIGHT)
    found: dict[Path, int] = defaultdict(int)
    for path in results:
        found[path] += 1
    assert list(found.values()) == [2, 2]


def test_ranks_that_see_it_fetch_nothing(bucket: Path, tmp_path: Path) -> None:
    nodes = [tmp_path / node for node in "aabb"]
    _, files = fetch_on(nodes, bucket, sees=(0, 1))
    assert files[:2] == [[], []]
    assert sorted(files[2] + files[3]) == [*map(own, range(RANKS)), "state.json"]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("cuts", [1, 9])
def test_a_cut_transfer_is_repeated_once(bucket: Path, tmp_path: Path, cuts: int) -> None:
    results, _ = fetch_on([tmp_path / "run"] * RANKS, bucket, cuts=cuts)
    if cuts == 1:
        assert torch.equal(read_checkpoint(results[0]).tensors["model"]["w"], WEIGHT)
    else:
        assert {type(one) for one in results} == {DamagedError}
        assert not list((tmp_path / "run").iterdir())


def test_what_an_attempt_before_has_left_is_not_used(bucket: Path, tmp_path: Path) -> None:
    left = tmp_path / "run" / f"{NAME}.upload"
    left.mkdir(parents=True)
    for rank in range(9):
        (left / f"rank{rank}").touch()
    (left / own(1)).write_bytes(b"half")
    results, _ = fetch_on([tmp_path / "run"] * RANKS, bucket)
    assert torch.equal(read_checkpoint(results[0]).tensors["model"]["w"], WEIGHT)
