"""The price of a step of a run, and the `c` that a batch size policy follows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from stretto.batching import Tokens, split
from stretto.batching.policy import has_tokens
from stretto.batching.rules import is_learning_rate
from stretto.batching.step_cost import StepCost, ladder
from stretto.data import MicroBatch, Step
from stretto.errors import TrainingError
from stretto.memory.examples import batches_of, example_batches
from stretto.memory.seconds import timed
from stretto.planning.bind import Prepared
from stretto.run import Run
from stretto.runtime import TrainStep
from stretto.runtime.ranks import Ranks
from stretto.training.stepper import Stepper

_TORCH = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop")
_KNOWN = tuple(getattr(torch.optim, name) for name in _TORCH)
"""Optimizers without a norm of their own, unlike Muon and those that use signs."""


def machine_of(ranks: Ranks) -> str:
    """Return the kind of machine and the number of ranks that a price is of."""
    device = ranks.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name} x {ranks.world_size}"


def check_rule(prepared: Prepared, optimizers: Sequence[object]) -> None:
    """Refuse sizes that follow the time without a rule of the learning rate.

    Raises:
        TrainingError: there is none.
    """
    names = " and ".join(type(one).__name__ for one in optimizers)
    if not any(map(is_learning_rate, prepared.rules)):
        kind = "linear" if all(isinstance(one, torch.optim.SGD) for one in optimizers) else "sqrt"
        least, _ = prepared.bound_policy.bounds or (32, 0)
        raise TrainingError.cannot(
            "follow c='time'",
            why="no rule says how the learning rate follows the batch size",
            instead=f"write rule={{'{kind}': {least}}} with the size that the rate is for",
        )
    if not all(isinstance(one, _KNOWN) for one in optimizers):
        warnings.warn(
            f"c='time' follows the noise scale of the gradient; if {names} measures it in another "
            "norm, as Muon and signSGD do, the right size is another one (arXiv 2602.03001)",
            UserWarning,
            stacklevel=4,  # who makes the trainer
        )


def measure_cost(
    stepper: Stepper,
    step: TrainStep,
    run: Run,
    sizes: Sequence[int] | None,
    *,
    clock: Callable[[], int],
) -> StepCost:
    """Return the seconds of whole steps, on all ranks together, noise included.

    Raises:
        TrainingError: no sample can be read before the run, or sizes are in tokens.
    """
    loader, ranks, most = run.loader, run.ranks, stepper.retry.size
    bounds = run.prepared.bound_policy.bounds
    in_tokens = isinstance(most, Tokens) or (sizes is None and has_tokens(bounds))
    if in_tokens or not loader.spec.is_map_style:
        why = "sizes are in tokens" if in_tokens else "the data are an iterable"
        raise TrainingError.cannot(
            "measure the seconds of a step",
            why=f"{why}, so no batch of a given size can be made",
            instead="write c= a number, such as what 'stretto step-cost' prints for like data",
        )
    example = example_batches(loader)
    row = loader.horizon.group or 1

    def made(size: int) -> Step:
        own = split(size, ranks.dp_world_size, most).micro_batch_sizes(ranks.dp_rank)
        weight = ranks.dp_world_size / size
        micros = [
            MicroBatch(batches_of(example, max(one, 1))[0], one, 0, one * weight, row)
            for one in own
        ]
        return Step(run.timer.timestamp, size, size, micros)

    def agreed(seconds: float) -> float:
        return ranks.agree((seconds if ranks.is_first else 0.0,))[0]

    resumed = stepper.resumed_from
    try:
        return timed(
            step,
            lambda _, one: stepper.rehearse(one),
            made,
            sizes=sorted(sizes or _sizes(run, bounds)),
            clock=clock,
            agreed=agreed,
        )
    finally:
        stepper.resumed_from = resumed
        stepper.clear()


def _sizes(run: Run, bounds: tuple[int, int] | None) -> list[int]:
    """Return the sizes to measure: those that the run may have, or some around them."""
    plan = run.prepared.sizes
    if bounds is None and plan is not None:
        found = [stage.size for stage in plan.stages]
        bounds = min(found), max(found)
    if bounds is None:
        raise TrainingError.cannot(
            "choose sizes to measure", why="those of the run are not known", instead="name some"
        )
    least, most = bounds
    return ladder(least, most) if most > 2 * least else ladder(max(least // 4, 1), 4 * most)
