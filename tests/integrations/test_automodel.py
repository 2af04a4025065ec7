"""The adapter to NeMo Automodel, against its real schedulers, configurations and dataloaders."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nemo_automodel", reason="needs nemo-automodel and torchdata: make adapters")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_automodel.components.datasets import loader as loaders
from nemo_automodel.components.optim.optimizer import LRSchedulerConfig
from nemo_automodel.components.training.step_scheduler import StepSchedulerConfig
from torch.utils.data import Dataset, IterableDataset

from stretto.errors import StrettoError
from stretto.integrations.automodel import follow
from stretto.planning import Plan, plan
from stretto.schedules import WSD, Linear
from stretto.timing import Horizon

pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata calls it
RATE, DECAY, FAR = 1e-3, 0.1, 10**9
SIZES = "0sp:8 160sp:16"
SCHEDULES = {"lr": WSD("20ba", warmup="10ba"), "weight_decay": Linear(1, 0.5)}


class Ids(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[Any]):
    """Numbers of a rank; it says where it is."""

    def __init__(self, count: int) -> None:
        self.count, self.ranks, self.rank, self.at = count, 1, 0, 0

    def shard(self, ranks: int, rank: int) -> Stream:
        self.ranks, self.rank = ranks, rank
        return self

    def __iter__(self) -> Iterator[int]:
        while self.at * self.ranks < self.count:
            self.at += 1
            yield (self.at - 1) * self.ranks + self.rank
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def ids_of(samples: list[Any]) -> list[int]:
    return list(samples)


class Recipe:
    """What a recipe's `setup` makes on one rank, and its loop, without a model."""

    def __init__(
        self,
        data: Any,
        rank: int = 0,
        ranks: int = 1,
        *,
        micro: int = 2,
        load: Any = None,
        lr_scheduler: dict[str, Any] | None = None,
        num_optimizers: int = 1,
        loader: dict[str, Any] | None = None,
        **steps: Any,
    ) -> None:
        self.cfg: Any = {"step_scheduler.local_batch_size": micro}
        self.ranks = ranks
        sizes = {"batch_size": micro, **(loader or {})}
        self.dataloader: Any = loaders.ParallelAwareDataloader(
            data, dp_rank=rank, dp_world_size=ranks, collate_fn=ids_of, **sizes
        )
        said = {"global_batch_size": 24 * ranks * micro, "preemption_signal": None, **steps}
        config = StepSchedulerConfig(**said)
        self.step_scheduler: Any = config.build(self.dataloader, ranks, micro)
        self.optimizers = [self._optimizer() for _ in range(num_optimizers)]
        schedule = {"min_lr": 0.0} if lr_scheduler is None else lr_scheduler
        self.lr_scheduler: Any = None
        if schedule:
            built = LRSchedulerConfig(**schedule)
            self.lr_scheduler = built.build(self.optimizers, self.step_scheduler)
        if load is not None:
            self._load(*load)
        self.saved: list[Any] = []
        self.rows: list[Any] = []

    @staticmethod
    def _optimizer() -> torch.optim.Optimizer:
        def one() -> list[torch.Tensor]:
            return [torch.zeros(1, requires_grad=True)]

        head: dict[str, Any] = {"params": one(), "lr": RATE / 4, "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": one()}, head], lr=RATE, weight_decay=DECAY)

    def _get_dp_group_size(self) -> int:
        return self.ranks

    def _state(self) -> Any:
        schedulers = [one.state_dict() for one in self.lr_scheduler or []]
        return self.dataloader.state_dict(), self.step_scheduler.state_dict(), schedulers

    def _load(self, loader: Any, steps: Any, schedulers: Any) -> None:
        self.dataloader.load_state_dict(loader)
        self.step_scheduler.load_state_dict(steps)
        for scheduler, state in zip(self.lr_scheduler or [], schedulers, strict=True):
            scheduler.load_state_dict(state)

    def run(self, stop: int | None = None, kill: int | None = None) -> list[Any]:
        """Train as recipes do; return a row for each step."""
        steps = self.step_scheduler
        for epoch in steps.epochs:
            steps.set_epoch(epoch)
            for micro_batches in steps:
                groups = [g for one in self.optimizers for g in one.param_groups]
                values = [(group["lr"], group["weight_decay"]) for group in groups]
                self.rows.append(([list(one) for one in micro_batches], values))
                for scheduler in self.lr_scheduler or []:
                    scheduler.step(1)
                if kill == steps.step:
                    os.kill(os.getpid(), signal.SIGTERM)
                if steps.is_ckpt_step or stop == steps.step + 1:
                    self.saved.append((epoch, steps.step, self._state(), steps.is_last_step))
                    if stop == steps.step + 1:
                        return self.rows
        return self.rows


@pytest.fixture(autouse=True, scope="module")
def _keeps_start_method() -> Iterator[None]:
    """Automodel's loader sets how this process starts others: not for the tests after these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "_set_spawn_start_method", lambda: None)
        yield


def the_plan(sizes: Any = SIZES, duration: str = "100ba", **facts: Any) -> Plan:
    kept = {name: facts.pop(name) for name in ("schedules", "base") if name in facts}
    horizon = Horizon(duration, last_batch="carry", **facts)
    return plan(horizon, sizes, **{"schedules": SCHEDULES, **kept})


def run_ranks(planned: Plan, make: Any, ranks: int, load: Any = None, **how: Any) -> list[Recipe]:
    found = []
    for rank in range(ranks):
        recipe = make(rank, ranks, load=None if load is None else load[rank])
        follow(planned, recipe)
        recipe.run(**how)
        found.append(recipe)
    return found


def check_rows(planned: Plan, recipes: list[Recipe], expected: list[int]) -> None:
    """Sizes, ids and values of each step are those of the plan."""
    ranks, batches = len(recipes), list(planned.batches())
    assert len(recipes[0].rows) == len(batches)
    for step, batch in enumerate(batches):
        start = batch.timestamp.sample
        flat = [[i for micro in one.rows[step][0] for i in micro] for one in recipes]
        assert {len(one) * ranks for one in flat} == {batch.size}
        assert sorted(i for one in flat for i in one) == sorted(
            expected[start : start + batch.size]
        )
        lr, decay = (batch.values.get(name, 1.0) for name in ("lr", "weight_decay"))
        groups = [(RATE * lr, DECAY * decay), (RATE / 4 * lr, 0.0)]
        for recipe in recipes:
            for at, value in enumerate(recipe.rows[step][1]):
                assert value == pytest.approx(groups[at % 2], rel=1e-12, abs=0)


def check_resumes(planned: Plan, make: Any, whole: list[Recipe], steps: Any) -> None:
    """What follows a checkpoint is what followed it in the whole run."""
    for at in steps:
        first = run_ranks(planned, make, len(whole), stop=at)
        states = [recipe.saved[-1][2] for recipe in first]
        rest = run_ranks(planned, make, len(whole), load=states)
        for before, after, all_ in zip(first, rest, whole, strict=True):
            assert before.rows + after.rows == all_.rows, at


def shuffled(count: int, per_epoch: int, epochs: int) -> list[int]:
    """The samples as the distributed sampler numbers them over its ranks."""
    found = []
    for epoch in range(epochs):
        generator = torch.Generator()
        generator.manual_seed(42 + epoch)
        found += torch.randperm(count, generator=generator).tolist()[:per_epoch]
    return found


def test_a_run_is_the_plan_on_two_ranks_and_resumes_at_any_step() -> None:
    planned = the_plan()

    def make(rank: int, ranks: int, load: Any = None) -> Recipe:
        data = Ids(2000)
        return Recipe(data, rank, ranks, load=load, max_steps=100, ckpt_every_steps=FAR)

    whole = run_ranks(planned, make, 2)
    check_rows(planned, whole, shuffled(2000, 2000, 1))
    assert [group["lr"] for group in whole[0].optimizers[0].param_groups] == [0.0, 0.0]
    assert [(one[0], one[1], one[3]) for one in whole[0].saved] == [(0, 99, True)]
    assert whole[0].step_scheduler.grad_acc_steps == 4  # the most
    steps = [1, 19, 20, 21, *random.Random(3).sample(range(2, 99), 4), 99, 100]
    check_resumes(planned, make, whole, steps)


def test_a_step_goes_on_over_the_end_of_an_epoch() -> None:
    planned = the_plan("0sp:12 96sp:24", "41ba", dataset_num_samples=100)

    def make(rank: int, ranks: int, load: Any = None) -> Recipe:
        steps: Any = {"max_steps": 41, "ckpt_every_steps": FAR, "num_epochs": 9}
        return Recipe(Ids(101), rank, ranks, load=load, **steps)

    whole = run_ranks(planned, make, 2)
    check_rows(planned, whole, shuffled(101, 100, 9))
    ends = [batch.timestamp.sample + batch.size for batch in planned.batches()]
    crossing = [at for at, end in enumerate(ends) if end // 100 > ([0, *ends][at]) // 100]
    assert [(one[0], one[1]) for one in whole[0].saved] == [
        (ends[at] // 100 - (ends[at] % 100 == 0), at) for at in [*crossing, 40]
    ]
    assert [one[3] for one in whole[0].saved] == [False] * len(crossing) + [True]
    check_resumes(planned, make, whole, [7, 8, 9, 12, 13, 20, 40])


def test_streams_run_while_they_last() -> None:
    planned = the_plan("0sp:8 80sp:16", "30ba")

    def make(rank: int, ranks: int, load: Any = None, count: int = 400) -> Recipe:
        return Recipe(Stream(count), rank, ranks, load=load, max_steps=30)

    whole = run_ranks(planned, make, 2)
    check_rows(planned, whole, list(range(400)))
    assert not any(recipe.step_scheduler.is_last_batch for recipe in whole)
    check_resumes(planned, make, whole, [3, 10, 11])
    short = make(0, 1, count=200)
    follow(planned, short)
    with pytest.raises(StrettoError, match="cannot train step 17: its data have ended"):
        short.run()


def megatron(kind: str, count: int, rank: int, ranks: int, said: int) -> Any:
    """The sampler of Megatron's data sets, without what its package imports beside it."""
    folder = Path(loaders.__file__).parent
    where = folder / "llm" / "megatron" / "sampler.py"
    spec = importlib.util.spec_from_file_location("megatron_sampler", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.create_megatron_sampler(count, 2, said, kind, rank=rank, world_size=ranks)


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_the_samplers_of_megatron_data_sets(kind: str) -> None:
    planned = the_plan("0sp:8 80sp:16", "30ba")

    def make(rank: int, ranks: int, load: Any = None, count: int = 402) -> Recipe:
        sampler = megatron(kind, count, rank, ranks, 160)
        given = {"batch_size": 2, "batch_sampler": sampler}
        return Recipe(Ids(count), rank, ranks, load=load, max_steps=30, loader=given)

    whole = run_ranks(planned, make, 2)
    ids = [
        i
        for row in zip(*(one.rows for one in whole), strict=True)
        for micros, _ in row
        for m in micros
        for i in m
    ]
    assert (len(ids), len(set(ids))) == (400, 400)
    if kind == "single":
        check_rows(planned, whole, ids)
        assert sorted(ids) == list(range(400))
    check_resumes(planned, make, whole, [3, 10, 11])
    with pytest.raises(StrettoError, match="global_batch_size for a Megatron data set"):
        follow(planned, make(0, 2, count=396))  # a second epoch would be the same samples


def test_a_preempted_run_saves_and_resumes() -> None:
    planned = the_plan("0sp:8 80sp:16", "30ba")

    def make(load: Any = None) -> Recipe:
        how: Any = {"max_steps": 30, "ckpt_every_steps": FAR, "preemption_signal": "SIGTERM"}
        recipe = Recipe(Ids(400), load=load, **how)
        follow(planned, recipe)
        return recipe

    made = []
    try:
        whole, first = make(), make()
        made += [first, whole]
        whole.run()
        first.run(kill=11)
        assert ([one[1] for one in first.saved], len(first.rows)) == ([11], 12)
        rest = make(load=first.saved[0][2])
        made.append(rest)
        assert first.rows + rest.run() == whole.rows
    finally:
        for recipe in reversed(made):
            recipe.step_scheduler.sig_handler.release()


def test_each_optimizer_and_loaders_with_workers() -> None:
    planned = the_plan("0sp:8 80sp:16", "20ba", schedules={"lr": Linear(1, 0)}, base={"lr": RATE})

    def make(rank: int, ranks: int, load: Any = None) -> Recipe:
        workers = {"num_workers": 1, "persistent_workers": True}
        how: Any = {"max_steps": 20, "loader": workers, "num_optimizers": 3}
        return Recipe(Ids(100), rank, ranks, load=load, **how)

    whole = run_ranks(planned, make, 1)
    assert len(whole[0].rows[0][1]) == 6
    assert [row[1][4][0] for row in whole[0].rows] == [
        one.values["lr"] for one in planned.batches()
    ]
    check_resumes(planned, make, whole, [11])


def test_validation_and_checkpoints_come_at_their_steps() -> None:
    planned, found = the_plan("0sp:8 80sp:16", "20ba", schedules={"lr": Linear(1, 0)}), []
    recipe = Recipe(Ids(400), max_steps=20, ckpt_every_steps=8, val_every_steps=5)
    follow(planned, recipe)
    for _ in recipe.step_scheduler.epochs:
        for _ in recipe.step_scheduler:
            steps = recipe.step_scheduler
            found.append((steps.is_val_step, steps.is_ckpt_step))
    assert [at for at, one in enumerate(found) if one[1]] == [7, 15, 19]
    assert [at for at, one in enumerate(found) if one[0]] == [4, 7, 9, 14, 15, 19]


@st.composite
def runs(draw: Any) -> tuple[Any, ...]:
    micro, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    unit = micro * ranks
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    at = sorted({0, *(unit * draw(st.integers(1, 30)) for _ in sizes[1:])})
    text = " ".join(f"{start}sp:{unit * size}" for start, size in zip(at, sizes, strict=False))
    batches, count = draw(st.integers(1, 12)), draw(st.integers(unit, 40))
    return micro, ranks, text, batches, count, draw(st.integers(1, batches))


@settings(max_examples=200)
@given(runs())
def test_any_plan(run: tuple[Any, ...]) -> None:
    micro, ranks, text, batches, count, at = run
    planned = the_plan(text, f"{batches}ba", schedules={"lr": Linear(1, 0)})
    per_epoch = count // (micro * ranks) * micro * ranks
    epochs = -(-(planned.num_samples or 0) // per_epoch)

    def make(rank: int, ranks: int, load: Any = None) -> Recipe:
        steps: Any = {"max_steps": batches, "num_epochs": epochs, "micro": micro}
        return Recipe(Ids(count), rank, ranks, load=load, loader={"drop_last": True}, **steps)

    whole = run_ranks(planned, make, ranks)
    # The sampler gives each rank the same count, of which the dataloader leaves out the rest.
    check_rows(planned, whole, shuffled(count, per_epoch, epochs))
    only = at % ranks
    check_resumes(planned, lambda _, __, load=None: make(only, ranks, load), [whole[only]], [at])


def load_at(step: int, **how: Any) -> Any:
    """The state that a run saves after a step."""
    recipe = Recipe(Ids(2000), max_steps=100, **how)
    follow(the_plan(), recipe)
    recipe.run(stop=step)
    return recipe.saved[-1][2]


def without_position(part: str) -> Any:
    loader, steps, schedulers = load_at(30)
    if part == "dataloader":
        return {}, steps, schedulers
    return loader, steps, [{**one, "num_steps": 0} for one in schedulers]


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "before_setup": (
        the_plan,
        SimpleNamespace,
        "follow the plan in this recipe: its step_scheduler is a NoneType.*after recipe.setup",
    ),
    "steps_of_another_length": (
        the_plan,
        lambda: Recipe(Ids(2000), max_steps=90),
        "cannot follow the plan in this recipe: its max_steps is 90; write max_steps: 100",
    ),
    "a_size_that_is_no_multiple": (
        lambda: the_plan("0sp:8 160sp:15"),
        lambda: Recipe(Ids(2000), max_steps=100),
        "cannot train on a batch of 15 samples: it is not a multiple of 2",
    ),
    "a_cut_micro_batch": (
        lambda: the_plan("0sp:8 160sp:16", "40ba"),
        lambda: Recipe(Ids(301), max_steps=40),
        "the last micro-batch of an epoch is cut; write drop_last: true",
    ),
    "too_few_epochs": (
        the_plan,
        lambda: Recipe(Ids(300), max_steps=100, num_epochs=4),
        "cannot train on 1440 samples: the recipe has 1200; write a larger num_epochs",
    ),
    "another_epoch": (
        lambda: the_plan(dataset_num_samples=1000),
        lambda: Recipe(Ids(900), max_steps=100),
        "an epoch has 900 rows; write dataset_num_samples=900",
    ),
    "another_batch_size_of_the_dataloader": (
        the_plan,
        lambda: Recipe(Ids(2000), max_steps=100, loader={"batch_size": 4}),
        "it loads 4 samples at once; load 2",
    ),
    "no_lr_scheduler": (
        the_plan,
        lambda: Recipe(Ids(2000), max_steps=100, lr_scheduler={}),
        r"it has no lr_scheduler; write lr_scheduler: \{min_lr: 0.0\}",
    ),
    "its_own_least_rate": (
        the_plan,
        lambda: Recipe(Ids(2000), max_steps=100, lr_scheduler={"lr_decay_style": "cosine"}),
        "cannot follow min_lr=1e-05: the plan ends at a learning rate of 0; write min_lr=0",
    ),
    "fewer_ranks_on_resume": (
        the_plan,
        lambda: Recipe(Ids(2000), max_steps=100, load=load_at(30, ranks=2)),
        (
            "at step 30: the dataloader is at micro-batch 80 of 2 samples, and the plan "
            "at sample 320; resume with the plan, ranks"
        ),
    ),
    "another_plan_on_resume": (
        lambda: the_plan("0sp:8 80sp:16"),
        lambda: Recipe(Ids(2000), max_steps=100, load=load_at(30)),
        "resume with the plan",
    ),
    "no_position_of_the_dataloader": (
        the_plan,
        lambda: Recipe(Ids(2000), max_steps=100, load=without_position("dataloader")),
        "the dataloader is at micro-batch 0",
    ),
    "no_position_of_the_scheduler": (
        the_plan,
        lambda: Recipe(Ids(2000), max_steps=100, load=without_position("lr_scheduler")),
        "its lr_scheduler is at step 0, not 30; load all",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_before_the_first_step(name: str) -> None:
    make_plan, make, said = REFUSED[name]
    planned, recipe = make_plan(), make()
    with pytest.raises(StrettoError, match=said):
        follow(planned, recipe)


def test_a_recipe_follows_one_plan() -> None:
    recipe = Recipe(Ids(2000), max_steps=100)
    follow(the_plan(), recipe)
    with pytest.raises(StrettoError, match=r"call follow\(\) once"):
        follow(the_plan(), recipe)
