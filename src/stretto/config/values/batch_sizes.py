"""`batch_size` in a run file: what `as_policy` reads, and the keys that need the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeAlias, final

from pydantic import PlainValidator

from stretto.batching import BatchSizePolicy, SizeFunction, rampup
from stretto.batching.parse import Dialect, without_nulls
from stretto.batching.written import COUPLED, Way
from stretto.config.reading.source import Path
from stretto.config.values.context import CHECKING, Building, read_section
from stretto.errors import BatchSizeError
from stretto.schedules import Cosine, Schedule
from stretto.timing import TimeLike


def coupled_key(value: object) -> str | None:
    """Return the key that couples a batch size with the learning rate, if there is one.

    >>> coupled_key({"seesaw": 16})
    'seesaw'
    """
    words = value if isinstance(value, Mapping) else {}
    return next((key for key in COUPLED if words.get(key) is not None), None)


def build_sizes(
    value: Any, schedules: Mapping[str, Schedule], building: Building, path: Path
) -> tuple[BatchSizePolicy, Mapping[str, Schedule]]:
    """Return the policy that a `batch_size` says, and what becomes of the schedules with it.

    Sizes that take over the decay of the learning rate take it from its schedule.

    >>> from stretto.schedules import Linear
    >>> build_sizes({"seesaw": 16}, {"lr": Linear()}, Building(), ("batch_size",))
    (Seesaw(Linear(), Fixed(16)).policy, {'lr': Seesaw(Linear(), Fixed(16)).schedule})

    Raises:
        ConfigError: it cannot be built; the message says where it stands.
    """
    key = coupled_key(value)
    dialect = FileWords(building).dialect
    if key is None:
        return dialect.policy(value, path), schedules
    way = replace(COUPLED[key], make=partial(COUPLED[key].make, schedules["lr"]))
    with dialect.at(path):
        words = dialect.evened(without_nulls(value), path)
        pair = dialect.made(way, words, path, others=["even"])
    return pair.policy, {**schedules, "lr": pair.schedule}


@final
@dataclass(frozen=True, slots=True)
class FileWords:
    """The keys of a batch size that only a run file has: they need imports, or the ranks."""

    building: Building

    @property
    def dialect(self) -> Dialect:
        """What `as_policy` reads, and these keys."""
        building = self.building
        return Dialect(
            at=building.at,
            function=lambda value, path: building.function(read_section(value, path), path),
            readers={"target": self.of_target, "rampup": self.of_rampup},
            even_unit=building.even_unit,
        )

    def of_target(self, words: dict[str, Any], path: Path) -> BatchSizePolicy:
        """Return a policy of yours, or a function; keys that it does not take are arguments."""
        options = {key: words[key] for key in ("every", "planned") if words.get(key) is not None}
        rest = {key: value for key, value in words.items() if key not in ("every", "planned")}
        target = read_section(rest, path)
        if self.building.is_class(target.target, BatchSizePolicy, path):
            policy: BatchSizePolicy = self.building.made(
                read_section({**rest, **options}, path), path
            )
            return policy
        function = self.building.function(target, path)
        way = Way(partial(SizeFunction, function, None), "target", None)
        return self.dialect.made(way, {**options, "target": ""}, path)  # type: ignore[no-any-return]

    def of_rampup(self, words: dict[str, Any], path: Path) -> BatchSizePolicy:
        """Return a ramp in numbers of micro-batches."""
        way = Way(self.rampup, "rampup", "final_size")
        others = ["rampup"]
        return self.dialect.made(way, without_nulls(words), path, others)  # type: ignore[no-any-return]

    def rampup(
        self,
        final_size: int,
        over: TimeLike,
        *,
        initial_global_train_batch_size: int | None = None,
    ) -> BatchSizePolicy:
        """Doubles up to a final size, by gradient accumulation alone.

        Args:
            final_size: the size from `over` on: a multiple of world_size * micro_batch_size, like
                every other.
            over: how long the ramp is, from the start of the run.
            initial_global_train_batch_size: the size of the first batch; left out, the lowest
                possible, world_size * micro_batch_size.
        """
        building = self.building
        micro = building.micro_batch_size if building.imports else 1  # checking knows no ranks
        if micro is None:
            raise BatchSizeError.cannot(
                f"ramp up to {final_size} by gradient accumulation",
                why="the run file states no micro-batch size",
                instead="write micro_batch_size: 8, or another ramp such as "
                f"{{ramp: double, start: 8, end: {final_size}, over: {over}}}",
            )
        return rampup(
            final_size,
            over,
            world_size=building.world_size,
            micro_batch_size=micro,
            initial_global_train_batch_size=initial_global_train_batch_size,
        )


def _checked(value: Any) -> Any:
    build_sizes(value, {"lr": Cosine()}, CHECKING, ())
    return value


BatchSize: TypeAlias = Annotated[Any, PlainValidator(_checked)]
"""Samples of one optimizer step over all ranks, in any of the ways to write it."""
