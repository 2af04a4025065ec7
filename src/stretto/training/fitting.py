"""Finds the largest micro-batch that fits into memory, before the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from stretto.batching.functions import NO_LIMIT
from stretto.batching.metrics import NOISE
from stretto.batching.policy import in_unit_of
from stretto.data import StepLoader
from stretto.errors import TrainingError
from stretto.planning import Plan
from stretto.run import Run
from stretto.runtime import TrainStep
from stretto.runtime.ranks import Ranks
from stretto.runtime.sharded import check_shapes, is_fully_sharded
from stretto.settings import Loading
from stretto.timing import TimeUnit
from stretto.training.callback import Callback

if TYPE_CHECKING:
    from stretto.memory import Answer


def find_micro_batch(step: TrainStep, run: Run, ranks: Ranks, plan: Plan | None) -> Answer:
    """Find the largest micro-batch of a rank that fits, and set it; the same on all ranks.

    Raises:
        TrainingError: the data are an iterable.
        FitError: not even one sample fits, or the model is sharded in another way than by FSDP2.
    """
    loader = run.loader
    bounds, num_samples = run.prepared.decided_between, run.horizon.dataset_num_samples
    if _finds_budget(run):
        bounds = run.prepared.bound_policy.bounds
        largest = (run.horizon.dataset_num_tokens or NO_LIMIT) if bounds is None else bounds[1]
    elif plan is not None and plan.stages:
        largest = max(stage.whole_sizes[1] for stage in plan.stages)
    else:
        largest = (num_samples or 2**20) if bounds is None else bounds[1]
    most = -(-largest // loader.world_size)
    measures = keeps_gradients_apart(loader.reads, map(type, run.callbacks))
    answer = _largest(step, run, loader, ranks, most, accumulation=2, measures_noise=measures)
    run.set_micro_batch_size(answer.size)
    return answer


class FoundMaximum(NamedTuple):
    """The largest batch size of a run that fits into memory."""

    size: int
    """Samples of one pass on each rank, over all ranks, or `Tokens`."""
    answer: Answer
    """The answer for the share of one rank."""


def find_maximum(step: TrainStep, run: Run, ranks: Ranks) -> FoundMaximum:
    """Return the largest batch that ranks can run in one pass each, at most all samples.

    On one rank, measuring the noise cuts a batch of one pass into halves, which have to fit, too.

    Args:
        step: the step; its model is on its device.
        run: the run, without a limit of its sizes.
        ranks: the processes of the run.

    Raises:
        TrainingError: the data are an iterable.
        FitError: not even one sample fits, or the model is sharded in another way than by FSDP2.
    """
    loading = Loading(collate_fn=run.loading.collate_fn)
    loader = StepLoader(run.spec, run.prepared, loading=loading, rank=0, world_size=1)
    horizon = run.horizon
    there_are = horizon.dataset_num_tokens if _finds_budget(run) else horizon.dataset_num_samples
    answer = _largest(step, run, loader, ranks, max(1, (there_are or 1) // ranks.world_size))
    size, measures = answer.size, keeps_gradients_apart(loader.reads, map(type, run.callbacks))
    if ranks.world_size == 1 and measures:
        half = (size + 1) // 2
        halves = _largest(step, run, loader, ranks, half, accumulation=2, measures_noise=True)
        if 2 * halves.size < size:
            size, answer = 2 * halves.size, halves
    return FoundMaximum(in_unit_of(answer.size, size * ranks.world_size), answer)


def _finds_budget(run: Run) -> bool:
    """Return whether micro-batches are limited by tokens: sizes are, and lengths are known."""
    return run.prepared.bound_policy.unit is TimeUnit.TOKEN and run.spec.lengths is not None


def _largest(
    step: TrainStep,
    run: Run,
    loader: StepLoader,
    ranks: Ranks,
    most: int,
    *,
    accumulation: int = 1,
    measures_noise: bool = False,
) -> Answer:
    """Return the largest micro-batch of a rank, at most `most`; the same on all ranks.

    All samples count as the longest of a few from the whole data set, padded or packed. A budget in
    tokens fits for any samples.
    Transforms of callbacks do not run.
    """
    from stretto.memory import find_batch_size  # imported only if needed
    from stretto.memory.examples import UnequalSamples, example_batches, unequal_samples
    from stretto.memory.limits import free_memory

    check_shapes(step.model, "find a micro-batch size for")
    if not loader.spec.is_map_style:
        raise TrainingError.cannot(
            "find a micro-batch size that fits",
            why="the data are an iterable, so no sample can be read before the run",
            instead="write a number, such as what 'stretto find-batch-size --gpu' answers",
        )
    margin, packed = None, run.loading.packed
    finds = _finds_budget(run)
    batch = unequal_samples(loader, packed=packed) if finds else example_batches(loader)
    if ranks.world_size > 1:  # DDP copies the gradients
        copied = () if is_fully_sharded(step.model) else step.model.parameters()
        copies = sum(p.nbytes for p in copied if p.requires_grad)
        percent = 40 if ranks.device.type == "cpu" else 3
        margin = copies + free_memory(ranks.device).bytes * percent // 100
    transforms, step.transforms = step.transforms, ()
    try:
        return find_batch_size(
            step,
            batch,
            accumulation=accumulation,
            measures_noise=measures_noise,
            maximum=max(most, 2 * batch.longest) if isinstance(batch, UnequalSamples) else most,
            margin=margin,
            ranks=ranks,
        )
    finally:
        step.transforms = transforms


def keeps_gradients_apart(reads: frozenset[str], callbacks: Iterable[type]) -> bool:
    """Return whether measuring needs memory for one more gradient.

    Args:
        reads: the signals that the batch size policy reads.
        callbacks: the types of the callbacks.
    """
    return NOISE in reads or any(
        issubclass(one, Callback) and one.on_noise is not Callback.on_noise for one in callbacks
    )
