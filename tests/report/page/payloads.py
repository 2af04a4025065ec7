"""Made-up payloads of the run page: runs that ramp, resume and measure noise."""

# ruff: noqa: E501

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
START = 1_790_000_000.0


def packed(values: npt.ArrayLike, dtype: str) -> str:
    """Return the values as little-endian base64."""
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()


def series(
    name: str,
    panel: str,
    rows: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    interval: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a series of the payload."""
    made = {
        "name": name,
        "panel": panel,
        "label": name,
        "step": False,
        "planned": False,
        "rows": packed(rows, "<u4"),
        "values": packed(values, "<f4"),
        "unit": "",
    }
    if interval:
        made |= {"low": packed(interval[0], "<f4"), "high": packed(interval[1], "<f4")}
    return made | more


def clock(columns: Mapping[str, npt.ArrayLike | None]) -> dict[str, Any]:
    """Return a clock of these columns."""
    (n,) = {np.size(v) for v in columns.values() if v is not None}
    return {"n": n, **{k: None if v is None else packed(v, "<f8") for k, v in columns.items()}}


def run(
    name: str,
    batches: int = 800,
    *,
    sizes: Sequence[int] = (8, 16, 32, 64),
    points: int = 400,
    seed: int = 0,
    noise: bool = True,
    resumed: bool = True,
    micro_batch_size: int = 16,
) -> dict[str, Any]:
    """Return a run whose batch size doubles, with at most `points` logged rows."""
    chance = np.random.default_rng(seed)
    cuts = [batches * i // (2 * len(sizes)) for i in range(len(sizes))]
    size = np.zeros(batches)
    for cut, value in zip(cuts, sizes, strict=True):
        size[cut:] = value
    samples = np.concatenate([[0], np.cumsum(size)])
    seconds = np.concatenate(
        [[0], np.cumsum(0.004 * size**0.7 * chance.uniform(0.9, 1.2, batches))]
    )
    logged = np.unique(np.linspace(0, batches, points + 1).astype(int)[1:])
    rows = np.union1d(np.union1d([0], cuts), logged)
    away = np.where(rows > 0.4 * batches, 0.3 * seconds[-1], 0.0) if resumed else 0.0
    columns = {
        "ba": rows,
        "sp": samples[rows],
        "tok": samples[rows] * 128,
        "ep": samples[rows] / (samples[-1] / 3),
        "dur": samples[rows] / samples[-1],
        "sec": seconds[rows],
        "utc": START + seed * 40 + seconds[rows] + away,
    }
    at = np.searchsorted(rows, logged)
    share = samples[logged] / samples[-1]
    loss = 1.45 + 3.6 * np.exp(-9 * share) + 0.5 * (1 - share) + chance.normal(0, 0.05, share.size)
    middle = 20 + 300 * share**2 * np.exp(chance.normal(0, 0.12, share.size))
    width = np.exp(0.7 / np.sqrt(1 + 30 * share))
    now = size[logged - 1]
    steps, step_rows = np.asarray(sizes), np.searchsorted(rows, cuts)
    seen = at[:: max(1, at.size // 14)]
    rate = 0.004 * np.minimum(1, share / 0.12) * (0.1 + 0.9 * np.cos(np.pi / 2 * share) ** 2)
    per_second = now / (0.0042 * now**0.7) * chance.uniform(0.85, 1.1, share.size)
    found = [
        series("train/loss", "loss", at, loss, label="training"),
        series("eval/loss", "loss", seen, np.interp(seen, at, loss) + 0.06, label="validation"),
        series("batch_size", "batch_size", step_rows, steps, label="actual", step=True),
        series("planned", "batch_size", step_rows, steps, step=True, planned=True),
        series("accumulation", "accumulation", step_rows, -(-steps // micro_batch_size), step=True),
        series("lr", "lr", at, rate),
        series("grad_norm", "grad_norm", at, 0.4 + 2 * np.exp(-6 * share) * chance.lognormal(0, 0.3, share.size)),
        series("memory", "memory", at, (2.1 + 0.02 * now + chance.normal(0, 0.01, share.size)) * 2**30, label="measured", unit="bytes"),
        series("predicted", "memory", step_rows, (2.2 + 0.02 * steps) * 2**30, label="predicted", unit="bytes", step=True, planned=True),
        series("throughput", "throughput", at, per_second, unit="sp/s"),
        series("eval/accuracy", "eval/accuracy", seen, 1 - 0.8 * np.exp(-3 * seen / rows.size)),
    ]  # fmt: skip
    if noise:
        found.append(
            series("noise", "noise_scale", at, middle, interval=(middle / width, middle * width))
        )
    events = [event(0, "start", "started on 1 rank")]
    events += [
        event(int(row), "evaluation", f"loss {2.5 - i / 20:.3f}") for i, row in enumerate(seen)
    ]
    events += [
        event(int(row), "checkpoint", f"ba{rows[row]}") for row in at[:: max(1, at.size // 4)]
    ]
    if resumed:
        back = int(np.searchsorted(rows, 0.4 * batches, side="right"))
        events.append(event(back, "resume", "from ba320, 11 batches done again", attempt=2))
        out = int(np.searchsorted(rows, 0.62 * batches))
        events.append(event(out, "out_of_memory", "micro-batch 32 to 16", attempt=2))
    stages = [
        [str(i + 1), str(value), f"{int(samples[cut]):,}", f"{100 * samples[cut] / samples[-1]:.1f}%", "as planned"]
        for i, (cut, value) in enumerate(zip(cuts, sizes, strict=True))
    ]  # fmt: skip
    return {
        "name": name,
        "kind": "run",
        "clock": clock(columns),
        "series": found,
        "events": events,
        "stages": {"columns": ["stage", "batch size", "from sample", "of the run", "planned"], "rows": stages},
        "facts": [
            ["model", "TinyGPT, 1.2M parameters"],
            ["optimizer", "AdamW, lr 0.004"],
            ["batch size", f"DoublingRamp({sizes[0]}, {sizes[-1]})"],
            ["data", "20,480 samples, 3 epochs"],
            ["ranks", "1, CPU"],
            ["took", f"{seconds[-1]:.0f} s in {1 + resumed} attempts"],
        ],
    }  # fmt: skip


def event(row: int, kind: str, text: str, attempt: int = 1) -> dict[str, Any]:
    """Return an event of the payload."""
    return {"row": row, "kind": kind, "attempt": attempt, "text": text}


def payload(*runs: dict[str, Any], live: bool = False) -> dict[str, Any]:
    """Return a page of these runs."""
    return {"version": 1, "live": live, "kind": "runs", "runs": list(runs)}


def three() -> dict[str, Any]:
    """Return three runs that differ."""
    other = run("noise", 900, sizes=(8, 16, 32, 128), seed=1, resumed=False, micro_batch_size=8)
    return payload(run("default"), other, run("runs/longer", 1100, seed=2, noise=False))


def memory() -> dict[str, Any]:
    """Return the memory of two steps on a card of 16 GiB."""
    made = {
        "title": "TinyGPT on an A4000",
        "limit_bytes": 16 * 2**30,
        "peak_bytes": int(12.9 * 2**30),
        "time": "time: a step takes at least 0.2 s",
        "step": 2,
        "steps": [memory_step(1, 0.0), memory_step(2, 4.0)],
    }
    return {"version": 1, "live": False, "kind": "memory", "runs": [], "memory": made}


def memory_step(number: int, optimizer: float) -> dict[str, Any]:
    """Return the memory of one step."""
    n = 400
    forward = np.minimum(1, np.arange(n) / 180)
    backward = np.clip((np.arange(n) - 200) / 150, 0, 1)
    activations = 5.5 * forward * (1 - backward)
    parts = {
        "parameters": np.full(n, 3.0),
        "gradients": 3.0 * backward,
        "optimizer": np.full(n, optimizer),
        "activations": activations,
        "temporary": 0.4 * (np.arange(n) % 7 == 0),
    }
    places = {"model.py:7 forward": activations / 4, "model.py:9 forward": activations * 3 / 4}

    def shown(stacks: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"name": k, "bytes": packed(v * 2**30, "<f8")} for k, v in stacks.items()]

    marks = [(190, "peak"), (192, "backward"), (390, "optimizer step")]
    return {
        "step": number,
        "times": packed(np.arange(n), "<f8"),
        "categories": shown(parts),
        "places": shown(places),
        "marks": [{"at": at, "text": text} for at, text in marks],
    }
