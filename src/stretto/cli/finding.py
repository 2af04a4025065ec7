"""`stretto find-batch-size`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from stretto.batching import Tokens, checked_size
from stretto.batching.policy import has_tokens
from stretto.config.run import RunConfig
from stretto.config.training import build_finding
from stretto.errors import ConfigError
from stretto.memory import Answer, find_batch_size, find_num_ranks
from stretto.memory.answer import NothingFitsError
from stretto.memory.finder import MAXIMUM
from stretto.report.tables import answers_table, memory_table
from stretto.settings import DATA_DIMENSIONS


def find(
    config: RunConfig,
    *,
    world_size: str | None,
    micro_batch_size: str | None,
    shard: str | None,
    minimum: str,
    maximum: str | None,
    **asked: Any,
) -> tuple[str, Any]:
    """Return the largest micro-batch of a device, or of each number of ranks; or the fewest ranks.

    Sizes in tokens ask for a token budget.

    Returns:
        The answer as text and as plain values.

    Raises:
        ConfigError: the options contradict each other, or the numbers of ranks cannot be read.
    """
    worlds = numbers("--world-size", world_size or "1")
    if asked["gpu"] is None and (world_size, micro_batch_size, shard) != (None, None, None):
        raise ConfigError.cannot(
            "find a batch size for ranks",
            why="the kind of their GPUs is not known",
            instead="write --gpu h100",
        )
    given = {"--micro-batch-size": micro_batch_size, "--minimum": minimum, "--maximum": maximum}
    size, least, most = (
        None if one is None else checked_size(one, option) for option, one in given.items()
    )
    is_budget = has_tokens((size, least, most))
    amount = Tokens if is_budget else None if (size, most) == (None, None) else int
    found = None
    if asked["gpu"] is not None:
        # The model may be larger than this machine. If it reads values while it is built, or is
        # wrong, it is built again with them.
        with suppress(ConfigError, RuntimeError, NotImplementedError):
            found = build_finding(config, on_meta=True, amount=amount)
    found = build_finding(config, amount=amount) if found is None else found
    # Of a step with several micro-batches, the second needs the most memory: gradients exist.
    asked |= {"accumulation": 2, "measures_noise": found.measures_noise}
    asked["shard"] = shard or _shard_of(config)
    if size is not None:
        rest = ("multiple_of", "power_of_two")
        asked = {name: value for name, value in asked.items() if name not in rest}
        ranks, answer = find_num_ranks(found.step, found.batch, size, **asked)
        return _shown(answer, num_ranks=ranks)
    asked |= {"minimum": least, "maximum": most or found.most or MAXIMUM}
    if len(worlds) > 1:
        rows = [(ranks, _answer(found.step, found.batch, ranks, asked)) for ranks in worlds]
        plain = [
            {"ranks": ranks, **({"size": None} if answer is None else _to_record(answer))}
            for ranks, answer in rows
        ]
        return answers_table([({"ranks": ranks}, answer) for ranks, answer in rows]), plain
    answer = find_batch_size(found.step, found.batch, world_size=worlds[0], **asked)
    return _shown(answer, **({} if world_size is None else {"ranks": worlds[0]}))


def _shown(answer: Answer, **more: int) -> tuple[str, dict[str, Any]]:
    return f"{memory_table(answer)}\n\n{answer}".lstrip(), more | _to_record(answer)


def _shard_of(config: RunConfig) -> str:
    """Return how ranks share the model of a run file."""
    if not isinstance(config.parallel, str):
        raise ConfigError.cannot(
            "find a batch size for ranks that share the model",
            why="a function in 'parallel' spreads it over a mesh",
            instead="write --shard fsdp, hsdp:N or ddp, whichever is nearest",
            where=config.source.where(("parallel",)),
        )
    mesh = config.mesh or {}
    shards = [size for name, size in mesh.items() if name in DATA_DIMENSIONS]
    is_hybrid = config.parallel == "fsdp" and len(shards) > 1
    return f"hsdp:{shards[-1]}" if is_hybrid else config.parallel


def _answer(step: Any, batch: Any, ranks: int, asked: dict[str, Any]) -> Answer | None:
    try:
        return find_batch_size(step, batch, world_size=ranks, **asked)
    except NothingFitsError:
        return None


def numbers(option: str, text: str) -> list[int]:
    """Return the numbers in a text such as `8,16,64`.

    Raises:
        ConfigError: they are none.
    """
    found = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() and int(number) for number in found):
        raise ConfigError.bad(option, text, "it is not a list of numbers", "write 64 or 8,16,64")
    return list(map(int, found))


def _to_record(answer: Answer) -> dict[str, Any]:
    return {
        "size": answer.size,
        "unit": "tok" if isinstance(answer.size, Tokens) else "sp",
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
