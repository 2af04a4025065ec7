"""Finds the largest micro-batch that fits into memory, before the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from stretto.batching import BatchSizePolicy, with_maximum
from stretto.batching.metrics import NOISE
from stretto.data import DataSpec, StepLoader
from stretto.data.spec import Collate
from stretto.errors import TrainingError
from stretto.planning import Plan
from stretto.runtime import TrainStep
from stretto.runtime.ranks import Ranks
from stretto.runtime.sharded import check_shapes, is_fully_sharded
from stretto.settings import Loading
from stretto.timing import TimeLike
from stretto.training.callback import Callback

if TYPE_CHECKING:
    from stretto.memory import Answer

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
    Transforms of callbacks do not run.

    Args:
        step: the step; its model is on its device.
        loader: the data.
        ranks: the processes of the run.
        most: the largest size that is needed.
        accumulates: whether a step may have several micro-batches.
        measures_noise: whether the gradient of each micro-batch is kept apart.

    Raises:
        TrainingError: the data are an iterable, or the model is sharded over ranks.
        FitError: not even one sample fits.
    """
    from stretto.memory import find_batch_size  # imported only if needed
    from stretto.memory.examples import example_batches
    from stretto.memory.limits import free_memory

    check_shapes(step.model, "find a micro-batch size for")
    if not loader.spec.is_map_style or is_fully_sharded(step.model):
        raise TrainingError.cannot(
            "find a micro-batch size that fits",
            why="the model is sharded over ranks, and a rank out of memory would block the others"
            if loader.spec.is_map_style
            else "the data are an iterable, so no sample can be read before the run",
            instead="write a number, such as what 'stretto find-batch-size --gpu' answers",
        )
    margin = None
    if ranks.world_size > 1:  # DDP copies the gradients
        copies = sum(p.nbytes for p in step.model.parameters() if p.requires_grad)
        percent = 40 if ranks.device.type == "cpu" else 3
        margin = copies + free_memory(ranks.device).bytes * percent // 100
    transforms, step.transforms = step.transforms, ()
    try:
        return find_batch_size(
            step,
            example_batches(loader),
            accumulation=2 if accumulates else 1,
            measures_noise=measures_noise,
            maximum=most,
            margin=margin,
            ranks=ranks,
        )
    finally:
        step.transforms = transforms


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
        loading=Loading(last_batch="keep", collate_fn=collate_fn),
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
