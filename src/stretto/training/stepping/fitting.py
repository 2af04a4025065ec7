"""How much of a batch a rank takes at once, found before the run: as much as fits into memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import nn

from stretto.batching import BatchSizePolicy, awaits_maximum, with_maximum
from stretto.data import DataSpec, StepLoader
from stretto.data.spec import Collate
from stretto.errors import FitError, TrainingError
from stretto.planning import Plan
from stretto.runtime import TrainStep
from stretto.runtime.gradients import is_fully_sharded
from stretto.timing import TimeLike
from stretto.training.distributed.ranks import Ranks

if TYPE_CHECKING:
    from stretto.memory import Answer

MARGIN = "3%"
"""What stays free."""
_NO_LIMIT = 2**31
"""Stands for a largest batch size that is still to be found."""


def find_fitting(
    step: TrainStep,
    *,
    loader: StepLoader,
    ranks: Ranks,
    most: int,
    accumulates: bool,
    measures_noise: bool = False,
) -> Answer:
    """Return the most samples that a rank can take at once, at most `most`; the same on all ranks.

    The longest of a few samples from all over the data set stands for all of them, padded or
    packed. What callbacks make of a batch before the first step is followed on fake tensors.

    Args:
        step: the step, its model on its device.
        loader: has the data.
        ranks: the processes of the run.
        most: more are never needed.
        accumulates: whether a step may have several micro-batches.
        measures_noise: whether the gradient of each of them is kept apart from those before.

    Raises:
        TrainingError: the data are an iterable, or the model is spread over ranks.
        FitError: not even one sample fits.
    """
    from stretto.memory import find_batch_size  # for who asks for it
    from stretto.memory.examples import example_batches

    _check(step.model, loader)
    examples = example_batches(loader)

    def find(method: Literal["predict", "auto"]) -> Answer:
        return find_batch_size(
            step,
            examples,
            accumulation=2 if accumulates else 1,
            measures_noise=measures_noise,
            method=method,
            margin=_margin(step.model, ranks),
            maximum=most,
            agree_minimum=ranks.least if ranks.world_size > 1 else None,
        )

    def found() -> Answer:
        try:
            answer = find("predict")
        except FitError:
            return find("auto")  # which probes what fake tensors cannot follow
        is_sure = answer.certainty in ("exact", "upper bound")
        # The first real step verifies it; where memory is short, more is tried before.
        return answer if is_sure and answer.size == most else find("auto")

    transforms, step.transforms = step.transforms, ()
    try:
        answer = found()
    finally:
        step.transforms = transforms
    if transforms:
        # One that makes batches smaller now may not do so later; one that makes them larger counts.
        # Only on fakes: a real step would change what callbacks remember.
        with contextlib.suppress(FitError):
            answer = min(answer, find("predict"), key=lambda one: one.size)
    return answer


class FoundMaximum(NamedTuple):
    """The largest batch size of a run, found by what fits."""

    size: int
    """Samples over all ranks."""
    answer: Answer
    """How the share of one rank was found."""


def with_found_maximum(
    policy: BatchSizePolicy,
    spec: DataSpec,
    max_duration: TimeLike,
    find: Callable[..., Answer],
    *,
    ranks: Ranks,
    measures: Callable[[frozenset[str]], bool],
    collate_fn: Collate | None = None,
) -> tuple[BatchSizePolicy, FoundMaximum | None]:
    """Return a policy whose largest size is what the ranks can take in a single pass each.

    And that size; None if the policy does not await one.

    On one rank such a pass is cut into halves where its noise is measured, which have to fit, too.

    Args:
        policy: one that may await its largest size.
        spec: the data.
        max_duration: the length of the run.
        find: `find_fitting`, but for the loader and what is wanted of it.
        ranks: the processes of the run.
        measures: whether gradients are kept apart in a run whose policy reads these signals.
        collate_fn: makes a batch of samples.

    Raises:
        TrainingError: the data are an iterable, or the model is spread over ranks.
        FitError: not even one sample fits.
    """
    if not awaits_maximum(policy):
        return policy, None
    unlimited = with_maximum(policy, _NO_LIMIT)
    loader = StepLoader(
        spec,
        unlimited,
        max_duration=max_duration,
        last_batch="keep",
        collate_fn=collate_fn,
        rank=0,
        world_size=1,
    )
    most = max(1, (loader.horizon.dataset_num_samples or 1) // ranks.world_size)
    answer = find(loader=loader, most=most, accumulates=False)
    size = answer.size
    if ranks.world_size == 1 and measures(loader.reads):
        half = (size + 1) // 2
        halves = find(loader=loader, most=half, accumulates=True, measures_noise=True)
        if 2 * halves.size < size:
            size, answer = 2 * halves.size, halves
    found = FoundMaximum(size * ranks.world_size, answer)
    return with_maximum(policy, found.size), found


def largest_share(plan: Plan | None, loader: StepLoader) -> int:
    """Return the most samples that a rank ever has of one batch, as far as that is known."""
    if plan is not None and plan.stages:
        return max(-(-stage.size // loader.world_size) for stage in plan.stages)
    bounds = loader.prepared.decided_between
    if bounds is not None:
        return -(-bounds[1] // loader.world_size)
    return max(1, (loader.horizon.dataset_num_samples or 2**20) // loader.world_size)


def _check(model: nn.Module, loader: StepLoader) -> None:
    if not loader.spec.is_map_style:
        raise TrainingError.cannot(
            "find a batch size that fits",
            why="the data are an iterable, of which no sample can be looked at beforehand",
            instead="write a number, such as what 'stretto find-batch-size' answers",
        )
    if is_fully_sharded(model):
        raise TrainingError.cannot(
            "find a batch size that fits",
            why="the model is spread over ranks, and each needs memory for what it gathers",
            instead="write a number",
        )


def _margin(model: nn.Module, ranks: Ranks) -> str | int:
    """What stays free: a few percent, and what averaging gradients keeps a copy of them in."""
    from stretto.memory.measuring.limits import free_memory

    if ranks.world_size == 1:
        return MARGIN
    copies = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return copies + free_memory(ranks.device).bytes * 3 // 100
