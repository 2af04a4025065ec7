"""What is fuzzed: each target takes any bytes, and only an error of ours may come of them.

Where something is read, more must hold: what was read is written and read back the same. The corpus
beside this file is replayed by a test; `fuzz.py` searches for more with atheris.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stretto.checkpoint import read_checkpoint, write_checkpoint
from stretto.checkpoint.manifest import MANIFEST, RECORDS, manifest_text
from stretto.config.run import RunConfig, dump_run_file, parse_run_file
from stretto.config.yaml import Source, apply_overrides, parse_yaml
from stretto.errors import CheckpointError, ConfigError, TimeError
from stretto.timing import Time

GOOD = """\
max_duration: 2ep
model: {target: "my.models:Model", layers: 4}
data: {target: "my.data:make", num_samples: 1000}
optimizer: {target: "torch.optim:AdamW", lr: 3.0e-3}
schedules: {lr: {Periods: [[5%, {Linear: {}}], [rest, {Cosine: {}}]]}}
batch_size: {DoublingRamp: {start: 8, end: 64, over: 40%}}
evaluate: [{every: 10%}]
"""


def read_time(data: bytes) -> None:
    """A time: what is read has a canonical text, which is read back to an equal one."""
    try:
        time = Time(data.decode("utf-8", "surrogateescape"))
    except TimeError:
        return
    again = Time(str(time))
    assert again == time
    assert hash(again) == hash(time)
    assert str(again) == str(time)


def read_run_file(data: bytes) -> None:
    """A run file: what is read is written out whole, and that is read back to the same."""
    try:
        config = parse_run_file(data.decode("utf-8", "surrogateescape"))
    except ConfigError as error:
        _check_words(error)
        return
    assert parse_run_file(dump_run_file(config)) == config


def read_override(data: bytes) -> None:
    """Values set on the command line, one in each line."""
    overrides = data.decode("utf-8", "surrogateescape").split("\n")
    try:
        config = RunConfig.parse(*apply_overrides(good_values(), Source("run.yaml"), overrides))
    except ConfigError as error:
        _check_words(error)
        return
    assert parse_run_file(dump_run_file(config)) == config


def read_manifest(data: bytes) -> None:
    """A checkpoint whose manifest is `data`."""
    _read_with(MANIFEST, data)


def read_state(data: bytes) -> None:
    """A checkpoint whose `state.json` is `data`, with the right checksum in the manifest."""
    _read_with(RECORDS, data)


def read_tensors(data: bytes) -> None:
    """A checkpoint whose tensor file is `data`, with the right checksum in the manifest."""
    _read_with("model.safetensors", data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "time": read_time,
    "run-file": read_run_file,
    "override": read_override,
    "manifest": read_manifest,
    "state": read_state,
    "tensors": read_tensors,
}


def _check_words(error: Exception) -> None:
    for line in str(error).split("\n"):
        assert line.startswith(("cannot ", "and ")), line
        assert line.isprintable(), line


@functools.cache
def good_values() -> Any:
    """The values of a run file that is right; nobody may change them."""
    return parse_yaml(GOOD, "run.yaml")[0]


@functools.cache
def good_checkpoint() -> Path:
    """A small checkpoint, written once; its files are replaced one at a time."""
    folder = Path(tempfile.mkdtemp(prefix="stretto-fuzz-")) / "checkpoint-000000000008"
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"model": {"weight": weight, "tied": weight, "bias": torch.zeros(2)}}
    write_checkpoint(folder, tensors, {"epoch": 1, "names": ["a"]})
    return folder


def _read_with(name: str, data: bytes) -> None:
    folder = good_checkpoint()
    kept = {path: path.read_bytes() for path in (folder / name, folder / MANIFEST)}
    (folder / name).write_bytes(data)
    if name != MANIFEST:
        known = json.loads(kept[folder / MANIFEST])
        files = {**known["files"], name: (len(data), hashlib.sha256(data).hexdigest())}
        (folder / MANIFEST).write_text(manifest_text(files))
    try:
        tensors = read_checkpoint(folder).tensors
        total = sum(one.nbytes for named in tensors.values() for one in named.values())
        assert total <= 100 * len(data) + 10_000, "more than the files hold, each alias counted"
    except CheckpointError as error:
        _check_words(error)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def remove_checkpoint() -> None:
    """Remove what `good_checkpoint` wrote."""
    shutil.rmtree(good_checkpoint().parent)
    good_checkpoint.cache_clear()
