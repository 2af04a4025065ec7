"""What loops of your own commonly forget is said once; right loops hear nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

from stretto.data.mistakes import LoopMistakes
from stretto.errors import TrainingError
from stretto.schedules import Constant, Cosine
from stretto.training import Run, prepare

DATA = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))


def loop(
    *,
    weigh: Callable[[Run, Any, Any], float] = lambda run, step, micro: micro.weight,
    updates: int = 1,
    clear: Callable[[Any], None] | None = lambda one: one.zero_grad(),
    clears_first: bool = False,
    before_update: Callable[[nn.Module], object] = lambda model: None,
    scheduler: Callable[[Any], Any] | None = None,
    steps_late: bool = False,
    trains: bool = True,
    after: Callable[[nn.Module], object] = lambda model: None,
    kind: Any = torch.optim.SGD,
    **settings: Any,
) -> list[str]:
    """Train; return the warnings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).train(trains)
    optimizer = kind(model.parameters(), lr=0.01)
    also = None if scheduler is None else scheduler(optimizer)
    given: dict[str, Any] = {"max_duration": "2ep", "micro_batch_size": 2} | settings
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = prepare(DATA, 8, optimizer=optimizer, model=model, **given)
        for step in run:
            if clear is not None and clears_first:
                clear(optimizer)
            for micro in step:
                loss = nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1])
                (loss * weigh(run, step, micro)).backward()
            before_update(model)
            for _ in range(updates):
                optimizer.step()
            if clear is not None and not clears_first:
                clear(optimizer)
            if also is not None and not steps_late:
                also.step()
            after(model)
            run.finish()
            if also is not None and steps_late:
                also.step()
    return [str(one.message) for one in found if issubclass(one.category, UserWarning)]


def in_place(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)


def clip_once() -> Callable[[nn.Module], object]:
    """Clip the first time only, as a threshold does."""
    first = [None]
    return lambda model: clip(model) if first and not first.pop() else None


class Around(torch.optim.Optimizer):
    """Accelerate's is like that: it has none of torch's own attributes."""

    def __init__(self, weights: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(weights, lr=lr)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)


COSINE = {"schedules": {"lr": Cosine()}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"weigh": lambda run, step, micro: 1.0}, "weights of micro-batches"),
        ({"updates": 2}, "more than once"),
        ({"updates": 0}, "was not called"),
        ({"updates": 0, "max_duration": "1ba"}, "was not called in 1 steps"),
        ({"clear": None}, "not cleared"),
        ({"clear": None, "before_update": clip}, "not cleared"),
        ({"clear": None, "kind": torch.optim.AdamW}, "not cleared"),
        ({"clear": None, "micro_batch_size": 8}, "not cleared"),
        ({"scheduler": step_lr, **COSINE}, "something else has set"),
        ({"scheduler": step_lr, "steps_late": True, **COSINE}, "something else has set"),
        ({"clear": None, "before_update": clip_once()}, "not cleared"),
        ({"clear": None, "kind": Around}, "not cleared"),
        ({"updates": 2, "kind": Around}, "more than once"),
        ({"trains": False}, "eval mode"),
        ({"schedules": {"lr": Cosine(3e-4, 3e-5)}}, "at most 0.0003 times"),
        ({"schedules": {"lr": Constant(1e-3)}}, "at most 0.001 times"),
    ],
)
def test_a_mistake_is_said_once(settings: dict[str, Any], says: str) -> None:
    (only,) = loop(**settings)
    assert says in only


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clears_first": True},
        {"clear": in_place},
        {"clear": in_place, "clears_first": True},
        {"clear": in_place, "before_update": clip},
        {"clear": in_place, "clears_first": True, "before_update": clip, "micro_batch_size": 3},
        {"before_update": clip},
        {"weigh": lambda run, step, micro: micro.num_samples / step.num_samples},
        {"weigh": lambda run, step, micro: 1.0, "micro_batch_size": 8},
        {"scheduler": step_lr},
        COSINE,
        {"schedules": {"lr": Cosine(warmup="10%")}},
        {"schedules": {"lr": Cosine(1, 0, warmup="90%")}},
        {"schedules": {"lr": 0.0}},
        {"kind": torch.optim.AdamW, **COSINE},
        {"clear": in_place, "before_update": clip_once()},
        {"weigh": lambda run, step, micro: len(micro.batch[0]) / step.num_samples},
        {"weigh": lambda run, step, micro: replace(micro, batch=None).weight},
        {"weigh": lambda run, step, micro: pickle.loads(pickle.dumps(micro)).weight},
        {"before_update": nn.Module.train, "after": nn.Module.eval},
        {"kind": Around, **COSINE},
    ],
)
def test_a_right_loop_hears_nothing(settings: dict[str, Any]) -> None:
    assert loop(**settings) == []


def test_a_state_saved_after_the_update_is_refused_until_the_step_is_counted() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = prepare(DATA, 8, max_duration="1ep", optimizer=optimizer)
    assert run.state_dict()["open"] is False
    for step in run:
        assert run.state_dict()["open"]  # not trained yet: it comes again
        for micro in step:
            (
                nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1]) * micro.weight
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(TrainingError, match=r"finish\(\)"):
            run.state_dict()
        run.finish()
        state = run.state_dict()
        break
    again = prepare(DATA, 8, max_duration="1ep", optimizer=optimizer)
    again.load_state_dict(state)
    following = next(iter(again))
    assert following.timestamp.batch == 1


def test_several_updates_of_one_optimizer_of_two_are_no_mistake() -> None:
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    critic = torch.optim.SGD(first.parameters(), lr=0.01)
    generator = torch.optim.SGD(second.parameters(), lr=0.01)
    run = prepare(DATA, 8, max_duration="1ep", optimizer=[critic, generator])
    for step in run:
        for model, optimizer in ((first, critic), (first, critic), (second, generator)):
            for micro in step:
                (model(micro.batch[0]).mean() * micro.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.finish()


def test_a_run_leaves_optimizers_as_they_were() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    prepare(range(8), 2, max_duration="1ep", optimizer=optimizer)  # the hook that all runs share
    before = len(hooks)
    run = prepare(range(8), 2, max_duration="1ep", optimizer=optimizer)
    assert len(copy.deepcopy(optimizer).state_dict()["param_groups"]) == 1
    del run
    gc.collect()
    assert len(hooks) == before


def test_a_loop_may_be_collected_inside_a_step_of_any_optimizer() -> None:
    """The hook of a loop that goes must not be removed while torch goes through its hooks."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loops = list[LoopMistakes]()

    def collect(*_: object) -> None:
        loops.clear()
        gc.collect()

    clearing = register_optimizer_step_post_hook(collect)
    loops += [LoopMistakes([optimizer], None), LoopMistakes([optimizer], None)]
    weight.grad = torch.ones(1)
    optimizer.step()
    clearing.remove()
    assert not loops
