"""`convert`: exact conversion between units, from given facts about a run."""

from __future__ import annotations

from stretto._foreign import knows_foreign
from stretto.errors import ConversionError
from stretto.timing.grammar import TimeUnit, parse_unit
from stretto.timing.horizon import Horizon, checked_count
from stretto.timing.time import Time, TimeLike


@knows_foreign
def convert(
    time: TimeLike,
    unit: str,
    *,
    dataset_num_samples: int | None = None,
    dataset_num_tokens: int | None = None,
    max_training_duration: TimeLike | None = None,
    batch_size: int | None = None,
    drop_last: bool = False,
) -> Time:
    """Convert a time to another unit, from given facts.

    Pairs: epochs and batches (needs `dataset_num_samples` and `batch_size`), epochs and samples
    (`dataset_num_samples`), batches and samples (`batch_size`; epochs end with a smaller batch
    if `dataset_num_samples` is known, too), epochs and tokens (`dataset_num_tokens`), `dur` and
    the unit of `max_training_duration`, and every chain of these.

    Batches, samples and tokens are rounded up to whole numbers: to the first batch whose end has
    reached the time.

    >>> convert("0.1dur", "ep", max_training_duration="90ep")
    Time('9ep')
    >>> convert("0.1dur", "ba", max_training_duration="90ep", dataset_num_samples=50_000,
    ...         batch_size=128)
    Time('3519ba')

    Args:
        time: what to convert.
        unit: the unit to convert to.
        dataset_num_samples: samples in an epoch.
        dataset_num_tokens: tokens in an epoch.
        max_training_duration: how long the run is.
        batch_size: samples in a batch, over all ranks.
        drop_last: skip an epoch's last batch if it would be smaller.

    Raises:
        ConversionError: a fact is missing, or is not a positive count.
        TimeError: a text is not a time.
    """
    found, target = Time(time), parse_unit(unit)
    needs_run = TimeUnit.DURATION in (found.unit, target) and found.unit is not target
    if max_training_duration is None:
        if needs_run:
            instead = f"set max_training_duration, or write it in '{target}'"
            why = "the length of the run is not known"
            raise ConversionError.cannot(f"convert {found} to {target}", why=why, instead=instead)
        max_training_duration = "1s"  # no wall time has an end among the samples
    horizon = Horizon(
        max_training_duration,
        dataset_num_samples=dataset_num_samples,
        dataset_num_tokens=dataset_num_tokens,
        batch_sizes=checked_count("batch_size", batch_size),
        last_batch="drop" if drop_last else "keep",
    )
    return horizon.convert(found, target)
