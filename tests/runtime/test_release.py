"""Memory comes back after it ran out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.runtime.out_of_memory import attempt, release_memory


class Step:
    """A step whose tensors can be watched."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.tensors: list[weakref.ref[Tensor]] = []

    def __call__(self) -> None:
        batch = torch.ones(10)
        self.tensors.append(weakref.ref(batch))
        self.inner(batch * 2)

    def inner(self, activations: Tensor) -> None:
        self.tensors.append(weakref.ref(activations))
        cycle: list[Any] = [activations.clone()]
        cycle.append(cycle)
        self.tensors.append(weakref.ref(cycle[0]))
        raise self.error

    def alive(self) -> int:
        return sum(one() is not None for one in self.tensors)


def test_a_result() -> None:
    done = attempt(lambda: "done")
    assert (done.result, done.out_of_memory) == ("done", None)


def test_nothing_is_held_after_it_ran_out() -> None:
    step = Step(torch.OutOfMemoryError("CUDA out of memory"))
    done = attempt(step)
    assert (done.result, done.out_of_memory) == (None, "CUDA out of memory")
    assert len(step.tensors) == 3
    assert step.alive() == 0


def test_nothing_is_held_by_the_errors_behind_it() -> None:
    step = Step(MemoryError())

    def wrapped() -> None:
        try:
            step()
        except MemoryError as error:
            kept = torch.ones(3)
            step.tensors.append(weakref.ref(kept))
            raise RuntimeError("the step failed") from ExceptionGroup("ranks", [error])

    assert attempt(wrapped).out_of_memory == "the step failed"
    assert step.alive() == 0


def test_an_error_without_text_says_its_type() -> None:
    assert attempt(Step(MemoryError())).out_of_memory == "MemoryError"


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("mat1 and mat2 shapes")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        attempt(Step(error))


def test_what_only_a_finder_takes_for_it() -> None:
    error = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        attempt(Step(error))
    assert attempt(Step(error), in_finder=True).out_of_memory == str(error)


def test_the_graph_of_a_backward_that_failed_is_gone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    seen: list[weakref.ref[Tensor]] = []

    def fail(_gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def work() -> None:
        hidden = model[0](torch.ones(2, 4))
        hidden.register_hook(fail)
        seen.append(weakref.ref(hidden))
        model[1](hidden).sum().backward()

    assert attempt(work).out_of_memory
    assert seen[0]() is None


def test_cycles_are_collected() -> None:
    cycle: list[Any] = [torch.ones(3)]
    cycle.append(cycle)
    tensor = weakref.ref(cycle[0])
    gc.disable()
    try:
        del cycle
        release_memory()
        assert tensor() is None
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
def test_the_scratch_of_multiplications_is_given_back(limited: Callable[..., str]) -> None:
    """MKL keeps some for every shape: tens of MiB, which a finder would take for needed."""
    code = """
        import torch
        from torch import nn
        from stretto.runtime.out_of_memory import release_memory
        torch.set_num_threads(1)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24)))

        def held(*sizes):
            for size in sizes:
                model(torch.randn(size, 256)).sum().backward()
                model.zero_grad()
            return data_bytes() / 2**20

        held(8)
        release_memory()
        before = held()
        during = held(*range(40, 200, 16))
        release_memory()
        print(during - before, held() - before)
    """
    during, after = map(float, limited(code).split())
    if during < 10:
        pytest.skip("the kernels of this CPU keep little scratch")
    assert after < 3
