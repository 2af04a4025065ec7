"""The order of the methods, with fake estimators; and the whole, with real ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.errors import ConfigError, FitError, cannot
from stretto.memory.finding.agreement import Agreement
from stretto.memory.finding.finder import find_batch_size
from stretto.memory.finding.methods import Finder
from stretto.memory.finding.result import Answer
from stretto.memory.measuring.limits import MemoryLimit
from stretto.memory.search import CandidateSizes
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep

LIMIT = 1_000_000


class FakeEstimator:
    """Says that a batch needs so many bytes a sample."""

    def __init__(self, slope: int = 100, certainty: str = "exact", mends: int = 0) -> None:
        self.slope = slope
        self.certainty_if_verified: Any = certainty
        self.reason = f"fake, {certainty}"
        self.num_steps = 3
        self.mends = mends
        self.sizes: set[int] = set()
        self.verified: list[int] = []

    def __call__(self, step: SupervisedStep, make: Callable[[int], Any], **_: Any) -> FakeEstimator:
        return self

    def certainty(self, size: int) -> Any:
        return self.certainty_if_verified if size in self.verified else "extrapolated"

    def guess(self, limit: int) -> None:
        return None

    def peak(self, size: int) -> int:
        return self.slope * size

    def verify(self, size: int) -> bool:
        self.verified.append(size)
        if self.mends:
            self.mends -= 1
            self.slope *= 2
            return False
        return True


def cannot_tell(*_: Any, **__: Any) -> Any:
    raise FitError(cannot("follow the model", why="it is too strange", instead="probe"))


class Capacity(nn.Module):
    """Runs out of memory where a batch has more samples than there is room for."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        TRIED.append(len(x))
        if len(x) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        result: Tensor = self.layer(x)
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("no copies are made of a model")


TRIED: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_tried() -> Iterator[None]:
    TRIED.clear()
    # Memory is given back before each trial: a collection of all that pytest and torch hold.
    gc.freeze()
    yield
    gc.unfreeze()


def ask(
    method: str = "auto",
    *,
    predict: Any = cannot_tell,
    probe: Any = cannot_tell,
    capacity: int = 1 << 20,
    sizes: CandidateSizes | None = None,
    agreement: Agreement | None = None,
    took: Callable[[int], int | None] = lambda size: 100 * size,
    monkeypatch: pytest.MonkeyPatch | None = None,
    **options: Any,
) -> Answer:
    model = Capacity(capacity)
    step = SupervisedStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean()
    )
    finder = Finder(
        step=WholeStep.of(step),
        make_batch=lambda size: torch.ones(size, 1),
        make_fake=lambda size: torch.ones(size, 1),
        sizes=sizes or CandidateSizes(maximum=1 << 20),
        limit=MemoryLimit(LIMIT, "fake"),
        reserve=options.pop("reserve", 0),
        is_here=options.pop("is_here", True),
        agreement=agreement or Agreement(),
        predict=predict,
        probe=probe,
        **options,
    )
    patched = monkeypatch or pytest.MonkeyPatch()
    held = finder.static_bytes()
    with patched.context() as patch:
        # What the real step takes is said by the test.
        def measure(work: Callable[[], object], _device: Any, **_: Any) -> int | None:
            work()
            amount = took(TRIED[-1])
            return None if amount is None else amount - held

        patch.setattr("stretto.memory.measuring.trial.footprint", measure)
        return finder.run(method)


def test_what_is_exact_is_verified_at_the_answer_and_above() -> None:
    estimator = FakeEstimator()
    answer = ask(predict=estimator, is_here=False)
    assert (answer.size, answer.certainty, answer.too_large) == (10_000, "exact", 10_001)
    assert (answer.peak, answer.cost[:4]) == (LIMIT, (3, 0, 0, 0))
    assert estimator.verified == [10_000, 10_001]
    assert TRIED == []


def test_a_curve_that_is_mended_is_asked_again() -> None:
    estimator = FakeEstimator(mends=2)
    answer = ask(predict=estimator, is_here=False)
    assert answer.size == 2_500
    assert estimator.verified == [10_000, 10_001, 2_500, 2_501]


def test_the_reserve_stays_free() -> None:
    answer = ask(predict=FakeEstimator(), is_here=False, reserve=LIMIT // 10)
    assert (answer.size, answer.rows()[0].size) == (9_000, 1)
    assert [row.headroom for row in answer.rows() if row.size in {9_000, 9_001}] == [0, -100]


@pytest.mark.parametrize(
    ("sizes", "size", "too_large"),
    [
        (CandidateSizes(multiple_of=64), 9_984, 10_048),
        (CandidateSizes(power_of_two=True), 8_192, 16_384),
        (CandidateSizes(maximum=500), 500, None),
    ],
)
def test_only_what_is_wanted(sizes: CandidateSizes, size: int, too_large: int | None) -> None:
    estimator = FakeEstimator()
    answer = ask(predict=estimator, is_here=False, sizes=sizes)
    assert (answer.size, answer.too_large) == (size, too_large)
    assert set(estimator.verified) == {size, too_large} - {None}
    assert all(row.size % sizes.multiple_of == 0 for row in answer.rows())


def test_here_an_answer_is_calibrated_by_a_tenth() -> None:
    answer = ask(predict=FakeEstimator())
    assert (answer.size, answer.certainty) == (10_000, "calibrated")
    assert TRIED == [2, 500, 1_000]
    assert answer.cost[:4] == (3, 3, 1_502, 0)


def test_a_probe_that_took_a_step_of_that_size_is_calibrated_by_another() -> None:
    """Else what libraries keep for a size that they meet would not be seen."""
    probe = FakeEstimator(certainty="calibrated")
    probe.sizes = {2, 3, 1_000}
    assert ask(probe=probe).size == 10_000
    assert TRIED == [2, 999]


def test_what_comes_on_top_is_taken_off() -> None:
    answer = ask(predict=FakeEstimator(), took=lambda size: 105 * size)
    # At the tenth 5,000 come on top; 1,050 of them are chance, and do not grow.
    assert (answer.size, answer.certainty) == (9_609, "calibrated")
    assert answer.peak is not None
    assert answer.peak <= LIMIT


def test_much_on_top_is_looked_at_again() -> None:
    # Twice what tensors need in small steps, a fifth on top in large ones.
    answer = ask(
        predict=FakeEstimator(), took=lambda size: 200 * size if size < 5_000 else 120 * size
    )
    assert (answer.size, answer.certainty) == (8_366, "tried")
    assert TRIED == [2, 500, 1_000, 5_040, 8_366]
    assert any("more than its tensors" in note for note in answer.notes)


def test_what_is_better_must_fit() -> None:
    answer = ask(
        predict=FakeEstimator(),
        took=lambda size: 200 * size if size < 5_000 else 120 * size,
        capacity=6_000,
    )
    assert (answer.size, answer.certainty, answer.cost.num_out_of_memory) == (5_040, "tried", 1)


def test_where_nothing_can_be_measured_the_answer_is_tried() -> None:
    answer = ask(predict=FakeEstimator(), took=lambda size: None)
    assert (answer.size, answer.certainty) == (10_000, "tried")
    answer = ask(predict=FakeEstimator(), took=lambda size: None, capacity=9_700)
    assert (answer.size, answer.certainty) == (9_500, "tried")


def test_a_prediction_that_is_far_off_ends_in_trials() -> None:
    answer = ask(predict=FakeEstimator(), capacity=499)
    assert (answer.size, answer.too_large, answer.certainty) == (499, 500, "tried")


def test_what_is_checked_is_tried() -> None:
    answer = ask(predict=FakeEstimator(), is_checked=True)
    assert (answer.size, answer.certainty, TRIED[-1]) == (10_000, "tried", 10_000)


@pytest.mark.parametrize("certainty", ["upper bound", "estimate"])
def test_what_is_not_exact_is_probed_here(certainty: str) -> None:
    answer = ask(predict=FakeEstimator(50, certainty), probe=FakeEstimator(200, "estimate"))
    assert (answer.size, answer.certainty) == (5_000, "calibrated")
    assert f"not predicted: it would only be an {certainty}: fake, {certainty}" in answer.notes
    answer = ask(predict=FakeEstimator(50, certainty), is_here=False)
    assert (answer.size, answer.certainty) == (20_000, certainty)


def test_where_nothing_can_tell_sizes_are_tried() -> None:
    answer = ask(capacity=9)
    assert (answer.size, answer.too_large, answer.certainty) == (9, 10, "tried")
    assert [note.split(":")[0] for note in answer.notes] == ["not predicted", "not probed"]
    with pytest.raises(FitError, match="strange"):
        ask(is_here=False)


@pytest.mark.parametrize(("method", "size"), [("try", 77), ("halve", 64)])
def test_trials_alone(method: str, size: int) -> None:
    answer = ask(method, capacity=77, sizes=CandidateSizes(maximum=256))
    assert (answer.size, answer.certainty, answer.peak) == (size, "tried", None)
    assert answer.cost.fake_steps == 0
    assert max(tried for tried in TRIED if tried <= 77) == size
    with pytest.raises(FitError, match="device_memory"):
        ask(method, is_here=False)


@pytest.mark.parametrize("method", ["predict", "probe"])
def test_one_way_alone_says_why_it_cannot(method: str) -> None:
    with pytest.raises(FitError, match="strange"):
        ask(method)


def test_memory_that_runs_out_in_tiny_steps() -> None:
    def probe(*_: Any, **__: Any) -> Any:
        raise MemoryError

    answer = ask(probe=probe, capacity=1)
    assert (answer.size, answer.too_large) == (1, 2)
    assert "memory ran out in a small step" in answer.notes[1]


def test_nothing_fits() -> None:
    with pytest.raises(FitError, match="sample"):
        ask(predict=FakeEstimator(2 * LIMIT), is_here=False)
    with pytest.raises(FitError, match="CUDA"):
        ask("try", capacity=0)


def test_ranks_get_the_same_answer(on_ranks: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "stretto.memory.measuring.trial.footprint", lambda work, device, **_: work() and None
        )
        results = on_ranks(
            [
                lambda t: ask_plain(FakeEstimator(100), t),
                lambda t: ask_plain(FakeEstimator(125), t),
            ]
        )
    assert [(answer.size, answer.too_large) for answer in results] == [(8_000, 8_001)] * 2


def ask_plain(
    estimator: Any, agreement: Agreement, method: str = "auto", capacity: int = 1 << 20
) -> Any:
    model = Capacity(capacity)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    finder = Finder(
        step=WholeStep.of(step),
        make_batch=lambda size: torch.ones(size, 1),
        make_fake=lambda size: torch.ones(size, 1),
        sizes=CandidateSizes(maximum=1 << 20),
        limit=MemoryLimit(LIMIT, "fake"),
        reserve=0,
        is_here=method == "try",
        agreement=agreement,
        predict=estimator,
        probe=cannot_tell,
    )
    return finder.run(method)


def test_ranks_with_different_memory_try_together(on_ranks: Any) -> None:
    results = on_ranks([lambda t, c=c: ask_plain(None, t, "try", c) for c in (13, 7)])
    assert [(answer.size, answer.too_large) for answer in results] == [(7, 8)] * 2


def test_no_rank_waits_for_one_that_fails(on_ranks: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("a mistake in the model")

    first, second = on_ranks(
        [lambda t: ask_plain(FakeEstimator(), t), lambda t: ask_plain(broken, t)]
    )
    assert "another rank has failed" in str(first)
    assert isinstance(second, ValueError)
    # Nor for one whose model cannot be followed: then all go the next way.
    first, second = on_ranks(
        [lambda t: ask_plain(FakeEstimator(), t), lambda t: ask_plain(cannot_tell, t)]
    )
    assert isinstance(first, FitError)
    assert isinstance(second, FitError)


# The whole


def small_step() -> SupervisedStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    return SupervisedStep(model, optimizer, lambda m, x: m(x).square().mean())


def test_for_a_device_that_is_not_here() -> None:
    step = small_step()
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    answer = find_batch_size(step, torch.randn(4, 64), device_memory="100MiB", margin="1MiB")
    assert answer.certainty == "exact"
    assert answer.peak is not None
    assert answer.peak <= 99 * 2**20 < answer.peaks[answer.size + 1]
    assert answer.cost.fake_steps <= 5
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    text = str(answer)
    assert text.startswith(f"largest micro-batch that fits: {answer.size:,} samples (exact)\n")
    assert "100 MiB (as stated), 1.00 MiB of it left free" in text


def test_a_model_that_is_nowhere() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 65536), nn.ReLU(), nn.Linear(65536, 4096))
    step = SupervisedStep(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).square().mean()
    )
    answer = find_batch_size(step, torch.randn(2, 4096), device_memory="80GiB", multiple_of=8)
    assert answer.certainty == "exact"
    assert answer.size % 8 == 0
    assert answer.size > 10_000
    with pytest.raises(FitError, match="device_memory"):
        find_batch_size(step, torch.randn(2, 4096))
    with pytest.raises(FitError, match="device"):
        find_batch_size(step, torch.randn(2, 4096), device_memory="80GiB", method="probe")


def test_a_batch_may_be_a_function() -> None:
    sizes = []

    def make(size: int) -> Tensor:
        sizes.append(size)
        return torch.ones(size, 64)

    answer = find_batch_size(small_step(), make, device_memory="10MiB")
    assert {2, 3, answer.size, answer.size + 1} == set(sizes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "guess"}, FitError, "by 'guess': there is no such choice; write 'auto'"),
        ({"device_memory": "80G"}, ConfigError, "1000 or 1024"),
        ({"margin": "100%"}, ConfigError, "nothing would be left"),
        ({"minimum": 0}, FitError, "minimum=0"),
        ({"device_memory": "1KiB"}, FitError, "cannot fit 1 sample into 1.00 KiB"),
    ],
)
def test_mistakes(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_batch_size(small_step(), torch.randn(4, 64), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "mebibytes"), [("auto", 300), ("probe", 300), ("try", 120)])
def test_under_a_real_limit_the_answer_fits_and_little_more_does(
    method: str, mebibytes: int, limited: Callable[..., str]
) -> None:
    code = f"""
        import torch
        from torch import nn
        from stretto.memory.step import WholeStep
        from stretto.runtime import SupervisedStep
        from stretto.memory.finding.finder import find_batch_size
        from stretto.runtime.out_of_memory import attempt
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        step = SupervisedStep(model, torch.optim.AdamW(model.parameters()),
                            lambda m, x: m(x).square().mean())
        leave({mebibytes} * 2**20)
        before = [p.clone() for p in model.parameters()]
        answer = find_batch_size(step, torch.randn(2, 256), method="{method}", multiple_of=64)
        print(all(torch.equal(a, b) for a, b in zip(before, model.parameters())))
        print(answer.cost.num_out_of_memory == 0, len(step.optimizers[0].state))
        take = lambda size: WholeStep.of(step).run(torch.randn(size, 256))
        run = lambda size: attempt(lambda: take(size)).out_of_memory is None
        take(2)
        print(run(answer.size), run(int(answer.size * 1.1)))
    """
    never = method != "try"
    assert limited(code).splitlines() == ["True", f"{never} 0", "True False"]


@pytest.mark.parametrize("method", ["auto", "probe"])
def test_sparse_gradients_are_probed(method: Any) -> None:
    """They have no memory of their own but that of their parts."""
    model = nn.Sequential(nn.Embedding(1000, 64, sparse=True), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = SupervisedStep(model, optimizer, lambda model, batch: model(batch).square().mean())
    tokens = torch.randint(0, 1000, (4, 16))
    answer = find_batch_size(step, tokens, method=method, maximum=64)
    assert (answer.size, answer.cost.num_out_of_memory) == (64, 0)
