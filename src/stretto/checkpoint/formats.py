"""Weights in the formats of others: Hugging Face's safetensors, and torch's DCP."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

from stretto._location import open_plain, own_name
from stretto.checkpoint.parts import save_plain
from stretto.checkpoint.reading import CheckpointReader, open_checkpoint
from stretto.errors import CheckpointError, first_line, shown
from stretto.runtime.compiled import plain_state

Format: TypeAlias = Literal["hf", "dcp"]
SHARD_BYTES = 5 * 10**9
"""Bytes of one file of Hugging Face's; theirs are as large."""
_METADATA = ".metadata"
"""The file of a DCP folder that describes its tensors, as a pickle."""


def export_weights(
    path: Path, folder: Path, to: Format | str, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights and buffers of a checkpoint into a new folder, bit by bit.

    Weights that several ranks wrote are put together. Only one file is in memory at a time for
    `"hf"`, and all weights for `"dcp"`.

    Args:
        path: the checkpoint; every byte of it is verified.
        folder: the folder to create.
        to: `"hf"`: `model.safetensors`, or several files with an index, as `from_pretrained` reads
            them beside a `config.json`; `"dcp"`: a folder that `torch.distributed.checkpoint`
            reads as `{"model": state_dict}`.
        shard_bytes: the most bytes of one file of `"hf"`.

    Raises:
        CheckpointError: it is not a checkpoint, or is damaged; or the folder exists or cannot be
            written.
    """
    if to not in get_args(Format):
        raise CheckpointError.bad("to", to, "there is no such format", "write hf or dcp")
    reader = open_checkpoint(path)
    if folder.exists():
        raise CheckpointError.cannot(
            f"write {folder}", why="it exists", instead="choose a new folder"
        )
    unfinished = own_name(folder)
    try:
        unfinished.mkdir(parents=True)
        if to == "hf":
            _write_hf(reader, unfinished, shard_bytes)
        else:
            from torch.distributed.checkpoint.state_dict_saver import save

            save({"model": _state(reader)}, checkpoint_id=str(unfinished), no_dist=True)
        unfinished.rename(folder)
    except OSError as error:
        instead = "free space or choose another folder"
        raise CheckpointError.cannot(f"write {folder}", why=str(error), instead=instead) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _state(reader: CheckpointReader) -> dict[str, Tensor]:
    """Return all weights; those that share memory share it again."""
    state: dict[str, Tensor] = {}
    for name in reader.names("model"):  # aliases come last
        original = reader.original("model", name)
        state[name] = state[original] if original in state else reader.tensor("model", name)
    return state


def _write_hf(reader: CheckpointReader, folder: Path, shard_bytes: int) -> None:
    names = reader.names("model")
    sizes = {}
    for name in names:
        if reader.original("model", name) == name:
            sizes[name] = reader.entry("model", name).num_bytes
    # Shared memory is stored once; the other names are in the metadata, as save_torch_model does.
    tied = {name: reader.original("model", name) for name in names if name not in sizes}
    shards = list(_cut(sizes, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        place = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"model{place}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        tensors = {name: reader.tensor("model", name) for name in shard}
        save_plain(tensors, folder / file, {"format": "pt", **tied})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        text = json.dumps(index, indent=2) + "\n"
        with open_plain(folder / "model.safetensors.index.json", "xb") as opened:
            opened.write(text.encode())


def _cut(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Yield groups of names, in order, of at most so many bytes; a larger one is alone."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def is_dcp(path: Path) -> bool:
    """Return whether a folder is a checkpoint of `torch.distributed.checkpoint`."""
    return (path / _METADATA).is_file()


def load_dcp_weights(model: nn.Module, path: Path) -> tuple[str, ...]:
    """Load the weights of a DCP folder into a model, which may be sharded.

    Every rank reads only its part. DCP keeps a pickle, and reading it can run any code: use only
    folders that you trust.

    Args:
        model: the model.
        path: the folder, of `{"model": state_dict}` or of a state dict.

    Returns:
        The names in the folder that are not used.

    Raises:
        CheckpointError: there is none, or its weights are those of another model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    what = f"load the weights of {path}"
    try:
        reader = FileSystemReader(path)
        saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
        state = plain_state(model)
        prefix = "" if set(state) <= set(saved) else "model."
        _check_same(what, state, saved, prefix)
        wanted = {f"{prefix}{name}": tensor for name, tensor in state.items()}
        load(wanted, storage_reader=reader, no_dist=True)
    except (OSError, CheckpointException, pickle.UnpicklingError) as error:
        instead = "name a whole folder of torch.distributed.checkpoint"
        raise CheckpointError.cannot(what, why=first_line(error), instead=instead) from error
    return tuple(name for name in saved if name not in wanted)


def _check_same(what: str, state: dict[str, Any], saved: dict[str, Any], prefix: str) -> None:
    """Compare names, shapes and types: DCP would cast to another type without a word."""
    instead = "build the model that it was saved from"
    for name, tensor in state.items():
        there: Any = saved.get(f"{prefix}{name}")
        why = f"it has no tensor {shown(name)}"
        if isinstance(tensor, Tensor) and hasattr(there, "properties"):
            own = tuple(tensor.shape), tensor.dtype
            found = tuple(there.size), there.properties.dtype
            if own == found:
                continue
            why = f"{shown(name)} is {own} in the model and {found} there"
        raise CheckpointError.cannot(what, why=why, instead=instead)
