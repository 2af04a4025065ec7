"""The run and the source of a loader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from stretto.batching import PolicyLike, Tokens
from stretto.batching.metrics import NOISE
from stretto.batching.rows import LengthsLike
from stretto.data.chunks import (
    ChunkSource,
    check_streams,
    read_once,
    record_of_all,
    record_of_rank,
)
from stretto.data.fetch import Fetch, RankShare, Steps
from stretto.data.map_style import (
    MapSource,
    direct_pieces,
    direct_steps,
    planned_steps,
    sample_steps,
)
from stretto.data.pieces import cut_by_tokens
from stretto.data.spec import DataSpec, check_workers, is_one_shot
from stretto.data.streams import OwnStreams, SameStream, Stream, cut_steps
from stretto.data.workers import batched, pins_memory, with_own_settings
from stretto.errors import DataError
from stretto.planning import Prepared, bind_run
from stretto.runtime.random_state import kept_generators
from stretto.settings import Loading
from stretto.timing import Horizon, TimeLike, Timestamp, TimeUnit


def prepared_for(
    spec: DataSpec,
    batch_size: PolicyLike | Prepared,
    max_duration: TimeLike | None,
    loading: Loading,
    sequence_length: LengthsLike | None = None,
) -> Prepared:
    """Return the run of a loader: the given one, or one that is bound here.

    Raises:
        DataError: the run has other data, or its length is given twice or not at all.
    """
    if not isinstance(batch_size, Prepared):
        if max_duration is None:
            raise DataError.bad("max_duration", None, "a run needs a length", "write '90ep'")
        horizon = spec.horizon(max_duration, loading=loading)
        return bind_run(horizon, batch_size, sequence_length=sequence_length)
    facts = batch_size.facts
    twice: dict[str, object] = {"max_duration": max_duration, "last_batch": loading.last_batch}
    twice["sequence_length"] = sequence_length
    for name, value in twice.items():
        if value is not None and value != getattr(facts, name, None):
            raise DataError.bad(name, value, f"the run has its own {name}", "leave it out")
    known, group = spec.known_num_samples, facts.group or 1
    if facts.dataset_num_samples != (known and known // group * group):
        why = f"the run was prepared for {facts.dataset_num_samples} samples"
        instead = "bind the run with the number of samples of these data"
        raise DataError.bad("num_samples", spec.known_num_samples, why, instead)
    if facts.lengths is not None and facts.lengths != spec.ordered_lengths(loading):
        why = "the run was prepared for other lengths, or another order of them"
        instead = "bind the run with DataSpec.horizon(max_duration, loading=loading) of these data"
        raise DataError.cannot("use these data", why=why, instead=instead)
    return batch_size


LEAST_CHUNK = 128  # a batch from a worker costs 0.7 ms, whatever its size: few large ones are best


@final
@dataclass(frozen=True, slots=True)
class BatchSource:
    """Where a loader's batches come from."""

    steps: Steps
    map_source: MapSource | None
    """None for iterables."""
    chunks: ChunkSource | None
    """None for map-style data sets."""
    spec: DataSpec
    part: RankShare
    looks_ahead: bool = False
    """Whether batches must be decided ahead of the step."""
    pins: bool = False
    """Whether batches still have to be copied to pinned memory."""

    @property
    def order_record(self) -> dict[str, Any]:
        """What determines the order of samples, as JSON; for iterables, which ranks read."""
        if self.map_source is None:
            return {"sharded": True} if self.spec.sharded else {}
        order = self.map_source.order
        record = {"num_samples": order.num_samples, "seed": order.seed, "shuffle": order.shuffle}
        return record | {"longest_row": order.group if order.shuffle else 1}

    def check_streams(self) -> None:
        """Compare the streams of all ranks, which all must call it.

        Raises:
            DataError: they differ and are not said to be sharded, or are said to be and do not.
        """
        sharded = self.spec.sharded
        if self.chunks is not None and sharded is not False:
            check_streams(self.part, self.chunks, is_sharded=bool(sharded))

    def example_batch(self, indices: list[int]) -> Any:
        """Return the batch of these samples of a map-style data set, or of the longest rows."""
        source = self.map_source
        assert source is not None, "an iterable has no samples to look at"
        if (row := source.order.group) > 1:
            last = source.order.num_samples // row - 1
            source, indices = source.in_rows(row), [min(index // row, last) for index in indices]
        with kept_generators():
            return source.fetch(indices)

    def state_dict(self, timestamp: Timestamp) -> dict[str, Any] | None:
        """Return the position of an iterable; a map-style data set needs only the clock.

        For sharded streams it has the position of each; every rank must call it.
        """
        if self.chunks is None:
            return None
        chunks = self.chunks
        if not self.spec.sharded:
            return chunks.state_dict(timestamp.epoch)
        return record_of_all(self.part, lambda: chunks.state_dict(timestamp.epoch))

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Return to the position of `state_dict`."""
        if self.chunks is not None and state is not None:
            if self.spec.sharded:
                state = record_of_rank(self.part, state)
            self.chunks.load_state_dict(state)


def make_source(spec: DataSpec, run: Prepared, loading: Loading, part: RankShare) -> BatchSource:
    """Return the source of this rank's part of the data.

    Raises:
        DataError: the data cannot be read in this way.
        PlanError: batches of a map-style data set are in tokens, and its lengths are not known.
    """
    _check_whole(spec, loading)
    loading = with_own_settings(loading, spec.data)
    # At least 128 samples, in whole micro-batches.
    micro_batch = part.micro_batch_size or 1
    is_budget = isinstance(part.micro_batch_size, Tokens)
    chunk_size = LEAST_CHUNK if is_budget else -(-LEAST_CHUNK // micro_batch) * micro_batch
    steps: Steps
    group = run.facts.group or 1
    if not spec.is_map_style:
        if group > 1:
            why, instead = "the data are an iterable", "pass a map-style data set, or leave it out"
            raise DataError.cannot("follow a sequence length", why=why, instead=instead)
        _check_iterable(spec, run.horizon, loading)
        check_workers(spec, loading.num_workers)
        batches, own_rank = batched(spec, loading, chunk_size), part.rank if spec.sharded else 0
        chunks = ChunkSource(spec, batches, seed=loading.seed, rank=own_rank)
        chunks.is_compared = NOISE in run.bound_policy.reads
        stream: Stream = SameStream(chunks, part)
        if spec.sharded:
            stream = OwnStreams(chunks, part, part.ranks.gather_dp)
        steps = partial(cut_steps, stream, chunks.kind, run.horizon)
        return BatchSource(steps, None, chunks, spec, part, pins=pins_memory(loading))
    if run.is_read:
        assert run.refusal is not None, "its sizes are not known"
        raise run.refusal
    whole = len(spec.dataset) // group * group
    order = replace(spec.order(loading), num_samples=whole, group=group)
    keyed_seed = loading.seed if loading.keyed_randomness else None
    get_batch, collate_fn = spec.get_batch, loading.collate_fn
    fetch = Fetch(
        spec.dataset, collate_fn, get_batch=get_batch, keyed_seed=keyed_seed, num_samples=whole
    )
    source = MapSource(spec, order, part, fetch, loading)
    # Indexing tensors is faster than any worker; `get_batch` does not give single samples.
    is_direct = fetch.tensors is not None or (fetch.get_batch is not None and not run.is_planned)
    if is_budget:
        source = replace(source, cut=cut_by_tokens(source, run))
    if run.is_planned and loading.num_workers and not is_direct:
        steps = partial(planned_steps, source)
        return BatchSource(steps, source, None, spec, part, looks_ahead=True)
    steps = partial(sample_steps, source, chunk_size, run.horizon.end_sample)
    if is_direct or not loading.num_workers:
        steps = partial(direct_pieces if is_budget else direct_steps, source)
    return BatchSource(steps, source, None, spec, part, pins=pins_memory(loading))


def _check_whole(spec: DataSpec, loading: Loading) -> None:
    """Refuse settings of single samples beside `get_batch`."""
    for name in ("collate_fn", "keyed_randomness"):
        if spec.get_batch is not None and getattr(loading, name):
            why = "get_batch of the DataSpec makes whole batches"
            raise DataError.bad(name, getattr(loading, name), why, "leave one of the two out")


def _check_iterable(spec: DataSpec, horizon: Horizon, loading: Loading) -> None:
    if loading.keyed_randomness:
        why, instead = "samples of an iterable have no index", "use stretto.data.sample_seed there"
        raise DataError.bad("keyed_randomness", value=True, why=why, instead=instead)
    run = horizon.max_duration
    if is_one_shot(spec.data) and run.unit is TimeUnit.EPOCH and run.amount > 1:
        raise read_once(f"run for {run} on data of type {type(spec.data).__name__}")
