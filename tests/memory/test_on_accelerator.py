"""What is predicted and found for CUDA, against its allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.accelerator import DEVICE, leave, warm_up
from torch import Tensor, nn
from torch.nn import functional

from stretto.examples.tiny_gpt import TinyGPT
from stretto.memory import find_batch_size, predict, probe
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep
from stretto.runtime.out_of_memory import attempt

LENGTH = 128


def next_token(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def gpt_step(device: str, precision: Any = "fp32") -> SupervisedStep:
    torch.manual_seed(0)
    model: nn.Module = TinyGPT(4, 256, heads=4, context=LENGTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SupervisedStep(model, optimizer, next_token, precision=precision, clip_norm=1.0)


def tokens(size: int, device: str = DEVICE) -> Tensor:
    return torch.zeros(size, LENGTH + 1, dtype=torch.long, device=device)


def allocated(step: SupervisedStep, size: int) -> int:
    """What a step takes at its peak, less what was there for others, such as cuBLAS."""
    batch = tokens(size)
    for _ in range(2):
        WholeStep.of(step).run(batch)
    states = [one for state in step.optimizers[0].state.values() for one in state.values()]
    kept = [batch, *step.parameters, *states]
    own = sum(one.nbytes for one in kept if one.device.type == DEVICE)
    others = torch.cuda.memory_allocated() - own
    torch.cuda.reset_peak_memory_stats()
    WholeStep.of(step).run(batch)
    return torch.cuda.max_memory_allocated() - others


@pytest.mark.phantom
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_prediction_made_without_it_is_near(precision: str) -> None:
    predicted = predict(gpt_step("cpu", precision), lambda size: tokens(size, "cpu"), device="cuda")
    step = gpt_step(DEVICE, precision)
    for size in (64, 256):
        assert predicted.at(size).bytes == pytest.approx(allocated(step, size), rel=0.1)


@pytest.mark.phantom
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_probe_sees_what_the_allocator_counts(precision: str) -> None:
    step = gpt_step(DEVICE, precision)
    found = probe(step, tokens)
    assert found.peak(256) == pytest.approx(allocated(step, 256), rel=0.001)


METHODS = ["auto", "probe", "try"]


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_what_is_found_leaves_no_trace(method: Any) -> None:
    step = gpt_step(DEVICE, "bf16")
    before = [parameter.clone() for parameter in step.parameters]
    answer = find_batch_size(step, tokens(2), method=method, maximum=512)
    assert answer.size
    assert all(map(torch.equal, before, step.parameters))


def fits(step: SupervisedStep, size: int) -> bool:
    torch.cuda.empty_cache()
    return attempt(lambda: WholeStep.of(step).run(tokens(size))).out_of_memory is None


@pytest.mark.phantom
@pytest.mark.parametrize("method", METHODS)
def test_what_is_found_fits_and_little_more_does(method: Any) -> None:
    step = gpt_step(DEVICE, "bf16")
    torch.cuda.empty_cache()
    warm_up()
    leave(3 << 30)
    try:
        answer = find_batch_size(step, tokens(2), method=method)
        assert method == "try" or answer.cost.num_out_of_memory == 0
        assert fits(step, answer.size)
        assert not fits(step, answer.size * 5 // 4)
    finally:
        leave(None)


@pytest.mark.phantom
def test_a_history_of_the_user_goes_on() -> None:
    """Recording a step reads the allocator's history, and stops only what it has begun."""
    step, library = gpt_step(DEVICE), cast(Any, torch._C)
    torch.cuda.memory._record_memory_history(context=None)
    try:
        probe(step, tokens)
        assert library._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)
    probe(step, tokens)
    assert not library._cuda_isHistoryEnabled()
