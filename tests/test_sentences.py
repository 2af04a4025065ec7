"""Each sentence of the three designs that stretto comes from is true, or refused with what works.

The designs are Composer's issue on time (#146), bert24's pull request for a batch ramp (#76) and
torchtune's RFC on adaptive batching (#2199). A row has the number of a sentence, the sentence in
short, and a check of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto import (
    Callback,
    Checkpointing,
    DataSpec,
    Evaluation,
    Horizon,
    Linear,
    LinearRamp,
    SquareRootRule,
    StepLoader,
    Time,
    Timestamp,
    Trainer,
    convert,
    plan,
    prepare,
)
from stretto.batching import IncreaseFunction, as_policy, rampup
from stretto.config import build_plan, parse_run_file
from stretto.errors import (
    BatchSizeError,
    ConfigError,
    ConversionError,
    FitError,
    ScheduleError,
    StrettoError,
    TimeError,
    UnitError,
)
from stretto.memory import Answer, find_batch_size
from stretto.optim import from_torch
from stretto.planning import walk
from stretto.runtime import SupervisedStep
from stretto.runtime.out_of_memory import is_out_of_memory
from stretto.schedules import Cosine, MultiStep, Periods, StepDecay, as_schedule
from stretto.timing import Every, Timer
from stretto.training import Logging, algorithms

ROOT = Path(__file__).parents[1]
N = 24
DATA = TensorDataset(torch.linspace(-1, 1, 3 * N).reshape(N, 3), torch.ones(N, 1))
ROWS: list[Any] = []


def says(number: int, sentence: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the check of a sentence."""

    def registered(check: Callable[..., None]) -> Callable[..., None]:
        ROWS.append(pytest.param(check, id=f"{number}: {sentence}"))
        return check

    return registered


def has_test(path: str, *names: str) -> None:
    """Check that a test exists that tells the same and would take seconds here."""
    text = (ROOT / "tests" / path).read_text(encoding="utf-8")
    for name in names:
        assert re.search(rf"^ *def {name}\(", text, re.MULTILINE), f"{path} has no {name}"


def documented(page: str, *texts: str) -> None:
    """Check that a page says something."""
    written = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    for text in texts:
        assert text in written, f"{page} does not say: {text}"


def trainer(**settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = settings.pop("model", None) or nn.Linear(3, 1)
    given: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": nn.MSELoss(),
        "max_duration": "2ep",
        "batch_size": 4,
        "log": {"console": False},
    }
    return Trainer(model, settings.pop("data", DATA), **given | settings)


class Watch(Callback):
    """Notes each batch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rates: list[float] = []
        self.lines: list[dict[str, float]] = []
        self.evaluated: list[int] = []

    def on_batch_end(self, run: Any, step: Any) -> None:
        self.sizes.append(step.num_samples)
        self.rates.append(run.optimizers[0].param_groups[0]["lr"])

    def on_log(self, run: Any, line: Any) -> None:
        self.lines.append(dict(line))

    def on_evaluation_end(self, run: Any, name: str, metrics: Any) -> None:
        self.evaluated.append(run.timer.batch)


def watched(**settings: Any) -> Watch:
    """Train, and return what was seen."""
    watch = Watch()
    trainer(callbacks=[watch, *settings.pop("callbacks", [])], **settings).fit()
    return watch


def sizes_of(policy: Any, max_duration: str, **facts: Any) -> list[int]:
    horizon = Horizon(max_duration, **facts)
    return [step.size for step in walk(horizon, as_policy(policy).bind(horizon))]


def from_file(text: str) -> Any:
    """The plan of a run file."""
    return build_plan(parse_run_file(text))


RUN = "max_duration: 2ep\ndata: {num_samples: 100}\nbatch_size: 10\n"


# ---- Composer #146 ----


@says(1, "a time is an amount and a unit")
def _() -> None:
    for text in ("90ep", "500ba", "1000sp", "4096tok"):
        assert str(Time(text)) == text


@says(2, "times of one unit compare, add and subtract")
def _() -> None:
    assert Time("2ep") > Time("1ep") == Time("3ep") - Time("2ep")
    assert Time("2ep") + Time("1ep") == Time("3ep")


@says(3, "times of different units are not mixed up")
def _() -> None:
    assert Time("1ep") != Time("1ba")
    for mixed in (lambda: Time("1ep") < Time("1ba"), lambda: Time("1ep") + Time("1ba")):
        with pytest.raises(UnitError, match="convert one"):
            mixed()


@says(4, "raw integers, with a UserWarning")
def _() -> None:
    with pytest.warns(UserWarning, match="no unit"):
        assert Time("2ep") + 1 == Time("3ep")
    with pytest.warns(UserWarning, match="no unit"):
        assert Time("2ep") > 1


@says(5, "getters for the amount as an integer, and the unit")
def _() -> None:
    assert (int(Time("90ep")), Time("90ep").unit) == (90, "ep")
    assert Time("90ep").amount == 90


@says(6, "a timer is attached to the trainer's state")
def _() -> None:
    one = trainer()
    assert isinstance(one.timer, Timer)
    assert one.timer is one.run.timer


@says(7, "the timer tracks epochs, batches, samples, tokens")
def _() -> None:
    timer = Timer(Horizon("2ep", dataset_num_samples=10))
    timer.update(10, tokens=70)
    assert (timer.epoch, timer.batch, timer.sample, timer.token) == (1, 1, 10, 70)


@says(8, "its counters are Time objects: integers by name, times by unit")
def _() -> None:
    timer = Timer.at(Timestamp(epoch=1, batch=3, sample=30), Horizon("9ba"))
    assert type(timer.epoch) is int
    assert (timer.get("ep"), timer.get("ba")) == (Time("1ep"), Time("3ba"))
    documented("guides/time.md", "`timer.get(unit)` is the same as a `Time`")


@says(9, "tokens are 0 if nobody counts them")
def _() -> None:
    timer = Timer(Horizon("9ba"))
    timer.update(8)
    assert timer.token == 0


@says(10, "one update(samples=, tokens=) at the end of a batch")
def _() -> None:
    timer = Timer(Horizon("9ba"))
    timer.update(samples=8, tokens=64)
    assert (timer.batch, timer.sample, timer.token) == (1, 8, 64)


@says(11, "counters within the epoch")
def _() -> None:
    timer = Timer(Horizon("2ep", dataset_num_samples=10))
    for size in (6, 4, 6):
        timer.update(size, tokens=size)
    now = timer.timestamp
    assert (now.batch_in_epoch, now.sample_in_epoch, now.token_in_epoch) == (1, 6, 6)


class Stream:
    """Collated batches of any size."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"x": torch.ones(n, 2), "mask": torch.ones(n, 5)} for n in (3, 4, 2)])


def emptied(loader: StepLoader) -> Timer:
    """The clock after all steps."""
    for _ in loader:
        loader.finish()
    return loader.timer


def counted(**facts: Any) -> Timer:
    """The clock after these batches, in steps of three samples."""
    return emptied(StepLoader(DataSpec(Stream(), **facts), 3, max_duration="1ep"))


@says(12, "data may count the samples and tokens of a batch")
def _() -> None:
    timer = counted(
        get_num_samples_in_batch=lambda batch: len(batch["x"]),
        get_num_tokens_in_batch=lambda batch: int(batch["mask"].sum()),
    )
    assert (timer.sample, timer.token) == (9, 45)


@says(13, "by default, samples are counted")
def _() -> None:
    assert counted().sample == 9


@says(14, "tokens are not tracked if nobody says how many there are")
def _() -> None:
    assert counted().token == 0
    with pytest.raises(StrettoError, match="tokens"):
        trainer(max_duration="100tok").fit()


@says(15, "partial batches count what they have, and may be dropped")
def _() -> None:
    facts = {"dataset_num_samples": 10}
    assert sizes_of(4, "2ep", **facts) == [4, 4, 2, 4, 4, 2]
    assert sizes_of(4, "2ep", last_batch="drop", **facts) == [4, 4, 4, 4]


@says(16, "the length of a data set is its number of samples")
def _() -> None:
    assert trainer().run.horizon.dataset_num_samples == len(DATA) == N


@says(17, "the tokens of a data set are stated, not asked of it")
def _() -> None:
    class Asked(TensorDataset):
        def get_num_tokens(self) -> int:
            raise AssertionError("it is not called")

    spec = DataSpec(Asked(*DATA.tensors), num_tokens=N * 7)
    assert StepLoader(spec, 4, max_duration="1ep").horizon.dataset_num_tokens == N * 7
    documented("guides/data.md", "`DataSpec(data, num_tokens=data.get_num_tokens())`")


@says(18, "a wrong number of tokens is noticed")
def _() -> None:
    facts = {"num_samples": 9, "num_tokens": 8}
    with pytest.warns(UserWarning, match="num_tokens is 8"):
        counted(**facts, get_num_tokens_in_batch=lambda batch: len(batch["x"]))


class Doubled(DataSpec):
    """Data whose samples have two tokens each."""

    def count_tokens(self, batch: Any) -> int | None:
        return 2 * self.count_samples(batch)


@says(19, "custom data inherit DataSpec and override it")
def _() -> None:
    assert emptied(StepLoader(Doubled(Stream()), 3, max_duration="1ep")).token == 18


@says(20, "max_duration in epochs, steps, samples or tokens")
def _() -> None:
    data = DataSpec(DATA, tokens_per_sample=2)
    for length, batches in (("1ep", 6), ("5ba", 5), ("20sp", 5), ("16tok", 2)):
        assert len(watched(data=data, max_duration=length).sizes) == batches


@says(21, "trainer.get_elapsed_duration() in [0, 1]")
def _() -> None:
    one = trainer()
    assert one.get_elapsed_duration() == 0.0
    one.fit()
    assert one.get_elapsed_duration() == 1.0


FACTS: dict[str, Any] = {
    "dataset_num_samples": 100,
    "dataset_num_tokens": 1000,
    "max_training_duration": "90ep",
    "batch_size": 10,
}


def converted(time: str, unit: str, *facts: str) -> str:
    """The time in the unit; without any of the facts, an error names it."""
    for fact in facts:
        with pytest.raises(ConversionError, match=fact):
            convert(time, unit, **{name: FACTS[name] for name in facts if name != fact})
    return convert(time, unit, **{name: FACTS[name] for name in facts}).to_timestring()


@says(22, "a static convert(time, unit, dataset_num_samples=...)")
def _() -> None:
    assert converted("0.5ep", "sp", "dataset_num_samples") == "50sp"


@says(23, "it is of the timing module, not of the timer")
def _() -> None:
    assert stretto.timing.convert is convert
    assert not hasattr(Timer, "convert")


@says(24, "epochs and batches")
def _() -> None:
    facts = ("dataset_num_samples", "batch_size")
    assert converted("2ep", "ba", *facts) == "20ba"
    assert converted("20ba", "ep", *facts) == "2ep"


@says(25, "epochs and samples")
def _() -> None:
    assert converted("2ep", "sp", "dataset_num_samples") == "200sp"
    assert converted("200sp", "ep", "dataset_num_samples") == "2ep"


@says(26, "batches and samples")
def _() -> None:
    assert converted("3ba", "sp", "batch_size") == "30sp"
    assert converted("30sp", "ba", "batch_size") == "3ba"


@says(27, "epochs and tokens")
def _() -> None:
    assert converted("2ep", "tok", "dataset_num_tokens") == "2000tok"
    assert converted("2000tok", "ep", "dataset_num_tokens") == "2ep"


@says(28, "0.1dur of 90ep is 9ep")
def _() -> None:
    assert converted("0.1dur", "ep", "max_training_duration") == "9ep"
    assert converted("9ep", "dur", "max_training_duration") == "0.1dur"


@says(29, "fractions and other units, by chains")
def _() -> None:
    facts = ("max_training_duration", "dataset_num_samples")
    assert converted("0.1dur", "sp", *facts) == "900sp"
    assert converted("0.1dur", "ba", *facts, "batch_size") == "90ba"
    assert converted("90ba", "dur", *facts, "batch_size") == "0.1dur"


@says(30, "the parameters are given explicitly")
def _() -> None:
    with pytest.raises(TypeError):
        convert("1ep", "sp", 100)  # type: ignore[call-arg]
    with pytest.raises(ConversionError, match="dataset_num_samples"):
        convert("1ep", "sp")


@says(31, "a conversion may be inaccurate if a fact changes later")
def _() -> None:
    assert convert("1ep", "ba", dataset_num_samples=100, batch_size=10) == Time("10ba")
    ramp = plan(Horizon("1ep", dataset_num_samples=100), "0sp:10 50sp:25")
    assert ramp.num_batches == 7, "a plan knows the sizes of all batches"


@says(32, "schedules in closed form from the elapsed duration")
def _() -> None:
    half = as_schedule(lambda timer: 1 - timer.get_elapsed_duration()).bind(Horizon("10ba"))
    line = Linear(1, 0).bind(Horizon("10ba"))
    assert all(half(at) == line(at) for at in (Timestamp(batch=b) for b in range(10)))


@says(33, "so they work with data of unknown size")
def _() -> None:
    factor = as_schedule(lambda timer: 1 - timer.get_elapsed_duration())
    assert factor.bind(Horizon("100sp"))(Timestamp(sample=25)) == 0.75
    with pytest.warns(stretto.errors.PlanWarning, match="'sp', 'ba' or 'tok'"):
        assert factor.bind(Horizon("4ep"))(Timestamp(epoch=1, sample=99)) == 0.75
    with pytest.raises(ConversionError, match="'sp', 'ba' or 'tok'"):
        Linear(1, 0).bind(Horizon("4ep"))


@says(34, "convert can initialise torch schedulers")
def _() -> None:
    steps = int(convert("2ep", "ba", dataset_num_samples=100, batch_size=10))
    schedule = from_torch(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, steps))
    assert schedule.bind(Horizon("20ba"))(Timestamp(batch=5)) == pytest.approx(0.75)


@says(35, "the timer tracks the training loop")
def _() -> None:
    one = trainer()
    one.fit()
    assert (one.timer.epoch, one.timer.batch, one.timer.sample) == (2, 12, 48)


@says(36, "times as text in schedules")
def _() -> None:
    factor = Cosine(end=0.1, warmup="2ba").bind(Horizon("10ba"))
    assert [factor(Timestamp(batch=batch)) for batch in (0, 1, 2)] == [0.0, 0.5, 1.0]


@says(37, "the interval of checkpoints is a time")
def _(folder: Path) -> None:
    trainer(folder=folder, checkpoint=Checkpointing("0.5ep", keep=9)).fit()
    assert len([*folder.rglob("manifest.json")]) == 4


@says(38, "the interval of flushing is a time")
def _() -> None:
    assert Logging(flush="5ba").flush == "5ba"
    with pytest.raises(TimeError, match="write"):
        trainer(log={"flush": "often"})


@says(39, "the interval of logging is a time")
def _() -> None:
    assert [line["ba"] for line in watched(log={"every": "25%", "console": False}).lines] == [
        *(3, 6, 9, 12)
    ]


@says(40, "drop-in replacements for the schedulers of torch")
def _() -> None:
    has_test("schedules/test_against_torch.py", "test_the_factor_before_each_step_is_that_of_torch")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs, ours = torch.optim.lr_scheduler.StepLR(optimizer, 3), StepDecay("3ba", 0.1)
    factor = ours.bind(Horizon("9ba"))
    for batch in range(9):
        assert factor(Timestamp(batch=batch)) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


@says(41, "the algorithms take times")
def _() -> None:
    for make in (
        lambda: algorithms.LayerFreezing(["a"], start="50%"),
        lambda: algorithms.StochasticDepth(["a"], rate=0.2, warmup="5%"),
        lambda: algorithms.ExponentialMovingAverage(half_life="100ba"),
    ):
        assert make() is not None
    with pytest.raises(TimeError, match="write"):
        algorithms.LayerFreezing(["a"], start="half")


@says(42, "functional forms of the algorithms take no timer")
def _() -> None:
    import inspect

    for name in ("freeze", "truncate", "select", "drop_layers", "scale"):
        names = inspect.signature(getattr(algorithms, name)).parameters
        assert names
        assert not {"timer", "run", "step"} & set(names)


@says(43, "evaluations have an interval in any unit")
def _() -> None:
    watch = watched(evaluate=Evaluation(DATA, "4ba"))
    assert watch.evaluated == [4, 8, 12]


@says(44, "run validation every 1% of the run")
def _() -> None:
    due = Every("1%").bind(Horizon("300ba"))
    fired = [b for b in range(300) if due(Timestamp(batch=b), Timestamp(batch=b + 1))]
    assert fired == [*range(2, 300, 3)]
    assert watched(evaluate=Evaluation(DATA, "25%")).evaluated == [3, 6, 9, 12]


@says(45, "wall clock in the timer: every 30 minutes")
def _() -> None:
    due = Every("30m").bind(Horizon("9ba"))
    before, after = (Timestamp(run_nanoseconds=minutes * 60 * 10**9) for minutes in (29, 31))
    assert due(before, after)
    assert not due(after, after)
    assert after.get("sec") == Time("31m")


@says(46, "the length of a run in wall-clock time")
def _() -> None:
    horizon = Horizon("1h30m")
    assert horizon.elapsed(Timestamp(run_nanoseconds=45 * 60 * 10**9)) == 0.5


@says(47, "wall clock inside a schedule of a run of epochs: as a factor of its own")
def _() -> None:
    run = Horizon("2ep", dataset_num_samples=100)
    with pytest.raises(ConversionError) as caught:
        Periods([("30m", Linear(0, 1)), ("rest", Cosine())]).bind(run)
    assert "Linear(0, 1, over='30m') * Cosine()" in caught.value.message.instead
    factor = (Linear(0, 1, over="30m") * Cosine()).bind(run)
    assert factor(Timestamp(sample=100, run_nanoseconds=15 * 60 * 10**9)) == 0.25
    text = RUN + "schedules: {lr: [{Linear: {start: 0, end: 1, over: 30m}}, {Cosine: {}}]}\n"
    assert "wall clock" in "\n".join(from_file(text).warnings)


@says(48, "variable batches: ask for the current size at each step")
def _() -> None:
    run = prepare(range(20), "0sp:2 8sp:6", max_duration="1ep")
    run.bind(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    seen = []
    for step in run:
        seen.append((run.batch_size, step.num_samples))
        run.finish()
    assert seen == [(2, 2)] * 4 + [(6, 6)] * 2


@says(49, "wrap default torch schedulers")
def _() -> None:
    has_test("optim/test_from_torch.py", "test_every_scheduler_of_torch_sets_what_it_sets_in_torch")
    has_test("optim/test_resume.py", "test_every_scheduler_of_torch_goes_on_to_the_last_bit")
    schedule = from_torch(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), every="1ep")
    assert schedule.bind(Horizon("4ep"))(Timestamp(epoch=2)) == 0.25


@says(50, "methods that use arbitrary schedulers: also one that follows a metric")
def _() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    follows = from_torch(lambda o: plateau(o, patience=0), monitor="validation/loss")
    evaluation = Evaluation(DATA, "1ba", loss=lambda model, batch: torch.ones(()))
    one = trainer(evaluate=evaluation, schedules={"lr": follows}, max_duration="4ba")
    assert one.plan is not None
    assert any("lr follows 'validation/loss'" in line for line in one.plan.warnings)
    one.fit()
    assert one.step.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)
    factory = "{target: 'torch.optim.lr_scheduler:ReduceLROnPlateau', patience: 0}"
    file = f"{RUN}schedules: {{lr: {{from_torch: {{factory: {factory}, monitor: test/loss}}}}}}\n"
    with pytest.raises(ConfigError, match="test/loss"):
        from_file(file)
    assert from_file(file + "evaluate: {name: test, every: 1ep}\n").scheduled == ("lr",)


@says(51, "a very simple API for schedules of your own")
def _() -> None:
    halved = as_schedule(lambda timer: 0.5**timer.epoch).bind(Horizon("3ep"))
    assert [halved(Timestamp(epoch=epoch)) for epoch in range(3)] == [1.0, 0.5, 0.25]


class TriangleScheduler:
    """The issue's own class."""

    def get_factor(self, timer: Timer) -> float:
        frac = timer.get_current_period_frac_elapsed()
        return frac if frac <= 0.5 else (1 - frac)


class MilestoneDecayScheduler:
    """The issue's own class; the list of drops is summed."""

    def __init__(self, milestones: list[Time], decay: float) -> None:
        super().__init__()
        self.milestones = milestones
        self.decay = decay

    def get_factor(self, timer: Timer) -> float:
        period_time = timer.get_current_period_time()
        num_drops = sum([m >= period_time for m in self.milestones])
        return self.decay ** (num_drops)


def factors(schedule: Any, run: Horizon, samples: tuple[int, ...], size: int = 10) -> list[float]:
    """The factors at these samples, in batches of a size."""
    bound, n = as_schedule(schedule).bind(run), run.dataset_num_samples or 1
    stamps = [
        Timestamp(batch=s // size, sample=s, epoch=s // n, sample_in_epoch=s % n) for s in samples
    ]
    return [bound(stamp) for stamp in stamps]


NINETY = Horizon("90ep", dataset_num_samples=100, batch_sizes=10)


@says(52, "stateless get_factor(timer)")
def _() -> None:
    assert factors(TriangleScheduler(), Horizon("100sp"), (75, 25, 75)) == [0.25, 0.25, 0.25]


@says(53, "almost like one-line functions")
def _() -> None:
    triangle = as_schedule(lambda t: min(t.get_elapsed_duration(), 1 - t.get_elapsed_duration()))
    assert factors(triangle, Horizon("100sp"), (25, 50, 75)) == [0.25, 0.5, 0.25]


@says(54, "get_current_period_frac_elapsed() in a triangle")
def _() -> None:
    periods = Periods([("40%", TriangleScheduler()), ("rest", 1.0)])
    assert factors(periods, Horizon("100sp"), (10, 20, 30, 50)) == [0.25, 0.5, 0.25, 1.0]


@says(55, "get_current_period_time() with milestones in epochs, batches or fractions")
def _() -> None:
    for milestone, sample in (("0.5dur", 4725), ("40ep", 4450), ("400ba", 4450)):
        inner = MilestoneDecayScheduler([Time(milestone)], 0.1)
        periods = Periods([("5%", 1.0), ("rest", inner)])
        around = (sample - 10, sample + 10)
        assert factors(periods, NINETY, around) == [0.1, 1.0], milestone


@says(56, "max_duration_base_units: periods need no whole epochs")
def _() -> None:
    periods = Periods({"warmup": ("5%", Linear(0, 1)), "main": ("rest", 1.0)})
    assert factors(periods, NINETY, (225, 450)) == [0.5, 1.0]
    with pytest.raises(ConfigError, match="leave it out"):
        trainer(max_duration_base_units="sp")


@says(57, "periods of 0.05dur")
def _() -> None:
    assert factors(Periods([("0.05dur", 0.0), ("rest", 1.0)]), NINETY, (449, 450)) == [0.0, 1.0]


@says(58, "duration: -1 is the remainder: 'rest'")
def _() -> None:
    with pytest.raises(ScheduleError, match="write 'rest'"):
        Periods({"warmup": ("5%", 0.0), "main": (-1, 1.0)})  # type: ignore[dict-item]
    file = (
        RUN + "schedules: {lr: {Periods: {warmup: [5%, 0], main: {duration: LENGTH, schedule: 1}}}}"
    )
    with pytest.raises(ConfigError, match="write 'rest'"):
        from_file(file.replace("LENGTH", "-1"))
    assert from_file(file.replace("LENGTH", "rest")).values_at(1)["lr"] == 1.0


@says(59, "periods have names, in the plan and the log")
def _(folder: Path) -> None:
    periods = Periods({"warmup": ("3ba", Linear(0, 1)), "main": ("rest", Cosine())})
    one = trainer(schedules={"lr": periods}, folder=folder)
    assert one.plan is not None
    named = [change.what.partition(" ")[0] for change in one.plan.changes]
    assert named == ["'warmup'", "'main'"]
    one.fit()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    found = [(one["ba"], one["periods"]) for one in events if one["event"] == "period"]
    assert found == [(0, {"lr": "warmup"}), (3, {"lr": "main"})]


@says(60, "0.5dur in a period is of the period: 47.25 epochs")
def _() -> None:
    periods = Periods([("5%", 1.0), ("rest", MultiStep(["0.5dur"]))])
    assert factors(periods, NINETY, (4724, 4725)) == [1.0, 0.1]


@says(61, "the run's max_duration counts, not that of the settings")
def _() -> None:
    one = trainer(scale_schedule=0.5)
    assert one.run.horizon.max_duration == Time("1ep")


@says(62, "no time is used before the schedule is scaled")
def _() -> None:
    watch = watched(schedules={"lr": Linear(1, 0)}, scale_schedule=0.5)
    assert watch.rates == pytest.approx([0.1 * (1 - batch / 6) for batch in range(6)])


@says(63, "all time quantities are scaled")
def _() -> None:
    watch = watched(
        schedules={"lr": MultiStep(["1ep"])}, batch_size="0ep:2 1ep:4", scale_schedule=0.5
    )
    assert watch.sizes == [2] * 6 + [4] * 3
    assert watch.rates == pytest.approx([0.1] * 6 + [0.01] * 3)


@says(64, "scaling is a flag of the trainer")
def _() -> None:
    assert trainer(scale_schedule=2).run.horizon.max_duration == Time("4ep")
    assert from_file(RUN + "scale_schedule: 2").horizon.max_duration == Time("4ep")


@says(65, "a warm-up of 2 epochs stays so: only if it is written outside of the run")
def _() -> None:
    watch = watched(
        schedules={"lr": lambda timer: float(timer.epoch >= 2)},
        max_duration="6ep",
        scale_schedule=0.5,
    )
    assert watch.rates == [0.0] * 12 + [0.1] * 6


@says(66, "layer freezing with time")
def _() -> None:
    seen = []

    class Look(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            seen.append(run.model[0].weight.detach().clone())

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    freezing = algorithms.LayerFreezing(["0"], start="0%", end="50%")
    trainer(model=model, callbacks=[freezing, Look()]).fit()
    moved = [not torch.equal(one, two) for one, two in pairwise(seen)]
    assert moved == [True] * 5 + [False] * 6


@says(67, "selective backprop with time")
def _() -> None:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean(1)

    kept = algorithms.SelectiveBackprop(losses, keep=0.5, start="50%", end="100%")
    passed: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        passed.append(len(batch[0]))
        return losses(model, batch).mean()

    trainer(callbacks=[kept], loss=loss).fit()
    assert passed[-12:] == [4] * 7 + [2] * 5


@says(68, "stochastic depth in a run of any length")
def _() -> None:
    class Block(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden

    model = nn.Sequential(Block(), nn.Linear(3, 1))
    depth = algorithms.StochasticDepth(["0"], rate=0.5, warmup="50%")
    for length in ("2ep", "6ba", "20sp"):
        assert watched(model=model, callbacks=[depth], max_duration=length).sizes


def in_tokens(length: str) -> Trainer:
    """A run of sequences that grow in tokens."""
    ids = torch.arange(N * 8).reshape(N, 8)
    data = DataSpec([{"input_ids": one, "labels": one} for one in ids])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["input_ids"].float().mean(1, keepdim=True).expand(-1, 3)).mean()

    growing = algorithms.SequenceLengthWarmup("0tok:2 24tok:4")
    return trainer(data=data, max_duration=length, callbacks=[growing], loss=loss)


@says(69, "sequence length warm-up in runs of tokens or samples")
def _() -> None:
    for length, batches in (("56tok", 5), ("20sp", 5)):
        one = in_tokens(length)
        one.fit()
        assert one.timer.batch == batches


@says(70, "the tokens that are left are counted")
def _() -> None:
    one = in_tokens("20sp")
    one.fit()
    assert one.timer.token == 3 * 4 * 2 + 2 * 4 * 4


@says(71, "a helper from a time to its text")
def _() -> None:
    assert Time(90, "ep").to_timestring() == str(Time(90, "ep")) == "90ep"


@says(72, "counts are of all ranks")
def _() -> None:
    has_test("training/test_distributed.py", "test_two_ranks_train_like_one")
    run = prepare(range(20), 4, max_duration="1ep")
    run.bind(torch.optim.SGD([torch.zeros(1)], lr=0.1), rank=0, world_size=2)
    step = run.begin()
    assert step is not None
    assert (step.num_samples, step.local_num_samples) == (4, 2)
    assert run.loader.finish(tokens=0, seconds=0.0).sample == 4


# ---- bert24 #76 ----


@says(73, "a trainer with a batch ramp")
def _() -> None:
    assert watched(batch_size="0sp:2 8sp:8").sizes == [2] * 4 + [8, 8] + [8] * 3


@says(74, "on top of Composer's trainer, not a copy of it")
def _() -> None:
    has_test("integrations/test_composer.py", "test_a_trainer_follows_the_plan")
    documented("coming-from/composer.md", "callbacks=[attach(")


@says(75, "micro-batch * devices * accumulation = batch")
def _() -> None:
    ramp = rampup(4096, "10%", world_size=8, micro_batch_size=128)
    planned = plan(
        Horizon("1ep", dataset_num_samples=10**6), ramp, world_size=8, micro_batch_size=128
    )
    full = [stage for stage in planned.stages if stage.batches]
    assert [8 * 128 * (stage.accumulation or 0) for stage in full][:3] == [1024, 2048, 4096]


def ramped(world_size: int, **more: Any) -> tuple[int, ...]:
    """The sizes of a ramp to 4096."""
    ramp: Any = rampup(4096, "10%", world_size=world_size, micro_batch_size=128, **more)
    sizes: tuple[int, ...] = ramp.sizes
    return sizes


@says(76, "log2 of the accumulation stages: 1024, 2048, 4096")
def _() -> None:
    assert ramped(8) == (1024, 2048, 4096)


@says(77, "many devices leave less of a ramp")
def _() -> None:
    assert ramped(32) == (4096,)
    with pytest.raises(BatchSizeError, match="world_size"):
        ramped(64)


def logged(batch_size: Any, **more: Any) -> list[dict[str, float]]:
    return watched(batch_size=batch_size, log={"every": "8sp", "console": False}, **more).lines


@says(78, "logging every so many samples, in the ramp, too")
def _() -> None:
    assert [line["sp"] for line in logged("0sp:2 16sp:8")] == [8, 16, 24, 32, 40, 48]


@says(79, "the logged loss is the mean over the samples since the last line")
def _() -> None:
    lines = [logged(size, schedules={"lr": 0.0}) for size in ("0sp:2 16sp:8", 8)]
    ramp, flat = ([line["loss"] for line in one] for one in lines)
    assert ramp == pytest.approx(flat)


@says(80, "the length of the ramp is a time")
def _() -> None:
    for length in ("10%", "1ep", "9000sp", "1Mtok"):
        ramp = rampup(64, length, world_size=2, micro_batch_size=8)
        assert ramp.times() == (Time(length),)


@says(81, "the first size, else the lowest possible")
def _() -> None:
    assert ramped(8, initial_global_train_batch_size=2048) == (2048, 4096)
    assert ramped(8)[0] == 8 * 128


@says(82, "without a ramp, the loss of a plain loop")
def _() -> None:
    has_test(
        "training/test_trainer.py",
        "test_without_a_ramp_it_is_a_plain_pytorch_loop_to_the_last_bit",
    )


@says(83, "without a ramp, the throughput of a plain loop: a measured row")
def _() -> None:
    loops = (ROOT / "bench" / "step_cost_pair.py").read_text(encoding="utf-8")
    assert '"bare, wide": run_bare_wide' in loops
    assert '"stretto, wide": run_wide' in loops


@says(84, "the first stage of a ramp is a run at that size")
def _() -> None:
    has_test(
        "training/test_trainer.py",
        "test_the_first_stage_of_a_ramp_is_a_run_at_that_size_to_the_last_bit",
    )


@says(85, "the trainer that nobody had verified: any micro-batches give one result")
def _() -> None:
    weights = []
    for micro in (1, 3, 8):
        one = trainer(batch_size="0sp:2 8sp:8", micro_batch_size=micro)
        one.fit()
        weights.append(next(one.model.parameters()).detach())
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0])


@says(86, "level 1, an algorithm that removes samples: sizes are decided before reading")
def _() -> None:
    documented("guides/batch-sizes.md", "No sample is read and thrown away")
    seen: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.extend(batch[0][:, 0].tolist())
        return model(batch[0]).mean()

    trainer(batch_size="0sp:2 8sp:8", max_duration="1ep", loss=loss).fit()
    assert sorted(seen[-N:]) == sorted(DATA.tensors[0][:, 0].tolist())


@says(87, "level 2, several loaders in the first epoch: one loader, any sizes")
def _() -> None:
    loader = StepLoader(DATA, "0sp:2 8sp:8", max_duration="1ep")
    assert [step.num_samples for step in loader] == [2] * 4 + [8, 8]


@says(88, "level 3, a loader whose sizes follow the tokens")
def _() -> None:
    data = DataSpec(DATA, tokens_per_sample=100)
    loader = StepLoader(data, "0tok:2 800tok:8", max_duration="1ep")
    assert [step.num_samples for step in loader] == [2] * 4 + [8, 8]


@says(89, "it restarts")
def _() -> None:
    whole = [step.timestamp.sample for step in StepLoader(DATA, "0sp:2 8sp:8", max_duration="1ep")]
    first = StepLoader(DATA, "0sp:2 8sp:8", max_duration="1ep")
    for _ in range(3):
        next(first)
        first.finish()
    second = StepLoader(DATA, "0sp:2 8sp:8", max_duration="1ep")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [step.timestamp.sample for step in second] == whole[3:]


@says(90, "it works with the other features of Composer")
def _() -> None:
    has_test("integrations/test_composer.py", "test_algorithms_and_callbacks_stay")
    has_test("integrations/test_composer.py", "test_schedulers_of_the_trainer_stay")


@says(91, "it plays well with callbacks and algorithms that exist")
def _() -> None:
    documented("coming-from/composer.md", "algorithms and callbacks work as before")


@says(92, "more accurate loss logging")
def _() -> None:
    has_test(
        "training/test_trainer.py",
        "test_the_logged_loss_is_the_sample_weighted_mean_since_the_last_log",
    )


@says(93, "packed sequences with a ramp")
def _() -> None:
    has_test("training/test_following.py", "test_a_packing_run_is_the_same_with_any_workers")


@says(94, "ablations: a run with a ramp and one without are compared on one clock")
def _() -> None:
    runs = [logged(size, max_duration="1ep") for size in ("0sp:2 8sp:8", 8)]
    assert [[line["sp"] for line in run] for run in runs] == [[8, 16, 24]] * 2


# ---- torchtune #2199 ----


TRIED: list[int] = []


class Capacity(nn.Module):
    """Runs out of memory if a batch has more samples than there is room for."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.layer, self.capacity = nn.Linear(2, 1), capacity

    def forward(self, x: Tensor) -> Tensor:
        TRIED.append(len(x))
        if len(x) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        found: Tensor = self.layer(x)
        return found


def asked(capacity: int, **how: Any) -> Answer:
    """The largest micro-batch of a model; `TRIED` has the sizes that were tried."""
    TRIED.clear()
    with torch.random.fork_rng():
        model = Capacity(capacity)
    step = SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean())
    return find_batch_size(step, torch.ones(2, 2), **{"maximum": 64} | how)


@says(95, "the largest batch that does not run out of memory")
def _() -> None:
    answer = asked(21)
    assert answer.size in TRIED
    assert 20 <= answer.size <= 21


@says(96, "grow the batch during training")
def _() -> None:
    sizes = sizes_of(LinearRamp(4, 16, "48sp"), "96sp")
    assert (sizes[0], max(sizes)) == (4, 16)


@says(97, "use_maximum_batch_size: true, by default false")
def _() -> None:
    text = "max_duration: 2ep\ndata: {num_samples: 100}\n"
    uses = "use_maximum_batch_size: true\n"
    found = [parse_run_file(head + uses) for head in (text, text + "batch_size: 10\n")]
    assert [str(one.batch_size) for one in found] == [str(as_policy("auto")), "Fixed(10)"]
    assert [one.micro_batch_size for one in found] == [None, "auto"]
    unused = parse_run_file(text + "batch_size: 10\n" + uses.replace("true", "false"))
    assert unused.micro_batch_size is None
    by_name = {"loss": lambda m, x: m(x).mean(), "data": [torch.ones(2)] * 64, "batch_size": None}
    one = trainer(model=Capacity(16), use_maximum_batch_size=True, **by_name)
    step = one.run.begin()
    assert step is not None
    assert step.num_samples <= 16


GROW = "batch_increase_function: {target: 'tests.test_sentences:grown'}\n"


def grown(epoch: int, current_batch_size: int) -> int:
    """The example of the RFC: grow in some epochs."""
    return current_batch_size if epoch in (1, 2) else 0


@says(98, "batch_increase_function, not required")
def _() -> None:
    assert sizes_of(IncreaseFunction(grown, 8, 64), "3ep", dataset_num_samples=32) == [
        *[8] * 4,
        *[16] * 2,
        32,
    ]
    assert str(parse_run_file(RUN).batch_size) == "Fixed(10)"


@says(99, "it gets the epoch and the current size, and returns the increment")
def _() -> None:
    seen = []

    def noted(epoch: int, current: int) -> int:
        seen.append((epoch, current))
        return 4

    sizes_of(IncreaseFunction(noted, 4, 99), "2ep", dataset_num_samples=16)
    assert [*dict.fromkeys(seen)] == [(0, 4), (1, 8)]


@says(100, "0, or None, for no increase")
def _() -> None:
    for nothing in (0, None):
        policy = IncreaseFunction(lambda epoch, size: nothing, 8, 64)  # noqa: B023
        assert sizes_of(policy, "2ep", dataset_num_samples=16) == [8] * 4


@says(101, "only if increment + size <= max_batch_size")
def _() -> None:
    policy = IncreaseFunction(lambda epoch, size: 5, 8, 13)
    assert sizes_of(policy, "3ep", dataset_num_samples=13) == [13, 13, 13]


@says(102, "the bound is found before training")
def _() -> None:
    model = Capacity(16)
    policy = IncreaseFunction(lambda epoch, size: 6, 4, "auto")
    one = trainer(
        model=model, data=[torch.ones(2)] * 64, batch_size=policy, loss=lambda m, x: m(x).mean()
    )
    assert one.timer.batch == 0
    assert one.found_maximum is not None
    assert one.found_maximum[0] <= 16


@says(103, "ways that follow the optimizer's measurements are choices")
def _() -> None:
    for name in ("NoiseScale", "NormTest", "Plateau"):
        assert hasattr(stretto.batching, name)
    has_test("training/test_following.py", "test_a_resumed_run_decides_as_the_whole_one")


@says(104, "decrease until it fits: chunk //= 2")
def _() -> None:
    answer = asked(21, method="halve")
    assert answer.size <= 21
    assert TRIED.index(64) < TRIED.index(32)


@says(105, "the random state is restored")
def _() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    asked(21)
    assert torch.equal(torch.get_rng_state(), before)


@says(106, "each chunk's loss has its share of the batch")
def _() -> None:
    step = next(StepLoader(DATA, 10, max_duration="10sp", micro_batch_size=4))
    assert [micro.num_samples for micro in step] == [4, 3, 3]
    assert [micro.weight for micro in step] == pytest.approx([0.4, 0.3, 0.3])


@says(107, "is_oom_exception")
def _() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


@says(108, "not enough memory even for one sample")
def _() -> None:
    with pytest.raises(FitError, match="memory ran out"):
        asked(0)


@says(109, "binary search")
def _() -> None:
    answer = asked(21)
    assert answer.too_large is not None
    assert answer.size < answer.too_large
    assert len(TRIED) < 21


@says(110, "predict without running out of memory")
def _() -> None:
    answer = asked(1 << 20, method="predict")
    assert answer.cost.num_out_of_memory == 0


@says(111, "memory grows linearly: memory(2) - memory(1)")
def _() -> None:
    has_test("memory/test_finder.py", "test_ways_of_real_steps")


@says(112, "allocated and reserved memory")
def _() -> None:
    has_test("memory/test_limits.py", "test_what_tensors_hold")


@says(113, "for each device of several")
def _() -> None:
    has_test("memory/test_finder.py", "test_processes_with_different_memory_find_one_answer")


@says(114, "sharded models, too")
def _() -> None:
    has_test("memory/test_phantom.py", "test_a_model_is_sharded_before_it_has_memory")


@says(115, "the memory of the device from its properties")
def _() -> None:
    has_test("memory/test_limits.py", "test_what_the_machine_has")


@says(116, "rounded to the closest lower power of two")
def _() -> None:
    for method in ("halve", "bisect", "predict"):
        assert asked(21, power_of_two=True, method=method).size == 16


@says(117, "(memory - model) / memory of a sample")
def _() -> None:
    answer = asked(21, method="predict")
    assert answer.size <= 21


@says(118, "the optimizer steps within a trial")
def _() -> None:
    has_test("memory/test_trial.py", "test_the_optimizer_may_fail_in_the_middle")


@says(119, "gradient accumulation beside it")
def _() -> None:
    answer = asked(8, accumulation=3)
    assert answer.size <= 8
    assert TRIED.count(answer.size) >= 3


@says(120, "FSDP and activation checkpointing with a ramp")
def _() -> None:
    has_test("training/test_fully_sharded.py", "test_train_like_one_process")
    documented("how-to/fsdp2.md", "fully_shard")


@says(121, "compiled models with a ramp")
def _() -> None:
    has_test("training/test_compiled.py", "test_compile_true_trains_as_without")


@says(122, "the learning rate follows the batch")
def _() -> None:
    watch = watched(batch_size="0sp:4 24sp:16", rule=SquareRootRule(4))
    assert watch.rates == pytest.approx([0.1] * 6 + [0.2] * 2)


@says(123, "deterministic mode")
def _() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert watched(batch_size="0sp:2 8sp:8").sizes[-1] == 8
    finally:
        torch.use_deterministic_algorithms(mode=False)


@says(124, "timer.get_num_XXX calls: a counter by name")
def _() -> None:
    timer = Timer.at(Timestamp(epoch=1, batch=2, sample=3, token=4), Horizon("9ba"))
    assert [getattr(timer, name) for name in ("epoch", "batch", "sample", "token")] == [1, 2, 3, 4]


@says(125, "whatever uses the length of the run sees the scaled one")
def _() -> None:
    one = trainer(
        scale_schedule=0.5,
        schedules={"lr": Linear(1, 0)},
        batch_size="0ep:2 50%:4",
        evaluate=Evaluation(DATA, "50%"),
    )
    assert one.plan is not None
    assert [stage.size for stage in one.plan.stages] == [2, 4]
    assert next(event for event in one.plan.events if event.name == "validation").count == 2


NAMED = """
schedules:
  lr:
    Periods:
      - warmup:
          duration: 0.05dur
          scheduler: {Linear: {start: 0, end: 1}}
      - main:
          duration: rest
          scheduler: {MultiStep: [0.5dur, 0.75dur]}
"""


@says(126, "periods in YAML, each a duration and a scheduler with arguments")
def _() -> None:
    found = from_file(RUN.replace("2ep", "90ep") + NAMED)
    assert [found.at(time).values["lr"] for time in ("2.25ep", "4.5ep", "48ep")] == pytest.approx(
        [0.5111, 1.0, 0.1], abs=1e-4
    )
    assert [change.what.partition(" ")[0] for change in found.changes[:2]] == [
        "'warmup'",
        "'main'",
    ]


@says(127, "the batch size of a DataLoader is not what counts")
def _() -> None:
    assert watched(data=DataLoader(DATA, batch_size=12)).sizes == [4] * 12


@says(128, "a class with get_factor(timer) is a schedule")
def _() -> None:
    watch = watched(schedules={"lr": TriangleScheduler()}, max_duration="4ba")
    assert watch.rates == pytest.approx([0.0, 0.025, 0.05, 0.025])
    text = RUN + "schedules: {lr: {target: 'tests.test_sentences:TriangleScheduler'}}"
    assert from_file(text).values_at(5)["lr"] == 0.25


@says(129, "the issue's names are answered by ours")
def _() -> None:
    for name, value, ours in (
        ("max_epochs", 3, "max_duration"),
        ("validate_frequency", "1%", "evaluate"),
        ("max_duration_base_units", "sp", "leave it out"),
    ):
        with pytest.raises(ConfigError, match=ours):
            trainer(**{name: value})
        with pytest.raises(ConfigError, match=ours):
            from_file(RUN + f"{name}: {value}\n")


@says(130, "DataSpec is a class that custom ones inherit")
def _() -> None:
    assert Doubled(Stream()).count_tokens(next(iter(Stream()))) == 6
    assert isinstance(DataSpec.of(Doubled(Stream())), Doubled)


@says(131, "validate every 1% and checkpoint every 30 minutes in one run")
def _(folder: Path) -> None:
    one = trainer(evaluate=Evaluation(DATA, "25%"), checkpoint=Checkpointing("30m"), folder=folder)
    one.fit()
    assert one.plan is not None
    follows = {event.name: event.follows for event in one.plan.events}
    assert follows["validation"] is None
    assert follows["checkpoint"] is not None


@says(132, "level 1, as sequence length warm-up does: before_train_batch")
def _() -> None:
    cut = []

    class Half(Callback):
        changes_tokens = True

        def transform_batch(self, run: Any, batch: Any) -> Any:
            cut.append(len(batch[0]))
            return batch

    assert watched(callbacks=[Half()]).sizes == [4] * 12
    assert cut[-12:] == [4] * 12


@says(133, "bounds of the search")
def _() -> None:
    answer = asked(21, minimum=4, maximum=16, method="bisect")
    assert answer.size == 16
    assert min(TRIED) >= 2


@says(134, "the cache is emptied after a trial")
def _() -> None:
    has_test("memory/test_limits.py", "test_what_memory_a_step_held_when_it_ran_out_comes_back")


@says(135, "neither 1 nor 2 fit: an error that says so")
def _() -> None:
    for method in ("halve", "bisect", "predict"):
        with pytest.raises(FitError, match="memory ran out"):
            asked(0, method=method)


@says(136, "batch_increase_function as a key of the recipe")
def _() -> None:
    policy = parse_run_file(RUN + GROW).batch_size
    assert isinstance(policy, IncreaseFunction)
    assert (policy.start, policy.max_batch_size) == (10, "auto")


@says(137, "a parameter in torchtune's recipes")
def _() -> None:
    has_test("integrations/test_torchtune.py", "test_the_recipe_follows_the_plan")
    documented("coming-from/torchtune.md", "global_batch_size")


@says(138, "the current size is asked for at each step, not kept from the start")
def _() -> None:
    seen: list[int] = []

    class Look(Callback):
        def on_batch_start(self, run: Any, step: Any) -> None:
            seen.append(run.batch_size)

    assert watched(batch_size="0sp:2 8sp:8", callbacks=[Look()]).sizes == seen


@says(139, "batch_rampup and inital_global_train_batch_size are answered by ours")
def _() -> None:
    for name in ("batch_rampup", "inital_global_train_batch_size"):
        with pytest.raises(ConfigError, match="DoublingRamp"):
            trainer(**{name: "10%"})
        with pytest.raises(ConfigError, match="DoublingRamp"):
            from_file(RUN + f"{name}: 10%\n")


@says(140, "halving and binary search as methods, with a limit of one's own")
def _() -> None:
    for method in ("halve", "bisect"):
        assert asked(21, method=method, maximum=10).size == 10


@pytest.mark.parametrize("check", ROWS)
def test_sentence(check: Callable[..., None], tmp_path: Path) -> None:
    check(*[tmp_path] * check.__code__.co_argcount)


def test_every_sentence_has_a_row() -> None:
    assert [int(row.id.partition(":")[0]) for row in ROWS] == [*range(1, 141)]
