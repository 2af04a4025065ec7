"""stretto in trainers of Hugging Face, against the real packages."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs stretto[huggingface]: make test-adapters")

import torch
from tests.integrations import huggingface_toys as toys
from torch.optim.lr_scheduler import CyclicLR, ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from stretto.batching import NoiseScale, Plateau
from stretto.errors import CheckpointError, StrettoError, TrainingError
from stretto.integrations.counts import steps_in_epoch
from stretto.integrations.huggingface import attach
from stretto.optim import from_torch
from stretto.schedules import Cosine

PLAN = toys.planned()
assert PLAN.end is not None
STEPS = list(PLAN.batches())
ENDS = [*(step.timestamp for step in STEPS[1:]), PLAN.end]


class Watch(TrainerCallback):
    """The trainer's own counters after each step, and its events."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, int]] = []
        self.events: list[tuple[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append((state.global_step, state.epoch, state.max_steps))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("epoch begins", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("epoch ends", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("evaluates", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("saves", state.global_step))


def make(
    *, every: Any = None, schedules: Any = toys.SCHEDULES, sizes: Any = toys.SIZES, **settings: Any
) -> tuple[Any, toys.Recorder, Watch]:
    watch = Watch()
    trainer = Trainer(
        model=settings.pop("model", None) or toys.llama(),
        args=toys.arguments(**settings),
        train_dataset=settings.pop("data", None) or toys.rows(),
        eval_dataset=toys.rows(20),
        data_collator=toys.collate,
        callbacks=[watch],
    )
    attach(trainer, sizes, schedules, every=every)
    return trainer, toys.Recorder(trainer), watch


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, toys.Recorder, Watch, Path]:
    """A run that nothing interrupts, with a checkpoint after each step."""
    out = tmp_path_factory.mktemp("whole")
    trainer, recorder, watch = make(
        out=str(out), every={"evaluate": "70sp", "save": "1ba", "log": "1ba"}
    )
    trainer.train()
    return trainer, recorder, watch, out


@pytest.mark.small
def test_a_trainer_follows_the_plan(whole: Any) -> None:
    trainer, recorder, _, _ = whole
    assert recorder.ids == toys.planned_ids()
    assert recorder.rates == pytest.approx([step.values["lr"] for step in STEPS], rel=1e-15)
    assert max(size for sizes in recorder.micros for size in sizes) == 4
    weights, losses = toys.train_by_hand(toys.llama())
    torch.testing.assert_close(toys.flat(trainer.model), weights, rtol=0, atol=1e-7)
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["loss"] for line in logged] == pytest.approx(losses, rel=1e-5)
    assert [line["batch_size"] for line in logged] == [step.decided for step in STEPS]
    assert [line["learning_rate"] for line in logged] == recorder.rates


def test_the_counters_of_the_trainer_agree_with_the_clock(whole: Any) -> None:
    trainer, _, watch, _ = whole
    total = len(STEPS)
    assert watch.steps == [
        (number, after.sample / toys.N, total) for number, after in enumerate(ENDS, 1)
    ]
    first = steps_in_epoch(trainer.stretto.run, 0).exact
    epochs = [event for event in watch.events if event[0].startswith("epoch")]
    assert epochs == [
        ("epoch begins", 0),
        ("epoch ends", first),
        ("epoch begins", first),
        ("epoch ends", total),
    ]
    assert trainer.state.epoch == 2.0
    bounds = [70, 140, 210, 280]
    crossed = [
        number
        for number, (step, after) in enumerate(zip(STEPS, ENDS, strict=True), 1)
        if any(step.timestamp.sample < one <= after.sample for one in bounds)
    ]
    assert [at for name, at in watch.events if name == "evaluates"] == crossed


@pytest.mark.parametrize("at", [1, 7, 12, 14, 16])
def test_a_resumed_trainer_sees_each_sample_once(at: int, whole: Any) -> None:
    trainer, recorder, _, out = whole
    other, seen, watch = make()
    other.train(resume_from_checkpoint=str(out / f"checkpoint-{at}"))
    assert seen.ids == recorder.ids[at:]
    assert seen.rates == recorder.rates[at:]
    assert torch.equal(toys.flat(other.model), toys.flat(trainer.model))
    assert watch.steps[-1] == (len(STEPS), 2.0, len(STEPS))


def test_a_resumed_trainer_may_have_other_micro_batches(whole: Any) -> None:
    trainer, recorder, _, out = whole
    other, seen, _ = make(per_device_train_batch_size=7)
    other.train(resume_from_checkpoint=str(out / "checkpoint-9"))
    assert seen.ids == recorder.ids[9:]
    torch.testing.assert_close(toys.flat(other.model), toys.flat(trainer.model), rtol=0, atol=1e-7)


def test_a_wrapped_scheduler_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    schedule = from_torch(lambda o: CyclicLR(o, 1e-3, 1e-2, 4, cycle_momentum=False))
    rest: dict[str, Any] = {"schedules": {"lr": schedule}, "sizes": 40, "optim": "adamw_torch"}
    trainer, whole, _ = make(out=str(tmp_path), every={"save": "1ba"}, **rest)
    trainer.train()
    for at in range(1, len(whole.rates)):
        other, seen, _ = make(**rest)
        other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
        assert seen.rates == whole.rates[at:]


def test_a_rate_follows_what_is_evaluated_and_goes_on(tmp_path: Path) -> None:
    plateau = partial(ReduceLROnPlateau, mode="max", patience=0, factor=0.5)
    rest: dict[str, Any] = {
        "schedules": {"lr": from_torch(plateau, monitor="eval/loss")},
        "sizes": Plateau("eval/loss", start=30, maximum=60, mode="max", patience=2),
        "every": {"evaluate": "1ba", "save": "1ba"},
    }
    trainer, whole, _ = make(out=str(tmp_path), **rest)
    trainer.train()
    assert whole.rates[:3] == pytest.approx([0.01, 0.01, 0.005])
    assert [len(ids) for ids in whole.ids][:4] == [30, 30, 30, 60]
    for at in range(1, len(whole.rates)):
        other, seen, _ = make(**rest)
        other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
        assert seen.rates == whole.rates[at:]
        assert seen.ids == whole.ids[at:]


def test_a_metric_that_is_not_measured_is_named() -> None:
    for name, every in (("eval/accuracy", {"evaluate": "1ba"}), ("eval/loss", None)):
        schedule = from_torch(ReduceLROnPlateau, monitor=name)
        with pytest.raises(TrainingError, match=f"follow '{name}'"):
            make(schedules={"lr": schedule}, every=every)[0].train()


def test_restored_callbacks_change_nothing(whole: Any) -> None:
    _, recorder, _, out = whole
    other, seen, watch = make(restore_callback_states_from_checkpoint=True)
    other.train(resume_from_checkpoint=str(out / "checkpoint-9"))
    assert seen.ids == recorder.ids[9:]
    assert watch.steps[-1] == (len(STEPS), 2.0, len(STEPS))


def test_training_again_starts_anew(whole: Any) -> None:
    _, recorder, _, _ = whole
    other, seen, _ = make(schedules={"lr": Cosine(warmup="60sp", warmup_start=0)})
    other.train()
    first, count = seen.rates[:], len(seen.rates)
    other.train()
    assert seen.rates[count:] == first
    assert seen.ids[count:] == recorder.ids


HOOKS = {
    "get_train_dataloader": ["self"],
    "set_initial_training_values": ["self", "args", "dataloader"],
    "create_scheduler": ["self", "num_training_steps", "optimizer"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "log": ["self", "logs", "start_time"],
    "floating_point_ops": ["self", "inputs"],
    "_track_num_input_tokens": ["self", "inputs"],
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_trainer_has_the_hooks_that_are_used(name: str) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == HOOKS[name]


def test_a_checkpoint_of_a_stock_trainer_is_refused(tmp_path: Path) -> None:
    stock = Trainer(
        model=toys.llama(),
        args=toys.arguments(out=str(tmp_path), save_strategy="steps", save_steps=1, max_steps=2),
        train_dataset=toys.rows(),
        data_collator=toys.collate,
    )
    stock.train()
    with pytest.raises(CheckpointError, match="attached"):
        make()[0].train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_strategies_by_epochs_fire_where_epochs_end() -> None:
    trainer, _, watch = make(eval_strategy="epoch")
    trainer.train()
    first = steps_in_epoch(trainer.stretto.run, 0).exact
    assert [at for name, at in watch.events if name == "evaluates"] == [first, len(STEPS)]


def test_without_schedules_the_own_curve_runs_over_the_clock() -> None:
    settings = {"lr_scheduler_type": "cosine", "warmup_steps": 4}
    trainer, recorder, _ = make(schedules=None, **settings)
    trainer.train()
    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    total = len(STEPS)
    (curve,) = get_cosine_schedule_with_warmup(unused, 4, total).lr_lambdas
    expected = [toys.RATE * curve(step.timestamp.sample / (2 * toys.N) * total) for step in STEPS]
    assert recorder.rates == pytest.approx(expected, rel=1e-12)


def test_workers_read_the_same_samples(whole: Any) -> None:
    trainer, recorder, _ = make(dataloader_num_workers=1)
    trainer.train()
    assert recorder.ids == whole[1].ids


def test_a_run_ends_after_max_steps(whole: Any) -> None:
    trainer, recorder, watch = make(max_steps=5, schedules={})
    trainer.train()
    assert recorder.ids == whole[1].ids[:5]
    assert watch.steps[-1][::2] == (5, 5)


def test_sizes_follow_the_noise() -> None:
    trainer, recorder, watch = make(sizes=NoiseScale(6, 40, window=5))
    trainer.train()
    sizes = [len(ids) for ids in recorder.ids]
    assert sum(sizes) == 2 * toys.N
    assert trainer.stretto.signals.noise_numerator is not None
    assert watch.steps[-1][::2] == (len(sizes), len(sizes))
    assert len(set(sizes)) > 2


def streamed(rows: Callable[[], Any] = toys.rows) -> Any:
    datasets = pytest.importorskip("datasets", reason="make test-adapters has it")
    return datasets.IterableDataset.from_generator(rows)


@pytest.mark.parametrize("facts", [{}, {"num_samples": toys.N}], ids=["unknown length", "known"])
def test_a_stream_is_read_and_resumed(facts: dict[str, Any], tmp_path: Path) -> None:
    def start(**settings: Any) -> tuple[Any, toys.Recorder]:
        trainer = Trainer(
            model=toys.llama(),
            args=toys.arguments(max_steps=999, **settings),
            train_dataset=streamed(),
            data_collator=toys.collate,
        )
        attach(trainer, "0sp:8 65sp:18 200sp:31", {"lr": 1.0}, max_duration="280sp", **facts)
        return trainer, toys.Recorder(trainer)

    trainer, recorder = start(out=str(tmp_path), save_strategy="steps", save_steps=5)
    trainer.train()
    ids = [i for step in recorder.ids for i in step]
    assert ids == [*range(toys.N), *range(280 - toys.N)]
    for at in (5, 10):
        other, seen = start()
        other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
        assert seen.ids == recorder.ids[at:]
        assert torch.equal(toys.flat(other.model), toys.flat(trainer.model))
    assert trainer.state.max_steps == trainer.state.global_step == len(recorder.ids)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "accumulation": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
    "by length": ({"train_sampling_strategy": "group_by_length"}, "LengthGroupedSampler"),
    "events": ({"every": {"saves": "1ep"}}, "saves"),
    "curve": (
        {
            "schedules": None,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "epoch",
        },
        "reduce_lr_on_plateau",
    ),
}


@pytest.mark.parametrize(("settings", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        make(**settings)[0].train()


def test_a_weighted_sampler_is_refused() -> None:
    class Weighted(Trainer):  # type: ignore[misc,unused-ignore]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.WeightedRandomSampler([1.0] * toys.N, toys.N)

    trainer = Weighted(
        model=toys.llama(),
        args=toys.arguments(),
        train_dataset=toys.rows(),
        data_collator=toys.collate,
    )
    with pytest.raises(StrettoError, match="WeightedRandomSampler"):
        attach(trainer, 8)


def test_a_scheduler_object_is_refused() -> None:
    model = toys.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Trainer(
        model=model,
        args=toys.arguments(),
        train_dataset=toys.rows(),
        data_collator=toys.collate,
        optimizers=(optimizer, scheduler),
    )
    with pytest.raises(StrettoError, match="scheduler"):
        attach(trainer, 8)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_two_ranks_train_as_one_and_resume_what_one_has_begun(
    whole: Any, launch_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("datasets", reason="make test-adapters has it")
    trainer, recorder, _, out = whole
    script = Path(__file__).with_name("distributed_huggingface.py")
    launch_ranks(script, tmp_path, out / "checkpoint-7")
    weights = toys.flat(trainer.model)
    for name, begun in (("two", 0), ("resumed", 7)):
        ranks = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
        pairs = zip(ranks[0]["ids"], ranks[1]["ids"], strict=True)
        assert [sorted(one + other) for one, other in pairs] == recorder.ids[begun:]
        for rank in ranks:
            assert rank["rates"] == recorder.rates[begun:]
            assert rank["counters"] == [len(STEPS), 2.0, len(STEPS)]
            torch.testing.assert_close(torch.tensor(rank["weights"]), weights, rtol=0, atol=1e-7)
    noise = [json.loads((tmp_path / f"noise-{rank}.json").read_text()) for rank in (0, 1)]
    assert noise[0]["noise"] == noise[1]["noise"] is not None
    pairs = zip(noise[0]["ids"], noise[1]["ids"], strict=True)
    assert sum(len(one + other) for one, other in pairs) == 2 * toys.N
    for name, read in (("stream", [*range(150), *range(20)]), ("shards", [*range(140)])):
        ranks = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
        seen_ids = [i for rank in ranks for step in rank["ids"] for i in step]
        assert sorted(seen_ids) == sorted(read)
    # Saved on two ranks, it goes on with one and other micro-batches.
    alone, seen, _ = make(per_device_train_batch_size=5)
    alone.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-6"))
    assert seen.ids == recorder.ids[6:]
    torch.testing.assert_close(toys.flat(alone.model), weights, rtol=0, atol=1e-7)


def stock(**settings: Any) -> Any:
    data = settings.pop("data", None) or toys.rows()
    return Trainer(
        model=toys.llama(),
        args=toys.arguments(**settings),
        train_dataset=data,
        eval_dataset=toys.rows(10),
        data_collator=toys.collate,
    )


def test_a_notebook_cell_may_be_run_again(whole: Any) -> None:
    trainer = stock()
    attach(trainer, 8)
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.warns(RuntimeWarning, match="replaces the run"):
        attach(trainer, toys.SIZES, toys.SCHEDULES)
    assert trainer.evaluate()["eval_loss"] > 0
    recorder = toys.Recorder(trainer)
    trainer.train()
    assert recorder.ids == whole[1].ids
    assert torch.equal(toys.flat(trainer.model), toys.flat(whole[0].model))


def test_the_best_model_is_noted_or_refused(tmp_path: Path) -> None:
    every = {"evaluate": "20%"}
    steps = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    trainer = stock(load_best_model_at_end=True, **steps)
    with pytest.raises(TrainingError, match="best"):
        attach(trainer, 8, every=every)
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "out": str(tmp_path)}
    trainer = stock(load_best_model_at_end=True, **best)
    attach(trainer, 16, {"lr": 1.0}, every=every)
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_of_your_own_over_a_stream_is_read(workers: int) -> None:
    rows = toys.rows()[::-1]

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            stream = streamed(rows.__iter__)
            return self.accelerator.prepare(DataLoader(stream, 4, collate_fn=toys.collate))

    trainer = Own(
        model=toys.llama(),
        args=toys.arguments(max_steps=999, dataloader_num_workers=workers),
        train_dataset=streamed(),
        data_collator=toys.collate,
    )
    attach(trainer, 10, {"lr": 1.0}, max_duration="40sp")
    recorder = toys.Recorder(trainer)
    trainer.train()
    assert [i for step in recorder.ids for i in sorted(step, reverse=True)] == list(
        range(toys.N - 1, toys.N - 41, -1)
    )


def test_a_stock_curve_over_an_unknown_number_of_steps_is_refused() -> None:
    trainer = stock(lr_scheduler_type="cosine", max_steps=999, data=streamed())
    with pytest.raises(TrainingError, match="number"):
        attach(trainer, 8, max_duration="1500tok")


# What `attach` reads of `TrainingArguments`, and a value that changes a run or is refused.
ARGUMENTS: dict[str, Any] = {
    "num_train_epochs": 3,
    "max_steps": 5,
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "average_tokens_across_devices": False,
    "dataloader_drop_last": True,
    "seed": 8,
    "data_seed": 5,
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 4,
    "learning_rate": 3e-3,
    "ignore_data_skip": False,
    "load_best_model_at_end": True,
}


def trained(changed: dict[str, Any], how: str) -> Any:
    """Return what a trainer says or sees whose arguments are changed at some time."""

    def model_init() -> Any:
        return toys.llama()

    settings = {"max_steps": -1, **(changed if how == "before" else {})}
    steps = {"eval_strategy": "steps", "eval_steps": 9, "save_strategy": "steps", "save_steps": 9}
    args = toys.arguments(**{"num_train_epochs": 1} | settings)
    for name, value in steps.items():  # not checked beside `load_best_model_at_end`
        setattr(args, name, value)
    trainer = Trainer(
        model_init=model_init,
        args=args,
        train_dataset=toys.rows(44),
        eval_dataset=toys.rows(4),
        data_collator=toys.collate,
    )
    found: list[Any] = []
    try:
        attach(trainer, 8, every={"evaluate": "100ep"})
        if how == "again":
            trainer.train()
        if how in ("after", "again"):
            for name, value in changed.items():
                setattr(trainer.args, name, value)
        if how == "search":  # as `hyperparameter_search` trains
            trainer._hp_search_setup = partial(search, trainer, changed)
        own = trainer.stretto.run
        planned = None if how in ("again", "search") else own.plan.to_json()
        trainer.add_callback(Steps(trainer, found))
        trainer.train()
        run = trainer.stretto.run
        if planned is not None:
            assert planned["num_batches"] == run.plan.num_batches
        return found, run.timer.sample
    except StrettoError as error:
        return str(error)


def search(trainer: Any, changed: dict[str, Any], _: Any) -> None:
    """Set arguments as `Trainer._hp_search_setup` does, without the package of a backend."""
    for name, value in changed.items():
        setattr(trainer.args, name, value)
    trainer._train_batch_size = trainer.args.train_batch_size
    trainer.create_accelerator_and_postprocess()


class Steps(TrainerCallback):
    """The size, the micro-batches, the samples and the rate of each step."""

    def __init__(self, trainer: Any, found: list[Any]) -> None:
        self.trainer, self.found = trainer, found

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, rate = self.trainer.stretto.run.step, self.trainer.lr_scheduler.get_last_lr()
        ids = [ids for micro in step for ids in toys.ids_of(micro.batch)]
        self.found.append((step.num_samples, len(step), ids, rate))


@pytest.mark.small
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_arguments_count_when_training_starts(name: str) -> None:
    usual, changed = trained({}, "before"), {name: ARGUMENTS[name]}
    expected = trained(changed, "before")
    for how in ("after", "search", "again"):
        assert trained(changed, how) == expected, how
    alike = {"average_tokens_across_devices", "ignore_data_skip"}  # on one rank; at a resume
    assert (expected == usual) == (name in alike)


class Looks(TrainerCallback):
    """Looks at data and the plan in each event, as one that writes pictures of batches does."""

    trainer: Any = None
    seen = 0

    def look(self, *_: Any, **__: Any) -> None:
        loader = self.trainer.get_train_dataloader()
        first, again = (next(iter(one))["labels"] for one in (loader, loader))
        assert torch.equal(first, again)
        assert 0 < len(loader) < len(STEPS)
        self.seen += 1

    on_train_begin = on_epoch_begin = on_step_begin = on_step_end = on_epoch_end = look
    on_substep_end = on_evaluate = on_train_end = look


@pytest.mark.small
def test_looking_at_the_data_leaves_a_run_alone(whole: Any) -> None:
    plain, looked = (make(model=toys.llama(attention_dropout=0.2))[0] for _ in range(2))
    torch.manual_seed(7)
    plain.train()
    looks = Looks()
    looks.trainer = looked
    looked.add_callback(looks)
    looks.look()
    assert next(iter(looked.get_train_dataloader())).keys() == toys.collate(toys.rows(4)).keys()
    torch.manual_seed(7)
    looked.train()
    assert looks.seen > len(STEPS)
    assert torch.equal(toys.flat(looked.model), toys.flat(plain.model))
    assert looked.stretto.run.is_done


def test_the_dataloader_of_the_event_may_be_iterated_over(whole: Any) -> None:
    class Iterates(TrainerCallback):
        def on_step_end(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
            batch = next(iter(train_dataloader))
            assert len(toys.ids_of(batch)) == 4

    other, seen, _ = make()
    other.add_callback(Iterates())
    other.train()
    assert seen.ids == whole[1].ids


def test_looking_at_a_stream_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(toys.rows())

    trainer = stock(data=Stream(), max_steps=2)
    attach(trainer, 8, {"lr": 1.0})
    with pytest.raises(TrainingError, match=r"trainer\.train_dataset"):
        next(iter(trainer.get_train_dataloader()))
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.small
def test_the_plan_is_known_before_training() -> None:
    trainer, _, _ = make()
    before = trainer.stretto.run.plan.to_json()
    trainer.args.num_train_epochs = 4
    assert trainer.stretto.run.plan.num_samples == 4 * toys.N
    trainer.args.num_train_epochs = 2
    trainer.train()
    assert [one["batches"] for one in before["stages"]] == [
        one.batches for one in trainer.stretto.run.plan.stages
    ]
    stocks = stock(lr_scheduler_type="cosine", num_train_epochs=1)
    attach(stocks, 16)
    planned = [batch.values["lr"] for batch in stocks.stretto.run.plan.batches()]
    recorder = toys.Recorder(stocks)
    stocks.train()
    assert [toys.RATE * factor for factor in planned] == pytest.approx(recorder.rates)


class Notes(Trainer):  # type: ignore[misc,unused-ignore]
    """Notes what it computes, in every way that a trainer or a model does."""

    total = 0

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        self.total += 1
        self.number = getattr(self, "number", 0) + 1
        self.sizes[len(inputs["labels"])] = self.sizes.get(len(inputs["labels"]), 0) + 1
        self.seen.append(len(inputs["labels"]))
        model.calls += 1
        model.norm(torch.randn(4, 3))
        inputs["input_ids"].clamp_(0, toys.WORDS)  # in place
        inputs.pop("token_type_ids", None)
        self.log({"own": 1.0})
        return super().compute_loss(model, inputs, *given, **options)


def noting(kind: Any = Notes, **settings: Any) -> tuple[Any, list[Any]]:
    model, logged = toys.llama(), list[Any]()
    model.calls, model.norm = 0, torch.nn.BatchNorm1d(3)
    trainer = kind(model, toys.arguments(**settings), toys.collate, train_dataset=toys.rows())
    trainer.sizes, trainer.seen = {}, []

    class Log(TrainerCallback):
        def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
            logged.append("own" in logs)

    trainer.add_callback(Log())
    attach(trainer, toys.SIZES, toys.SCHEDULES)
    return trainer, logged


@pytest.mark.small
@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_measuring_the_loss_leaves_no_trace() -> None:
    calls: list[Any] = []

    class Counted(Notes):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
            calls.append(self.stretto.weight)
            return super().compute_loss(model, inputs, *given, **options)

    trainer, logged = noting(Counted)
    trainer.train()
    passes = [call for call in calls if call is not None]
    count = len(passes)
    assert trainer.total == trainer.number == trainer.model.calls == len(trainer.seen) == count
    assert sum(trainer.sizes.values()) == logged.count(True) == count
    assert int(trainer.model.norm.num_batches_tracked) == count
    probes = len(calls) - count  # 7 at first; 3 in steps 1, 2, 4, 8 and 16
    assert 0 < probes <= 7 + 3 * len(STEPS).bit_length()


@pytest.mark.small
@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_an_exception_in_a_probe_does_not_end_a_run() -> None:
    class Raises(Notes):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
            if self.stretto.probe.is_open:
                raise RuntimeError("not in a trial")
            return super().compute_loss(model, inputs, *given, **options)

    expected, _ = noting()
    expected.train()
    trainer, _ = noting(Raises)
    with pytest.warns(RuntimeWarning, match="mean over.*not in a trial") as found:
        trainer.train()
    assert len([one for one in found if "mean over" in str(one.message)]) == 1
    assert torch.equal(toys.flat(trainer.model), toys.flat(expected.model))


def test_a_callback_may_stop_a_run_without_a_warning() -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == 3

    other, seen, _ = make()
    other.add_callback(Stops())
    other.train()  # warnings are errors
    assert len(seen.ids) == 3


@pytest.mark.small
def test_attach_reads_no_argument_that_training_does_not_read_again() -> None:
    read: set[str] = set()

    class Recorded(TrainingArguments):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    trainer = Trainer(
        model=toys.llama(),
        args=toys.arguments(Recorded),
        train_dataset=toys.rows(8),
        data_collator=toys.collate,
    )
    read.clear()
    attach(trainer, 8)
    attached = set(read)
    read.clear()
    trainer.get_train_dataloader()
    assert {"max_steps", "gradient_accumulation_steps"} <= attached <= read


def test_a_version_without_the_hooks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = stock()
    monkeypatch.delattr(Trainer, "set_initial_training_values")
    with pytest.raises(TrainingError, match="hooks"):
        attach(trainer, 8)
