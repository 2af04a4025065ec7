"""`stretto find-batch-size`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from stretto.batching import Tokens, checked_size
from stretto.batching.policy import has_tokens
from stretto.config.run import RunConfig
from stretto.config.training import build_finding
from stretto.errors import ConfigError
from stretto.memory import Answer, find_batch_size
from stretto.memory.finder import MAXIMUM
from stretto.report.tables import memory_table
from stretto.settings import DATA_DIMENSIONS


def find(
    config: RunConfig,
    *,
    world_size: int | None,
    shard: str | None,
    minimum: str,
    maximum: str | None,
    **asked: Any,
) -> tuple[str, Any]:
    """Return the largest micro-batch of a device.

    Sizes in tokens ask for a token budget.

    Returns:
        The answer as text and as plain values.

    Raises:
        ConfigError: the options contradict each other.
    """
    if asked["gpu"] is None and (world_size, shard) != (None, None):
        raise ConfigError.cannot(
            "find a batch size for ranks",
            why="the kind of their GPUs is not known",
            instead="write --gpu h100",
        )
    least = checked_size(minimum, "--minimum")
    most = None if maximum is None else checked_size(maximum, "--maximum")
    amount = Tokens if has_tokens((least, most)) else None if most is None else int
    found = None
    if asked["gpu"] is not None:
        # The model may be larger than this machine. If it reads values while it is built, or is
        # wrong, it is built again with them.
        with suppress(ConfigError, RuntimeError, NotImplementedError):
            found = build_finding(config, on_meta=True, amount=amount)
    found = build_finding(config, amount=amount) if found is None else found
    answer = find_batch_size(
        found.step,
        found.batch,
        # Of a step with several micro-batches, the second needs the most memory: gradients exist.
        accumulation=2,
        measures_noise=found.measures_noise,
        world_size=1 if world_size is None else world_size,
        shard=shard or _shard_of(config),
        minimum=least,
        maximum=most or found.most or MAXIMUM,
        **asked,
    )
    text = f"{memory_table(answer)}\n\n{answer}".lstrip()
    return text, ({} if world_size is None else {"ranks": world_size}) | _to_record(answer)


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
