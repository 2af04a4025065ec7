"""`FollowPlan` and `follow`: a plan in Megatron-Bridge, Megatron-LM and loops on Megatron Core.

The plan decides the batch size, the learning rate and the weight decay of each step. In
Megatron-Bridge, pass a callback:

```python
pretrain(config, forward_step, callbacks=[FollowPlan(plan)])
```

Elsewhere, call `follow` when the scheduler is made and the checkpoint is loaded.

Tested with Megatron Core 0.19.2 and Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias, final

from megatron.core import num_microbatches_calculator as calculators
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from stretto.batching import from_megatron
from stretto.errors import TrainingError
from stretto.integrations.planned import PlannedSteps, setting
from stretto.integrations.shared import refuse
from stretto.planning import Plan
from stretto.timing.grammar import checked_whole

__all__ = ["FollowPlan", "follow", "from_megatron"]

Setting: TypeAlias = Callable[[str], Any]
"""Returns a setting of Megatron by its name; None: it is not known."""
_RAMPS = ("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed")
_OWN_SIZES = (*_RAMPS, "phase_transition_iterations", "hybrid_context_parallel", "perform_rl_step")
"""Settings with which Megatron decides batch sizes, or counts samples by `global_batch_size`."""


@final
class PlanCalculator(calculators.NumMicroBatchesCalculator):
    """Megatron's number of micro-batches at a position, read from a plan."""

    def __init__(self, steps: PlannedSteps, scheduler: Any) -> None:
        super().__init__()
        self.micro_batch_size = steps.micro_batch_size
        self._steps, self._scheduler = steps, scheduler

    def update(self, consumed_samples: int, *_: Any, **__: Any) -> None:
        """Set the micro-batches, learning rates and weight decays of the step at a position.

        Raises:
            TrainingError: no step of the plan begins there.
        """
        steps, plan = self._steps, self._steps.plan
        # A tensor would be shared with the scheduler, which adds to its count in place.
        consumed_samples = _position(consumed_samples)
        step = plan.batch_at_sample(consumed_samples)
        if step > steps.num_batches or plan.sample_at_batch(step) != consumed_samples:
            what, why = f"go on at sample {consumed_samples:,}", "no step of the plan begins there"
            refuse((True, what, why, "use the plan of the saved run"))
        # At the end of the run, Megatron asks once more.
        self.num_micro_batches = steps.num_micro_batches(min(step, steps.num_batches - 1))
        size = self.num_micro_batches * steps.unit
        self.current_global_batch_size = self.current_running_global_batch_size = size
        # Megatron does not step its scheduler after a skipped update.
        self._scheduler.num_steps = consumed_samples
        self._scheduler.step(0)


def follow(
    plan: Plan,
    scheduler: Any,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_size: int,
    *,
    settings: tuple[Any, ...] = (),
) -> None:
    """Make Megatron's calculator of micro-batches and a scheduler follow a plan.

    Args:
        plan: the plan of the whole run.
        scheduler: Megatron's `OptimizerParamScheduler`.
        consumed_samples: the position of the run: 0, or that of the checkpoint.
        micro_batch_size: as Megatron has it.
        data_parallel_size: as Megatron has it.
        settings: objects with settings of Megatron, which must agree with the plan, such as the
            configuration of the model. Those of Megatron-LM, which are global, are known.

    Raises:
        TrainingError: the plan does not go together with the position or Megatron's settings.
        BatchSizeError: a number of samples or ranks is not a whole one.
    """
    steps = PlannedSteps(plan, micro_batch_size, data_parallel_size)
    what, why = f"drive a {type(scheduler).__name__}", "it is no OptimizerParamScheduler"
    refuse((not isinstance(scheduler, OptimizerParamScheduler), what, why, "pass Megatron's"))
    consumed_samples = _position(consumed_samples)
    _check_calculator(steps)
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    every = (*settings, arguments)
    known = [SimpleNamespace(**one) if isinstance(one, dict) else one for one in every]

    def of(name: str) -> Any:
        found = (getattr(one, name, None) for one in known)
        return next((one for one in found if one is not None), None)

    step = plan.batch_at_sample(consumed_samples)
    _check_settings(steps, step, of)
    _check_pipeline(steps, step, of)
    steps.drive(scheduler, plan.batch_at_sample)
    calculator = PlanCalculator(steps, scheduler)
    calculator.update(consumed_samples)
    calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR = calculator


@final
class FollowPlan:
    """A callback of Megatron-Bridge: the training follows a plan.

    Args:
        plan: the plan of the whole run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._follows = plan, False

    def on_data_init_start(self, context: Any) -> None:
        """Follow the plan from the position of the checkpoint on.

        Raises:
            TrainingError: the plan does not go together with the position or the configuration.
        """
        config, state = context.state.cfg, context.state.train_state
        place = (state.consumed_train_samples, config.train.micro_batch_size)
        model = (config.model, getattr(config.model, "transformer", None))
        all_of = (config.train, config.dataset, *model, config.scheduler, state)
        follow(self._plan, context.scheduler, *place, config.data_parallel_size, settings=all_of)
        self._follows = True

    def on_train_start(self, _context: Any) -> None:
        """Refuse to train if the event before has not come.

        Raises:
            TrainingError: the plan is not followed.
        """
        why = "this Megatron-Bridge has no event 'on_data_init_start'"
        refuse((not self._follows, "follow the plan", why, "install megatron-bridge>=0.6.2"))


def _position(consumed_samples: object) -> int:
    what, instead = f"use consumed_samples={consumed_samples!r}", "pass a number of samples"
    return checked_whole(consumed_samples, TrainingError, what, instead, least=0)


def _check_calculator(steps: PlannedSteps) -> None:
    """Refuse a calculator of Megatron's that ramps, or that has other micro-batches or ranks."""
    if parallel_state.model_parallel_is_initialized():
        ranks = parallel_state.get_data_parallel_world_size()
        what, why = f"share batches of {steps.unit}", f"Megatron has {ranks} data-parallel ranks"
        is_other = ranks * steps.micro_batch_size != steps.unit
        refuse((is_other, what, why, f"pass data_parallel_size={ranks}"))
    present = calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if present is not None and not isinstance(present, PlanCalculator):
        unit = present.get_current_running_global_batch_size() // present.get()
        kind = calculators.ConstantNumMicroBatchesCalculator
        found = (type(present), present.micro_batch_size, unit)
        why = f"it has micro-batches of {present.micro_batch_size}, {unit} on all ranks, or a ramp"
        ranks = unit // present.micro_batch_size
        instead = f"pass micro_batch_size={present.micro_batch_size} and data_parallel_size={ranks}"
        instead += ", and write no ramp in Megatron"
        is_other = found != (kind, steps.micro_batch_size, steps.unit)
        refuse((is_other, f"replace {type(present).__name__}", why, instead))


def _check_settings(steps: PlannedSteps, step: int, of: Setting) -> None:
    """Refuse settings of Megatron that say something else than the plan."""
    plan, count = steps.plan, steps.num_batches
    total, each = plan.num_samples or 0, plan.horizon.tokens_per_sample or of("seq_length")
    counts = {"train_iters": count, "max_steps": count, "seq_length": each}
    why = "Megatron divides it by one batch size"
    instead = f"leave it out, and {setting('train_iters', count)}"
    refuse((of("train_samples"), f"use train_samples={of('train_samples')}", why, instead))
    for name, value in {**dict.fromkeys(_OWN_SIZES), **counts}.items():
        why = "the plan decides the batch sizes" if value is None else f"the plan has {value}"
        instead = "leave it out" if value is None else setting(name, value)
        is_wrong = of(name) not in (None, False, value)
        refuse((is_wrong, f"use {name}={of(name)}", why, instead))
    size, at = of("global_batch_size"), of("iteration") if of("step") is None else of("step")
    is_short = size is not None and count * size < total
    place, saved = f"at its sample, the plan has {step}", "use the plan of the saved run"
    more = setting("global_batch_size", steps.mean_size)
    if of("train_iters"):
        steps.check_growth(step)
    draws, other = "it draws batches of one size", "write 'single' or 'cyclic'"
    refuse(
        (at not in (None, step), f"go on at iteration {at}", place, saved),
        (is_short, f"prepare {count} x {size} samples of data", f"the plan reads {total:,}", more),
        (of("dataloader_type") == "batch", "use dataloader_type='batch'", draws, other),
    )


def _check_pipeline(steps: PlannedSteps, step: int, of: Setting) -> None:
    """Refuse steps that a pipeline of Megatron cannot run."""
    sizes = dict.fromkeys(steps.sizes_from(step))
    stages, virtual = of("pipeline_model_parallel_size"), of("virtual_pipeline_model_parallel_size")
    if parallel_state.model_parallel_is_initialized():
        stages = stages or parallel_state.get_pipeline_model_parallel_world_size()
        virtual = virtual or parallel_state.get_virtual_pipeline_model_parallel_world_size()
    graphs = f"{of('cuda_graph_impl')} {of('cuda_graph_scope')}"
    is_one = "full_iteration" in graphs
    is_one |= "transformer_engine" in graphs and (stages or 1) > 1
    what, why = "capture CUDA graphs of a whole step", "the plan has several batch sizes"
    refuse((is_one and len(sizes) > 1, what, why, "write cuda_graph_impl='none'"))
    if virtual is None:
        return
    group = of("microbatch_group_size_per_vp_stage") or stages or 1
    for size in sizes:
        passes = size // steps.unit
        # megatron/core/pipeline_parallel/schedules.py of 0.19.2
        is_wrong = passes < group or 0 < passes % group < (stages or group)
        what, why = f"interleave {passes} micro-batches", f"their groups are of {group}"
        refuse((is_wrong, what, why, f"write multiples of {group * steps.unit} samples"))
