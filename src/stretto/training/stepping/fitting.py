"""Finds the largest micro-batch that fits into memory, before the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import nn

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

    The longest of a few samples from the whole data set stands for all of them, padded or packed.
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

    _check(loader)
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
            return find("auto")  # probes the model if fake tensors cannot follow it
        is_sure = answer.certainty in ("exact", "upper bound")
        # The first real step verifies it. If memory limits the size, probe it now.
        return answer if is_sure and answer.size == most else find("auto")

    if is_fully_sharded(step.model):
        # Ranks communicate inside a forward pass, so only a prediction cannot make one wait. It is
        # for all transforms at once: no other answer could be compared with it.
        return _predict_sharded(
            step,
            examples,
            accumulation=2 if accumulates else 1,
            measures_noise=measures_noise,
            maximum=most,
            ranks=ranks,
        )
    transforms, step.transforms = step.transforms, ()
    try:
        answer = found()
    finally:
        step.transforms = transforms
    if transforms:
        # A transform that enlarges batches counts; one that shrinks them may not do so later.
        # Only on fake tensors: a real step would change the state of callbacks.
        with contextlib.suppress(FitError):
            answer = min(answer, find("predict"), key=lambda one: one.size)
    return answer


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


def _check(loader: StepLoader) -> None:
    if not loader.spec.is_map_style:
        raise TrainingError.cannot(
            "find a batch size that fits",
            why="the data are an iterable, so no sample can be read before the run",
            instead="write a number, such as what 'stretto find-batch-size' answers",
        )


def _predict_sharded(
    step: TrainStep, examples: Any, *, maximum: int, ranks: Ranks, **wishes: Any
) -> Answer:
    """Return the prediction for a sharded model; the least of all ranks."""
    from stretto.memory import find_batch_size
    from stretto.memory.measuring.limits import free_memory
    from stretto.memory.prediction.tensors import inner, step_tensors
    from stretto.memory.step import WholeStep

    is_cuda = ranks.device.type == "cuda"
    shards = sum(inner(tensor).nbytes for tensor in step_tensors(WholeStep.of(step)))
    return find_batch_size(
        step,
        examples,
        method="predict",
        device="cuda",
        device_memory=free_memory(ranks.device).bytes + shards,
        context=0,  # it has been taken already
        margin=MARGIN if is_cuda else MARGIN_ON_CPU,
        maximum=maximum,
        agree_minimum=ranks.least if ranks.world_size > 1 else None,
        **wishes,
    )


def _margin(model: nn.Module, ranks: Ranks) -> str | int:
    """Return the memory that stays free: a few percent, and a copy of the gradients for DDP."""
    from stretto.memory.measuring.limits import free_memory

    if ranks.world_size == 1:
        return MARGIN
    copies = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return copies + free_memory(ranks.device).bytes * 3 // 100
