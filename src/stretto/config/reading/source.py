"""Where a value of a run file was written, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeAlias, final

from stretto.errors import ConfigError, StrettoError

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

    >>> Source("run.yaml", {("seed",): 3}).where(("seed",))
    'seed in run.yaml, line 3'
    """

    name: str = "the run file"
    """The file's name, without its folder."""
    lines: Mapping[Path, int] = field(default_factory=dict)
    """The line, from 1, of each key and each item of a list."""
    overridden: frozenset[Path] = frozenset()
    """The paths that the command line has set."""

    def where(self, path: Path) -> str:
        """Return where the value at `path` comes from, or where it should be."""
        if not path:
            return self.name
        for end in range(len(path), 0, -1):
            if path[:end] in self.overridden:
                return f"{show_path(path)} on the command line"
            if path[:end] in self.lines:
                return f"{show_path(path)} in {self.name}, line {self.lines[path[:end]]}"
        return f"{show_path(path)} in {self.name}"

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
            raise ConfigError(f"{in_file_words(str(error))} ({self.where(path)})") from error


NO_SOURCE = Source()
"""A run file that was not read from anywhere."""


_WORDS = (
    (r"\bdataset_(num_samples|num_tokens)\b", r"data.\1"),
    (r"\bpass tokens_per_sample\b", "pass data.tokens_per_sample"),
    (r"\bpass (?=data\.)", "state "),
    (
        r"\bIncreaseFunction\(.*?, start=(\d+), max_batch_size=(\d+)\)",
        r"increase: {target: ...} with start: \1 and max_batch_size: \2",
    ),
    (r"\bAtMost\(policy, (\d+)\)", r"at_most: \1"),
    (r"\bAtLeast\(policy, (\d+)\)", r"at_least: \1"),
    (r"\bMultipleOf\(policy, (\d+)\)", r"multiple_of: \1"),
    # Behind a quote is what was written in the file.
    (r"(?<!')\b(maximum|minimum|start|end|multiple_of|reference)=(\d+)", r"\1: \2"),
    (r"\blast_batch='(\w+)'", r"last_batch: \1"),
    (r"\bSteps\('([^']*)'\)", r"'\1'"),
    (r"\bStep\('1ep'\)", "step: {every: 1ep}"),
    (r"\bpass evaluate=\.\.\.", "write evaluate: {every: 10%}"),
)


def in_file_words(message: str) -> str:
    """Return a message of a lower floor, which speaks of Python, in the words of a run file.

    >>> in_file_words("pass dataset_num_tokens, or write AtMost(policy, 100)")
    'state data.num_tokens, or write at_most: 100'
    """
    for pattern, word in _WORDS:
        message = re.sub(pattern, word, message)
    return message


def source_name(path: object) -> str:
    """Return how messages call a file: its name without the folder."""
    return PurePath(str(path)).name or str(path)
