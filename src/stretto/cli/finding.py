"""`stretto find-batch-size`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from stretto.config.run import RunConfig
from stretto.config.training import build_finding
from stretto.errors import ConfigError
from stretto.memory import Answer, find_batch_size, find_num_ranks
from stretto.memory.search import MAXIMUM
from stretto.report.memory import memory_table, ranks_table

REAL = ("try", "halve")
"""Methods that need a model with values."""


class Found(NamedTuple):
    """An answer as text and for JSON."""

    text: str
    plain: Any
    of_device: Answer | None = None
    """The answer for one device, which can be drawn."""

    @classmethod
    def of(cls, answer: Answer, **more: int) -> Found:
        """Return the answer for one device."""
        text = f"{memory_table(answer)}\n\n{answer}".lstrip()
        return cls(text, more | _to_record(answer), answer)


def find(
    config: RunConfig,
    *,
    world_size: str | None,
    micro_batch_size: int | None,
    shard: str | None,
    maximum: int | None,
    **asked: Any,
) -> Found:
    """Return the largest micro-batch of a device, or of each number of ranks; or the fewest ranks.

    Raises:
        ConfigError: the options contradict each other, or the numbers of ranks cannot be read.
    """
    numbers = [number.strip() for number in (world_size or "1").split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise ConfigError.bad(
            "--world-size", world_size, "it is not a list of numbers", "write 64 or 8,16,64"
        )
    if asked["gpu"] is None and (world_size, micro_batch_size, shard) != (None, None, None):
        raise ConfigError.cannot(
            "find a batch size for ranks",
            why="the kind of their GPUs is not known",
            instead="write --gpu h100",
        )
    found = None
    is_here = asked["gpu"] is None and asked["device_memory"] is None
    if not is_here and asked["method"] not in REAL:
        # The model may be larger than this machine. If it reads values while it is built, or is
        # wrong, it is built again with them.
        with suppress(ConfigError, RuntimeError, NotImplementedError):
            found = build_finding(config, on_meta=True)
    found = build_finding(config) if found is None else found
    asked |= {"accumulation": found.accumulation, "measures_noise": found.measures_noise}
    asked["shard"] = shard or config.parallel
    if micro_batch_size is not None:
        rest = ("minimum", "multiple_of", "power_of_two")
        asked = {name: value for name, value in asked.items() if name not in rest}
        ranks, answer = find_num_ranks(found.step, found.batch, micro_batch_size, **asked)
        return Found.of(answer, num_ranks=ranks)
    asked["maximum"] = maximum or found.num_samples or MAXIMUM
    answers = {
        ranks: find_batch_size(found.step, found.batch, world_size=ranks, **asked)
        for ranks in map(int, numbers)
    }
    if len(answers) == 1:
        ((ranks, answer),) = answers.items()
        return Found.of(answer) if world_size is None else Found.of(answer, ranks=ranks)
    records = [{"ranks": ranks, **_to_record(answer)} for ranks, answer in answers.items()]
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
        "peaks": [{"size": size, "peak_bytes": peak} for size, peak in answer.peaks.items()],
        "outside_bytes": dict(answer.outside),
        "notes": list(answer.notes),
        "cost": answer.cost._asdict(),
    }
