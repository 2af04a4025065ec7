"""Wrong data, and wrong ways to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from stretto.data import DataSpec, StepLoader, count_samples, count_target_tokens, take_samples
from stretto.data.chunks import ChunkSource
from stretto.data.fetch import Part
from stretto.data.streams import OwnStreams
from stretto.ordering import SampleOrder
from stretto.runtime import Ranks

NUMBERS = TensorDataset(torch.arange(10))


class Batches:
    """An iterable of batches with as many samples as said."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(length) for length in self.lengths])


class Lies(list[int]):
    """A data set that is shorter than it says."""

    def __len__(self) -> int:
        return 10


def loader(data: Any = NUMBERS, batch_size: Any = 4, **settings: Any) -> StepLoader:
    return StepLoader(data, batch_size, **({"max_duration": "1ep"} | settings))


def run(data: Any = NUMBERS, batch_size: Any = 4, **settings: Any) -> list[Any]:
    return list(loader(data, batch_size, **settings))


def resume(change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"data": NUMBERS, "batch_size": 4} | change
    loader(**settings).load_state_dict(loader().state_dict())


def sharded() -> StepLoader:
    sampler: Any = DistributedSampler(NUMBERS, num_replicas=2, rank=0)
    return loader(DataLoader(NUMBERS, sampler=sampler))


def stream() -> DataSpec:
    return DataSpec(Batches(4, 4), sharded=True)


def stream_without_samples() -> OwnStreams:
    """One of two ranks, of which the other has nothing."""
    spec, part = stream(), Part(Ranks.of(0, 2), None)
    source = ChunkSource(spec, spec.data, seed=0)
    return OwnStreams(source, spec, part, lambda own: [own, (0, 1, 0, 0)])


def of_two_ranks() -> dict[str, Any]:
    record = loader(stream()).state_dict()
    return {**record, "source": {"ranks": 2 * record["source"]["ranks"]}}


def batch_that_does_not_tell() -> Iterator[torch.Tensor]:
    yield torch.zeros(3, 5)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("ordering-no-samples", lambda: SampleOrder(0)),
    ("ordering-seed", lambda: SampleOrder(5, "7")),  # type: ignore[arg-type]
    ("data-unpack", lambda: [*next(loader()).micro_batches[0]]),
    ("data-none", lambda: loader(None)),
    ("data-mapping", lambda: loader({"x": 1})),
    ("data-empty", lambda: loader([])),
    ("data-num-samples", lambda: DataSpec(NUMBERS, num_samples=11)),
    ("data-num-samples-zero", lambda: DataSpec(NUMBERS, num_samples=0)),
    ("data-tokens-per-sample", lambda: DataSpec(NUMBERS, tokens_per_sample=1.5)),  # type: ignore[arg-type]
    ("data-get-batch", lambda: DataSpec(Batches(4), get_batch=len)),
    ("data-resumes-by", lambda: DataSpec(Batches(4), resumes_by="luck")),  # type: ignore[arg-type]
    ("data-sharded-twice", sharded),
    ("data-sharded-map-style", lambda: DataSpec(NUMBERS, sharded=True)),
    ("data-sharded-alone", lambda: run(stream(), rank=0, world_size=2)),
    ("data-sharded-without-samples", lambda: stream_without_samples().take(4, 0)),
    ("data-sharded-world-size", lambda: loader(stream()).load_state_dict(of_two_ranks())),
    ("data-sharded-before", lambda: loader(Batches(4)).load_state_dict(of_two_ranks())),
    ("data-sharded-now", lambda: loader(stream()).load_state_dict(loader(Batches(4)).state_dict())),
    ("data-length-lies", lambda: run(Lies([1, 2]), shuffle=False)),
    ("data-collate-loses-samples", lambda: run([1, 2], 2, collate_fn=lambda some: some[:1])),
    ("data-run-in-tokens", lambda: loader(max_duration="1Mtok")),
    ("data-size-by-tokens", lambda: loader(batch_size="0tok:4 1Ktok:8")),
    ("data-iterable-without-tokens", lambda: run(batch_that_does_not_tell(), max_duration="1Ktok")),
    ("data-part-of-unsized-epoch", lambda: loader(Batches(4), max_duration="0.5ep")),
    ("data-iterable-twice", lambda: loader(iter([torch.zeros(3)]), max_duration="2ep")),
    ("data-iterable-again", lambda: run(iter([torch.zeros(3)]), max_duration="9sp")),
    ("data-iterable-empty", lambda: run(Batches(0), max_duration="9sp")),
    ("data-iterable-short", lambda: run(DataSpec(Batches(3, 3), num_samples=10))),
    ("data-iterable-long", lambda: run(DataSpec(Batches(9, 3), num_samples=10))),
    ("data-iterable-workers", lambda: loader(Batches(4), num_workers=2)),
    ("data-iterable-collate", lambda: loader(Batches(4), collate_fn=len)),
    ("data-iterable-keyed", lambda: loader(Batches(4), keyed_randomness=True)),
    ("data-micro-batch-size", lambda: loader(micro_batch_size=0)),
    ("data-num-workers", lambda: loader(num_workers=1.5)),
    ("data-prefetch-without-workers", lambda: loader(num_workers=0, prefetch_factor=2)),
    ("data-rank-alone", lambda: loader(rank=1)),
    ("data-rank-beyond", lambda: loader(rank=2, world_size=2)),
    ("data-world-size", lambda: loader(rank=0, world_size=0)),
    ("data-batch-below-world", lambda: run(rank=0, world_size=8)),
    ("data-last-batch", lambda: loader(last_batch="cut")),
    ("data-finish-twice", lambda: loader().finish()),
    (
        "data-ranks-without-group",
        lambda: run([{"input_ids": torch.ones(3)}] * 9, rank=0, world_size=2),
    ),
    ("data-resume-seed", lambda: resume({"seed": 1})),
    ("data-resume-length", lambda: resume({"data": [1, 2, 3]})),
    ("data-resume-kind", lambda: resume({"data": Batches(10)})),
    ("data-resume-version", lambda: loader().load_state_dict({"version": 2})),
    ("data-cut-contradiction", lambda: take_samples((torch.zeros(4), torch.zeros(3)), slice(2))),
    ("data-cut-nothing", lambda: take_samples({"x": 1}, slice(2), 4)),
    ("data-count-nothing", lambda: count_samples({"x": 1})),
    ("data-no-targets", lambda: count_target_tokens(torch.zeros(3))),
]
