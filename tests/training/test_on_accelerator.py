"""Whole runs on an accelerator: what is promised of a CPU holds there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import DEVICE, is_phantom
from tests.training.numbered import BATCH_SIZE, NUM_SAMPLES, NumberedRun
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.batching import LinearRamp, NoiseScale, Signals
from stretto.schedules import Cosine
from stretto.training import Callback, Checkpointing, Logging, Run, Trainer

RANKS = Path(__file__).with_name("accelerator_ranks.py")


class Listener(Callback):
    """Keeps what was measured."""

    def __init__(self) -> None:
        self.heard: list[Signals] = []

    def on_noise(self, run: Run, step: Any, signals: Signals) -> None:
        del run, step
        self.heard.append(signals)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def samples() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long()


def run(device: str, *, compiled: bool = False, **more: Any) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))
    if compiled:
        model.compile()
    settings: dict[str, Any] = {
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "loss": loss,
        "max_duration": "3ep",
        "batch_size": LinearRamp(8, 64, "2ep"),
        "schedules": {"lr": Cosine(warmup="10%")},
        "device": device,
        **more,
    }
    return Trainer(model, TensorDataset(*samples()), **settings)


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in trainer.model.parameters()])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler uses torch.jit
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_ramp_trains(precision: Any, compiled: bool) -> None:
    trainer = run(DEVICE, compiled=compiled, precision=precision, clip_norm=1.0)
    trainer.fit()
    assert all(parameter.device.type == DEVICE for parameter in trainer.model.parameters())
    inputs, targets = samples()
    trainer.model.eval()
    with torch.no_grad():
        answers = trainer.model(inputs.to(DEVICE)).argmax(1).cpu()
    assert (answers == targets).float().mean() > 0.9


@pytest.mark.gpu
def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = run(DEVICE)
    whole.fit()
    run(DEVICE, folder=tmp_path, callbacks=[_Stop()], checkpoint=Checkpointing()).fit()
    again = run(DEVICE, folder=tmp_path, checkpoint=Checkpointing())
    again.resume()
    again.fit()
    assert torch.equal(weights(whole), weights(again))


class _Stop(Callback):
    def on_batch_end(self, run: Run, step: Any) -> None:
        del step
        if run.timer.batch == 20:
            run.stop("half way", is_final=False)


@pytest.mark.gpu
def test_the_noise_is_that_of_a_cpu() -> None:
    found = {}
    for device in (DEVICE, "cpu"):
        listener = Listener()
        trainer = run(device, callbacks=[listener], micro_batch_size=4, max_duration="5ba")
        for module in trainer.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # other generators, other masks
        trainer.fit()
        found[device] = [(one.noise_numerator, one.noise_denominator) for one in listener.heard]
    assert len(found["cpu"]) == 5
    for here, there in zip(found[DEVICE], found["cpu"], strict=True):
        assert here == pytest.approx(there, rel=1e-2)


@pytest.mark.gpu
def test_a_batch_follows_the_noise() -> None:
    listener = Listener()
    policy = NoiseScale(8, 64, c=4.0, window=10)
    trainer = run(DEVICE, batch_size=policy, micro_batch_size=4, callbacks=[listener])
    trainer.fit()
    assert len(listener.heard) == trainer.timer.batch
    assert trainer.timer.batch < 3 * 512 / 8


@pytest.mark.phantom
@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["plain", "clipped"])
@pytest.mark.parametrize("micro_batch_size", [None, 5], ids=["whole", "accumulated"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_runs(
    precision: Any, micro_batch_size: int | None, clip_norm: float | None, tmp_path: Path
) -> None:
    run = NumberedRun(
        micro_batch_size=micro_batch_size,
        folder=tmp_path,
        device=DEVICE,
        precision=precision,
        clip_norm=clip_norm,
    )
    dtypes = set()
    run.trainer.model.layers.register_forward_hook(  # type: ignore[union-attr]
        lambda module, inputs, output: dtypes.add(output.dtype)
    )
    run.trainer.fit()
    assert dtypes == {{"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)}
    assert (run.trainer.step.scaler is not None) == (precision == "fp16")
    assert run.sizes == ([BATCH_SIZE] if micro_batch_size is None else [4] * 4) * 8
    assert sorted(run.samples[:NUM_SAMPLES]) == list(range(NUM_SAMPLES))
    assert run.trainer.timer.sample == 8 * BATCH_SIZE
    assert run.trainer.run.skipped_steps == 0
    assert all(parameter.device.type == DEVICE for parameter in run.trainer.model.parameters())
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert ("grad_norm" in line) == (clip_norm is not None)


@pytest.mark.phantom
@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.smooth_l1_loss])
def test_losses_that_wait_for_the_log_take_no_memory(loss: Any) -> None:
    """These return a scalar in memory as large as the output of the model."""
    width = 1 << 16

    class Peak(Callback):
        def __init__(self) -> None:
            self.bytes: list[int] = []

        def on_batch_start(self, run: Run, step: Any) -> None:
            self.bytes.append(torch.cuda.memory_allocated())

    peak = Peak()
    model = nn.Linear(1, width)
    Trainer(
        model,
        TensorDataset(torch.ones(64, 1)),
        optimizer=torch.optim.SGD(model.parameters()),
        loss=lambda model, batch: loss(model(batch[0]), torch.zeros(16, width, device=DEVICE)),
        max_duration="20ba",
        batch_size=16,
        device=DEVICE,
        log=Logging(every="20ba"),
        callbacks=[peak],
    ).fit()
    assert peak.bytes[-1] - peak.bytes[1] < 16 * width * 4


@pytest.mark.phantom
@pytest.mark.distributed
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_without_memory_makes_all_ranks_repeat_the_step(
    where: str, launch_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    if is_phantom() and not torch.empty(1, pin_memory=True).is_pinned():
        pytest.skip("this phantom does not know pinned memory")
    launch_ranks(RANKS, tmp_path, where)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(found):
        assert one["device"] == f"cuda:{rank}"
        assert [len(numbers) for numbers in one["passes"]] == [8] * 2 + [4] * 2 * 6
        assert (one["splits"], one["sample"]) == (1, 8 * BATCH_SIZE)
    # Each epoch is four batches, and each sample is in one of them, on one rank.
    seen = [[number for numbers in one["passes"] for number in numbers] for one in found]
    for epoch in range(2):
        part = slice(epoch * NUM_SAMPLES // 2, (epoch + 1) * NUM_SAMPLES // 2)
        assert sorted(seen[0][part] + seen[1][part]) == list(range(NUM_SAMPLES))


@pytest.mark.phantom
def test_expandable_segments_run_out_of_memory_and_go_on() -> None:
    """The allocator then maps pages itself, and says in other words that none is left."""
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if done.stdout == "no segments\n":
        pytest.skip("this device cannot map memory")
    assert json.loads(done.stdout) == [[16] * 2 + [4] * 4 * 6, 2]


EXPANDABLE = """
import json, os, warnings
import torch
from tests.accelerator import warm_up
from tests.training.numbered import ROOM, NumberedRun

warnings.simplefilter("ignore")
try:
    warm_up()
    can_map = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
except RuntimeError:
    can_map = False
if can_map:
    run = NumberedRun("forward", rooms={2: ROOM})
    run.trainer.fit()
    print(json.dumps([run.sizes, run.splits]), flush=True)
else:
    print("no segments", flush=True)
os._exit(0)  # the phantom's libraries do not survive torch's destructors
"""
