"""What a run is made of, by name: for ranks, resumes and loggers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from stretto.data.chunks import fingerprint
from stretto.data.indices import seed_generators
from stretto.data.spec import DataSpec
from stretto.planning import Prepared
from stretto.runtime.random_state import kept_generators
from stretto.settings import Loading

OWN_OF_A_RANK = ("num_workers", "prefetch_factor", "pin_memory")
"""Settings of a `Loading` that ranks need not share."""


def described_run(spec: DataSpec, run: Prepared, loading: Loading) -> dict[str, Any]:
    """Return the settings of a run that no model is needed for, by name."""
    return {
        "batch_size": run.policy,
        "rule": run.rules.get("lr"),
        **{f"rule.{key}": one for key, one in run.rules.items() if key != "lr"},
        **{f"schedules.{key}": one for key, one in run.schedules.items()},
        **{f"values.{key}": one for key, one in run.values.items()},
        **described_data("data", spec),
        **{one.name: getattr(loading, one.name) for one in fields(loading)},
    }


def samples_mark(spec: DataSpec) -> str | None:
    """Return a fingerprint of a few samples of map-style data, to recognise another order.

    None: not known, because they are random, or cannot be read here.
    """
    if not spec.is_map_style:
        return None
    length = len(spec.dataset)
    places = sorted({0, length // 2, length - 1})
    marks = []
    try:
        for seed in (1, 2):
            with kept_generators():
                seed_generators(seed)
                marks.append(fingerprint([spec.dataset[place] for place in places]))
    except Exception:  # noqa: BLE001  the loader reports what it cannot read
        return None
    return marks[0] if marks[0] == marks[1] else None


def described_data(at: str, spec: DataSpec) -> dict[str, Any]:
    """Return what is known of data, by names that begin with `at`."""
    # Data of which each rank has its own part may be longer on one than on another.
    return {
        f"{at}.is_map_style": spec.is_map_style,
        f"{at}.num_samples": spec.num_samples if spec.sharded else spec.known_num_samples,
        f"{at}.num_tokens": spec.num_tokens if spec.sharded else spec.counts["dataset_num_tokens"],
        f"{at}.tokens_per_sample": spec.counts["tokens_per_sample"],
    } | {
        f"{at}.{one.name}": value
        for one in fields(spec)
        if isinstance(value := getattr(spec, one.name), (bool, str))
    }
