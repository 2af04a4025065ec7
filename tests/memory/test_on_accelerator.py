"""What is predicted for CUDA, held to its allocator: only where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.examples.tiny_gpt import TinyGPT
from stretto.memory import find_batch_size, predict, probe
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]
DEVICE = "cuda"
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_prediction_made_without_it_is_near(precision: str) -> None:
    predicted = predict(gpt_step("cpu", precision), lambda size: tokens(size, "cpu"), device="cuda")
    step = gpt_step(DEVICE, precision)
    for size in (64, 256):
        assert predicted.at(size).bytes == pytest.approx(allocated(step, size), rel=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_probe_sees_what_the_allocator_counts(precision: str) -> None:
    step = gpt_step(DEVICE, precision)
    found = probe(step, tokens)
    assert found.peak(256) == pytest.approx(allocated(step, 256), rel=0.05)


@pytest.mark.parametrize("method", ["auto", "probe", "try"])
def test_what_is_found_fits_and_leaves_no_trace(method: Any) -> None:
    step = gpt_step(DEVICE, "bf16")
    before = [parameter.clone() for parameter in step.parameters]
    answer = find_batch_size(step, tokens(2), method=method, maximum=512)
    assert answer.size
    assert answer.cost.num_out_of_memory == 0
    assert all(map(torch.equal, before, step.parameters))
    WholeStep.of(step).run(tokens(answer.size))
