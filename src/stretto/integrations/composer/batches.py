"""The train dataloader of steps, and what Composer cannot train on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from stretto.data.containers import opened
from stretto.errors import DataError, TrainingError
from stretto.integrations.counts import end_of
from stretto.integrations.run import ExternalRun

UNKNOWN = 2**40
"""Stands for a number of steps that is not known; more than any epoch has."""


@final
class Steps:
    """The train dataloader: one pass over it is one epoch of steps of this rank."""

    batch_size = None
    """Composer reads it for its logs."""

    def __init__(self, run: ExternalRun) -> None:
        self._run = run
        self.length = UNKNOWN
        """Steps of the present epoch, or a number above it."""
        self.read_length()

    def read_length(self) -> None:
        """Set the length to that of the epoch in which the run is."""
        run, epoch = self._run, self._run.timer.epoch
        end, num_samples = end_of(run.prepared), run.horizon.dataset_num_samples
        exact = run.steps_in_epoch(epoch).exact
        if exact is None or num_samples is None:
            self.length = UNKNOWN
            return
        # Composer ends an epoch when it has seen as many; it does not if the run ends inside it.
        is_cut = end is not None and epoch * num_samples < end < (epoch + 1) * num_samples
        self.length = exact + int(is_cut)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for step in self._run.steps():
            check_size(step.size, self._run.loader.world_size)
            yield joined([micro.batch for micro in step if micro.num_samples])


def joined(batches: Sequence[Any]) -> Any:
    """Return the micro-batches of a step as one batch; those of an iterable are cut already.

    Raises:
        DataError: their tensors have different shapes.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        shapes = {tuple(one.shape[1:]) for one in batches}
        if len(shapes) > 1:
            raise DataError.cannot(
                "join the batches of an iterable to one step",
                why=f"the samples have different shapes, such as {sorted(shapes)}",
                instead="pad all to one length, or pass a DataLoader over a map-style data set",
            )
        return torch.cat(list(batches))
    containers = [opened(one) for one in batches]
    if None in containers:
        return first
    items = [container.items for container in containers if container is not None]
    if isinstance(first, list) and not any(isinstance(one, Tensor) for one in first):
        return [one for each in items for one in each]
    assert containers[0] is not None, "checked"
    return containers[0].rebuilt([joined(each) for each in zip(*items, strict=True)])


def plain(dataloader: Any) -> Any:
    """Return a dataloader with the order of a single process if each rank has its own samples."""
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(dataloader, DataLoader) or not isinstance(sampler, DistributedSampler):
        return dataloader
    return DataLoader(
        dataloader.dataset,
        dataloader.batch_size,
        shuffle=sampler.shuffle,
        num_workers=dataloader.num_workers,
        collate_fn=dataloader.collate_fn,
        pin_memory=dataloader.pin_memory,
        drop_last=dataloader.drop_last,
        prefetch_factor=dataloader.prefetch_factor,
        worker_init_fn=dataloader.worker_init_fn,
        multiprocessing_context=dataloader.multiprocessing_context,
    )


def check_size(size: int | None, world_size: int) -> None:
    """Refuse a step in which a rank has no sample.

    Raises:
        TrainingError: it has fewer samples than ranks.
    """
    if size is not None and size < world_size:
        raise TrainingError.cannot(
            f"share a batch of {size} among {world_size} ranks",
            why="Composer trains on at least one sample of each rank",
            instead="choose larger batches, or Loading(last_batch='drop')"
            " if an epoch ends with a smaller one",
        )
