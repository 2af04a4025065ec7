"""What steps need on a GPU, held to what torch's own CUDA code took on the phantom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.families.cuda import FAMILIES
from torch import nn
from torch.nn import functional

from stretto.errors import ConfigError, FitError
from stretto.memory import CudaPrediction, find_batch_size, find_num_ranks, predict
from stretto.runtime import SupervisedStep

# torch 2.13 on an H100, `python bench/cuda_truth.py NAME --size SIZE`: allocated, reserved.
TRUTH = {
    ("MLP, SGD momentum, smooth l1", 64): (143_448_576, 146_800_640),
    ("MLP, AdamW fused, bf16, kl", 64): (172_752_896, 186_646_528),
    ("GPT, AdamW", 8): (275_829_760, 331_350_016),
    ("GPT, bf16, dropout, clipping", 8): (223_243_776, 249_561_088),
    ("GPT, fp16, tied, clipping, accumulation 2", 8): (229_349_376, 253_755_392),
    ("GPT, checkpointing, Adafactor", 8): (138_888_704, 163_577_856),
    ("GPT, attention by hand, bf16, accumulation 2", 8): (73_836_544, 75_497_472),
    ("GPT, LoRA, checkpointing, bf16", 8): (184_380_416, 205_520_896),
    ("GPT, Muon and AdamW, bf16", 8): (205_961_728, 230_686_720),
    ("experts with a mask", 8): (402_146_304, 438_304_768),
    ("ViT with masks, bf16, l1", 8): (135_008_256, 136_314_880),
    ("TinyGPT, bf16, accumulation 2", 64): (1_169_123_840, 1_289_748_480),
}


def prediction_of(name: str, **more: Any) -> CudaPrediction:
    family = FAMILIES[name]
    return predict(family.make_step("cpu"), family.make_batch, device="cuda", **more)


@pytest.mark.parametrize(("name", "size"), TRUTH, ids=[name for name, _ in TRUTH])
def test_bytes_are_those_of_torch(name: str, size: int) -> None:
    found = prediction_of(name)
    allocated, reserved = TRUTH[name, size]
    assert found.allocated(size) == pytest.approx(allocated, rel=1e-4)
    assert found.peak(size) == pytest.approx(reserved, rel=1e-4)
    assert found.certainty(size) == "estimate"


@pytest.mark.parametrize(
    ("name", "largest"), [("GPT, AdamW", 42), ("GPT, bf16, dropout, clipping", 64)]
)
def test_the_largest_batch_is_that_of_torch(name: str, largest: int) -> None:
    family = FAMILIES[name]
    answer = find_batch_size(
        family.make_step("cpu"), family.make_batch, device="cuda", device_memory="1GiB", context=0
    )
    assert 0.95 * largest <= answer.size <= largest
    assert answer.cost.real_steps == 0


def linear(width: int = 512) -> SupervisedStep:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return SupervisedStep(
        model, torch.optim.SGD(model.parameters()), lambda m, x: functional.mse_loss(m(x), x)
    )


def batch(size: int) -> torch.Tensor:
    return torch.zeros(size, 512)


def test_each_thread_that_multiplies_has_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {
        gpu: predict(linear(), batch, device="cuda", gpu=gpu).peak(8) for gpu in ("h100", "a100")
    }
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    as_on_ampere = predict(linear(), batch, device="cuda", gpu="h100")
    assert as_on_ampere.peak(8) == peaks["a100"]
    assert peaks["h100"] - peaks["a100"] == 2 * (32 << 20) - (20 << 20)  # both in one segment
    assert as_on_ampere.at(8).by_category["workspaces"] == 2 * 8_519_680


def test_settings_of_the_allocator_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = predict(linear(), batch, device="cuda").peak(40_000)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert predict(linear(), batch, device="cuda").peak(40_000) != usual
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:many")
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF"):
        predict(linear(), batch, device="cuda")


def test_step_counts_are_on_the_host() -> None:
    def of(optimizer: Any) -> int:
        step = linear()
        step = SupervisedStep(step.model, optimizer(step.model.parameters()), step.loss)
        found = predict(step, batch, device="cuda")._runs[0].recording(8).allocations
        return sum(one.bytes for one in found if one.category == "optimizer")

    parameters = sum(p.nbytes for p in linear().parameters)
    assert of(torch.optim.AdamW) == 2 * parameters
    assert of(lambda p: torch.optim.AdamW(p, fused=True)) == 2 * parameters + 4 * 4


def test_the_model_and_the_optimizer_are_not_changed() -> None:
    step = linear()
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    find_batch_size(step, batch(2), device="cuda", device_memory="1GiB")
    after = step.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert step.optimizers[0].param_groups[0]["foreach"] is None


def test_the_context_is_part_of_the_answer() -> None:
    def ask(**more: Any) -> Any:
        return find_batch_size(linear(), batch(2), device_memory="1GiB", **more)

    there = ask(gpu="a100")
    assert there.outside == {"the CUDA context": 500 << 20}
    assert there.limit.bytes == (1024 - 500) << 20
    assert "of 1.00 GiB: the CUDA context 500 MiB" in str(there)
    assert ask(gpu="a100", context="100MiB").size > there.size
    assert there.reserve == pytest.approx(0.01 * there.limit.bytes, abs=1)
    assert "A100" in str(there)


@pytest.mark.parametrize(
    ("wishes", "word"),
    [
        ({"gpu": "h1000", "device_memory": "1GiB"}, "write one that is like it"),
        ({"device": "cuda"}, "pass device_memory"),
        ({"context": "1GiB", "device_memory": "2GiB"}, "pass device='cuda'"),
        ({"device": "cuda", "device_memory": "64MiB"}, "CUDA context"),
        ({"gpu": "a100", "device_memory": "1GiB", "method": "probe"}, "real steps need the GPU"),
        ({"world_size": "8", "device_memory": "1GiB"}, "write a positive number"),
        ({"world_size": 8, "shard": "zero", "device_memory": "2GiB"}, "no such strategy"),
        ({"world_size": 8, "device": "cpu", "device_memory": "2GiB"}, "leave device out"),
    ],
)
def test_questions_that_make_no_sense(wishes: dict[str, Any], word: str) -> None:
    with pytest.raises(FitError, match=word):
        find_batch_size(linear(), batch(2), **wishes)


def test_a_step_that_cannot_be_followed_is_not_probed_on_a_cpu() -> None:
    model = nn.LSTM(8, 8)
    step = SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x)[0].mean())
    with pytest.raises(FitError) as caught:
        find_batch_size(step, torch.ones(2, 4, 8), device="cuda", device_memory="1GiB")
    assert "workspace" in str(caught.value)


def test_how_few_ranks_will_do() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192), nn.Linear(8192, 8192))
    step = SupervisedStep(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).square().mean()
    )
    samples = torch.zeros(2, 8192)
    found = find_num_ranks(step, samples, 4, device_memory="2460MiB", context=0)
    assert [(row.ranks, row.fits) for row in found.rows] == [(1, False), (2, True)]
    assert found.num_ranks == 2
    assert "too much" in str(found)
    with pytest.raises(FitError, match="checkpoint"):
        find_num_ranks(step, samples, 4, device_memory="300MiB", context=0)
    with pytest.raises(FitError, match="positive"):
        find_num_ranks(step, samples, 0, device_memory="1GiB")
