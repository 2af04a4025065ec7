"""Real steps in a sandbox, and memory that really runs out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.errors import FitError
from stretto.memory import trials
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")


class Capacity(nn.Module):
    """Runs out of memory where a batch has more samples than there is room for."""

    def __init__(self, capacity: int, *, fails_in: str = "forward") -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(1)
        self.capacity = capacity
        self.fails_in = fails_in
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        result: Tensor = self.norm(self.layer(x))
        if len(x) > self.capacity:
            if self.fails_in == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory")
            result.register_hook(self._fail)
        return result

    def _fail(self, _gradient: Tensor) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")


def make_step(model: nn.Module, **options: Any) -> SupervisedStep:
    return SupervisedStep(model, Adam(model.parameters()), lambda m, x: m(x).sum(), **options)


def batch(size: int) -> Tensor:
    return torch.randn(size, 3)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_whether_a_size_fits(fails_in: str) -> None:
    model = Capacity(10, fails_in=fails_in)
    step = make_step(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    chance = torch.get_rng_state()
    with trials(step, batch) as tried:
        assert [tried.fits(size) for size in (8, 11, 10, 64)] == [True, False, True, False]
        assert tried.num_out_of_memory == 2
        # The optimizer's state is made anew after each failure: a step of 2 samples.
        assert tried.num_samples == 2 + 8 + 11 + 2 + 10 + 64
        assert tried.num_steps == 6
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not step.optimizers[0].state
    assert model.sizes == []
    assert torch.equal(torch.get_rng_state(), chance)


def test_every_micro_batch_counts() -> None:
    with trials(WholeStep.of(make_step(Capacity(10)), accumulation=3), batch) as tried:
        assert tried.fits(10)
        assert tried.num_samples == 3 * (2 + 10)


def test_not_even_the_warm_up_fits() -> None:
    with trials(make_step(Capacity(1)), batch) as tried:
        assert not tried.fits(8)
        assert tried.num_out_of_memory == 1


def test_a_mistake_in_the_model_is_no_matter_of_memory() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.clone()
    step = SupervisedStep(model, SGD(model.parameters(), lr=1.0), lambda m, x: m(x))
    with pytest.raises(RuntimeError, match="scalar"), trials(step, batch) as tried:
        tried.fits(8)
    assert torch.equal(model.weight, before)


def test_the_optimizer_may_fail_in_the_middle() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = Adam(model.parameters(), foreach=False)
    step = SupervisedStep(model, optimizer, lambda m, x: m(x).sum())
    WholeStep.of(step).run(batch(4))
    before = [value.clone() for state in optimizer.state.values() for value in state.values()]
    take, failures = optimizer.step, [1]

    def fail(*arguments: Any) -> Any:
        if failures:
            failures.pop()
            next(iter(optimizer.state.values())).pop("exp_avg")
            raise MemoryError
        return take(*arguments)

    optimizer.step = fail  # type: ignore[method-assign,assignment]
    with trials(step, batch) as tried:
        assert not tried.fits(4)
        assert tried.fits(4)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_models_of_which_only_parts_are_sharded_are_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Sequential(nn.Linear(3, 1))
        fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(FitError, match="sharded"), trials(make_step(model), batch):
            pass
    finally:
        dist.destroy_process_group()


@linux_only
@pytest.mark.slow
def test_memory_that_really_runs_out_leaves_no_trace(limited: Callable[..., str]) -> None:
    code = """
        import torch
        from torch import nn
        from stretto.memory.step import WholeStep
        from stretto.runtime import SupervisedStep
        from stretto.memory import trials
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(),
                              nn.Dropout(0.5), nn.Linear(1024, 256))
        step = SupervisedStep(model, torch.optim.AdamW(model.parameters()),
                            lambda m, x: m(x).square().mean())
        for _ in range(2):
            WholeStep.of(step).run(torch.randn(8, 256))
        def state():
            tensors = [*model.state_dict().values(), torch.get_rng_state()]
            tensors += [v for s in step.optimizers[0].state.values() for v in s.values()]
            return [t.clone() for t in tensors]
        before = state()
        leave(250 * 2**20)
        with trials(step, lambda size: torch.randn(size, 256)) as tried:
            # 17 KiB a sample: 250 MiB hold about 15,000, and not 60,000.
            print([tried.fits(size) for size in (5_000, 60_000, 5_000, 60_000, 7_000)])
            print(tried.num_out_of_memory)
        print(all(torch.equal(a, b) for a, b in zip(before, state(), strict=True)))
    """
    said = limited(code)
    assert said.splitlines() == ["[True, False, True, False, True]", "2", "True"]
