"""A run file to the training step whose memory is asked about."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from stretto.config.building.data import make_spec
from stretto.config.building.parts import (
    make_loading,
    make_loss,
    make_model,
    make_optimizer,
    make_step,
)
from stretto.config.building.times_and_sizes import build_run
from stretto.config.building.training import check_complete, seed_everything, with_some_maximum
from stretto.config.run import RunConfig
from stretto.config.values.targets import import_target
from stretto.data import DataSpec, StepLoader
from stretto.errors import ConfigError, StrettoError
from stretto.memory.examples import example_batches, resizable
from stretto.runtime import SupervisedStep, TrainStep
from stretto.training.criterion import as_loss
from stretto.training.stepping.measuring import keeps_gradients_apart

MICRO_BATCHES = 2
"""Of a step with several, the second is the one that needs the most: the gradients are there."""


class Finding(NamedTuple):
    """What a search for a batch size needs to know of a run."""

    step: TrainStep
    accumulation: int
    measures_noise: bool
    batch: Any
    """A few samples, padded to the longest of them, or a function that makes other sizes."""
    num_samples: int | None
    """Samples in the data set; None where that is not known."""


def build_finding(config: RunConfig, *, on_meta: bool = False) -> Finding:
    """Return the training step of the run that a file describes, and an example of a batch.

    Args:
        config: the run file.
        on_meta: whether the model is built without memory, so that it may be larger than this
            machine; else it is built and moved to where it trains.

    Raises:
        ConfigError: something in it cannot be built; the message says where it stands.
        StrettoError: the run cannot be as described.
    """
    check_complete(config)
    seed_everything(config.seed)
    spec = make_spec(config)
    batch = _examples(config, spec)
    device = torch.device("meta") if on_meta else _device(config)
    with device if on_meta else contextlib.nullcontext():
        model = make_model(config)
    model.to(device)
    reduction = config.stepping.loss_reduction
    step = make_step(config, model) or SupervisedStep(
        model,
        make_optimizer(config, model),
        as_loss(make_loss(config, model), reduction),
        precision=config.precision,
        clip_norm=config.clip_norm,
        loss_reduction=reduction,
        compile=config.compile and not on_meta,
    )
    noise = _measures_noise(config, spec)
    return Finding(step, MICRO_BATCHES, noise, batch, spec.known_num_samples)


def _measures_noise(config: RunConfig, spec: DataSpec) -> bool:
    """Whether steps keep gradients apart, for batch sizes or callbacks that follow their noise."""
    reads: frozenset[str] = frozenset()
    # What cannot be planned for the data here can where it trains, or is refused there.
    with contextlib.suppress(StrettoError):
        run = with_some_maximum(build_run(config, spec))
        reads = run.policy.bind(run.horizon).reads
    callbacks = []
    for section in config.callbacks:
        # What cannot be imported here can where it trains, or is refused there.
        with contextlib.suppress(ConfigError):
            callbacks.append(import_target(section.target))
    kinds = [one for one in callbacks if isinstance(one, type)]
    return keeps_gradients_apart(reads, kinds)


def _examples(config: RunConfig, spec: DataSpec) -> Any:
    if spec.is_map_style:
        collate = make_loading(config).collate_fn
        loader = StepLoader(spec, 1, max_duration="1ba", collate_fn=collate, rank=0, world_size=1)
        return example_batches(loader)
    for batch in spec.data:
        return resizable(spec, batch)
    raise ConfigError.cannot(
        "find a batch size",
        why="the data have no batch to look at",
        instead="write data that yield at least one",
        where=config.source.where(("data",)),
    )


def _device(config: RunConfig) -> torch.device:
    name = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError.cannot(
            f"use the device {name!r}",
            why=str(error).splitlines()[0].lower().rstrip("."),
            instead="write one that this machine has, or ask with --device-memory",
            where=config.source.where(("device",)),
        ) from None
    return device
