"""Megatron's own classes, as far as they run without a GPU, and its order of calls."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch.jit
    from megatron.core import num_microbatches_calculator as calculators
    from megatron.core import optimizer_param_scheduler as schedulers

from stretto.integrations.megatron import follow
from stretto.planning import Plan

PEAK, DECAY = 1e-3, 0.1
MICRO, RANKS = 2, 2
UNIT = MICRO * RANKS
BATCH = 16


class Row(NamedTuple):
    """What a step was trained with: its samples, and the values of each group."""

    start: int
    size: int
    rates: tuple[float, ...]
    decays: tuple[float, ...]


def group(**values: Any) -> dict[str, Any]:
    """A group of parameters as Megatron Core 0.19 makes it."""
    real = {"wd_mult": 1.0, "lr_mult": 1.0, "max_lr": PEAK, "min_lr": 0.0, "default_config": True}
    return {"params": [torch.zeros(1, requires_grad=True)], **real, **values}


def optimizer(*groups: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(groups) or [group()], lr=PEAK)


def scheduler(of: Any = None, **changed: Any) -> Any:
    """Megatron's scheduler as its own settings would make it: a WSD over batches of 16."""
    values = {
        "init_lr": 0.0,
        "max_lr": PEAK,
        "min_lr": 0.0,
        "lr_warmup_steps": 10 * BATCH,
        "lr_decay_steps": 100 * BATCH,
        "lr_decay_style": "WSD",
        "start_wd": DECAY,
        "end_wd": DECAY,
        "wd_incr_steps": 100 * BATCH,
        "wd_incr_style": "constant",
        "wsd_decay_steps": 20 * BATCH,
        "lr_wsd_decay_style": "linear",
    }
    return schedulers.OptimizerParamScheduler(of or optimizer(), **{**values, **changed})


def constant(**changed: Any) -> None:
    """Make Megatron's calculator anew, as its initialization does."""
    calculators.unset_num_microbatches_calculator()
    sizes = {"global_batch_size": BATCH, "micro_batch_size": MICRO, "data_parallel_size": RANKS}
    given = {"rampup_batch_size": None, **sizes, **changed}
    calculators.init_num_microbatches_calculator(1, **given)


def row(start: int, unit: int, of: Any) -> Row:
    """What the step at a position would be trained with now."""
    groups = of.optimizer.param_groups
    rates = tuple(float(one["lr"]) for one in groups)
    size = calculators.get_num_microbatches() * unit
    assert calculators.get_current_global_batch_size() == size
    assert calculators.get_current_running_global_batch_size() == size
    return Row(start, size, rates, tuple(one["weight_decay"] for one in groups))


def train(of: Any, start: int, steps: range, unit: int = UNIT, skip: Sequence[int] = ()) -> Any:
    """Run steps in the order of calls of Megatron-LM and Bridge; return the rows and the end."""
    rows = []
    for step in steps:
        calculators.update_num_microbatches(start, consistency_check=False)
        calculators.update_num_microbatches(start, consistency_check=True)
        rows.append(row(start, unit, of))
        if step not in skip:  # gradients of fp16 overflow: Megatron steps no scheduler
            of.step(increment=rows[-1].size)
        start += rows[-1].size
    return rows, start


def expected(plan: Plan, scales: Sequence[tuple[float, float]] = ((PEAK, DECAY),)) -> list[Row]:
    """The rows that a plan says, for groups with these multipliers of lr and weight decay."""
    found = []
    for batch in plan.batches():
        lr, decay = (batch.values.get(name, 1.0) for name in ("lr", "weight_decay"))
        rates = tuple(lr * one for one, _ in scales)
        decays = tuple(decay * one for _, one in scales)
        found.append(Row(batch.timestamp.sample, batch.size, rates, decays))
    return found


def fresh(
    plan: Plan, consumed: int = 0, ranks: int = RANKS, saved: Any = None, *groups: Any
) -> Any:
    """A process that begins or resumes in the order of Megatron-Bridge, following a plan."""
    constant(data_parallel_size=ranks, global_batch_size=16 * ranks)
    of = scheduler(optimizer(*groups))
    if saved is not None:
        of.load_state_dict(saved)
    follow(plan, of, consumed, MICRO, ranks)
    return of


def bridge() -> SimpleNamespace:
    """Callbacks and samplers of Megatron-Bridge, whose package needs much more to be imported."""
    import megatron

    root = next(
        Path(one) / "bridge" for one in megatron.__path__ if (Path(one) / "bridge").exists()
    )
    for name in ("", ".training", ".data"):
        module = ModuleType(f"megatron.bridge{name}")
        module.__path__ = [str(root / name.removeprefix("."))]
        sys.modules.setdefault(module.__name__, module)
    return SimpleNamespace(
        callbacks=importlib.import_module("megatron.bridge.training.callbacks"),
        samplers=importlib.import_module("megatron.bridge.data.samplers"),
    )


def iterators(samplers: Any, total: int, consumed: int, ranks: int) -> list[Iterator[list[int]]]:
    """The micro-batches of each rank."""
    kind = samplers.MegatronPretrainingSampler
    return [iter(kind(total, consumed, MICRO, rank, ranks)) for rank in range(ranks)]
