"""Run files, their overrides, and where each value was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeAlias, final

from stretto.errors import Argument, ConfigError, Place, StrettoError

Path: TypeAlias = tuple[str | int, ...]
"""The keys and list indices that lead to a value."""


def show_path(path: Path) -> str:
    """Return a path as it is written in an override; indices as `.0`, for shells read `[0]`.

    >>> show_path(("schedules", "lr", "periods", 0, "duration"))
    'schedules.lr.periods.0.duration'
    """
    # A key may hold what would move the cursor of a terminal.
    parts = (str(part) for part in path)
    return ".".join(part if part.isprintable() else repr(part)[1:-1] for part in parts)


@final
@dataclass(frozen=True, slots=True)
class Source:
    """What a run file is called, and the line on which each of its values stands.

    Two files that say the same are equal, so all sources are.

    >>> print(Source("run.yaml", {("seed",): 3}).where(("seed",)))
    seed in run.yaml, line 3
    """

    name: str = field(default="the run file", compare=False)
    """The file's name, without its folder."""
    lines: Mapping[Path, int] = field(default_factory=dict, compare=False)
    """The line, from 1, of each key and each item of a list."""
    overridden: frozenset[Path] = field(default=frozenset(), compare=False)
    """The paths that the command line has set."""

    def where(self, path: Path) -> Place:
        """Return where the value at `path` comes from, or where it should be."""
        if not path:
            return Place(self.name)
        for end in range(len(path), 0, -1):
            if path[:end] in self.overridden:
                return Place(f"{show_path(path)} on the command line")
            if path[:end] in self.lines:
                return Place(show_path(path), self.name, self.lines[path[:end]])
        return Place(show_path(path), self.name)

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """Let errors of ours raised within say that they come from `path`.

        Raises:
            ConfigError: in place of any other error of ours.
        """
        try:
            yield
        except ConfigError:
            raise
        except StrettoError as error:
            raise error.recast(ConfigError, where=self.where(path), word=as_key) from error


NO_SOURCE = Source()
"""A run file that was not read from anywhere."""


_KEYS = {
    "dataset_num_samples": "data.num_samples",
    "dataset_num_tokens": "data.num_tokens",
    "tokens_per_sample": "data.tokens_per_sample",
    "max_training_duration": "max_duration",
    **{name: f"stepping.{name}" for name in ("non_finite", "rank_timeout")},
}
"""The keys that have another name than the arguments of Python."""


def as_key(argument: Argument) -> str:
    """Return how a run file writes an argument that a message names.

    >>> as_key(Argument("dataset_num_tokens")), as_key(Argument("at_most", 100))
    ('data.num_tokens', 'at_most: 100')
    """
    key = _KEYS.get(argument.name, argument.name)
    return key if argument.value is None else f"{key}: {argument.value}"


def source_name(path: object) -> str:
    """Return how messages call a file: its name without the folder."""
    return PurePath(str(path)).name or str(path)
