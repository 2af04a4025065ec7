"""`Building`: what sections of a run file are turned into objects with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, final

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from stretto.config.reading.source import NO_SOURCE, Path, Source
from stretto.config.values.fields import Target
from stretto.config.values.targets import bound_target, call_target, import_target
from stretto.errors import StrettoError


@final
@dataclass(frozen=True, slots=True)
class Building:
    """The surroundings that a section is built in.

    >>> Building(world_size=8, micro_batch_size=4).even_unit
    32
    """

    world_size: int = 1
    micro_batch_size: int | None = None
    source: Source = NO_SOURCE
    imports: bool = True
    """Whether targets are imported; when a file is only checked, a stand-in takes their place."""

    @property
    def even_unit(self) -> int:
        """What an evenly split batch size is a multiple of."""
        return self.world_size * (self.micro_batch_size or 1)

    def at(self, path: Path) -> AbstractContextManager[None]:
        """Name the place in errors that are raised inside."""
        return self.source.at(*path) if self.imports else _refused_at(path)

    def function(self, section: Target, path: Path) -> Callable[..., Any]:
        """Return the function that a section names, with its arguments bound."""
        if not self.imports:
            return _stand_in
        return bound_target(section, source=self.source, path=path)  # type: ignore[no-any-return]

    def is_class(self, target: str, kind: type, path: Path) -> bool:
        """Return whether a target is a class of `kind`; False if targets are not imported."""
        if not self.imports:
            return False
        found = import_target(target, where=self.source.where((*path, "target")))
        return isinstance(found, type) and issubclass(found, kind)

    def made(self, section: Target, path: Path) -> Any:
        """Return what a section's target returns for its arguments."""
        return call_target(section, source=self.source, path=path)


CHECKING = Building(imports=False)
"""Builds what can be built of a run file on its own: what is wrong there is wrong in any run."""


def _stand_in(*_: Any) -> int:
    return 1


def read_section(value: object, path: Path) -> Target:
    """Return a mapping with a `target` as a section.

    Raises:
        ValidationError: it is none.
    """
    try:
        return value if isinstance(value, Target) else Target.model_validate(value)
    except ValidationError as error:
        details: list[Any] = error.errors(include_url=False)
        lines = [{**one, "loc": (*path, *one["loc"])} for one in details]
        raise ValidationError.from_exception_data("batch_size", lines) from None  # type: ignore[arg-type]


@contextmanager
def _refused_at(path: Path) -> Iterator[None]:
    """Let pydantic list an error of ours raised within, at the path that it comes from."""
    try:
        yield
    except StrettoError as error:
        details = InitErrorDetails(type="value_error", loc=path, input=None, ctx={"error": error})
        raise ValidationError.from_exception_data("batch_size", [details]) from error
