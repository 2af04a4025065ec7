"""The run that a loader follows."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.batching import PolicyLike
from stretto.data.spec import DataSpec
from stretto.errors import DataError, shown
from stretto.planning import Prepared, bind_run
from stretto.timing import LastBatch, TimeLike


def prepared_for(
    spec: DataSpec,
    batch_size: PolicyLike | Prepared,
    max_duration: TimeLike | None,
    last_batch: LastBatch | None,
) -> Prepared:
    """Return the run of a loader: the given one, or one that is bound here.

    Raises:
        DataError: the run has other data, or its length is given twice or not at all.
    """
    if isinstance(batch_size, Prepared):
        _check_run(batch_size, spec, {"max_duration": max_duration, "last_batch": last_batch})
        return batch_size
    if max_duration is None:
        raise DataError.cannot(
            "load data",
            why="the length of the run is not known",
            instead="pass max_duration='90ep', or a run that bind_run() has bound",
        )
    return bind_run(spec.horizon(max_duration, last_batch), batch_size)


def _check_run(run: Prepared, spec: DataSpec, given: Mapping[str, object]) -> None:
    """Refuse a run of other data, and arguments that repeat the run's."""
    for name, value in given.items():
        if value is not None:
            raise DataError.cannot(
                f"load data with {name}={shown(value)} and a run that bind_run() has bound",
                why=f"the run has its own {name}",
                instead=f"leave {name} out, or write it in the Horizon",
            )
    if run.facts.dataset_num_samples != spec.known_num_samples:
        raise DataError.cannot(
            f"load data with {spec.known_num_samples} samples",
            why=f"the run was prepared for {run.facts.dataset_num_samples}",
            instead="pass Horizon(..., dataset_num_samples=...) of these data to bind_run()",
        )
