"""A dataloader, a schedules container and a trainer for torchtitan, by its own configurations.

One step of stretto is one `train_step`; its micro-batches are the accumulation steps of torchtitan,
which divides by the target tokens of all ranks, so nothing is weighed here. A rank without samples
gets targets of -100. The position is the same text on every rank, so a run resumes with another
data-parallel degree. Sizes that follow measurements, and pipeline parallelism, are refused.

Tested with torchtitan 0.3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.trainer import Trainer

from stretto.batching import PolicyLike, RuleLike
from stretto.data import Step, StepLoader
from stretto.integrations.shared import BY_SIZE, refuse
from stretto.optim import Hyperparameters
from stretto.planning import Plan, plan
from stretto.timing import Horizon, TimeLike

__all__ = ["StrettoDataLoader", "StrettoSchedules", "StrettoTrainer"]
IGNORED = -100


class StrettoDataLoader(BaseDataLoader):
    """Yields the micro-batches of the step that was drawn last, with at most `local_batch_size`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What the run is."""

        make_data: Callable[[Any, int], Any]
        """Returns the data from `(tokenizer, seq_len)`: samples are `({"input": ids}, labels)`."""
        batch_size: PolicyLike
        """Samples of one step over all ranks."""
        max_duration: TimeLike
        """How long the run is."""
        seed: int = 0
        even: bool = False
        """Refuse sizes that do not give every rank only full micro-batches, as CUDA graphs need.
        The last samples of an epoch, too few for a batch, are then dropped."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self.loader = StepLoader(
            config.make_data(tokenizer, seq_len),
            config.batch_size,
            max_duration=config.max_duration,
            micro_batch_size=local_batch_size,
            seed=config.seed,
            last_batch="drop" if config.even else None,
            rank=dp_rank,
            world_size=dp_world_size,
        )
        refuse(
            (
                bool(self.loader.reads),
                f"follow {', '.join(sorted(self.loader.reads))} in torchtitan",
                "its trainer does not give what a step has measured",
                "use sizes that are planned",
            )
        )
        self.plan: Plan = plan(
            self.loader.horizon,
            self.loader.policy,
            world_size=dp_world_size,
            micro_batch_size=local_batch_size,
            even=config.even,
        )
        self.step: Step | None = None

    def draw(self) -> Step | None:
        """Return the next step; None after the last."""
        self.step = next(self.loader, None)
        return self.step

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Yield the micro-batches of each step that `draw` returns."""
        while self.step is not None:
            for micro in self.step:
                inputs, labels = micro.batch
                yield inputs, labels if micro.weight else torch.full_like(labels, IGNORED)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as text, the same on every rank."""
        return {"stretto": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position; torchtitan passes nothing if it has no checkpoint."""
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["stretto"]))


class StrettoSchedules(LRSchedulersContainer):
    """Sets hyper-parameters for the time and size of each step; `step` changes nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """Schedules by hyper-parameter, and how learning rates follow the batch size."""

        schedules: Mapping[str, Any] | None = None
        rule: RuleLike | None = None

        def build(self, *, optimizers: Any, training_steps: int) -> StrettoSchedules:
            """Return the container."""
            del training_steps
            return StrettoSchedules(self, optimizers)

    def __init__(self, config: Config, optimizers: Any) -> None:
        self._config = config
        self.schedulers: list[Any] = []
        self.optimizers = list(optimizers)
        self._all: list[Hyperparameters] = []

    def bind(self, horizon: Horizon) -> None:
        """Bind the schedules to the run."""
        schedules, rule = self._config.schedules or {}, self._config.rule
        self._all = [Hyperparameters(one, schedules, horizon, rule=rule) for one in self.optimizers]

    def apply(self, step: Step) -> None:
        """Set the values of a step."""
        for one in self._all:
            one.apply(step.timestamp, step.batch_size)

    def get_metrics(self) -> dict[str, float]:
        """Return the present values for the log."""
        several = len(self._all) > 1
        return {
            f"{name}/{number}" if several else name: value
            for number, one in enumerate(self._all)
            for name, value in one.values().items()
        }

    def step(self) -> None:
        """Do nothing: `apply` has set the values."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the values follow from the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


class StrettoTrainer(Trainer):
    """The trainer of torchtitan, on the steps of a `StrettoDataLoader`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Its `dataloader` and `lr_scheduler` are those of this module."""

    def __init__(self, config: Config) -> None:
        training = config.training
        refuse(
            (
                training.global_batch_size > 0,
                f"use training.global_batch_size={training.global_batch_size}",
                BY_SIZE,
                "leave it out; StrettoDataLoader.Config(batch_size=...) has it",
            ),
            (
                config.parallelism.pipeline_parallel_degree > 1,
                "train with pipeline parallelism",
                "its schedule has a fixed number of micro-batches",
                "use pipeline_parallel_degree=1",
            ),
        )
        super().__init__(config)
        if (count := self.dataloader.plan.num_batches) is not None:
            self.config.training.steps = count  # it saves and logs after the last one
        self.lr_schedulers.bind(self.dataloader.loader.horizon)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Train on the next step."""
        data = self.dataloader
        step = data.draw()
        if step is None:
            raise DataloaderExhaustedError
        self.gradient_accumulation_steps = len(step)
        self.lr_schedulers.apply(step)
        super().train_step(data_iterator)
        data.loader.finish(step)

    def should_continue_training(self) -> bool:
        """Return whether the run has more steps."""
        loader = self.dataloader.loader
        return not loader.horizon.is_done(loader.timer.timestamp)
