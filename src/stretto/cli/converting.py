"""`stretto convert`."""

from __future__ import annotations

import typer

from stretto.errors import Argument, ConversionError
from stretto.timing import convert as convert_time

_OPTIONS = {
    "dataset_num_samples": "--samples",
    "dataset_num_tokens": "--tokens",
    "max_training_duration": "--max-duration",
    "batch_size": "--batch-size",
}
"""What the arguments of `stretto.convert` are called on the command line."""


def as_option(argument: Argument) -> str:
    """Return the option of an argument that a message names."""
    return _OPTIONS.get(argument.name, str(argument))


def convert(
    time: str,
    unit: str,
    *,
    max_duration: str | None,
    samples: int | None,
    tokens: int | None,
    batch_size: int | None,
    drop_last: bool,
) -> None:
    """Print `time` in `unit`."""
    try:
        found = convert_time(
            time,
            unit,
            dataset_num_samples=samples,
            dataset_num_tokens=tokens,
            max_training_duration=max_duration,
            batch_size=batch_size,
            drop_last=drop_last,
        )
    except ConversionError as error:
        raise error.recast(ConversionError, word=as_option) from error
    typer.echo(str(found))
