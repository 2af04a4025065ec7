"""`stretto convert`."""

from __future__ import annotations

import re

import typer

from stretto.errors import ConversionError
from stretto.timing import convert as convert_time

_OPTIONS = {
    "dataset_num_samples": "--samples",
    "dataset_num_tokens": "--tokens",
    "max_training_duration": "--max-duration",
    "batch_size": "--batch-size",
}
"""What the arguments of `stretto.convert` are called on the command line."""


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
        names = "|".join(_OPTIONS)
        said = re.sub(rf"\b({names})\b", lambda name: _OPTIONS[name[0]], str(error))
        raise ConversionError(said) from error
    typer.echo(str(found))
