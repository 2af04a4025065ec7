"""Streams sharded by rank: checks and positions."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from stretto.data.containers import nodes
from stretto.data.fetching.shares import Part
from stretto.data.iterables.chunks import ChunkSource
from stretto.data.ranks import gathered_texts, is_all
from stretto.errors import CheckpointError, DataError

_FAILED = "failed"


def check_streams(part: Part, source: ChunkSource, *, is_sharded: bool) -> None:
    """Compare the next batch of all ranks: equal for one stream, different for sharded ones.

    Every rank must call it. If the ranks are not connected, nothing is compared.

    Raises:
        DataError: the streams differ and are not said to be sharded, or are said to be and do not.
    """
    if part.world_size == 1 or not is_all(part):
        return
    left = source.next_range()
    own = "" if left is None else f"{fingerprint(left.chunk.batch)} {left.start}"
    found = gathered_texts(part, own)
    if is_sharded:
        same = Counter(one for one in found if one)
        text, count = max(same.items(), key=lambda item: item[1], default=("", 0))
        if count > 1:
            ranks = " and ".join(str(rank) for rank, one in enumerate(found) if one == text)
            raise DataError.cannot(
                f"read data of type {source.kind} as streams that are sharded",
                why=f"the first batch is the same on ranks {ranks}, and every sample would be "
                "trained on several times",
                instead="leave sharded=True out if the streams are the same; else give each "
                "rank its own share of the samples",
            )
    elif len(set(found)) > 1:
        raise DataError.cannot(
            f"read data of type {source.kind} on {part.world_size} ranks",
            why="the first batch is not the same on every rank, and each rank would keep only "
            "its share of what it reads",
            instead="pass DataSpec(data, sharded=True) if each rank has its own part of the "
            "samples; else give all ranks the same order; write sharded=False if only random "
            "augmentation differs",
        )


def fingerprint(batch: Any) -> str:
    """Return a short text that is the same for equal batches.

    >>> fingerprint([torch.zeros(2), "a"]) == fingerprint([torch.zeros(2), "a"])
    True
    >>> fingerprint([torch.zeros(2), "a"]) == fingerprint([torch.zeros(2), "b"])
    False
    """
    digest = blake2b(digest_size=16)

    for node in nodes(batch):
        digest.update(type(node).__name__.encode())
        if isinstance(node, Tensor):
            digest.update(f"{node.dtype} {tuple(node.shape)}".encode())
            digest.update(_bytes(node))
        elif hasattr(node, "tobytes"):  # an array
            digest.update(node.tobytes())
        elif isinstance(node, (str, bytes, int, float)):
            digest.update(repr(node).encode())
    return digest.hexdigest()


def record_of_all(part: Part, record: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the records of every rank as one, the same on each. Every rank must call it.

    Raises:
        DataError: one of them cannot be saved.
    """
    try:
        own = record()
    except DataError as error:
        own = {_FAILED: pickle.dumps(error).hex()}
    everybody = [json.loads(text) for text in gathered_texts(part, json.dumps(own))]
    for one in everybody:
        if _FAILED in one:
            raise pickle.loads(bytes.fromhex(one[_FAILED]))  # noqa: S301  of a rank of this run
    return {"ranks": everybody}


def record_of_rank(part: Part, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's record out of those of all ranks.

    Raises:
        CheckpointError: they are of another number of ranks.
    """
    ranks = saved["ranks"]
    if len(ranks) != part.world_size:
        raise CheckpointError.cannot(
            f"go on from the saved position with world_size={part.world_size}",
            why=f"it has the places in the streams of {len(ranks)} ranks, and others cannot go "
            "on from them",
            instead=f"resume with world_size={len(ranks)}, or start a new run from the weights",
        )
    own: dict[str, Any] = ranks[part.rank]
    return own


def _bytes(tensor: Tensor) -> bytes:
    try:
        flat = tensor.detach().cpu().contiguous().flatten()
        return flat.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, nested or quantized
        return b""
