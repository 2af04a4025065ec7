"""`follow`: a plan in a recipe of NeMo Automodel.

```python
recipe.setup()
follow(plan, recipe)
recipe.run_train_validation_loop()
```

Recipes divide the loss by what the whole step has, so micro-batches need no weights. A sample is a
row of the recipe's dataloader: with packed sequences, a pack.

Tested with NeMo Automodel 0.7.
"""

from __future__ import annotations

import math
from typing import Any

from nemo_automodel.components.training.step_scheduler import StepScheduler
from torch.utils.data import IterableDataset

from stretto.integrations.planned import PlannedSteps
from stretto.integrations.shared import refuse
from stretto.planning import Plan

__all__ = ["follow"]

_WHAT = "follow the plan in this recipe"


def follow(plan: Plan, recipe: Any) -> None:
    """Make a recipe follow a plan: its batch sizes, learning rates and weight decays.

    Call it once, between `recipe.setup()`, which also loads a checkpoint, and the loop.

    Args:
        plan: the plan of the whole run, also if it resumes.
        recipe: a recipe with a `StepScheduler`. Its `lr_scheduler` sets what the plan schedules;
            parameter groups keep their multipliers.

    Raises:
        TrainingError: the recipe cannot follow the plan; the message says what to write instead.
    """
    steps: Any = getattr(recipe, "step_scheduler", None)
    why = f"its step_scheduler is a {type(steps).__name__}, not the StepScheduler of Automodel"
    once = "call follow() once, after recipe.setup(), on the ranks that train"
    refuse((type(steps) is not StepScheduler, _WHAT, why, once))
    micro = recipe.cfg.get("step_scheduler.local_batch_size", 1)
    planned = PlannedSteps(plan, micro, recipe._get_dp_group_size())
    most, length = max(planned.sizes_from(0)) // planned.unit, _epoch_length(planned, steps, micro)
    schedulers = [] if recipe.lr_scheduler is None else recipe.lr_scheduler
    section, whole = "write lr_scheduler: {min_lr: 0.0}", "load all of the checkpoint"
    refuse((plan.scheduled and not schedulers, _WHAT, "it has no lr_scheduler", section))
    for scheduler in schedulers:
        why = f"its lr_scheduler is at step {scheduler.num_steps}, not {steps.step}"
        refuse((scheduler.num_steps != steps.step, _WHAT, why, whole))
        planned.drive(scheduler, int)
    steps.__class__ = _PlannedScheduler  # a recipe refuses another step_scheduler
    # The recipe of diffusion language models numbers its samples by grad_acc_steps: the most.
    vars(steps).update(planned=planned, length=length, waiting=[], grad_acc_steps=most)
    steps.num_epochs = 2**62  # the plan ends the run


class _PlannedScheduler(StepScheduler):
    """Yields as many micro-batches for a step as the plan says, also over the end of an epoch."""

    waiting: list[Any]

    def __iter__(self: Any) -> Any:
        for micro_batch in self.dataloader if self.step < self.max_steps else ():
            self.waiting.append(micro_batch)
            if len(self.waiting) == self.planned.num_micro_batches(self.step):
                yield self.waiting
                self.step, self.waiting = self.step + 1, []
                if self.step >= self.max_steps or self.sigterm_flag:
                    return
        why, instead = "its data have ended", "give it endless data, or data with a length"
        refuse((self.length == math.inf, f"train step {self.step}", why, instead))
        self.epoch += 1

    @property
    def is_last_batch(self) -> bool:
        """Whether an epoch ends in this step."""
        at, samples = self.planned.plan.sample_at_batch, self.length * self.planned.unit
        return bool(at(self.step) // samples < at(self.step + 1) // samples)


def _epoch_length(planned: PlannedSteps, steps: Any, micro: int) -> float:
    """Return the micro-batches of a rank in an epoch; refuse data that do not fit the plan."""
    plan, unit, count, loader = planned.plan, planned.unit, planned.num_batches, steps.dataloader
    # Only samplers of Megatron's data sets have it. Their len() is of whole batches, and the data
    # sets are made for one epoch: the whole run.
    total: Any = getattr(loader.batch_sampler, "total_samples", None)
    is_stream, is_plain = isinstance(loader.dataset, IterableDataset), total is None
    rows = 0 if is_stream else len(loader.sampler) if is_plain else total * micro // unit
    length, run = math.inf if is_stream else rows // micro, plan.num_samples or 0
    samples, given, size = length * unit, steps.max_steps, loader.batch_size
    most = samples * (steps.num_epochs if is_plain else 1)
    is_cut = is_plain and not loader.drop_last and rows % micro and run > samples
    is_other = not is_stream and plan.horizon.dataset_num_samples not in (None, samples)
    more = "write a larger num_epochs, or global_batch_size for a Megatron data set"
    refuse(
        (given != count, _WHAT, f"its max_steps is {given}", f"write max_steps: {count}"),
        (is_plain and size != micro, _WHAT, f"it loads {size} samples at once", f"load {micro}"),
        (is_cut, _WHAT, "the last micro-batch of an epoch is cut", "write drop_last: true"),
        (is_other, _WHAT, f"an epoch has {samples} rows", f"write dataset_num_samples={samples}"),
        (run > most, f"train on {run} samples", f"the recipe has {most}", more),
    )
    state, at = getattr(loader, "next_iter_state", None) or {}, plan.sample_at_batch(steps.step)
    # With workers, torchdata keeps the position in a snapshot, which is of each micro-batch here.
    found = state.get("_snapshot", {}).get("_snapshot_step", state.get("_num_yielded", 0))
    why = f"the dataloader is at micro-batch {found} of {unit} samples, and the plan at sample {at}"
    same = "resume with the plan, ranks and local_batch_size of the checkpoint"
    refuse(((at // unit - found) % length, f"resume at step {steps.step}", why, same))
    return length
