"""`StepDataLoader`, `Schedules` and `RunTrainer`: a run in the `Trainer` of torchtitan.

They are parts of a configuration of torchtitan, and its own training script runs them:

```python
RunTrainer.Config(
    dataloader=StepDataLoader.Config(make_data=..., batch_size="0sp:256 20%:1024"),
    lr_scheduler=Schedules.Config(schedules={"lr": Cosine(end=0.1)}),
    ...,
)
```

torchtitan divides the loss by the valid tokens of all ranks, so micro-batches need no weights. The
position in the data is the same text on every rank, so a run may resume with another data-parallel
degree.

Tested with torchtitan 0.3 on torch 2.14. torchtitan calls `torch.distributed.set_timeout`, which
torch 2.13 does not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.trainer import Trainer
from tyro.conf import Suppress

from stretto.data import DataSpec, Step
from stretto.distributed.mesh import Mesh
from stretto.integrations.counts import steps_left
from stretto.integrations.shared import BY_SIZE, ClockScheduler, refuse
from stretto.run import Run, prepare

__all__ = ["RunTrainer", "Schedules", "StepDataLoader"]

BATCH = "batch"
"""The dimension of torchtitan's mesh over which samples are shared."""


def _as_text(config: Any) -> dict[str, str]:
    """Return the fields of a configuration for the log: schedules and functions are no JSON."""
    return {field.name: repr(getattr(config, field.name)) for field in fields(config)}


class StepDataLoader(BaseDataLoader):
    """The micro-batches of a run; its `Config` says what the run is."""

    run: Run
    """The run, from when the trainer is made: its clock is `run.timer`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The run. `training.local_batch_size` is the most samples of a micro-batch."""

        make_data: Annotated[Callable[[Any, int], Any] | None, Suppress] = None
        """Returns the data for a tokenizer and `seq_len`: what `StepLoader` takes. A sample is
        `({"input": tokens}, labels)`."""
        batch_size: Annotated[Any, Suppress] = None
        """Samples of one step over all ranks: a number, a text, a policy or a pair."""
        max_duration: Annotated[Any, Suppress] = "1ep"
        """How long the run is, in any unit; `training.steps` follows from it."""
        loading: Annotated[Any, Suppress] = None
        """How data are loaded: a `Loading`, or a mapping of its fields."""
        even: bool = False
        """Whether all ranks run full micro-batches only, as CUDA graphs and pipelines need. Other
        sizes are refused."""

        to_dict = _as_text

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
        self._config, self._micro_batch_size = config, local_batch_size
        self._world_size = dp_world_size
        assert config.make_data is not None, "checked by the trainer"
        spec = DataSpec.of(config.make_data(tokenizer, seq_len))
        counts = (spec.num_tokens, spec.tokens_per_sample, spec.get_num_tokens_in_batch)
        self._length = seq_len if counts == (None, None, None) else None
        """The tokens of each sample; None: the data count them."""
        self._spec = DataSpec.of(spec, tokens_per_sample=self._length)

    def bind(
        self, optimizers: Any, config: Schedules.Config, mesh: DeviceMesh | None, num_passes: int
    ) -> Run:
        """Make the run; it sets the learning rates of these optimizers.

        Args:
            optimizers: those of the trainer.
            config: what is scheduled.
            mesh: all ranks, so that those which share a model agree on the wall clock, too.
            num_passes: the micro-batches that a pipeline takes at once; else 1.
        """
        self._unit = self._world_size * self._micro_batch_size * num_passes
        self.run = run = prepare(
            self._spec,
            self._config.batch_size,
            max_duration=self._config.max_duration,
            schedules=config.schedules,
            rule=config.rule,
            micro_batch_size=self._micro_batch_size,
            loading=self._config.loading,
            mesh=None
            if mesh is None
            else Mesh(mesh, [name for name in mesh.mesh_dim_names or () if name == BATCH]),
        ).bind(list(optimizers))
        what = "follow a batch size that depends on what steps measure"
        instead = "write sizes over time, such as '0sp:256 20%:1024'"
        refuse((run.loader.reads, what, "torchtitan does not measure it", instead))
        for stage in () if run.plan is None else run.plan.stages:
            for size in (stage.size, *stage.cut_sizes):
                self._check(size)
        return run

    def _check(self, size: int) -> None:
        unit = self._unit
        what = f"train on a batch of {size} samples with even=True"
        why = f"it is not a multiple of {unit}, what all ranks run at once"
        instead = f"write multiples of {unit}, and loading=Loading(last_batch='drop')"
        refuse((self._config.even and size % unit, what, why, instead))

    def draw(self) -> Step | None:
        """Begin the next step; None: the run is over."""
        step = self.run.begin()
        if step is not None:
            self._check(step.num_samples)
        return step

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            assert self.run.step is not None, "drawn by the trainer"
            for micro in self.run.step:
                inputs, labels = micro.batch
                length = self._length
                what, why = "count tokens", f"labels have the shape {tuple(labels.shape)}"
                instead = f"return rows of {length} tokens, or DataSpec(data, tokens_per_sample=1)"
                refuse((length and labels.shape[1:].numel() != length, what, why, instead))
                if length:  # as torchtitan's own loader: flex attention and CP ask for them
                    places = torch.arange(length).expand(len(labels), -1)
                    inputs = {"positions": places, **inputs}
                # The samples of a micro-batch of weight 0 are no part of the batch.
                yield inputs, labels if micro.weight else torch.full_like(labels, IGNORE_INDEX)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run as one text, the same on every rank."""
        return {"run": json.dumps(self.run.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was called, with another data-parallel degree too."""
        if state:  # none in a checkpoint that has only the model
            self.run.load_state_dict(json.loads(state["run"]))


class Schedules(LRSchedulersContainer):
    """Reports the learning rates that the run sets; its `Config` says how they change."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """What is scheduled. Leave the other fields, those of torchtitan's schedules, out."""

        schedules: Annotated[Any, Suppress] = None
        """By hyper-parameter, a schedule or several that multiply; None: values stay."""
        rule: Annotated[Any, Suppress] = None
        """How learning rates follow the batch size."""

        to_dict = _as_text

        def build(self, *, optimizers: Any, training_steps: int) -> Schedules:
            """Return an empty container: the run is made after it."""
            return Schedules(self)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.schedulers: list[ClockScheduler] = []

    def follow(self, run: Run) -> None:
        """Report what this run sets."""
        self._run = run
        self.schedulers = [ClockScheduler(optimizer, run.timer) for optimizer in run.optimizers]

    def get_metrics(self) -> dict[str, float]:
        """Return the learning rates as torchtitan names them, and the clock and the batch size."""
        return {**super().get_metrics(), **self._run.log_values()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the state of the run has it."""


class RunTrainer(Trainer):
    """The `Trainer` of torchtitan, for the steps of a run."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """As that of torchtitan."""

    config: Any
    step: int
    dataloader: StepDataLoader
    lr_schedulers: Schedules

    def __init__(self, config: Config) -> None:
        """Make the trainer.

        Raises:
            StrettoError: the configuration does not fit; the message says what to write instead.
        """
        check_titan(config)
        super().__init__(config)
        # The user's configuration keeps its steps.
        self.config = replace(self.config, training=replace(config.training))
        mesh = self.parallel_dims.get_activated_mesh(["pp", BATCH, "cp", "tp"])
        num_passes = self.num_pipeline_parallel_microbatches
        run = self.dataloader.bind(
            self.optimizers, self.lr_schedulers.config, mesh=mesh, num_passes=num_passes
        )
        self.lr_schedulers.follow(run)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Train one step of the run.

        Raises:
            DataloaderExhaustedError: the data have ended where that was not known before.
        """
        run, step = self.dataloader.run, self.dataloader.draw()
        if step is None:
            self.step -= 1
            self.checkpointer.save(self.step, last_step=True)
            raise DataloaderExhaustedError
        why = f"its data are at step {run.timer.batch + 1}"
        instead = "load the whole checkpoint, without exclude_from_loading"
        refuse((self.step != run.timer.batch + 1, f"train step {self.step}", why, instead))
        self.gradient_accumulation_steps = len(step) // self.num_pipeline_parallel_microbatches
        super().train_step(data_iterator)
        run.finish(step=step)
        self._note_end()

    def should_continue_training(self) -> bool:
        """Return whether the run has steps left."""
        self._note_end()
        return self.step < int(self.config.training.steps)

    def _note_end(self) -> None:
        """Set the number of steps as far as it is known: after the last, torchtitan saves."""
        run = self.dataloader.run
        left = 0 if run.is_done else steps_left(run).exact
        self.config.training.steps = 2**62 if left is None else run.timer.batch + left


def check_titan(config: RunTrainer.Config) -> None:
    """Refuse what cannot be followed, before a model is made.

    Raises:
        TrainingError: the configuration does not fit.
    """
    data, schedules = config.dataloader, config.lr_scheduler
    parts = (("dataloader", data, StepDataLoader), ("lr_scheduler", schedules, Schedules))
    for name, part, kind in parts:
        is_other = not isinstance(part, kind.Config)
        what = f"use {name}={type(part).__qualname__}"
        instead = f"write {kind.__name__}.Config(...)"
        refuse((is_other, what, "it does not follow the run", instead))
        base = fields(kind.__mro__[1].Config)
        changed = [field.name for field in base if getattr(part, field.name) != field.default]
        why = f"{kind.__name__} does not read it"
        refuse((changed, f"use {', '.join(changed)} of {name}", why, "leave it out"))
    training, pipelines = config.training, config.parallelism.pipeline_parallel_degree
    size, graphs = training.global_batch_size, not training.disable_cuda_graphs
    shapes = "CUDA graphs need micro-batches of one shape"
    even, equal = "write even=True in StepDataLoader.Config", "they take equal micro-batches"
    is_old, newer = not hasattr(dist, "set_timeout"), "install a torch later than 2.13"
    refuse(
        (is_old, f"train with torch {torch.__version__}", "torchtitan needs a later one", newer),
        (data.make_data is None, "make the data", "make_data is missing", "pass make_data=..."),
        (data.batch_size is None, "make steps", "batch_size is missing", "pass batch_size=..."),
        (size >= 0, f"use global_batch_size={size}", BY_SIZE, "leave it out"),
        (pipelines > 1 and not data.even, "train in pipelines", equal, even),
        (graphs and not data.even, "use CUDA graphs", shapes, f"{even}, or disable_cuda_graphs"),
    )
