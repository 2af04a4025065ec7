"""Which way answers, what it costs, and what ranks agree on."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.errors import ConfigError, FitError
from stretto.memory import Answer, find_batch_size, find_num_ranks, phantom
from stretto.memory.limits import MemoryLimit
from stretto.runtime import SupervisedStep

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
def _limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        "stretto.memory.finder.free_memory", lambda device: MemoryLimit(LIMIT, "fake")
    )
    monkeypatch.setattr(phantom, "missing", lambda: "it is not set up")
    TRIED.clear()
    # Memory is given back before each trial: a collection of all that pytest and torch hold.
    gc.freeze()
    yield
    gc.unfreeze()


def ask(capacity: int = 1 << 20, *, is_hidden: bool = False, **how: Any) -> Answer:
    model = Capacity(capacity, is_hidden=is_hidden)
    step = SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean())
    return find_batch_size(step, torch.ones(2, 25), **how)


def test_much_less_than_there_is_takes_no_step() -> None:
    answer = ask(maximum=100)
    assert (answer.size, answer.too_large, answer.certainty) == (100, None, "estimate")
    assert not TRIED


def test_an_answer_at_the_limit_is_verified_by_a_real_step() -> None:
    answer = ask()
    # 25 inputs, an output and its gradient: 108 bytes a sample, of 60 percent of the memory.
    assert 0.9 < answer.size * 108 / (0.6 * LIMIT) < 1.1
    assert answer.certainty == "tried"
    assert [2, answer.size] == TRIED
    assert answer.peak is not None
    assert answer.peak <= 0.6 * LIMIT < answer.peaks[answer.size + 1]


def test_a_step_that_does_not_fit_lowers_the_answer() -> None:
    answer = ask(1000)
    assert 980 <= answer.size <= 1000
    assert answer.certainty == "tried"
    assert answer.too_large is not None


def test_a_model_that_cannot_be_estimated_is_tried() -> None:
    answer = ask(500, is_hidden=True, maximum=4096)
    assert 490 <= answer.size <= 500
    assert answer.certainty == "tried"
    assert any("pickled" in note for note in answer.notes)


@pytest.mark.parametrize(("method", "least"), [("try", 490), ("halve", 256)])
def test_ways_of_real_steps(method: Any, least: int) -> None:
    answer = ask(500, method=method, maximum=4096)
    assert least <= answer.size <= 500
    assert answer.cost.num_out_of_memory > 0
    assert answer.cost.real_steps == len(TRIED)


def test_stated_memory_takes_no_step() -> None:
    answer = ask(device_memory="10MB", margin="20%")
    assert answer.certainty == "estimate"
    assert answer.reserve == 2_000_000
    assert not TRIED
    assert answer.peaks[answer.size] <= 8_000_000 < answer.peaks[answer.size + 1]


def test_bounds() -> None:
    assert ask(device_memory="1MB", multiple_of=100).size % 100 == 0
    size = ask(device_memory="1MB", power_of_two=True).size
    assert size & (size - 1) == 0
    assert ask(device_memory="1MB", maximum=7).size == 7


def test_without_the_phantom_a_gpu_gets_an_estimate_that_says_so() -> None:
    answer = ask(gpu="h100", maximum=64)
    assert answer.certainty == "estimate"
    assert "it is not set up" in str(answer)


def test_an_estimate_for_ranks_counts_a_part_of_the_state() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)])
    step = SupervisedStep(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).square().mean()
    )

    def peak(**how: Any) -> int:
        answer = find_batch_size(step, torch.ones(2, 4096), gpu="h100", maximum=8, **how)
        assert answer.peak is not None
        return answer.peak

    alone = peak()
    assert peak(world_size=8) < 0.3 * alone
    assert peak(world_size=16, shard="hsdp:8") == peak(world_size=8)
    assert peak(world_size=8, shard="ddp") > alone


def test_the_fewest_ranks() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2**15, 2**15) for _ in range(8)])  # 32 GiB of weights
    step = SupervisedStep(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).square().mean()
    )
    found = find_num_ranks(step, torch.ones(2, 2**15), 4, gpu="h100")
    assert found.num_ranks == 2
    assert found.answer.size == 4
    with pytest.raises(FitError):
        find_num_ranks(step, torch.ones(2, 2**15), 4, gpu="h100", most=1)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"method": "guess"}, "method"),
        ({"world_size": 8}, "gpu"),
        ({"world_size": 0, "gpu": "h100"}, "positive"),
        ({"gpu": "h100", "method": "try"}, "GPU"),
        ({"gpu": "h100", "method": "phantom"}, "set"),
        ({"gpu": "h100", "world_size": 2, "shard": "zero"}, "fsdp"),
        ({"gpu": "h100", "world_size": 2, "shard": lambda model, mesh: None}, "function"),
        ({"device_memory": 0}, "zero"),
        ({"device_memory": "1GiB", "method": "try"}, "device_memory"),
        ({"device_memory": "100B"}, "fit"),
        ({"method": "phantom"}, "gpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_questions_that_are_refused(how: dict[str, Any], word: str) -> None:
    with pytest.raises(FitError) as caught:
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


def test_a_function_makes_the_step_without_memory() -> None:
    devices = []

    def make() -> SupervisedStep:
        model = nn.Linear(1000, 1000)
        devices.append(model.weight.device.type)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        return SupervisedStep(model, optimizer, lambda m, x: m(x).mean())

    batch, memory = torch.ones(2, 1000), "64MiB"
    answer = find_batch_size(make, batch, device_memory=memory)
    assert devices == ["meta"]
    assert answer.size == find_batch_size(make(), batch, device_memory=memory).size


def test_a_model_alone_is_no_step() -> None:
    with pytest.raises(FitError) as caught:
        find_batch_size(nn.Linear(2, 2), torch.zeros(3, 2))
    assert "SupervisedStep" in caught.value.message.instead


def test_the_answer_prints_all_of_it() -> None:
    text = str(ask(device_memory="1MB"))
    assert "largest micro-batch that fits" in text
    assert "would not fit" in text
    assert "estimates" in text


def on_threads(
    monkeypatch: pytest.MonkeyPatch, work: list[Callable[[Callable[[int], int]], Any]]
) -> list[Any]:
    """Run ranks as threads that agree on a minimum; return results or errors."""
    # The limit of a process is no matter of its threads.
    monkeypatch.setattr("stretto.memory.trial.bounded", lambda *_: contextlib.nullcontext())
    barrier = threading.Barrier(len(work), timeout=20)
    numbers: dict[int, int] = {}
    results: list[Any] = [None] * len(work)

    def run(rank: int) -> None:
        def agree(number: int) -> int:
            numbers[rank] = number
            barrier.wait()
            least = min(numbers.values())
            barrier.wait()
            return least

        try:
            results[rank] = work[rank](agree)
        except Exception as error:  # noqa: BLE001  it is what is looked at
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_ranks_agree_on_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = on_threads(
        monkeypatch,
        [
            lambda agree: ask(600, method="halve", maximum=1024, agree_minimum=agree).size,
            lambda agree: ask(300, method="halve", maximum=1024, agree_minimum=agree).size,
        ],
    )
    assert sizes == [256, 256]


def test_an_error_on_one_rank_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(agree: Callable[[int], int]) -> Any:
        model = nn.Linear(25, 1)
        step = SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x))
        return find_batch_size(step, torch.ones(2, 25), method="try", agree_minimum=agree)

    first, second = on_threads(
        monkeypatch, [lambda agree: ask(method="try", agree_minimum=agree), fail]
    )
    assert isinstance(first, FitError)
    assert "another rank" in first.message.why
    assert isinstance(second, RuntimeError)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_processes_with_different_memory_find_one_answer(
    tmp_path: Path, launch_ranks: Callable[..., Any]
) -> None:
    launch_ranks(Path(__file__).with_name("distributed_find.py"), tmp_path, ranks=3)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for one in seen:
        assert one == {"try": [11, 12], "halve": [8, 16], "same": True, "weights": one["weights"]}
    assert seen[0]["weights"] == seen[1]["weights"] == seen[2]["weights"]
