"""The training data of a run file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.config.run import RunConfig
from stretto.config.values.targets import call_target
from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.data import DataSpec


def make_spec(config: RunConfig) -> DataSpec:
    """Return the training data with the sizes that the file states.

    Raises:
        ConfigError: they cannot be made, have other sizes, or are a `DataLoader` with
            `drop_last=True` and the file does not say `last_batch`.
    """
    from stretto.data import DataSpec  # imports torch, which a plan of stated sizes does without

    data = config.data
    with config.source.at("data"):
        spec = DataSpec.of(
            call_target(data, source=config.source, path=("data",)),
            num_samples=data.num_samples,
            num_tokens=data.num_tokens,
            tokens_per_sample=data.tokens_per_sample,
            sharded=data.sharded,
        )
    if spec.last_batch != config.last_batch and "last_batch" not in config.model_fields_set:
        raise ConfigError.cannot(
            "train on a DataLoader with drop_last=True",
            why=f"last_batch is {config.last_batch!r} if the run file does not say it",
            instead=f"write last_batch: {spec.last_batch}, or last_batch: {config.last_batch}",
            where=config.source.where(("data",)),
        )
    return spec


def data_counts(config: RunConfig, spec: DataSpec | None = None) -> dict[str, int | None]:
    """Return what a `Horizon` has to know of the data, by the names of its arguments.

    Args:
        config: the run file.
        spec: the data; left out, they are made if the file does not state the number of samples.

    Raises:
        ConfigError: the data are needed and cannot be made.
    """
    data = config.data
    if spec is None and data.num_samples is not None:
        return {
            "dataset_num_samples": data.num_samples,
            "dataset_num_tokens": data.num_tokens,
            "tokens_per_sample": data.tokens_per_sample,
        }
    return (spec or make_spec(config)).counts
