"""Which way answers, what it costs, and what ranks agree on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.threaded_ranks import on_threads
from torch import Tensor, nn

from stretto.errors import ConfigError, FitError, StrettoError
from stretto.memory import Answer, UnequalSamples, find_batch_size, phantom
from stretto.memory.answer import NothingFitsError
from stretto.memory.limits import MemoryLimit
from stretto.runtime import Ranks, SupervisedStep

LIMIT = 1_000_000
TRIED: list[int] = []


class Capacity(nn.Module):
    """Runs out of memory if a batch has more samples than there is room for."""

    def __init__(self, capacity: int, *, is_hidden: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(25, 1)
        self.capacity = capacity
        self.is_hidden = is_hidden

    def __getstate__(self) -> dict[str, Any]:
        if self.is_hidden:
            raise TypeError("it cannot be pickled")
        return vars(self)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            TRIED.append(len(x))
            if len(x) > self.capacity:
                raise torch.OutOfMemoryError("CUDA out of memory")
        result: Tensor = self.layer(x)
        return result


@pytest.fixture(autouse=True)
def _limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stretto.memory.finder.free_memory", lambda device: MemoryLimit(LIMIT, "fake")
    )
    monkeypatch.setattr(phantom, "setup_problem", lambda: "it is not set up")
    TRIED.clear()


def ask(capacity: int = 1 << 20, *, is_hidden: bool = False, **how: Any) -> Answer:
    model = Capacity(capacity, is_hidden=is_hidden)
    step = SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean())
    return find_batch_size(step, **{"batch": torch.ones(2, 25), **how})


def test_all_there_are_is_tried() -> None:
    answer = ask(maximum=100)
    assert (answer.size, answer.too_large, answer.certainty) == (100, None, "tried")
    assert TRIED[-1] == 100
    assert len(TRIED) <= 5


@given(capacity=st.integers(1, 5000), multiple_of=st.integers(1, 40), power_of_two=st.booleans())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_answer_is_the_largest_that_ran(
    capacity: int, multiple_of: int, *, power_of_two: bool
) -> None:
    multiple_of = 1 if power_of_two else multiple_of
    TRIED.clear()
    how: dict[str, Any] = {
        "maximum": 4096,
        "multiple_of": multiple_of,
        "power_of_two": power_of_two,
    }
    if capacity < multiple_of:
        with pytest.raises(FitError, match="memory ran out"):
            ask(capacity, **how)
        return
    answer = ask(capacity, **how)
    assert answer.size in TRIED
    assert answer.size <= capacity
    following = 2 * answer.size if power_of_two else answer.size + multiple_of
    assert following > min(capacity, 4096) or following <= 1.02 * answer.size + multiple_of
    failed = [size for size in TRIED if size > capacity]
    assert answer.too_large == min(failed, default=None)


@pytest.mark.parametrize(("powers", "least"), [(False, 490), (True, 256)])
def test_ways_of_real_steps(powers: bool, least: int) -> None:
    answer = ask(500, power_of_two=powers, maximum=4096)
    assert least <= answer.size <= 500
    assert answer.cost.num_out_of_memory > 0
    assert answer.cost.real_steps == len(TRIED)


@pytest.mark.parametrize(
    ("method", "how", "tried"),
    [
        ("halve", {}, [100, 50, 25, 37, 43, 40, 38]),
        ("halve", {"power_of_two": True}, [64, 32]),
        ("halve", {"maximum": 37}, [37]),
        ("bisect", {}, [50, 25, 37, 43, 40, 38]),
        ("bisect", {"power_of_two": True}, [8, 32, 64]),
        ("bisect", {"minimum": 30, "maximum": 38}, [34, 36, 37, 38]),
        ("predict", {"power_of_two": True}, [4, 32, 64]),
    ],
)
def test_where_a_search_begins(method: Any, how: dict[str, Any], tried: list[int]) -> None:
    answer = ask(37, **{"maximum": 100, **how}, method=method)
    assert answer.size == (32 if "power_of_two" in how else 37)
    assert [size for size in TRIED if size != 2] == tried  # 2 make the state of the optimizer


@given(
    capacity=st.integers(1, 300),
    minimum=st.integers(1, 10),
    span=st.integers(0, 300),
    power_of_two=st.booleans(),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_method_gives_the_same_answer(
    capacity: int, minimum: int, span: int, *, power_of_two: bool
) -> None:
    how: dict[str, Any] = {"minimum": minimum, "maximum": 2 * minimum + span}
    found: list[int | None] = []
    for method in ("predict", "bisect", "halve"):
        try:
            answer = ask(capacity, **how, power_of_two=power_of_two, method=method)
            found.append(answer.size)
        except NothingFitsError:
            found.append(None)
    sizes = [size for size in range(minimum, how["maximum"] + 1) if size <= capacity]
    powers = [size for size in sizes if size & (size - 1) == 0]
    expected = max(powers if power_of_two else sizes, default=None)
    near = [expected] if expected is None else range(expected - expected // 100, expected + 1)
    assert all(one in near for one in found)


def test_a_method_that_there_is_not() -> None:
    with pytest.raises(FitError, match="did you mean 'bisect'"):
        ask(method="bisects")


def test_without_the_phantom_a_gpu_gets_one_line_that_says_how_to_set_it_up() -> None:
    with pytest.raises(FitError) as caught:
        ask(gpu="h100", maximum=64)
    assert "it is not set up" in caught.value.message.instead


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"world_size": 8}, "gpu"),
        ({"world_size": 0, "gpu": "h100"}, "positive"),
        ({"gpu": "h100"}, "set"),
        ({"gpu": "h100", "world_size": 2, "shard": "zero"}, "fsdp"),
        ({"device_memory": 0}, "zero"),
        ({"device_memory": "1GiB"}, "gpu='h100'"),
        ({"gpu": 5}, "a text"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"accumulation": "2"}, "accumulation='2'"),
        ({"maximum": "64"}, "maximum='64'"),
        ({"minimum": 0}, "positive"),
        ({"ranks": 2}, "leave it out"),
        ({"margin": "1TiB"}, "nothing would be left"),
        ({"batch": []}, "no samples"),
        ({"batch": torch.ones(0, 25)}, "no samples"),
        ({"batch": UnequalSamples(torch.zeros, [2, 6]), "maximum": "x"}, "maximum='x'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_questions_that_are_refused(how: dict[str, Any], word: str) -> None:
    with pytest.raises(StrettoError) as caught:
        ask(**how)
    assert word in str(caught.value)


def test_memory_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError):
        ask(device_memory="10 apples")


def test_a_model_on_the_meta_device_needs_a_stated_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    step = SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean())
    with pytest.raises(FitError) as caught:
        find_batch_size(step, torch.ones(2, 2))
    assert "gpu" in caught.value.message.instead


def test_a_model_alone_is_no_step() -> None:
    with pytest.raises(FitError) as caught:
        find_batch_size(nn.Linear(2, 2), torch.zeros(3, 2))
    assert "SupervisedStep" in caught.value.message.instead


def test_the_answer_prints_all_of_it() -> None:
    text = str(ask(300))
    assert "largest micro-batch that fits" in text
    assert "would not fit" in text
    assert "real ones" in text


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory limit of a process is no matter of its threads."""
    monkeypatch.setattr("stretto.memory.trial.bounded", lambda *_: contextlib.nullcontext())


@pytest.mark.usefixtures("unbounded")
def test_ranks_agree_on_the_least() -> None:
    sizes = on_threads(
        [
            lambda ranks: ask(600, power_of_two=True, maximum=1024, ranks=ranks).size,
            lambda ranks: ask(300, power_of_two=True, maximum=1024, ranks=ranks).size,
        ]
    )
    assert sizes == [256, 256]


@pytest.mark.usefixtures("unbounded")
def test_an_error_on_one_rank_ends_all() -> None:
    def fail(ranks: Ranks) -> Any:
        model = nn.Linear(25, 1)
        step = SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x))
        return find_batch_size(step, torch.ones(2, 25), ranks=ranks)

    first, second = on_threads([lambda ranks: ask(ranks=ranks), fail])
    assert isinstance(first, RuntimeError)
    assert str(first) == str(second)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_processes_with_different_memory_find_one_answer(
    tmp_path: Path, launch_ranks: Callable[..., Any]
) -> None:
    launch_ranks(Path(__file__).with_name("distributed_find.py"), tmp_path, ranks=3)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for one in seen:
        assert one == {"try": [11, 12], "powers": [8, 16], "same": True, "weights": one["weights"]}
    assert seen[0]["weights"] == seen[1]["weights"] == seen[2]["weights"]
