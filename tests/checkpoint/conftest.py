"""What the tests of checkpoints share: one to tamper with, and how to seal it again."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.checkpoint import Shard
from stretto.checkpoint.manifest import manifest_text
from stretto.checkpoint.sharding import HostCopies
from stretto.checkpoint.writing import begin_checkpoint, finish_checkpoint, write_part

Build = Callable[[Mapping[str, Any], bytes], bytes]


@pytest.fixture(scope="session")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "checkpoint-000000000064"
    whole = torch.arange(12.0).reshape(4, 3)
    begin_checkpoint(path)
    for rank in range(2):
        half = Shard(whole[2 * rank : 2 * rank + 2], shape=(4, 3), offset=(2 * rank, 0))
        model: dict[str, Tensor | Shard]
        model = {"weight": half, "tied": half, "count": torch.tensor(7)}
        staged = HostCopies().take({"model": model, "optimizer": {}})
        write_part(path, staged, rank=rank, world_size=2)
    finish_checkpoint(path, {"epoch": 1}, world_size=2, clock=lambda: 0.0)
    return path


@pytest.fixture
def sharded(_sharded: Path, tmp_path: Path) -> Path:
    """A small checkpoint of two writers, of which each test has a copy."""
    return shutil.copytree(_sharded, tmp_path / _sharded.name)


@pytest.fixture
def seal() -> Callable[[Path], None]:
    """Write the manifest that fits the files of a checkpoint as they are now."""

    def write(path: Path) -> None:
        files = {}
        for file in sorted(path.iterdir()):
            if file.name != "manifest.json":
                content = file.read_bytes()
                files[file.name] = (len(content), hashlib.sha256(content).hexdigest())
        (path / "manifest.json").write_text(manifest_text(files))

    return write


@pytest.fixture
def tensor_file() -> Build:
    """Build a safetensors file from any header and data."""

    def build(header: Mapping[str, Any], data: bytes) -> bytes:
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    return build
