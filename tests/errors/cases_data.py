"""Wrong data, and wrong ways to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.data.records import loader_with
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from stretto.data import DataSpec, StepLoader
from stretto.data.chunks import ChunkSource
from stretto.data.fetch import RankShare
from stretto.data.streams import OwnStreams
from stretto.runtime import Ranks

NUMBERS = TensorDataset(torch.arange(10))


class Batches:
    """An iterable of batches with as many samples as said."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(length) for length in self.lengths])


def loader(data: Any = NUMBERS, batch_size: Any = 4, **settings: Any) -> StepLoader:
    return loader_with(data, batch_size, **({"max_duration": "1ep"} | settings))


def run(data: Any = NUMBERS, batch_size: Any = 4, **settings: Any) -> list[Any]:
    return list(loader(data, batch_size, **settings))


def sharded() -> StepLoader:
    sampler: Any = DistributedSampler(NUMBERS, num_replicas=2, rank=0)
    return loader(DataLoader(NUMBERS, sampler=sampler))


def stream() -> DataSpec:
    return DataSpec(Batches(4, 4), sharded=True)


def stream_without_samples() -> OwnStreams:
    """One of two ranks, of which the other has nothing."""
    spec, part = stream(), RankShare(Ranks.of(0, 2), None)
    source = ChunkSource(spec, spec.data, seed=0)
    return OwnStreams(source, part, lambda own: [own, (0, 0, 1, 0, 0)])


CASES: list[tuple[str, Callable[[], object]]] = [
    ("data-get-batch", lambda: DataSpec(Batches(4), get_batch=len)),
    ("data-resumes-by", lambda: DataSpec(Batches(4), resumes_by="luck")),  # type: ignore[arg-type]
    ("data-sharded-twice", sharded),
    ("data-sharded-map-style", lambda: DataSpec(NUMBERS, sharded=True)),
    ("data-sharded-without-samples", lambda: stream_without_samples().take(4, 0)),
    ("data-iterable-empty", lambda: run(Batches(0), max_duration="9sp")),
    ("data-iterable-workers", lambda: loader(Batches(4), num_workers=2)),
    ("data-iterable-collate", lambda: loader(Batches(4), collate_fn=len)),
    ("data-num-workers", lambda: loader(num_workers=1.5)),
    ("data-world-size", lambda: loader(rank=0, world_size=0)),
]
