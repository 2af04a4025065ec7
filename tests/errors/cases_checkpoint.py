"""Checkpoints that cannot be written, and those that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import latest_good, open_checkpoint, write_checkpoint
from stretto.checkpoint.writing import (
    encode_records,
)

PATH = Path("checkpoint-000000000008")
WEIGHT = torch.ones(2, 3)


def write(tensors: Any, records: Any = None) -> None:
    write_checkpoint(PATH, tensors, {} if records is None else records)


def written() -> Path:
    write({"model": {"weight": WEIGHT}})
    return PATH


def read(name: str, change: Callable[[bytes], bytes]) -> None:
    """Read a checkpoint of which one file has changed."""
    file = written() / name
    file.write_bytes(change(file.read_bytes()))
    open_checkpoint(PATH)


def without(name: str) -> None:
    (written() / name).unlink()
    open_checkpoint(PATH)


def all_damaged() -> None:
    (written() / "manifest.json").unlink()
    latest_good(Path())


def unreadable() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.checkpoint.folder.open_or_damage", stale)
        written()
        latest_good(Path(), sleep=lambda seconds: None)


def stale(path: Path) -> None:
    raise OSError(116, "Stale file handle", str(path / "state.json"))


def with_manifest(document: Any) -> None:
    PATH.mkdir()
    (PATH / "manifest.json").write_text(json.dumps(document))
    open_checkpoint(PATH)


def in_the_way() -> None:
    Path("file").write_text("")
    write_checkpoint(Path("file/checkpoint"), {}, {})


CASES: list[tuple[str, Callable[[], object]]] = [
    ("checkpoint-not-one", lambda: open_checkpoint(Path("runs/a"))),
    ("checkpoint-newer", lambda: with_manifest({"format": 9})),
    ("checkpoint-manifest-not-ours", lambda: with_manifest({"format": "2"})),
    (
        "checkpoint-manifest-outside",
        lambda: with_manifest({"format": 2, "files": {"../model.safetensors": [1, "0" * 64]}}),
    ),
    ("checkpoint-manifest-size", lambda: with_manifest({"format": 2, "files": {"state.json": 3}})),
    ("checkpoint-manifest-cut", lambda: read("manifest.json", lambda text: text[:-9])),
    (
        "checkpoint-manifest-changed",
        lambda: read("manifest.json", lambda text: text.replace(b'"format": 3', b'"format": 1')),
    ),
    ("checkpoint-file-missing", lambda: without("state.json")),
    ("checkpoint-no-manifest", lambda: without("manifest.json")),
    ("checkpoint-all-damaged", all_damaged),
    ("checkpoint-unreadable", unreadable),
    ("checkpoint-file-cut", lambda: read("model.safetensors", lambda text: text[:-1])),
    (
        "checkpoint-file-flipped",
        lambda: read("model.safetensors", lambda text: text[:-1] + b"\1"),
    ),
    ("checkpoint-folder", in_the_way),
    ("checkpoint-type", lambda: write({"model": {"weight": WEIGHT.to(torch.complex128)}})),
    ("checkpoint-name", lambda: write({"model": {"__metadata__": WEIGHT}})),
    ("checkpoint-records", lambda: encode_records({"seen": {1, 2}})),
]
