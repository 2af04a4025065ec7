"""`stretto find-batch-size`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from stretto.config.run import RunConfig
from stretto.config.training import Finding, build_finding
from stretto.errors import ConfigError, shown
from stretto.memory import Answer, find_batch_size, find_num_ranks
from stretto.memory.finding.estimators import NoEstimateError
from stretto.memory.finding.finder import FindMethod
from stretto.memory.search import MAXIMUM
from stretto.report.memory import memory_table, ranks_table

ABSTRACT = ("auto", "predict")
"""Ways that need no model with values."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The ranks that are asked about."""

    world_sizes: tuple[int, ...] = ()
    shard: str | None = None
    micro_batch_size: int | None = None
    """Not None: how few ranks will do for it."""

    @classmethod
    def of(cls, world_size: str | None, shard: str | None, micro_batch_size: int | None) -> Spread:
        """Read the options of the command line.

        Raises:
            ConfigError: the numbers of ranks cannot be read.
        """
        parts = [] if world_size is None else world_size.split(",")
        if not all(part.strip().isdecimal() and int(part) for part in parts):
            raise ConfigError.cannot(
                f"read --world-size {shown(world_size)}",
                why="it is not a positive number, or several with commas between them",
                instead="write for example 64 or 8,16,64",
            )
        return cls(tuple(map(int, parts)), shard, micro_batch_size)


def ask(config: RunConfig, *, method: str, device_memory: str | None, **wishes: Any) -> Answer:
    """Return the largest micro-batch; without memory for the model where that will do."""

    def find(found: Finding, method: str) -> Answer:
        if wishes["maximum"] is None:
            wishes["maximum"] = found.num_samples or MAXIMUM
        return find_batch_size(
            found.step,
            found.batch,
            accumulation=found.accumulation,
            measures_noise=found.measures_noise,
            method=cast(FindMethod, method),  # looked at there
            device_memory=device_memory,
            **wishes,
        )

    if device_memory is not None and method in ABSTRACT:
        # The model may be larger than this machine, so it is built without memory first.
        try:
            found = build_finding(config, on_meta=True)
        except (ConfigError, RuntimeError, NotImplementedError):
            pass  # it reads values while it is built, or is wrong: the next attempt will say
        else:
            try:
                return find(found, "predict")
            except NoEstimateError:
                if method == "predict":
                    raise
    return find(build_finding(config), method)


class _Said(NamedTuple):
    """An answer about ranks, as text and for JSON."""

    text: str
    plain: Any


def for_ranks(
    config: RunConfig, spread: Spread, device_memory: str | None, *, method: str, **wishes: Any
) -> _Said:
    """Answer for simulated ranks of GPUs.

    Raises:
        ConfigError: the options do not go together.
    """
    if device_memory is None or method not in ABSTRACT:
        raise ConfigError.cannot(
            "find a batch size for ranks that are not here",
            why="the memory of their devices is not known"
            if device_memory is None
            else f"method {method!r} needs the devices",
            instead="write --device-memory, for example 80GiB, and leave --method out",
        )
    found = build_finding(config, on_meta=True)
    shard = spread.shard or config.parallel
    about = {
        "accumulation": found.accumulation,
        "measures_noise": found.measures_noise,
        "device_memory": device_memory,
        "shard": shard,
        **{name: wishes[name] for name in ("gpu", "context", "margin")},
    }
    if spread.micro_batch_size is not None:
        fewest = find_num_ranks(found.step, found.batch, spread.micro_batch_size, **about)
        record = {"num_ranks": fewest.num_ranks, "rows": [row._asdict() for row in fewest.rows]}
        return _Said(str(fewest), record)
    for name in ("minimum", "maximum", "multiple_of", "power_of_two"):
        if wishes[name] is not None:
            about[name] = wishes[name]
    answers = {
        ranks: find_batch_size(found.step, found.batch, world_size=ranks, **about)
        for ranks in spread.world_sizes
    }
    rows = [{"ranks": ranks, **to_record(answer)} for ranks, answer in answers.items()]
    if len(answers) == 1:
        (answer,) = answers.values()
        return _Said(f"{memory_table(answer)}\n\n{answer}", rows[0])
    return _Said(ranks_table(answers), rows)


def to_record(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain values for JSON."""
    return {
        "size": answer.size,
        "certainty": answer.certainty,
        "too_large": answer.too_large,
        "limit_bytes": answer.limit.bytes,
        "limit": answer.limit.source,
        "reserve_bytes": answer.reserve,
        "peak_bytes": answer.peak,
        "peaks": [{"size": row.size, "peak_bytes": row.peak} for row in answer.rows()],
        "outside_bytes": dict(answer.outside),
        "notes": list(answer.notes),
        "cost": answer.cost._asdict(),
    }
