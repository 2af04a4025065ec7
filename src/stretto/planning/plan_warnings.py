"""The warnings of a plan: what it allows but is probably a mistake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stretto.batching import BatchSizePolicy, LearningRateRule, NoRule, couplings_in
from stretto.batching.rules import is_learning_rate
from stretto.errors import ConversionError, samples_text
from stretto.planning.sizes import PlannedSizes
from stretto.planning.stages import Stage
from stretto.schedules import Schedule
from stretto.timing import Horizon, TimeUnit


def warnings_of(
    horizon: Horizon,
    sizes: PlannedSizes,
    stages: Sequence[Stage],
    *,
    world_size: int,
    even: bool,
) -> Iterator[str]:
    """Yield a line for each likely mistake; `horizon` has the planned sizes."""
    if sizes.end is None:
        unit = sizes.horizon.max_duration.unit
        measure = "wall time" if unit is TimeUnit.SECOND else "what the data turn out to hold"
        yield f"the run ends by {measure}, so the plan does not know when its last stage is over"
    yield from _cut(sizes, stages, world_size=world_size, even=even)
    yield from _left_out(sizes, stages)
    yield from _beyond(horizon, sizes)
    yield from sizes.policy.warnings(
        sizes.horizon, max((stage.size for stage in stages), default=0)
    )
    bound = bound_of(sizes)
    if bound is not None:
        does = "leaves out samples" if horizon.last_batch == "drop" else "cuts a batch"
        yield (
            "the number of samples in the data set is not known: each epoch that ends during the "
            f"run {does}, so this plan is a bound ({bound}); state the number, or write "
            "last_batch='carry'"
        )


def bound_of(sizes: PlannedSizes) -> str | None:
    """Return what a plan is a bound of, if the data may end inside any batch; None: it is exact.

    >>> from stretto.timing import Horizon
    >>> bound_of(PlannedSizes(Horizon("18sp"), 4)), bound_of(PlannedSizes(Horizon("6ba"), 4))
    ('at least 5 batches', 'at most 24 samples')
    """
    if sizes.is_exact or sizes.end is None:
        return None if sizes.is_exact else "it assumes that no epoch ends inside a batch"
    is_counted = sizes.horizon.max_duration.unit is TimeUnit.BATCH
    is_least = is_counted == (sizes.horizon.last_batch == "drop")
    number, what = (sizes.end.sample, "samples") if is_counted else (sizes.end.batch, "batches")
    return f"at {'least' if is_least else 'most'} {number:,} {what}"


def growth_alone(
    policy: BatchSizePolicy, schedules: Mapping[str, Schedule], rule: LearningRateRule | None
) -> Iterator[str]:
    """Yield a warning if batches replace a decay that the learning rate does not account for."""
    rates = [one for name, one in schedules.items() if is_learning_rate(name)]
    pairs = [pair for rate in rates for pair in couplings_in(rate)]
    has_rule = rule is not None and not isinstance(rule, NoRule)
    if policy.is_coupled and rates and not pairs and not has_rule:
        yield (
            f"batches grow by {policy!r}, and no learning rate goes with them; "
            "schedules={'lr': pair.schedule} of the same pair does"
        )


def _cut(
    sizes: PlannedSizes, stages: Sequence[Stage], *, world_size: int, even: bool
) -> Iterator[str]:
    cut = [(size, stage) for stage in stages for size in stage.cut_sizes]
    num_samples = sizes.horizon.dataset_num_samples
    instead = "last_batch='carry' avoids it"
    for stage in stages:
        if sizes.horizon.last_batch == "keep" and num_samples and stage.size > num_samples:
            yield (
                f"batches of {stage.size} are cut to the {num_samples} samples of an epoch; "
                f"{instead}"
            )
            return
    small = [size for size, _ in cut if size < world_size]
    if small:
        yield (
            f"the last batch of an epoch or of the run has {_range(small)} for {world_size} ranks, "
            f"so some run a dummy of weight 0; {instead} within the run"
        )
    elif even and cut:
        yield (
            f"the last batch of an epoch or of the run has {_range([s for s, _ in cut])}, which "
            f"is not split evenly; {instead} within the run"
        )


def _left_out(sizes: PlannedSizes, stages: Sequence[Stage]) -> Iterator[str]:
    if sizes.horizon.last_batch != "drop" or sizes.end is None:
        return
    seen = sum(stage.samples or 0 for stage in stages)
    if seen < sizes.end.sample:
        yield (
            f"last_batch='drop' leaves out {sizes.end.sample - seen:,} of {sizes.end.sample:,} "
            "samples"
        )


def _beyond(horizon: Horizon, sizes: PlannedSizes) -> Iterator[str]:
    """Warn of policy times after the end of the run, usually a ramp longer than the run."""
    axis = horizon.axis(TimeUnit.DURATION)
    if sizes.end is None:
        return
    for time in dict.fromkeys(sizes.policy.times()):
        try:
            late = horizon.ticks(time, axis) > horizon.ticks(horizon.max_duration, axis)
        except ConversionError:
            continue
        if late:
            run = horizon.max_duration
            yield f"the run of {run} is over before {time} of the batch size policy"


def _range(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return samples_text(least) if least == most else f"{least:,} to {most:,} samples"
