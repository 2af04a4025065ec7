"""`stretto find-batch-size`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from stretto.config.run import RunConfig
from stretto.config.training import Finding, build_finding
from stretto.errors import ConfigError
from stretto.memory import Answer, find_batch_size, find_num_ranks
from stretto.memory.finding.estimators import NoEstimateError
from stretto.memory.search import MAXIMUM
from stretto.report.memory import memory_table, ranks_table

ABSTRACT = ("auto", "predict")
"""Methods that need no model with values."""


class Found(NamedTuple):
    """An answer as text and for JSON."""

    text: str
    plain: Any
    of_device: Answer | None = None
    """The answer for one device, which can be drawn."""

    @classmethod
    def of(cls, answer: Answer) -> Found:
        """Return the answer for one device."""
        text = f"{memory_table(answer)}\n\n{answer}".lstrip()
        return cls(text, _to_record(answer), answer)


def for_device(config: RunConfig, *, method: str, **asked: Any) -> Found:
    """Return the largest micro-batch, without memory for the model if that is enough."""
    found = None
    if asked["device_memory"] is not None and method in ABSTRACT:
        # The model may be larger than this machine. If it reads values while it is built, or is
        # wrong, it is built again with them.
        with suppress(ConfigError, RuntimeError, NotImplementedError):
            found = build_finding(config, on_meta=True)
    if found is not None:
        try:
            return Found.of(_find(found, method="predict", **asked))
        except NoEstimateError:
            if method == "predict":
                raise
    return Found.of(_find(build_finding(config), method=method, **asked))


def _find(found: Finding, **asked: Any) -> Answer:
    if asked["maximum"] is None:
        asked["maximum"] = found.num_samples or MAXIMUM
    return find_batch_size(found.step, found.batch, **_facts(found), **asked)


def _facts(found: Finding) -> dict[str, Any]:
    return {"accumulation": found.accumulation, "measures_noise": found.measures_noise}


def for_ranks(
    config: RunConfig,
    world_size: str | None,
    micro_batch_size: int | None,
    *,
    method: str,
    shard: str | None,
    **asked: Any,
) -> Found:
    """Return the largest micro-batch of simulated ranks of GPUs, or the fewest ranks for one.

    Raises:
        ConfigError: the options contradict each other, or the numbers of ranks cannot be read.
    """
    if asked["device_memory"] is None or method not in ABSTRACT:
        raise ConfigError.cannot(
            "find a batch size for simulated ranks",
            why="the memory of their devices is not known, or the method needs the devices",
            instead="write --device-memory, for example 80GiB, without --method",
        )
    numbers = (world_size or "1").split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise ConfigError.bad(
            "--world-size", world_size, "it is not a list of numbers", "write 64 or 8,16,64"
        )
    found = build_finding(config, on_meta=True)
    asked |= {"shard": shard or config.parallel, **_facts(found)}
    if micro_batch_size is not None:
        names = ("minimum", "maximum", "multiple_of", "power_of_two")
        rest = {name: value for name, value in asked.items() if name not in names}
        fewest = find_num_ranks(found.step, found.batch, micro_batch_size, **rest)
        rows = [row._asdict() for row in fewest.rows]
        return Found(str(fewest), {"num_ranks": fewest.num_ranks, "rows": rows})
    if asked["maximum"] is None:
        del asked["maximum"]
    answers = {
        ranks: find_batch_size(found.step, found.batch, world_size=ranks, **asked)
        for ranks in map(int, numbers)
    }
    records = [{"ranks": ranks, **_to_record(answer)} for ranks, answer in answers.items()]
    if len(answers) == 1:
        (answer,) = answers.values()
        return Found(Found.of(answer).text, records[0])
    return Found(ranks_table(answers), records)


def _to_record(answer: Answer) -> dict[str, Any]:
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
