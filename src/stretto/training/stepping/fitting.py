"""Finds the largest micro-batch that fits into memory, before the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stretto.batching import BatchSizePolicy, with_maximum
from stretto.batching.following import NOISE
from stretto.data import DataSpec, StepLoader
from stretto.data.spec import Collate
from stretto.distributed.ranks import Ranks
from stretto.errors import FitError, TrainingError
from stretto.planning import Plan
from stretto.runtime import TrainStep
from stretto.runtime.gradients import is_fully_sharded
from stretto.timing import TimeLike
from stretto.training.callback import Callback

if TYPE_CHECKING:
    from stretto.memory import Answer

MARGIN = "3%"
"""Memory that stays free."""
MARGIN_ON_CPU = "30%"
"""The same for a sharded model on CPUs, whose steps are predicted as if they ran on GPUs."""
_NO_LIMIT = 2**31
"""Stands for a maximum batch size that is not yet known."""


def find_fitting(
    step: TrainStep,
    *,
    loader: StepLoader,
    ranks: Ranks,
    most: int,
    accumulates: bool,
    measures_noise: bool = False,
) -> Answer:
    """Return the largest micro-batch of a rank, at most `most`; the same on all ranks.

    All samples count as the longest of a few from the whole data set, padded or packed.
    Transforms of callbacks run on fake tensors only.

    Args:
        step: the step; its model is on its device.
        loader: the data.
        ranks: the processes of the run.
        most: the largest size that is needed.
        accumulates: whether a step may have several micro-batches.
        measures_noise: whether the gradient of each micro-batch is kept apart.

    Raises:
        TrainingError: the data are an iterable.
        FitError: not even one sample fits.
    """
    from stretto.memory import find_batch_size  # imported only if needed
    from stretto.memory.examples import example_batches
    from stretto.memory.measuring.limits import free_memory

    if not loader.spec.is_map_style:
        raise TrainingError.cannot(
            "find a batch size that fits",
            why="the data are an iterable, so no sample can be read before the run",
            instead="write a number, such as what 'stretto find-batch-size' answers",
        )
    find = partial(
        find_batch_size,
        step,
        example_batches(loader),
        accumulation=2 if accumulates else 1,
        measures_noise=measures_noise,
        maximum=most,
        agree_minimum=ranks.least if ranks.world_size > 1 else None,
    )
    if is_fully_sharded(step.model):
        # Ranks communicate inside a forward pass, so only a prediction cannot make one wait. It is
        # for all transforms at once: no other answer could be compared with it.
        return find(**_sharded(step, ranks))
    margin: str | int = MARGIN
    if ranks.world_size > 1:  # DDP copies the gradients
        copies = sum(p.nbytes for p in step.model.parameters() if p.requires_grad)
        margin = copies + free_memory(ranks.device).bytes * 3 // 100
    predict, search = (partial(find, method=one, margin=margin) for one in ("predict", "auto"))
    transforms, step.transforms = step.transforms, ()
    answer: Answer | None = None
    try:
        with contextlib.suppress(FitError):  # fake tensors cannot follow the model
            answer = predict()
        # The first real step verifies it. If memory limits the size, probe it now.
        sure = ("exact", "upper bound")
        if answer is None or answer.certainty not in sure or answer.size != most:
            answer = search()
    finally:
        step.transforms = transforms
    if transforms:
        # A transform that enlarges batches counts; one that shrinks them may not do so later.
        # Only on fake tensors: a real step would change the state of callbacks.
        with contextlib.suppress(FitError):
            answer = min(answer, predict(), key=lambda one: one.size)
    return answer


def _sharded(step: TrainStep, ranks: Ranks) -> dict[str, Any]:
    """Return how the step of a sharded model is predicted."""
    from stretto.memory.measuring.limits import free_memory
    from stretto.memory.prediction.tensors import inner, step_tensors
    from stretto.memory.step import WholeStep

    shards = sum(inner(tensor).nbytes for tensor in step_tensors(WholeStep.of(step)))
    return {
        "method": "predict",
        "device": "cuda",
        "device_memory": free_memory(ranks.device).bytes + shards,
        "context": 0,  # it has been taken already
        "margin": MARGIN if ranks.device.type == "cuda" else MARGIN_ON_CPU,
    }


class FoundMaximum(NamedTuple):
    """The largest batch size of a run that fits into memory."""

    size: int
    """Samples over all ranks."""
    answer: Answer
    """The answer for the share of one rank."""


def with_found_maximum(
    policy: BatchSizePolicy,
    spec: DataSpec,
    max_duration: TimeLike,
    find: Callable[..., Answer],
    *,
    ranks: Ranks,
    measures: Callable[[frozenset[str]], bool],
    collate_fn: Collate | None = None,
) -> tuple[BatchSizePolicy, FoundMaximum]:
    """Return the policy with the largest size that ranks can run in one pass each, and that size.

    On one rank, measuring the noise cuts such a pass into halves, which have to fit, too.

    Args:
        policy: the policy; its maximum is unknown.
        spec: the data.
        max_duration: the length of the run.
        find: `find_fitting` without the loader and the wanted size.
        ranks: the processes of the run.
        measures: returns whether gradients are kept apart if the policy reads these signals.
        collate_fn: makes a batch of samples.

    Raises:
        TrainingError: the data are an iterable.
        FitError: not even one sample fits.
    """
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
    """Return the most samples of one batch on a rank, as far as known."""
    if plan is not None and plan.stages:
        return max(-(-stage.size // loader.world_size) for stage in plan.stages)
    bounds = loader.prepared.decided_between
    if bounds is not None:
        return -(-bounds[1] // loader.world_size)
    return max(1, (loader.horizon.dataset_num_samples or 2**20) // loader.world_size)


def keeps_gradients_apart(reads: frozenset[str], callbacks: Iterable[type]) -> bool:
    """Return whether measuring needs memory for one more gradient.

    Args:
        reads: the signals that the batch size policy reads.
        callbacks: the types of the callbacks.
    """
    return NOISE in reads or any(
        issubclass(one, Callback) and one.on_noise is not Callback.on_noise for one in callbacks
    )
