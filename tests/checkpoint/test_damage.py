"""Every byte that flips and every file that is cut is recognised."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import stretto.checkpoint
from stretto.checkpoint import describe, read_checkpoint
from stretto.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden"
NAMES = ["format-3", "format-3-of-two-writers"]


def spots(path: Path) -> list[tuple[Path, int]]:
    """Every byte of a checkpoint."""
    return [(file, at) for file in sorted(path.iterdir()) for at in range(file.stat().st_size)]


def is_recognised(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except CheckpointError:
        return True
    return False


def flips(path: Path, where: list[tuple[Path, int]], bits: list[int]) -> Iterator[bool]:
    """Whether each of the flips is recognised; each is undone."""
    for (file, at), bit in zip(where, bits, strict=True):
        content = bytearray(file.read_bytes())
        content[at] ^= 1 << bit
        file.write_bytes(content)
        yield is_recognised(path)
        content[at] ^= 1 << bit
        file.write_bytes(content)


def cuts(path: Path, where: list[tuple[Path, int]]) -> Iterator[bool]:
    """Whether a file that ends at each of these bytes is recognised; each is undone."""
    for file, at in where:
        content = file.read_bytes()
        file.write_bytes(content[:at])
        yield is_recognised(path)
        file.write_bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_sampled_flips_and_cuts_are_recognised(name: str, tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN / name, tmp_path / name)
    chance = random.Random(0)
    sampled = chance.sample(spots(path), 400)
    assert all(flips(path, sampled, [chance.randrange(8) for _ in sampled]))
    assert all(cuts(path, sampled[:100]))
    assert describe(path).is_whole  # all of it was undone


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_every_flip_and_every_cut_is_recognised(name: str, tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN / name, tmp_path / name)
    everywhere = spots(path)
    assert len(everywhere) >= 500
    chance = random.Random(1)
    assert all(flips(path, everywhere, [chance.randrange(8) for _ in everywhere]))
    assert all(cuts(path, everywhere))
    assert describe(path).is_whole


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_or_longer_file_is_recognised(name: str, tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN / name, tmp_path / name)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        assert is_recognised(path)
        file.unlink()
        assert is_recognised(path)
        file.write_bytes(content)


def test_what_the_manifest_does_not_name_is_never_opened(sharded: Path) -> None:
    (sharded / "payload.pkl").write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
    (sharded / "model.pt").write_bytes(b"\x80\x02.")
    os.mkfifo(sharded / "pipe")  # opening it would never end
    assert describe(sharded).is_whole


def test_no_module_of_this_floor_unpickles() -> None:
    folder = Path(stretto.checkpoint.__file__).parent
    for file in folder.glob("*.py"):
        if file.name == "formats.py":  # asks for a flag before it reads DCP's pickled metadata
            continue
        text = file.read_text()
        for word in ("import pickle", "torch.load", "pickle.", "torch.save", "marshal", "shelve"):
            assert word not in text, f"{file.name} has {word}"
